"""A real run with PACELINE_TIMELINE: the work of both sides, in one consistent file."""

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import psworker
from tests.integration.cluster import Shards, Station

STEPS = 6
WORKER_NAMES = {
    *("forward", "backward", "compress", "push", "pull", "wait", "local update", "optimizer.step")
}
SHARD_NAMES = {"decode", "aggregate", "step", "publish"}

Event = dict[str, Any]


def train(station: Station) -> bool:
    torch.manual_seed(station.rank)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64))
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        mode="ssd(steps=2, warmup=2)",
        compression="2bit",
        compress_min_nbytes=1024,
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    return psworker.job.context.current().session.timeline is not None


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    folder = tmp_path_factory.mktemp("timeline")
    env = {"PACELINE_TIMELINE": str(folder / "trace.json")}
    with Shards(2, env=env) as shards:
        assert shards.run(train, env=env) == [True, True]
    names = ("shard0", "shard1", "worker0", "worker1")
    files = [folder / f"trace.{name}.json" for name in names]
    assert sorted(folder.iterdir()) == files
    out = folder / "all.json"
    lines = psworker_timeline(files, out)
    assert [line.split(":")[0] for line in lines] == ["worker 0", "worker 1", "shard 0", "shard 1"]
    trace = json.loads(out.read_text())
    events: list[Event] = trace["traceEvents"]
    return events


def psworker_timeline(files: Iterable[Path], out: Path) -> list[str]:
    from typer.testing import CliRunner

    from psworker.commands.cli import app

    done = CliRunner().invoke(app, ["timeline", *map(str, files), "--out", str(out)])
    assert done.exit_code == 0, done.output
    return done.output.splitlines()[:-1]


def spans(events: list[Event], process: str) -> list[Event]:
    """Returns the spans of a process, which is found by its name."""
    pids = [
        event["pid"]
        for event in events
        if event["name"] == "process_name" and event["args"]["name"] == process
    ]
    assert len(pids) == 1
    return [event for event in events if event["ph"] == "X" and event["pid"] == pids[0]]


def train_rounds(station: Station) -> None:
    """Rounds of two steps, of which each closes with both workers in."""
    weight = torch.nn.Parameter(torch.zeros(64))
    optimizer = psworker.DistributedOptimizer(
        torch.optim.SGD([weight], lr=0.1),
        named_parameters=[("weight", weight)],
        mode="local(steps=2, quorum=2)",
    )
    for _ in range(STEPS):
        weight.grad = torch.ones(64)
        optimizer.step()
    psworker.shutdown()


def test_rounds_and_their_windows_are_shown(tmp_path: Path) -> None:
    env = {"PACELINE_TIMELINE": str(tmp_path / "trace.json")}
    with Shards(1, env=env) as shards:
        shards.run(train_rounds, env=env)
    files = [tmp_path / f"trace.{name}.json" for name in ("shard0", "worker0", "worker1")]
    psworker_timeline(files, tmp_path / "all.json")
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    for rank in (0, 1):
        rounds = [e["args"] for e in spans(events, f"worker {rank}") if e["name"] == "round"]
        assert [(e["step"], e["steps"]) for e in rounds] == [(1, 2), (3, 2), (5, 2)]
    mine = [event for event in spans(events, "shard 0") if event["name"] in ("round", "window")]
    found = {(event["name"], event["args"]["version"]): event for event in mine}
    assert set(found) == {("round", 2), ("round", 3), *(("window", n) for n in (1, 2, 3))}
    for version in (2, 3):
        whole, window = found["round", version], found["window", version]
        ends_us = [event["ts"] + event["dur"] for event in (whole, window)]
        assert ends_us[0] == pytest.approx(ends_us[1], abs=0.1)
        assert window["ts"] >= whole["ts"]
        pushes = [
            event["ts"] + event["dur"]
            for event in spans(events, "shard 0")
            if event["name"] == "decode" and event["args"]["step"] == version - 1
        ]
        assert len([push for push in pushes if push >= whole["ts"]]) >= 2


