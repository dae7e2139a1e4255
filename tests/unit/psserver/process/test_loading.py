"""The start of a shard: from its journals, else from the newest good checkpoint of each job."""

import copy
import json
import math
import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from pscore.rules import ASGD, SSGD
from psserver.decisions.limits import Limits
from psserver.decisions.membership import Member
from psserver.decisions.shard import Shard
from psserver.durability.journal_dir import JournalDir
from psserver.engine.engine import Engine
from psserver.engine.resume import recover
from psserver.exits import CommandError
from psserver.process.checkpoint_loading import MARKER, load
from psserver.remote import checkpoint_files as files
from psserver.slices.store import SliceStore
from tests.unit.psserver.front import stores_of
from tests.unit.psserver.ordered import last_of
from tests.unit.psserver.remote.test_checkpoint_files import flip, make, spoil_manifest

JOB = "run/1"
FORK = multiprocessing.get_context("fork")


def begin(journals: Path | None = None, limits: Limits | None = None) -> Engine:
    """Returns a shard that has taken up what its journals has."""
    kept = None if journals is None else JournalDir(journals)
    engine = Engine(Shard(0, 1, 10.0, limits), journals=kept, now=lambda: 5.0)
    recover(engine)
    return engine


def weight_of(engine: Engine) -> float:
    (store,) = stores_of(engine.jobs[JOB])
    arrays = last_of(store.export())
    assert np.array_equal(arrays["weights"][:6], -arrays["state.0"][:6])
    return float(arrays["weights"][0])


def test_the_newest_good_one_of_each_job_is_loaded(tmp_path: Path) -> None:
    files.write(tmp_path, make(1.0), keep=3)
    flip(files.write(tmp_path, make(2.0), keep=3) / "model.safetensors")
    files.write(tmp_path, make(3.0, "done", is_finished=True), keep=3)
    engine = begin()
    with capture_logs() as lines:
        assert list(load(engine, tmp_path, None)) == [JOB]
    assert weight_of(engine) == 1.0
    job = engine.shard.jobs[JOB]
    assert (job.membership.num_workers, job.membership.members) == (2, {})
    events = [line["event"] for line in lines]
    assert "checkpoint cannot be used" in events
    assert "job had ended; it is not loaded" in events
    (told,) = [line for line in lines if line["event"].startswith("job recovered")]
    assert (told["at"], told["path"]) == ("7 updates", str(tmp_path / "run_1-00000001"))


WRONG = [10**30, -7, 1.5, math.inf, math.nan, "x", "", None, True, [], {}]


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_no_value_of_a_manifest_ends_a_shard(tmp_path: Path, wrong: object) -> None:
    """Each value in turn is wrong, under a digest that fits; an older checkpoint is there."""
    files.write(tmp_path, make(1.0), keep=3)
    path = files.write(tmp_path, make(2.0), keep=3)
    whole = json.loads((path / files.MANIFEST).read_text())
    values = set()
    for place in places_in(whole):
        spoil_manifest(path, **replaced(whole, place, wrong))
        engine = begin()
        load(engine, tmp_path, None)
        if JOB in engine.jobs:  # Else its name is another one now, or it has ended.
            values.add(weight_of(engine))
    assert 1.0 in values


def places_in(value: object, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Returns the way to each value in a JSON value."""
    if place:
        yield place
    inner: list[tuple[Any, object]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    for key, one in inner:
        yield from places_in(one, (*place, key))


def replaced(whole: Any, place: tuple[Any, ...], wrong: object) -> Any:
    """Returns a copy of a JSON value with another value at one place."""
    copied = copy.deepcopy(whole)
    target = copied
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = wrong
    return copied


def test_an_asynchronous_job_continues_beyond_all_that_was_counted(tmp_path: Path) -> None:
    """Versions do not go back, and a worker's steps are not drawn again."""
    apart = make(1.0)
    apart.tables[0].slices = {"0": {"version": 7, "clocks": {"0": 4, "1": 3}}}
    files.write(tmp_path, apart, keep=1)
    engine = begin()
    load(engine, tmp_path, None)
    clock = engine.shard.jobs[JOB].tables["model"].clocks[0]
    assert (clock.version, clock.clock(0), clock.clock(1)) == (7, 4, 4)


@pytest.mark.parametrize("rule", [ASGD(), SSGD()])
def test_a_loaded_checkpoint_is_in_the_journal(tmp_path: Path, rule: ASGD | SSGD) -> None:
    """A shard that is killed before the workers come tells them the same step."""
    files.write(tmp_path / "c", make(1.0, rule=rule), keep=1)
    first = begin(tmp_path / "v")
    load(first, tmp_path / "c", tmp_path / "v")
    clock = first.shard.jobs[JOB].tables["model"].clocks[0]
    expected = clock.version, clock.clock(0), clock.clock(1)
    assert first.recovery._folder is not None
    first.recovery._folder.close()  # As the end of the process does.
    again = begin(tmp_path / "v")
    files.write(tmp_path / "c", make(9.0, rule=rule), keep=1)
    assert load(again, tmp_path / "c", tmp_path / "v") == {}  # The journal is newer.
    assert weight_of(again) == 1.0
    clock = again.shard.jobs[JOB].tables["model"].clocks[0]
    assert (clock.version, clock.clock(0), clock.clock(1)) == expected


def test_a_shard_that_is_killed_while_it_loads_loads_again(tmp_path: Path) -> None:
    """Its journal has the job by then, without weights: it is refused, and is no loss."""
    files.write(tmp_path / "c", make(1.0), keep=1)

    def run() -> None:
        SliceStore.restore = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
        load(begin(tmp_path / "v"), tmp_path / "c", tmp_path / "v")

    process = FORK.Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert (tmp_path / "v" / MARKER).exists()
    engine = begin(tmp_path / "v")
    lost = engine.shard.lifetimes.lost
    assert (list(engine.shard.jobs), [name for name, _ in lost.values()]) == ([], [JOB])
    assert list(load(engine, tmp_path / "c", tmp_path / "v")) == [JOB]
    assert (weight_of(engine), lost) == (1.0, {})
    assert not (tmp_path / "v" / MARKER).exists()


def test_a_good_one_that_has_no_room_is_refused_and_not_begun_again(tmp_path: Path) -> None:
    path = files.write(tmp_path, make(1.0), keep=1)
    engine = begin(limits=replace(Limits(), memory_nbytes=8))
    with pytest.raises(CommandError, match=f"cannot load {path}: .* move its checkpoints away"):
        load(engine, tmp_path, None)


def test_workers_of_a_loaded_job_begin_where_it_was(tmp_path: Path) -> None:
    files.write(tmp_path, make(1.0, rule=SSGD()), keep=1)
    engine = begin()
    load(engine, tmp_path, None)
    member = Member(rank=1, incarnation=9, restart=0, host="a", pid=1, heard_s=5.0)
    job = engine.join(JOB, 2, member)
    assert job is engine.jobs[JOB]
    assert job.job.tables["model"].clocks[0].version == 7
