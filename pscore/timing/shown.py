"""Numbers of predictions and measurements for people: with three figures."""

from __future__ import annotations

WHOLE = 100  # From it on a number with three figures has no decimals.


def three_figures(number: float) -> str:
    """Returns a number with three figures, as people write it: `0.0123`, `98.8`, `21,800`."""
    rounded = float(f"{number:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= WHOLE else f"{rounded:g}"


def in_ms(seconds: float) -> str:
    """Returns seconds as milliseconds with three figures: `3,750 ms`."""
    return f"{three_figures(1e3 * seconds)} ms"
