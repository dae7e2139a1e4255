"""The wire format of each compressor: payloads that were committed, and by hand."""

import json

import pytest

from pscore.compressors import COMPRESSORS, parse_compressor
from tests.golden.compressors.vectors import FILE, NAMES, vectors

GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))


def test_every_compressor_has_golden_payloads() -> None:
    assert {parse_compressor(name).name for name in NAMES} == set(COMPRESSORS)
    assert list(GOLDEN) == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_payloads_and_state_are_the_committed_ones(name: str) -> None:
    assert vectors(name) == GOLDEN[name]