@pytest.mark.slow
def test_every_span_is_one_that_chrome_reads(joined: list[Event]) -> None:
    complete = [event for event in joined if event["ph"] == "X"]
    assert {event["ph"] for event in joined} == {"X", "M", "s", "f"}
    for event in complete:
        assert isinstance(event["name"], str)
        assert event["dur"] >= 0
        assert event["ts"] >= 0
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
    assert min(event["ts"] for event in complete) == 0
    rows = {(e["pid"], e["tid"]) for e in joined if e["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in complete} <= rows


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_shows_each_phase(joined: list[Event], rank: int) -> None:
    mine = spans(joined, f"worker {rank}")
    assert {event["name"] for event in mine} == WORKER_NAMES
    steps = [event for event in mine if event["name"] == "optimizer.step"]
    assert [event["args"]["step"] for event in steps] == list(range(STEPS))
    for name in ("forward", "backward"):
        assert sum(event["name"] == name for event in mine) == STEPS
    order = [e["name"] for e in mine if e["name"] in ("forward", "backward", "optimizer.step")]
    assert order == ["forward", "backward", "optimizer.step"] * STEPS


@pytest.mark.parametrize("index", [0, 1])
def test_a_shard_shows_what_becomes_of_a_push(joined: list[Event], index: int) -> None:
    mine = spans(joined, f"shard {index}")
    assert {event["name"] for event in mine} == SHARD_NAMES
    for name in ("decode", "aggregate"):
        counted = {
            (event["args"]["slice"], worker, event["args"]["step"])
            for event in mine
            if event["name"] == name and event["args"].get("role", "gradient") == "gradient"
            for worker in event["args"].get("workers") or [event["args"]["worker"]]
        }
        assert len({entry[1:] for entry in counted}) == 2 * STEPS
    versions = [event["args"]["version"] for event in mine if event["name"] == "step"]
    assert set(versions) == set(range(1, STEPS + 1))


def test_spans_of_a_row_nest(joined: list[Event]) -> None:
    """A span that begins inside of another one of its row ends inside of it."""
    rows: dict[tuple[int, int], list[Event]] = {}
    for event in joined:
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append(event)
    for row in rows.values():
        assert [event["ts"] for event in row] == sorted(event["ts"] for event in row)
        open_: list[float] = []
        for event in row:
            end = event["ts"] + event["dur"]
            while open_ and open_[-1] <= event["ts"] + 0.001:
                open_.pop()
            assert not open_ or end <= open_[-1] + 0.001, event
            open_.append(end)
    tracks = [row for (_, tid), row in rows.items() if tid >= 1 << 20]
    assert tracks
    for row in tracks:
        for former, later in pairwise(row):
            assert former["ts"] + former["dur"] <= later["ts"] + 0.001


def test_one_clock_orders_both_sides(joined: list[Event]) -> None:
    """A push begins before its shard reads it, and is acknowledged after that."""
    keys = ("job", "table", "slice", "worker", "step", "role")

    def keyed(name: str) -> dict[tuple[Any, ...], Event]:
        found = [event for event in joined if event["name"] == name and event["ph"] == "X"]
        return {tuple(event["args"][key] for key in keys): event for event in found}

    pushed, decoded = keyed("push"), keyed("decode")
    assert pushed
    for key, push in pushed.items():
        assert push["ts"] <= decoded[key]["ts"] <= push["ts"] + push["dur"]
    arrows = [event for event in joined if event["ph"] in "sf"]
    assert len(arrows) == 2 * len(pushed)


def test_without_the_variable_nothing_is_recorded(tmp_path: Path) -> None:
    with Shards(1) as shards:
        assert shards.run(train, num_workers=1) == [False]
    assert not list(tmp_path.iterdir())
