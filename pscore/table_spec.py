"""The declaration of a table: a worker sends it, a shard compares it, and a record keeps it.

Both sides use the one class. It travels as `pb.Table` when a worker declares its table, and as JSON
in checkpoints and journals.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pscore.compressors import COMPRESSORS, make_compressor
from pscore.compressors.base import Compressor
from pscore.compressors.none import NoCompression
from pscore.content import Content
from pscore.contents import FLAT, make_content
from pscore.errors import ConfigError
from pscore.estimate import require_for_pulls
from pscore.json_text import count_of
from pscore.optimizers import OPTIMIZERS
from pscore.partition import Layout, fingerprint, first_difference
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.registry import Registry
from pscore.rules import RULES, make_rule
from pscore.rules.base import Rule
from pscore.types import Origin, TensorSpec

RAW = NoCompression()
START = Origin()


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """The declaration of a table; all workers of a job must declare the same."""

    name: str
    tensors: tuple[TensorSpec, ...]
    num_shards: int
    rule: Rule
    compressor: Compressor  # Compressor of pushes.
    optimizer: str  # Name of the shards' optimizer.
    num_groups: int  # Parameter groups.
    pull_compressor: Compressor = RAW
    content: Content = FLAT  # The kind of numbers in the slices.
    origin: Origin = START  # Not declared: it changes with the mode.
    is_held: bool = (
        False  # Whether the workers have all of it, for a shard that loses it; likewise.
    )

    def layout(self) -> Layout:
        """Returns the slices of the table on each shard.

        Raises:
            ConfigError: There are no tensors, two of one name, or one that no shard accepts.
        """
        return self.content.layout(self.tensors, self.num_shards)

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that differ when tensors, shards or slices differ."""
        return fingerprint(self.tensors, self.num_shards, self.content.arguments())

    def step_at(self, clock: int) -> int:
        """Returns the training step of a worker that has pushed `clock` times."""
        return self.rule.step_after(self.origin.step, max(0, clock - self.origin.clock))

    def difference(self, theirs: TableSpec) -> str | None:
        """Returns a sentence about the first difference from the job's declaration, or None."""
        for what, mine, yours in (
            ("mode", str(self.rule), str(theirs.rule)),
            ("compression", str(self.compressor), str(theirs.compressor)),
            ("pull compression", str(self.pull_compressor), str(theirs.pull_compressor)),
            ("optimizer", self.optimizer, theirs.optimizer),
            ("number of parameter groups", str(self.num_groups), str(theirs.num_groups)),
        ):
            if mine != yours:
                return f"{what} is {mine} here and {yours} in the job"
        return first_difference(self.tensors, theirs.tensors) or self.content.difference(
            theirs.content, self.tensors
        )

    # ----- as a message

    def to_proto(self) -> pb.Table:
        """Returns the message that declares this table; the origin is not part of it."""
        return pb.Table(
            name=self.name,
            tensors=[
                pb.Tensor(
                    name=t.name, shape=t.shape, dtype=t.dtype, group=t.group, compress=t.compress
                )
                for t in self.tensors
            ],
            num_shards=self.num_shards,
            rule=plugin_to_proto(self.rule),
            compressor=plugin_to_proto(self.compressor),
            pull_compressor=plugin_to_proto(self.pull_compressor),
            optimizer=self.optimizer,
            optimizer_release=OPTIMIZERS.release(self.optimizer),
            num_groups=self.num_groups,
            fingerprint=self.fingerprint,
            content=None if self.content == FLAT else content_to_proto(self.content),
        )

    @classmethod
    def from_proto(cls, table: pb.Table) -> TableSpec:
        """Returns the declaration in a message.

        Raises:
            ConfigError: A rule, compressor or argument does not exist, is not JSON, is of another
                version than the sender's, or the compressor is not one for pulls.
        """
        pulls: Compressor = RAW
        if table.HasField("pull_compressor"):
            pulls = compressor_from_proto(table.pull_compressor)
            require_for_pulls(pulls)
        OPTIMIZERS.agree(table.optimizer, table.optimizer_release)
        content = content_from_proto(table)
        return cls(
            name=table.name,
            tensors=tuple(
                TensorSpec(
                    name=t.name,
                    shape=tuple(t.shape),
                    dtype=t.dtype,
                    group=t.group,
                    compress=t.compress,
                )
                for t in table.tensors
            ),
            num_shards=table.num_shards,
            rule=rule_from_proto(table.rule),
            compressor=compressor_from_proto(table.compressor),
            optimizer=table.optimizer,
            num_groups=table.num_groups,
            pull_compressor=pulls,
            content=content,
        )

    # ----- as a record

    def to_json(self) -> dict[str, Any]:
        """Returns this declaration, origin included, as JSON can hold it."""
        return {
            "name": self.name,
            "tensors": [asdict(tensor) for tensor in self.tensors],
            "num_shards": self.num_shards,
            "rule": [self.rule.name, self.rule.arguments()],
            "compressor": [self.compressor.name, self.compressor.arguments()],
            "optimizer": self.optimizer,
            "num_groups": self.num_groups,
            "pull_compressor": [self.pull_compressor.name, self.pull_compressor.arguments()],
            "origin": [self.origin.clock, self.origin.step],
            "is_held": self.is_held,
            "content": [self.content.name, self.content.arguments()],
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> TableSpec:
        """Returns the declaration that `to_json` returned; older records lack the last fields.

        Raises:
            ConfigError: A rule, compressor or argument does not exist, the compressor is not one
                for pulls, or a number is not a count.
            LookupError, TypeError, ValueError: The record has another form.
        """
        tensors = [_tensor_from_json(tensor) for tensor in record["tensors"]]
        pulls = make_compressor(*record.get("pull_compressor", (RAW.name, {})))
        require_for_pulls(pulls)
        clock, step = record.get("origin", (0, 0))
        content = make_content(*record.get("content", (FLAT.name, {})))
        return cls(
            name=str(record["name"]),
            tensors=tuple(tensors),
            num_shards=count_of(record["num_shards"], "the number of shards"),
            rule=make_rule(*record["rule"]),
            compressor=make_compressor(*record["compressor"]),
            optimizer=str(record["optimizer"]),
            num_groups=count_of(record["num_groups"], "the number of parameter groups"),
            pull_compressor=pulls,
            content=content,
            origin=Origin(count_of(clock, "the first clock"), count_of(step, "the first step")),
            is_held=record.get("is_held") is True,
        )


def _tensor_from_json(record: Mapping[str, Any]) -> TensorSpec:
    tensor = TensorSpec(
        **{
            **record,
            "shape": tuple(count_of(size, "a length of a tensor") for size in record["shape"]),
        }
    )
    count_of(tensor.group, "the parameter group of a tensor")
    for value, kind in ((record["name"], str), (record.get("compress", False), bool)):
        if not isinstance(value, kind):
            raise TypeError(f"{tensor} is not the declaration of a tensor")
    return tensor


def plugin_to_proto(plugin: Rule | Compressor) -> pb.Plugin:
    """Returns name, arguments and release of a rule or compressor as a message."""
    registry: Registry[Any] = RULES if isinstance(plugin, Rule) else COMPRESSORS
    return pb.Plugin(
        name=plugin.name,
        arguments=json.dumps(plugin.arguments()),
        release=registry.release(plugin.name),
    )


def rule_from_proto(plugin: pb.Plugin) -> Rule:
    """Returns the rule in a message.

    Raises:
        ConfigError: It or an argument does not exist, or the sender has another version of it.
    """
    return make_rule(*_plugin_from_proto(RULES, plugin))


def compressor_from_proto(plugin: pb.Plugin) -> Compressor:
    """Returns the compressor in a message; raises as `rule_from_proto`."""
    return make_compressor(*_plugin_from_proto(COMPRESSORS, plugin))


def _plugin_from_proto(registry: Registry[Any], plugin: pb.Plugin) -> tuple[str, dict[str, Any]]:
    """Returns the name and arguments in a message, if the sender has the plug-in that we have."""
    registry.agree(plugin.name, plugin.release)
    return plugin.name, _arguments_of(plugin)


def content_to_proto(content: Content) -> pb.Plugin:
    """Returns name and arguments of a content as a message."""
    return pb.Plugin(name=content.name, arguments=json.dumps(content.arguments()))


def content_from_proto(message: pb.Table | pb.DefineReply) -> Content:
    """Returns the content in a message; without one it is `FLAT`.

    Raises:
        ConfigError: It or an argument does not exist.
    """
    if not message.HasField("content"):
        return FLAT
    return make_content(message.content.name, _arguments_of(message.content))


def _arguments_of(plugin: pb.Plugin) -> dict[str, Any]:
    """Returns the arguments in a message; raises ConfigError if they are not a JSON object."""
    try:
        arguments = json.loads(plugin.arguments or "{}")
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"arguments of {plugin.name!r} are not JSON") from problem
    if not isinstance(arguments, dict):
        raise ConfigError(f"arguments of {plugin.name!r} are not an object")
    return arguments
