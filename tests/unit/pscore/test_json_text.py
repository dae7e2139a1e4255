"""JSON that is written for others holds no number that is none in JSON."""

import json
import math

from pscore.json_text import to_json


def refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def test_numbers_that_are_not_finite_are_null_at_every_depth() -> None:
    value = {"a": [1.5, math.nan, (math.inf, {"b": -math.inf})], "c": "NaN", "d": None, "e": True}
    found = json.loads(to_json(value), parse_constant=refuse)
    assert found == {"a": [1.5, None, [None, {"b": None}]], "c": "NaN", "d": None, "e": True}


def test_other_values_are_as_python_writes_them() -> None:
    value = {"a": [1, 1e300, 1 << 70], "b": {"c": "\u202e"}}
    for indent in (None, 1):
        assert to_json(value, indent=indent) == json.dumps(value, indent=indent)
