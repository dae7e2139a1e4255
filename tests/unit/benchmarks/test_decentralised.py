"""The benchmark of modes whose workers exchange models: its estimates and its last line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import decentralised
from benchmarks.exchanges import kills, learning, links, straggler
from benchmarks.exchanges.tables import RESULTS


def test_steps_that_come_in_bursts_count_by_cycles_of_the_slow_worker() -> None:
    """Some make three steps at once every 3 s, or run ahead at first: it is a step a second."""
    slow = [1.0 * step for step in range(1, 12)]
    bursts = [0.1, 0.2, *(3.0 + 3.0 * (index // 3) + 0.001 * index for index in range(12))]
    even = [0.1, 0.2, 0.3, *(end + 0.01 for end in slow)]
    assert straggler.step_s(slow, [bursts, even], 11.4) == pytest.approx(1.0)


def test_workers_that_do_not_wait_have_their_own_pace() -> None:
    own = [0.1 * step for step in range(1, 300)]
    assert straggler.step_s([5.0, 10.0, 15.0, 20.0], [own], 22.0) == pytest.approx(0.1)


def test_a_slow_worker_without_two_steps_gives_no_figure() -> None:
    assert straggler.step_s([5.0], [[1.0]], 20.0) == np.inf


def test_results_of_other_parts_stay(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    decentralised.keep(path, {"straggler": {"adpsgd": {"1x": 3.0}}})
    decentralised.keep(path, {"learning": [{"mode": "ssgd", "seed": 1, "steps": 3}]})
    kept = json.loads(path.read_text())
    assert kept["straggler"]["figures"] == {"adpsgd": {"1x": 3.0}}
    assert set(kept) == {"straggler", "learning"}


class Line(torch.nn.Module):
    """One weight."""

    weight: torch.nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))


class Parabola:
    """A task with one minimum, at 1."""

    seed = 3

    def make_model(self) -> torch.nn.Module:
        return Line()

    def gradient(self, model: Line, rank: int, step: int) -> float:
        loss = ((model.weight - 1.0) ** 2).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.item())

    def evaluate(self, model: Line) -> tuple[float, float]:
        return float(model.weight.detach().mean()), 0.0


@pytest.mark.parametrize("mode", ["allreduce", "dpsgd", "adpsgd", "ssgd", "asgd", "sgp"])
def test_every_mode_learns(mode: str) -> None:
    found = learning.learn(mode, Parabola(), 60)  # type: ignore[arg-type]
    assert found.accuracy == pytest.approx(1.0, abs=0.15)
    assert np.isfinite(found.consensus)


@pytest.mark.parametrize("mode", ["allreduce", "dpsgd(graph=complete, order=atc)"])
def test_every_mode_has_the_learning_rate_of_the_same_step(mode: str) -> None:
    """Under a rate that falls, modes that are the same by their equations end at one place."""
    task: Any = Parabola()
    ends = [learning.learn(each, task, 5).accuracy for each in (mode, "ssgd")]
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)


def test_figures_are_of_the_modes_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    args = argparse.Namespace(seeds=[1], data=None, steps=1, epochs=1.0, modes=["ssgd", "dpsgd"])
    found = decentralised.learn(args)
    assert [run["mode"] for run in found] == ["ssgd", "dpsgd"]
    assert "from ssgd" in capsys.readouterr().out


def test_the_last_line_has_every_mode() -> None:
    kept = {name: part["figures"] for name, part in json.loads(RESULTS.read_text()).items()}
    said = decentralised.brief(kept, list(straggler.MODES))
    assert set(said) == {"straggler", "accuracy", "consensus"}
    assert all(set(part) == set(straggler.MODES) for part in said.values())
    assert all(set(row) == set(straggler.FACTORS) for row in said["straggler"].values())


def test_a_run_of_kills_is_good_only_if_nothing_counts_twice_and_nobody_waits() -> None:
    def found(*, twice: int = 0, waited_s: float = 0.1, last: float = 0.5) -> kills.Found:
        result = kills.Found()
        for index in range(100):
            loss = 2.0 if index < 50 else last
            result.add(0, kills.Step(index, loss, waited_s, index, twice, 0))
        result.num_twice = twice
        return result

    assert found().is_good
    assert not found(twice=1).is_good
    assert not found(waited_s=kills.LEASE_S + 2).is_good
    assert not found(last=1.9).is_good


def test_rounds_after_which_models_differ_are_counted_but_not_those_of_the_dead() -> None:
    result, step = kills.Found(), kills.Step(7, 1.0, 0.1, 1, 0, 111)
    result.add(0, step)
    result.add(1, step._replace(check=222))
    assert result.num_unlike == 1
    result.drop(1, step)
    assert result.num_unlike == 0


@pytest.mark.parametrize(
    ("mode", "models"), [("allreduce", 1.5), ("dpsgd", 1.0), ("adpsgd", 0.5), (links.DDP, 1.5)]
)
def test_bytes_by_the_formula(mode: str, models: float) -> None:
    assert links.formula_mb(mode, 4, 0.5) == pytest.approx(4e-6 * links.NUMEL * models)


def test_figures_of_one_run_replace_those_of_the_same_links_and_workers() -> None:
    nets = list(links.NETS)
    former = [{"net": nets[1], "workers": 2, "step_ms": 1.0}, {"net": nets[0], "workers": 8}]
    found = [{"net": nets[1], "workers": 2, "step_ms": 2.0}, {"net": nets[0], "workers": 4}]
    joined = links.joined(former, found)
    assert [(one["net"], one["workers"]) for one in joined] == [
        (nets[0], 4),
        (nets[0], 8),
        (nets[1], 2),
    ]
    assert joined[2]["step_ms"] == 2.0


def test_kill_runs_of_other_modes_and_seeds_stay() -> None:
    former = [{"mode": "allreduce", "seed": 1, "kills": 3}, {"mode": "adpsgd", "seed": 2}]
    found = [{"mode": "allreduce", "seed": 1, "kills": 5}, {"mode": "adpsgd", "seed": 1}]
    assert kills.joined(former, found) == [
        {"mode": "adpsgd", "seed": 1},
        {"mode": "adpsgd", "seed": 2},
        {"mode": "allreduce", "seed": 1, "kills": 5},
    ]


def test_accuracies_of_other_seeds_stay_if_they_are_of_as_many_steps() -> None:
    former = [{"mode": "ssgd", "seed": 1, "steps": 9}, {"mode": "ssgd", "seed": 2, "steps": 7}]
    found = [{"mode": "dpsgd", "seed": 1, "steps": 9}]
    assert decentralised.joined_seeds(former, found) == [found[0], former[0]]
