"""The words of the protocol; `python -m tests.golden.protocol.protocol` records them.

Builds of one `wire.PROTOCOL` train together (docs/versions.md). So under one number a field or a
plug-in may come, which an older peer ignores or refuses by its name; one that is there keeps its
number, type and arguments, and a worker's own choices stay as they are.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from google.protobuf.descriptor import FieldDescriptor

from pscore.compressors import COMPRESSORS, parse_compressor
from pscore.net import wire
from pscore.optimizers import OPTIMIZERS
from pscore.pb.ps.v1 import checkpoint_pb2, control_pb2, data_pb2, publish_pb2, standby_pb2
from pscore.rules import RULES, parse_mode
from psworker.training.declaration import Declaration

FILE = Path(__file__).with_name("protocol.json")
MODULES = (checkpoint_pb2, control_pb2, data_pb2, publish_pb2, standby_pb2)
RAW = parse_compressor("none")


def words() -> dict[str, str]:
    """Returns the words that a peer has to know, by name."""
    return {"protocol": str(wire.PROTOCOL)} | _fields() | _arguments() | _contents()


def _fields() -> dict[str, str]:
    found = {}
    for module in MODULES:
        about = module.DESCRIPTOR
        for message in about.message_types_by_name.values():
            for field in message.fields:
                found[f"{message.name}.{field.name}"] = _type(field)
        for enum in about.enum_types_by_name.values():
            found |= {f"{enum.name}.{value.name}": str(value.number) for value in enum.values}
        for service in about.services_by_name.values():
            for method in service.methods:
                kinds = method.input_type.name, method.output_type.name
                found[f"{service.name}.{method.name}"] = " -> ".join(kinds)
    return found


def _type(field: FieldDescriptor) -> str:
    kind = field.message_type or field.enum_type
    many = " repeated" if field.is_repeated else ""
    return f"{field.number}{many} {kind.name if kind else field.type}"


def _arguments() -> dict[str, str]:
    """Returns the names of all arguments of each plug-in: a worker sends all of them."""
    found = {f"optimizer {name}": "" for name in OPTIMIZERS.own}
    for name, rule in RULES.own.items():
        found[f"mode {name}"] = " ".join(sorted(parse_mode(name + rule.examples[0]).arguments()))
    for name, compressor in COMPRESSORS.own.items():
        made = parse_compressor(name + compressor.examples[0])
        found[f"compression {name}"] = " ".join(sorted(made.arguments()))
    return found


def _contents() -> dict[str, str]:
    """Returns the content that a worker declares, by mode and by its way to the shards."""
    declaration = Declaration(
        named=[("w", torch.nn.Parameter(torch.zeros(3)))],
        compressor=RAW,
        pull_compressor=RAW,
        min_nbytes=0,
        exclude=(),
    )
    found = {}
    for (name, rule), is_near in product(RULES.own.items(), (True, False)):
        links = [SimpleNamespace(transport=SimpleNamespace(is_near=is_near))]
        session: Any = SimpleNamespace(group=SimpleNamespace(is_alone=True), links=links)
        content = declaration.content(parse_mode(name + rule.examples[0]), session)
        way = "shared memory" if is_near else "TCP"
        found[f"content {name} {way}"] = f"{content.name} {json.dumps(content.arguments())}"
    return found


def recorded() -> dict[str, str]:
    """Returns the words as they were recorded."""
    loaded: dict[str, str] = json.loads(FILE.read_text(encoding="utf-8"))
    return loaded


def changed(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """Returns the words that an older peer of the protocol would refuse or misunderstand."""
    if old["protocol"] != new["protocol"]:
        return []
    return [f"{key}: {old[key]!r}, now {new.get(key)!r}" for key in old if old[key] != new.get(key)]


if __name__ == "__main__":
    if FILE.exists() and (problems := changed(recorded(), words())):
        raise SystemExit("\n".join(("raise wire.PROTOCOL first:", *problems)))
    FILE.write_text(json.dumps(words(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
