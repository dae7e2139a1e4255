"""The numbers of `psworker simulate`; tests/unit/pssim/timing has the scan itself."""

import pytest

from pscore.errors import ConfigError
from psworker.commands.simulate import numbers_of, workers_of


def test_numbers_are_read_from_a_list() -> None:
    assert numbers_of("1,0.5", "--gbit") == [1.0, 0.5]
    assert workers_of("64,1024") == [64, 1024]


@pytest.mark.parametrize("text", ["", "0", "inf", "nan", "1,x", "-1"])
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="numbers above 0"):
        numbers_of(text, "--gbit")


@pytest.mark.parametrize("text", ["2.5", "0.5", "2000000", "inf"])
def test_a_number_of_workers_is_whole_and_bounded(text: str) -> None:
    with pytest.raises(ConfigError, match="--workers is"):
        workers_of(text)
