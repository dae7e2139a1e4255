"""Numbers for people."""

import pytest

from pscore.timing.shown import in_ms, three_figures


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (183.671, "184"),
        (21_794.3, "21,800"),
        (999.7, "1,000"),
        (99.96, "100"),
        (0.043251, "0.0433"),
        (98.25, "98.2"),
        (5.0, "5"),
        (0.0, "0"),
        (47_421_984.0, "47,400,000"),
    ],
)
def test_numbers_have_three_figures_and_no_exponent(number: float, text: str) -> None:
    assert three_figures(number) == text


def test_a_short_time_is_not_nothing() -> None:
    assert (in_ms(0.000432), in_ms(3.7521)) == ("0.432 ms", "3,750 ms")
