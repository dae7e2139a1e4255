"""The recorded scenarios still happen message by message; `python -m tests.sim` records them."""

import pytest

from tests.sim.scenarios import SCENARIOS, TRANSCRIPTS, transcript


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_a_scenario_is_as_recorded(name: str) -> None:
    recorded = (TRANSCRIPTS / f"{name}.txt").read_text(encoding="ascii")
    assert transcript(name) == recorded, "record it again: python -m tests.sim"


def test_every_recording_has_a_scenario() -> None:
    assert {path.stem for path in TRANSCRIPTS.glob("*.txt")} == set(SCENARIOS)
