"""The benchmark of rounds: the search for an outer rate, its result file, and the table of it."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pytest

from benchmarks import pages, round_links, rounds
from benchmarks.chars import PART

LOSSES = {0.1: 3.0, 0.2: 2.5, 0.4: 2.0, 0.7: 2.2, 1.0: math.nan}


def arguments(out: Path, seeds: int) -> argparse.Namespace:
    words = {"quick": False, "rates": {}, "steps": 0, "delay": -1, "control": 0.0, "unlike": False}
    return argparse.Namespace(out=out, seeds=seeds, data=PART, **words)


def search(monkeypatch: pytest.MonkeyPatch, form: str, num_seeds: int = 2) -> rounds.Found:
    def train(setting: rounds.Setting, outer_lr: float, seed: int) -> float:
        return LOSSES[outer_lr] + 0.1 * seed

    monkeypatch.setattr(rounds.Setting, "train", train)
    return rounds.search(rounds.Setting(form=form, length=20), num_seeds)


def test_the_walk_ends_at_the_best_rate_from_either_side(monkeypatch: pytest.MonkeyPatch) -> None:
    above, below = (search(monkeypatch, form) for form in ("mirror", "late"))
    assert above.rate == below.rate == 0.4
    assert above.losses == below.losses == [2.0, 2.1]
    assert above.tried == {"0.2": 2.5, "0.4": 2.0, "0.7": 2.2, "1": None}
    assert below.tried == {"0.1": 3.0, "0.2": 2.5, "0.4": 2.0, "0.7": 2.2}


def test_a_result_continues_where_it_was_ended_and_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "rounds.json"
    monkeypatch.setattr(pages, "ROUNDS", path)
    assert "Not measured in full yet" in pages.rounds()
    blocking = rounds.Found(rate=0.7, losses=[2.0, 2.0], tried={"0.7": 2.0, "1": None})
    rounds.Result(arguments(path, 2)).add(20, "blocking", blocking)
    result = rounds.Result(arguments(path, 2))
    assert result.has(20, "blocking")
    assert not result.has(20, "mirror")
    assert not rounds.Result(arguments(path, 3)).has(20, "blocking")
    result.add(20, "mirror", search(monkeypatch, "mirror"))
    assert result.means() == {"H20": {"blocking": 2.0, "mirror": 2.05}}
    shown = pages.rounds()
    assert "`mirror` within 1 % of rounds that block: **not met** at H = 20." in shown
    assert "| 20 | `mirror` | 0.4 | 2.050 | +2.5 % | 0.2: 2.500, 0.7: 2.200, 1: diverged |" in shown


def test_bytes_on_a_slow_link_are_shares_of_those_of_ddp() -> None:
    figures = {"seconds": 1.0, "out_nbytes": 1e6, "in_nbytes": 2e6}
    sparse = list(round_links.FORMS)[-1]
    forms = {round_links.DDP: figures, sparse: {**figures, "out_nbytes": 1e4, "in_nbytes": 1e4}}
    rows = round_links.rows_of({"forms": forms}).splitlines()
    assert rows[-1].endswith("| 0.010 | 1.00% | 0.010 | 0.50% |")
    assert round_links.verdict({"forms": forms}).endswith("with sparseloco: met.")
    forms[sparse]["in_nbytes"] = 4e4
    assert round_links.verdict({"forms": forms}).endswith("with sparseloco: not met.")
