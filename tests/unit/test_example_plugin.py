"""The formulas of examples/plugin, with numbers worked by hand."""

import importlib

import numpy as np
import pytest

from pscore.rules.base import Memory
from tests.house.source import ROOT


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples" / "plugin")


def test_gap_aware_divides_by_the_gap_in_average_updates() -> None:
    """C = 0.5 * 0 + 0.5 * |3 - 1| = 1; the gap is |3 - 1| = 2; g~ = 6 / (1 + 2 / 1) = 2."""
    module = importlib.import_module("paceline_example.gap_aware")
    rule, memory = module.GapAware(decay=0.5), Memory(weights=np.ones(1, np.float32))
    grad = np.full(1, 6.0, np.float32)
    rule.compensate(grad, 0, memory)
    assert grad[0] == 6.0
    rule.on_pull(0, memory)
    rule.on_update(np.full(1, 3.0, np.float32), memory)
    memory.weights = np.full(1, 3.0, np.float32)
    rule.compensate(grad, 0, memory)
    assert grad[0] == 2.0


def test_int16_keeps_the_largest_numbers_finite() -> None:
    module = importlib.import_module("paceline_example.int16")
    largest = np.finfo(np.float32).max
    state, out = {"residual": np.zeros(3, np.float32)}, np.zeros(10, np.uint8)
    module.Int16().encode(np.array([largest, -largest, 1.0], np.float32), state, out)
    module.Int16().check(out, 3)
    sent = np.zeros(3, np.float32)
    module.Int16().decode_add(out, sent, 1.0, assign=True)
    assert np.isfinite(sent).all()
    assert np.isfinite(state["residual"]).all()


def test_int16_sends_what_it_takes_from_the_residual() -> None:
    module = importlib.import_module("paceline_example.int16")
    compressor, grad = module.Int16(), np.array([1.0, -0.3, 1e-6, 0.0], np.float32)
    state = {"residual": np.zeros(4, np.float32)}
    out = np.zeros(compressor.payload_nbytes_max(4), np.uint8)
    compressor.encode(grad, state, out)
    compressor.check(out, 4)
    sent = np.zeros(4, np.float32)
    compressor.decode_add(out, sent, 1.0, assign=True)
    assert np.allclose(sent + state["residual"], grad, rtol=0, atol=1e-7)
    assert np.abs(state["residual"]).max() <= 0.5 / 32767 + 1e-7
