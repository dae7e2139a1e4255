"""Plug-ins as text and as names with arguments: parses `mode=` and `compression=`.

A plug-in is a frozen dataclass with a default for each field. It travels as its name and its
fields, never as code; a wrong name or argument is refused with a list of the right ones.
"""

from __future__ import annotations

import json
import re
import sys
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from pscore.errors import ConfigError
from pscore.registry import Registry

T = TypeVar("T")
WORDS = "words"  # In a field's metadata: words that may stand for its value.
BRIEF_BITS_MAX = 256  # Python refuses to print whole numbers of many digits.
BRIEF_LENGTH_MAX = 200


@dataclass(frozen=True)
class Plugin(ABC):
    """A rule or compressor: a frozen dataclass whose fields are its arguments.

    Its constructor raises ConfigError for an argument that is out of its range.

    Attributes:
        name: Its name in the registry, in the argument of `DistributedOptimizer` and on the wire.
        source: The paper, as the docs and `psserver rules` print it.
        examples: Arguments with which all tests of its kind run it, as text behind the name.
    """

    name: ClassVar[str]
    source: ClassVar[str] = ""
    examples: ClassVar[tuple[str, ...]] = ("",)

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments by name, as they travel."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def __str__(self) -> str:
        """Returns the text that `parse_plugin` reads: `ssd(steps=5, warmup=500)`."""
        inner = ", ".join(f"{name}={value!r}" for name, value in self.arguments().items())
        return f"{self.name}({inner})" if inner else self.name


def make_plugin(registry: Registry[T], name: str, arguments: Mapping[str, Any]) -> T:
    """Returns plug-in `name` of `registry` with `arguments`; those left out have their defaults.

    Raises:
        ConfigError: There is no such plug-in or field, or a value has another type.
    """
    kind, plugin = registry.kind, registry.require(name)
    known = {item.name: item for item in fields(plugin)}  # type: ignore[arg-type]
    checked: dict[str, Any] = {}
    for key, value in arguments.items():
        if key not in known:
            listed = ", ".join(known) or "no arguments"
            raise ConfigError(f"{kind} {name!r} has no argument {key!r}; it has {listed}")
        if isinstance(value, str) and value in known[key].metadata.get(WORDS, ()):
            checked[key] = value
        else:
            checked[key] = _checked(f"{name}.{key}", value, type(known[key].default))
    return plugin(**checked)


def _checked(what: str, value: Any, wanted: type) -> Any:
    """Returns a value as one of type `wanted`; a whole number is accepted for a float."""
    if wanted is float and type(value) in {int, float}:
        if not abs(value) <= sys.float_info.max:  # Compares whole numbers of any size, and NaN.
            raise ConfigError(f"{what} is {_brief(value)}, must be a finite number")
        value = float(value)
    if type(value) is not wanted:
        raise ConfigError(f"{what} is {_brief(value)}, must be of type {wanted.__name__}")
    return value


def _brief(value: Any) -> str:
    """Returns a value for a message, in bounded length: it may come from a peer."""
    if isinstance(value, int) and value.bit_length() > BRIEF_BITS_MAX:
        return f"a whole number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= BRIEF_LENGTH_MAX else f"{text[:BRIEF_LENGTH_MAX]}..."


def parse_plugin(kind: str, text: str) -> tuple[str, dict[str, Any]]:
    """Returns name and arguments from text like `ssd(steps=5, warmup=100, local=glu)`.

    Raises:
        ConfigError: The argument is no text, or not of that form.
    """
    if not isinstance(text, str):
        raise ConfigError(
            f"{kind} is {_brief(text)}, must be text such as name or name(argument=value), or an "
            "object with the arguments"
        )
    match = re.fullmatch(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", text)
    if match is None:
        raise ConfigError(f"{kind} is {text!r}, must look like name or name(argument=value)")
    arguments: dict[str, Any] = {}
    inside = (match[2] or "").strip().removesuffix(",")  # As in Python.
    for item in (part.strip() for part in inside.split(",")) if inside else ():
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise ConfigError(f"{kind} is {text!r}: {item!r} must look like argument=value")
        if key in arguments:
            raise ConfigError(f"{kind} is {text!r}: {key} is given twice")
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


def require_range(name: str, value: float, low: float, high: float) -> None:
    """Raises a `ConfigError` unless `low <= value <= high`."""
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}, must be in {low}..{high}")


def require_one_of(name: str, value: str, choices: Mapping[str, Any]) -> None:
    """Raises a `ConfigError` that lists the choices unless `value` is one of them."""
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}, must be one of {', '.join(sorted(choices))}")
