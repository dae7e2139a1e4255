"""Every rule's page has its drawing, and the drawing is the one that its program makes."""

import pytest

from benchmarks import drawings
from benchmarks.drawing import fragments, peers, planes
from pscore.rules import RULES
from tests.house.source import ROOT

NBYTES_MAX = 20_000


def test_every_rule_has_a_drawing() -> None:
    modes = drawings.MODES | peers.MODES
    missing = set(RULES.own) - set(modes)
    assert not missing, f"MODES in benchmarks/drawing/peers.py has no {missing}"
    assert all(mode.partition("(")[0] == rule for rule, (mode, _) in modes.items())


@pytest.mark.parametrize("rule", sorted({*RULES, *drawings.VARIANTS, *fragments.MODES}))
def test_a_drawing_is_of_the_simulated_run(rule: str) -> None:
    path = ROOT / "docs" / "pictures" / f"rule-{rule}.svg"
    assert path.stat().st_size < NBYTES_MAX
    assert f"(../pictures/{path.name})" in (ROOT / "docs" / "rules" / f"{rule}.md").read_text()
    assert path.read_text() == drawings.draw(rule), "run `python -m benchmarks.drawings`"


@pytest.mark.parametrize("plane", sorted(planes.PLANES))
def test_a_plane_is_drawn_as_its_program_draws_it(plane: str) -> None:
    path = ROOT / "docs" / "pictures" / f"plane-{plane}.svg"
    assert f"(pictures/{path.name})" in (ROOT / "docs" / "dataplane.md").read_text()
    assert path.read_text() == planes.draw(plane), "run `python -m benchmarks.drawings`"
