"""Every rule's page has its plot, drawn from the results in the repository."""

import json
from pathlib import Path

import pytest

from benchmarks import peer_plots, rule_plots
from benchmarks.learning.runs import collect, load
from pscore.rules import RULES
from tests.house.source import ROOT

NBYTES_MAX = 60_000


def test_every_rule_has_a_plot() -> None:
    assert {*rule_plots.PAGES, *peer_plots.PAGES} == set(RULES)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_page_has_all_its_parts(rule: str) -> None:
    page = (ROOT / f"docs/rules/{rule}.md").read_text(encoding="utf-8")
    for part in ("**What it does.**", "**Source.**", "**Use it**", "**Cost"):
        assert part in page, part
    assert "**Not**" in page or "**Do not**" in page
    assert "*Differs:*" in page
    for argument in RULES[rule]().arguments():
        assert f"`{argument}`" in page, argument
    assert f"(../plots/rule-{rule}.png)" in page
    assert (ROOT / f"docs/plots/rule-{rule}.png").stat().st_size < NBYTES_MAX


def test_a_plot_is_drawn_from_the_results_that_are_kept(tmp_path: Path) -> None:
    rows = collect(load(ROOT / rule_plots.RESULTS / "convergence.jsonl"))
    paces = json.loads((ROOT / rule_plots.RESULTS / "straggler.json").read_text())
    for trained, slowed in rule_plots.PAGES.values():
        assert {"ssgd", *trained} <= set(rows)
        assert {"ssgd", *slowed} <= set(paces)
    path = rule_plots.draw("ssd", rows, paces, tmp_path)
    assert 0 < path.stat().st_size < NBYTES_MAX
