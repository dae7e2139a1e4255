"""`mode="auto"` as text, and the steps at which workers report."""

import pytest

from pscore.errors import ConfigError
from pscore.rules import SSGD, parse_mode
from pscore.timing.auto import FIRST, AutoMode, auto_candidates, parse_wish


def test_the_wish_is_told_from_modes() -> None:
    assert parse_wish("auto") == AutoMode()
    assert parse_wish(" auto(steps=10, risk=low)") == AutoMode(steps=10, risk="low")
    assert parse_wish(str(AutoMode(steps=4))) == AutoMode(steps=4)
    for mode in ("ssgd", "automatic", SSGD()):
        assert parse_wish(mode) is None


@pytest.mark.parametrize("mode", ["auto(steps=1)", "auto(risk=much)", "auto(of=1)", "auto(steps)"])
def test_wrong_arguments_are_refused(mode: str) -> None:
    with pytest.raises(ConfigError, match="auto"):
        parse_wish(mode)


def test_workers_report_before_every_nth_step() -> None:
    assert [step for step in range(10) if AutoMode(steps=4).is_due(step)] == [4, 8]


def test_where_no_step_waits_for_slow_workers_few_reports_do() -> None:
    wish = AutoMode(steps=4)
    assert [step for step in range(50) if wish.is_due(step, passes_slow=True)] == [16, 32, 48]


def test_the_first_candidate_is_the_mode_to_begin_with() -> None:
    for number in (1, 4, 64):
        candidates = auto_candidates(number)
        assert candidates[0] == FIRST
        assert len({str(parse_mode(one.mode)) for one in candidates}) == len(candidates)
