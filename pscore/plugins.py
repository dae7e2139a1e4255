"""Plug-ins as text and as names with arguments: how `mode=` and `compression=` are read.

A plug-in is a frozen dataclass with a default for each field. It travels as its name and its
fields, never as code; a wrong name or argument is refused with a list of the right ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from pscore.errors import ConfigError

T = TypeVar("T")


def make_plugin(
    kind: str, registry: Mapping[str, type[T]], name: str, arguments: Mapping[str, Any]
) -> T:
    """Returns plug-in `name` of `registry` with `arguments`; those left out have their defaults.

    Args:
        kind: What it is called in messages: "mode", "compression".
        registry: The plug-ins there are, by name.
        name: Which one.
        arguments: Values for its fields.

    Raises:
        ConfigError: There is no such plug-in or field, or a value has another type.
    """
    if name not in registry:
        raise ConfigError(f"no {kind} {name!r}; there are {', '.join(sorted(registry))}")
    known = {item.name: item for item in fields(registry[name])}  # type: ignore[arg-type]
    checked: dict[str, Any] = {}
    for key, value in arguments.items():
        if key not in known:
            listed = ", ".join(known) or "no arguments"
            raise ConfigError(f"{kind} {name!r} has no argument {key!r}; it has {listed}")
        wanted = type(known[key].default)
        number = isinstance(value, int) and not isinstance(value, bool)
        if wanted is float and number:
            value = float(value)
        if type(value) is not wanted:
            raise ConfigError(f"{name}.{key} is {value!r}, must be of type {wanted.__name__}")
        checked[key] = value
    return registry[name](**checked)


def parse_plugin(kind: str, text: str) -> tuple[str, dict[str, Any]]:
    """Returns name and arguments from text like `ssd(steps=5, warmup=100, local=glu)`.

    Raises:
        ConfigError: The text is not of that form.
    """
    match = re.fullmatch(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", text)
    if match is None:
        raise ConfigError(f"{kind} is {text!r}, must look like name or name(argument=value)")
    arguments: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in (match[2] or "").split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise ConfigError(f"{kind} is {text!r}: {item!r} must look like argument=value")
        arguments[key] = _literal(value)
    return match[1], arguments


def _literal(value: str) -> Any:
    """Returns a number, True, False or a word, quoted or not."""
    if value in {"True", "False"}:
        return value == "True"
    try:
        return json.loads(value)
    except ValueError:
        return value.strip("'\"")
