"""Plug-ins as text and as names with arguments: conversion both ways, and refusals."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pscore.compressors import COMPRESSORS, make_compressor, parse_compressor
from pscore.errors import ConfigError
from pscore.plugins import make_plugin, parse_plugin
from pscore.registry import Registry
from pscore.rules import RULES, make_rule, parse_mode
from pscore.rules.ssd import SSD

PLUGINS: dict[str, Mapping[str, type[Any]]] = {"mode": RULES, "compression": COMPRESSORS}
PARSERS: dict[str, Any] = {"mode": parse_mode, "compression": parse_compressor}
MAKERS: dict[str, Any] = {"mode": make_rule, "compression": make_compressor}
ALL = [(kind, name) for kind, registry in PLUGINS.items() for name in sorted(registry)]


@dataclass(frozen=True)
class Thing:
    """A plug-in with one field of each type."""

    name: ClassVar[str] = "thing"

    count: int = 3
    ratio: float = 0.5
    word: str = "plain"
    flag: bool = False


THINGS = Registry("thing", "paceline.things", Thing, [Thing])


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_a_plugin_with_its_defaults_reads_its_own_text(kind: str, name: str) -> None:
    plugin = PLUGINS[kind][name]()
    assert PARSERS[kind](str(plugin)) == plugin
    assert PARSERS[kind](name) == plugin
    assert PARSERS[kind](plugin) is plugin


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_a_plugin_travels_as_name_and_arguments(kind: str, name: str) -> None:
    plugin = PLUGINS[kind][name]()
    assert plugin.name == name
    assert MAKERS[kind](name, plugin.arguments()) == plugin


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_every_argument_has_a_default_of_a_plain_type(kind: str, name: str) -> None:
    """`make_plugin` takes the type of the default for the type of the argument."""
    for item in dataclasses.fields(PLUGINS[kind][name]):
        assert type(item.default) in (int, float, str, bool), item.name


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_a_wrong_argument_lists_the_right_ones(kind: str, name: str) -> None:
    known = ", ".join(item.name for item in dataclasses.fields(PLUGINS[kind][name]))
    with pytest.raises(ConfigError) as caught:
        MAKERS[kind](name, {"nonesuch": 1})
    assert str(caught.value) == (
        f"{kind} {name!r} has no argument 'nonesuch'; it has {known or 'no arguments'}"
    )


@pytest.mark.parametrize("kind", sorted(PLUGINS))
def test_a_wrong_name_lists_the_right_ones(kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PARSERS[kind]("nonesuch")
    assert (
        str(caught.value) == f"no {kind} 'nonesuch'; there are {', '.join(sorted(PLUGINS[kind]))}"
    )


@given(
    st.builds(
        Thing,
        count=st.integers(),
        ratio=st.floats(allow_nan=False, allow_infinity=False),
        word=st.from_regex(r"[a-z_]+", fullmatch=True),
        flag=st.booleans(),
    )
)
def test_any_arguments_come_back_from_text(thing: Thing) -> None:
    fields = [f"{item.name}={getattr(thing, item.name)!r}" for item in dataclasses.fields(thing)]
    name, arguments = parse_plugin("thing", f"thing({', '.join(fields)})")
    assert make_plugin(THINGS, name, arguments) == thing


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("thing", {}),
        ("thing()", {}),
        ("  thing ( ) ", {}),
        ("thing(count=5)", {"count": 5}),
        ("thing( count = 5 , word=glu )", {"count": 5, "word": "glu"}),
        ("thing(word='glu')", {"word": "glu"}),
        ('thing(word="glu")', {"word": "glu"}),
        ("thing(ratio=1e-3)", {"ratio": 0.001}),
        ("thing(flag=True)", {"flag": True}),
        ("thing(flag=False,)", {"flag": False}),
    ],
)
def test_text_is_read(text: str, arguments: dict[str, Any]) -> None:
    assert parse_plugin("thing", text) == ("thing", arguments)


@pytest.mark.parametrize("text", ["", "(", "thing(", "thing)", "thing(a=1", "a b", "thing(a=1)x"])
def test_text_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"must look like name or name\(argument=value\)"):
        parse_plugin("thing", text)


@pytest.mark.parametrize(
    "text",
    ["thing(5)", "thing(count)", "thing(count=1, 2)", "thing(count=1,,flag=True)", "thing(,,)"],
)
def test_an_argument_without_a_name_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must look like argument=value"):
        parse_plugin("thing", text)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"count": 1.5}, "thing.count is 1.5, must be of type int"),
        ({"count": True}, "thing.count is True, must be of type int"),
        ({"count": "1"}, "thing.count is '1', must be of type int"),
        ({"count": None}, "thing.count is None, must be of type int"),
        ({"ratio": "0.1"}, "thing.ratio is '0.1', must be of type float"),
        ({"ratio": True}, "thing.ratio is True, must be of type float"),
        ({"word": 3}, "thing.word is 3, must be of type str"),
        ({"word": ["a"]}, "thing.word is ['a'], must be of type str"),
        ({"flag": 1}, "thing.flag is 1, must be of type bool"),
    ],
)
def test_a_value_of_another_type_is_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_plugin(THINGS, "thing", arguments)
    assert str(caught.value) == sentence


def test_a_whole_number_is_a_float() -> None:
    thing = make_plugin(THINGS, "thing", {"ratio": 2})
    assert (thing.ratio, type(thing.ratio)) == (2.0, float)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_too_large_for_a_float_is_refused(sign: int) -> None:
    """It comes as JSON from anybody."""
    with pytest.raises(ConfigError, match=r"thing\.ratio is"):
        make_plugin(THINGS, "thing", {"ratio": sign * (1 << 2000)})


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(ConfigError, match=r"thing\.ratio is"):
        make_plugin(THINGS, "thing", {"ratio": bad})


def test_an_argument_out_of_its_range_is_named() -> None:
    with pytest.raises(ConfigError, match=r"ssd\.steps is 0, must be in 1\.\.1024"):
        parse_mode("ssd(steps=0)")
    assert parse_mode("ssd(steps=1024)") == SSD(steps=1024)
