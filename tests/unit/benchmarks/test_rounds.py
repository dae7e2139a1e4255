"""The benchmark of rounds: the search for an outer rate, its result file, and the table of it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from benchmarks import round_links, round_reach, round_tables, round_times, rounds
from benchmarks.chars import PART
from benchmarks.images import Images

LOSSES = {0.05: 3.5, 0.1: 3.0, 0.2: 2.5, 0.4: 2.0, 0.7: 2.2, 1.0: math.nan}


def arguments(out: Path, seeds: int) -> argparse.Namespace:
    words = {"quick": False, "rates": {}, "delay": -1, "unlike": False, "task": "text"}
    return argparse.Namespace(out=out, seeds=seeds, data=PART, **words)


def search(
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    num_seeds: int = 2,
    known: Mapping[str, float | None] | None = None,
    losses: Mapping[float, float] = LOSSES,
) -> rounds.Found:
    def train(setting: rounds.Setting, outer_lr: float, seed: int) -> float:
        trained.append((outer_lr, seed))
        return losses[outer_lr] + 0.1 * seed

    trained: list[tuple[float, int]] = []
    monkeypatch.setattr(rounds.Setting, "train", train)
    found = rounds.search(rounds.Setting(form=form, length=20), num_seeds, known or {})
    again = [pair for pair in trained if pair[1] == 0 and f"{pair[0]:g}" in (known or {})]
    assert not again, "trained although its loss is known"
    return found


def test_the_walk_ends_at_the_best_rate_from_either_side(monkeypatch: pytest.MonkeyPatch) -> None:
    above, below = (search(monkeypatch, form) for form in ("mirror", "late"))
    assert above.rate == below.rate == 0.4
    assert above.losses == below.losses == [2.0, 2.1]
    assert above.tried == {"0.05": 3.5, "0.2": 2.5, "0.4": 2.0, "0.7": 2.2, "1": None}
    assert below.tried == {"0.05": 3.5, "0.1": 3.0, "0.2": 2.5, "0.4": 2.0, "0.7": 2.2}
    assert search(monkeypatch, "mirror", known={"0.7": 2.2, "1": None}) == above


def test_the_walk_begins_at_the_better_of_a_low_and_a_high_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    losses = LOSSES | {0.025: 1.7, 0.05: 1.5}
    found = search(monkeypatch, "mirror", losses=losses)
    assert found.rate == 0.05
    assert found.tried == {"0.025": 1.7, "0.05": 1.5, "0.1": 3.0, "0.7": 2.2}


def test_a_result_continues_where_it_was_ended_and_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "rounds.json"
    monkeypatch.setattr(round_tables, "ROUNDS", (path, tmp_path / "not there"))
    tried = {"0.7": 2.0, "1": None}
    blocking = rounds.Found(steps=800, rate=0.7, losses=[2.0, 2.0], tried=tried)
    rounds.Result(arguments(path, 2)).add(20, "blocking", blocking)
    result = rounds.Result(arguments(path, 2))
    assert result.has(20, "blocking", 800, 2)
    assert not result.has(20, "mirror", 800, 2)
    assert not result.has(20, "blocking", 400, 2)
    assert not result.has(20, "blocking", 800, 3)
    assert result.tried(20, "blocking", 800) == tried
    assert result.tried(20, "blocking", 400) == {}
    result.add(20, "mirror", search(monkeypatch, "mirror"))
    assert result.means() == {"H20": {"blocking": 2.0, "mirror": 2.05}}
    shown = round_tables.rounds()
    assert "`mirror` is within 1% of rounds that block, or below them, in 0 of these 1 " in shown
    assert shown.endswith("| characters | alike | 20 | 800 | 2 | 2.000 | +2.5% |")


def test_bytes_on_a_slow_link_are_shares_of_those_of_ddp() -> None:
    figures = {"seconds": 1.0, "out_nbytes": 1e6, "in_nbytes": 2e6}
    sparse = list(round_links.FORMS)[-1]
    forms = {round_links.DDP: figures, sparse: {**figures, "out_nbytes": 1e4, "in_nbytes": 1e4}}
    rows = round_links.rows_of({"forms": forms}).splitlines()
    assert rows[-1].endswith("| 0.010 | 1.00% | 0.50% |")
    assert round_links.verdict({"forms": forms}).endswith("with sparseloco: met.")
    forms[sparse]["in_nbytes"] = 4e4
    assert round_links.verdict({"forms": forms}).endswith("with sparseloco: not met.")


def test_times_of_rounds_stand_beside_the_computing_in_them() -> None:
    names = list(round_times.modes(steps=50))
    seconds = dict.fromkeys(names, 2.05) | {round_times.PLAIN: 2.0, round_times.BLOCKING: 3.0}
    run = {"seconds": {"50 steps": {"1 Gbit/s": seconds}}}
    rows = round_times.rows_of(run).splitlines()
    assert rows[0].startswith("| round | links | plain torch, s | blocking | late |")
    assert rows[-1].startswith("| 50 steps | 1 Gbit/s | 2.000 | +50.0% | +2.5% |")
    assert round_times.verdict(run).endswith(": met in 1 of 1 cases.")
    seconds["eager"] = 2.07
    assert round_times.verdict(run).endswith(": met in 0 of 1 cases.")


def test_times_of_links_that_are_in_the_file_are_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Cluster:
        def run(self, run: round_times.Run) -> list[float]:
            return [1.0, 2.0]

    @contextmanager
    def hosts_of_all(train: object, rate: str, delay_s: float) -> Iterator[Cluster]:
        made.append(rate)
        yield Cluster()

    made: list[str] = []
    monkeypatch.setattr(round_times, "hosts_of_all", hosts_of_all)
    monkeypatch.setattr("benchmarks.forked.prepare", lambda: None)
    out = tmp_path / "times.json"
    first = round_times.measure(out)
    assert made == ["100mbit", "1gbit", "1gbit"] * 2
    assert (
        first["seconds"]["50 steps of 50 ms"]["1 Gbit/s"]["mirror"] == 2.0
    )  # The slowest worker's.
    assert round_times.measure(out)["seconds"] == first["seconds"]
    assert len(made) == 6


def test_the_reach_of_mirror_is_shown_beside_rounds_that_block() -> None:
    row = {**round_reach.BASE, "blocking": [2.0, 2.0], "mirror": [2.0, 2.1]}
    assert round_reach.rows_of({"rows": [row]}).endswith("| 4 | 0.9 | 4 | 2.000 | 2.050 | +2.5 % |")


@pytest.mark.parametrize("num_parts", [1, 4])
def test_images_of_a_worker_with_unlike_data_are_of_few_classes(num_parts: int) -> None:
    images = Images("lenet", num_parts=num_parts)
    seen: list[set[int]] = []
    for rank in range(4):
        labels = [images.draw(rank, step)[1] for step in range(20)]
        seen.append(set(torch.cat(labels).tolist()))
    assert all((len(classes) <= 4) == (num_parts == 4) for classes in seen)
