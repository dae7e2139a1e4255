"""A pipeline with PACELINE_TIMELINE: forwards and backwards of each worker, each in its file."""

import json
from typing import Any

import pytest

from tests.integration.cluster import Shards, new_job
from tests.integration.test_pipeline_driver import train

REPLICAS, TOTAL = (2, 1), 13
Event = dict[str, Any]


@pytest.fixture(scope="module", params=["1f1b", "ScheduleGPipe"])
def workers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The events of each worker."""
    folder = tmp_path_factory.mktemp("timeline")
    env = {"PACELINE_TIMELINE": str(folder / "trace.json")}
    case = [(REPLICAS, request.param, "weights")]
    with (
        Shards(1) as shards,
        shards.workers(
            train, new_job(), case, TOTAL, num_workers=sum(REPLICAS), env=env
        ) as running,
    ):
        for worker in running:
            worker.result()
    files = [folder / f"trace.worker{rank}.json" for rank in range(sum(REPLICAS))]
    assert sorted(folder.iterdir()) == files
    return [json.loads(file.read_text())["traceEvents"] for file in files]


def named(events: list[Event], what: str) -> dict[int, Event]:
    """Returns the spans of a kind, by number."""
    found = [event for event in events if event["name"].startswith(f"{what} ")]
    return {event["args"]["number"]: event for event in found}


@pytest.mark.slow
def test_each_worker_has_a_file_with_the_minibatches_of_its_replica(workers: list[Any]) -> None:
    of_replica = [range(0, TOTAL, 2), range(1, TOTAL, 2), range(TOTAL)]
    for events, numbers in zip(workers, of_replica, strict=True):
        forwards, backwards = named(events, "forward"), named(events, "backward")
        assert sorted(forwards) == sorted(backwards) == [*numbers]
        for number, forward in forwards.items():
            assert forward["ts"] + forward["dur"] <= backwards[number]["ts"]


def test_a_stage_waits_for_its_neighbour_and_begins_then(workers: list[Any]) -> None:
    for events, what, wait in zip(
        workers,
        ["backward", "backward", "forward"],
        ["gradient", "gradient", "activation"],
        strict=True,
    ):
        waits = named(events, "wait")
        for number, span in named(events, what).items():
            assert waits[number]["args"]["awaits"] == wait
            assert waits[number]["ts"] + waits[number]["dur"] <= span["ts"]


def test_updates_are_in_order_behind_a_backward(workers: list[Any]) -> None:
    for events in workers:
        updates = named(events, "update")
        assert [*updates] == sorted(updates)
        first = min(span["ts"] + span["dur"] for span in named(events, "backward").values())
        assert updates
        assert all(first <= update["ts"] for update in updates.values())
