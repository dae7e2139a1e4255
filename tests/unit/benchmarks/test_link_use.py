"""The use of links, folded over steps."""

from __future__ import annotations

import numpy as np

from benchmarks.links.link_use import BINS, LinkUse, counters


def test_the_use_of_a_link_is_folded_over_the_steps() -> None:
    """One host sends 100 bytes a second in the first half of each step, and receives 10 always."""
    moments = np.arange(0.0, 4.01, 0.01)
    whole, part = np.divmod(moments, 1.0)
    out = 50 * whole + np.minimum(100 * part, 50)
    use = LinkUse(np.stack([moments, out, 10 * moments], axis=1).tolist(), [0.0, 1.0, 2.0, 4.0])
    assert use.rates.shape == (1, 2, BINS)
    assert use.step_s == 4 / 3
    np.testing.assert_allclose(use.rates[0, 1], 10, rtol=1e-4)
    two = LinkUse(np.stack([moments, out, 10 * moments], axis=1).tolist(), [0.0, 1.0, 2.0])
    np.testing.assert_allclose(two.rates[0, 0, : BINS // 2], 100, rtol=1e-3)
    np.testing.assert_allclose(two.rates[0, 0, BINS // 2 :], 0, atol=1e-3)


def test_the_loopback_device_has_counters() -> None:
    assert counters()["lo"].sent >= 0
