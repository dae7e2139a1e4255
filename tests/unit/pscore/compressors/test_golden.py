"""The wire format of each compressor: payloads that were committed, and by hand."""

import json

import pytest

from tests.golden.compressors.vectors import FILE, NAMES, vectors

GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))


def test_every_compressor_has_golden_payloads() -> None:
    """One that is new gets them by `python -m tests.golden.compressors.vectors`."""
    assert list(GOLDEN) == list(NAMES), "run `python -m tests.golden.compressors.vectors`"


@pytest.mark.parametrize("name", NAMES)
def test_payloads_and_state_are_the_committed_ones(name: str) -> None:
    assert vectors(name) == GOLDEN[name]
