"""Checkpoints as files: their order, kills at every step of writing, damage of every kind."""

import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pscore.compressors.none import NoCompression
from pscore.rules import ASGD, SSGD, LocalSGD
from pscore.rules.base import Rule
from pscore.table_spec import TableSpec
from pscore.types import TensorSpec
from psserver.durability import records
from psserver.exits import CommandError, Exit
from psserver.remote import checkpoint_files as files
from psserver.remote.checkpoint_files import Checkpoint, TableState

SHAPE = (3, 2)
FORK = multiprocessing.get_context("fork")


def make(value: float, job: str = "run/1", rule: Rule | None = None, **more: Any) -> Checkpoint:
    """Returns a checkpoint whose weights are all `value`."""
    spec = TableSpec(
        name="model",
        tensors=(TensorSpec(name="w", shape=SHAPE, dtype="float32"),),
        num_shards=1,
        rule=rule or ASGD(),
        compressor=NoCompression(),
        optimizer="sgd",
        num_groups=1,
    )
    slices = {"0": {"version": 7, "clocks": {"0": 4, "1": 3}}}
    table = TableState(
        spec=spec,
        version=7,
        slices=slices,
        counts=[7],
        arrays={
            "weights": {"w": np.full(SHAPE, value, np.float32)},
            "momentum_buffer": {"w": np.full(SHAPE, -value, np.float32)},
        },
    )
    return Checkpoint(job=job, num_workers=2, tables=[table], **more)


def test_rounds_of_different_slices_continue_from_the_newest_version() -> None:
    (table,) = make(1.0, rule=LocalSGD(steps=2, quorum=1)).tables
    table.version = -1
    table.slices = {
        str(index): {"version": version, "clocks": {"0": 40}}
        for index, version in enumerate((41, 42, 41))
    }
    assert table.updates == (41, 42)
    assert table.clock == 42
    assert table.position == "41 to 42 updates"


def value_of(path: Path, job: str | None = None) -> float:
    """Returns the weights of the newest good checkpoint, which must be whole."""
    _, found = files.read(path, job, lambda _: None)
    (table,) = found.tables
    weights, momentum = table.arrays["weights"]["w"], table.arrays["momentum_buffer"]["w"]
    assert np.array_equal(weights, -momentum)
    return float(weights[0, 0])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name[0] != ".")


def flip(path: Path, place: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 1
    path.write_bytes(data)


# ----- aside


def test_those_of_a_forgotten_job_are_set_aside_and_none_is_lost(tmp_path: Path) -> None:
    assert files.set_aside(tmp_path / "none", "run/1") is None
    for value, job in ((1.0, "run/1"), (2.0, "run/1"), (3.0, "other")):
        files.write(tmp_path, make(value, job), keep=2)
    aside = files.set_aside(tmp_path, "run/1")
    assert aside is not None
    assert list(files.newest(tmp_path)) == ["other"]
    assert value_of(aside) == 2.0
    assert files.set_aside(tmp_path, "run/1") is None
    files.write(tmp_path, make(4.0), keep=2)
    again = files.set_aside(tmp_path, "run/1")
    assert again is not None
    assert (value_of(aside), value_of(again)) == (2.0, 4.0)


# ----- order


def test_those_of_ended_and_forgotten_jobs_are_deleted_after_a_time(tmp_path: Path) -> None:
    for number in range(8):  # Jobs that come and end.
        files.write(tmp_path, make(1.0, f"run{number}", is_finished=True), keep=3)
    files.write(tmp_path, make(1.0, "interrupted"), keep=3)
    files.write(tmp_path, make(1.0, "forgotten"), keep=3)
    aside = files.set_aside(tmp_path, "forgotten")
    assert aside is not None
    assert files.expire(tmp_path, 1000.0) == []
    for path in (*tmp_path.glob("*-00000001"), aside):
        os.utime(path, (0.0, 0.0))
    files.write(tmp_path, make(2.0, "run7"), keep=3)  # It has begun again.
    assert len(files.expire(tmp_path, 1000.0)) == 8
    assert names(tmp_path) == [
        "forgotten",
        "interrupted-00000001",
        "run7-00000001",
        "run7-00000002",
    ]
    assert not list((tmp_path / "forgotten").iterdir())


def test_each_has_its_number_and_the_newest_is_read(tmp_path: Path) -> None:
    for value in (1.0, 2.0, 3.0, 4.0):
        files.write(tmp_path, make(value), keep=3)
    assert names(tmp_path) == ["run_1-00000002", "run_1-00000003", "run_1-00000004"]
    assert value_of(tmp_path) == 4.0


def test_the_order_is_that_of_the_manifests_and_not_of_names(tmp_path: Path) -> None:
    first = files.write(tmp_path, make(1.0), keep=3)
    second = files.write(tmp_path, make(2.0), keep=3)
    first.rename(tmp_path / "z-99999999")
    second.rename(tmp_path / "a")
    assert value_of(tmp_path) == 2.0
    assert files.write(tmp_path, make(3.0), keep=1).name == "run_1-00000003"
    assert names(tmp_path) == ["run_1-00000003"]


def test_jobs_share_a_folder_and_each_keeps_its_own(tmp_path: Path) -> None:
    """Names that are alike as folders are those of two jobs all the same."""
    files.write(tmp_path, make(1.0, "run/1"), keep=1)
    files.write(tmp_path, make(2.0, "run_1"), keep=1)
    files.write(tmp_path, make(3.0, "run/1"), keep=1)
    assert value_of(tmp_path, "run/1") == 3.0
    assert value_of(tmp_path, "run_1") == 2.0
    with pytest.raises(CommandError, match=r"of jobs 'run/1', 'run_1'; choose one") as refusal:
        files.read(tmp_path, None, lambda _: None)
    assert refusal.value.code is Exit.USAGE


@pytest.mark.parametrize(
    "job", ["..", ".", "a/../../b", "\x1b[31m", "x" * 256, " ", "ü", "-rf", "--", chr(0x20000) * 64]
)
def test_a_name_stays_in_the_folder(tmp_path: Path, job: str) -> None:
    path = files.write(tmp_path / "in", make(1.0, job), keep=1)
    assert path.parent == tmp_path / "in"
    assert os.listdir(tmp_path) == ["in"]
    assert len(path.name) < 80
    assert path.name.isprintable()
    assert path.name[0] not in ".-"  # A hidden folder, or an option of `rm`.
    assert value_of(tmp_path / "in") == 1.0


def test_positions_of_both_kinds_of_modes(tmp_path: Path) -> None:
    for rule, position in ((ASGD(), "7 updates"), (SSGD(), "step 7")):
        files.write(tmp_path, make(1.0, rule=rule), keep=1)
        _, found = files.read(tmp_path, None, lambda _: None)
        assert found.position == position
    apart = make(1.0).tables[0]
    apart.version = -1
    apart.slices = {"0": {"version": 5, "clocks": {"0": 3}}, "1": {"version": 8, "clocks": {}}}
    assert (apart.position, apart.updates, apart.clock) == ("5 to 8 updates", (5, 8), 3)


# ----- writers that die, or write at once

STEPS = ("mkdir", "fsync", "rename", "unlink", "rmdir")


def killed_at(number: int, act: Callable[[], object]) -> bool:
    """Runs `act` in a process that is killed before its `number`-th change of the disk.

    Returns whether it was: it makes fewer changes otherwise.
    """

    def run() -> None:
        left = number

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **more: Any) -> Any:
                nonlocal left
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return function(*arguments, **more)

            return call

        for name in STEPS:
            setattr(os, name, counted(getattr(os, name)))
        vars(files)["save_file"] = counted(save_file)
        act()
        os._exit(0)

    process = FORK.Process(target=run)
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_good_one(tmp_path: Path) -> None:
    number = 0
    while True:
        folder = tmp_path / str(number)
        for value in (1.0, 2.0):
            files.write(folder, make(value), keep=2)
        was_killed = killed_at(number, lambda: files.write(folder, make(3.0), keep=1))  # noqa: B023
        assert value_of(folder) in (2.0, 3.0)
        files.write(folder, make(4.0), keep=1)
        assert value_of(folder) == 4.0
        assert len(names(folder)) == 1
        assert not list(folder.glob(".draft-*"))
        if not was_killed:
            break
        number += 1
    assert number >= 12  # Files, their syncs, the rename, and deletions.


def test_all_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, rename = records.sync, os.rename

    def noted(path: Path) -> None:
        done.append(re.sub(r"draft-\w+", "draft", str(path.relative_to(tmp_path))))
        sync(path)

    def renamed(old: Path, new: Path) -> None:
        done.append(f"rename to {new.relative_to(tmp_path)}")
        rename(old, new)

    monkeypatch.setattr(records, "sync", noted)
    monkeypatch.setattr(os, "rename", renamed)
    files.write(tmp_path / "a" / "b", make(1.0), keep=1)
    draft = "a/b/.draft"
    written = ["model.safetensors", "momentum_buffer.safetensors", "manifest.json"]
    assert done == [
        "a", ".", *(f"{draft}/{name}" for name in written), draft,
        "rename to a/b/run_1-00000001", "a/b",
    ]  # fmt: skip


def test_writers_at_once_take_a_number_each(tmp_path: Path) -> None:
    def run(first: int) -> None:
        for value in range(first, first + 5):
            files.write(tmp_path, make(float(value), f"job {first % 20}"), keep=50)

    writers = [FORK.Process(target=run, args=(10 * number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    found = files.newest(tmp_path)
    for job, values in (("job 0", {*range(5), *range(20, 25)}), ("job 10", {*range(10, 15)})):
        sequences = [one.sequence for one in found[job]]
        assert len(set(sequences)) == len(sequences)
        assert {value_of(one.path) for one in found[job]} >= {float(value) for value in values}


def test_a_draft_of_a_writer_at_work_is_left_alone(tmp_path: Path) -> None:
    with files._writing(tmp_path):
        draft = tmp_path / ".draft-of-another"
        draft.mkdir()
        files.write(tmp_path, make(1.0), keep=1)
        assert draft.exists()
    files.write(tmp_path, make(1.0), keep=1)
    assert not draft.exists()


def test_a_full_disk_leaves_those_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write(tmp_path, make(1.0), keep=1)
    for failing in range(1, 5):  # Two arrays, the manifest, the draft.
        calls = itertools.count(1)

        def sync(path: Path, calls: Any = calls, failing: int = failing) -> None:
            if next(calls) == failing:
                raise OSError(28, "No space left on device", str(path))

        with monkeypatch.context() as patch:
            patch.setattr(records, "sync", sync)
            with pytest.raises(OSError, match="No space left"):
                files.write(tmp_path, make(2.0), keep=1)
        assert value_of(tmp_path) == 1.0
        assert not list(tmp_path.glob(".draft-*"))


# ----- what comes back is verified


def spoil_manifest(path: Path, **changes: Any) -> None:
    """Changes values of a manifest, with a digest that fits."""
    manifest = json.loads((path / files.MANIFEST).read_text()) | changes
    manifest["digest"] = files._digest(manifest)
    (path / files.MANIFEST).write_text(json.dumps(manifest))


def spoil_table(path: Path, **changes: Any) -> None:
    """Changes values of the first table of a manifest, with a digest that fits."""
    (table,) = json.loads((path / files.MANIFEST).read_text())["tables"]
    spoil_manifest(path, tables=[table | changes])


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "bit of weights": (lambda p: flip(p / "model.safetensors"), "model.safetensors has changed"),
    "bit of state": (lambda p: flip(p / "momentum_buffer.safetensors"), "momentum_buffer"),
    "bit of the manifest": (lambda p: flip(p / files.MANIFEST, 0.2), ""),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "model.safetensors is missing"),
    "empty weights": (lambda p: (p / "model.safetensors").write_bytes(b""), "has changed"),
    "cut weights": (lambda p: os.truncate(p / "model.safetensors", 90), "has changed"),
    "no manifest": (lambda p: (p / files.MANIFEST).unlink(), "manifest.json is missing"),
    "empty manifest": (lambda p: (p / files.MANIFEST).write_text(""), ""),
    "a list": (lambda p: (p / files.MANIFEST).write_text("[]"), ""),
    "another format": (lambda p: spoil_manifest(p, format=1), "its format is 1, and this version"),
    "no hashes": (lambda p: spoil_manifest(p, sha256={}), "the manifest has no"),
    "a text for a number": (lambda p: spoil_manifest(p, num_workers="two"), "two"),
    "null for tables": (lambda p: spoil_manifest(p, tables=None), ""),
    "numbers for tables": (lambda p: spoil_manifest(p, tables=[1]), ""),
    "a large number": (
        lambda p: spoil_table(p, counts=[10**30]),
        "the optimizer's steps of tensor",
    ),
    "a number too many": (lambda p: spoil_table(p, counts=[7, 7]), "2 counts of steps for 1"),
    "infinity": (
        lambda p: spoil_table(p, version=math.inf),
        "a version is inf, must be an integer",
    ),
    "another folder": (lambda p: spoil_table(p, arrays=["../weights"]), "is named '../weights'"),
    "a large sequence": (lambda p: spoil_manifest(p, sequence=10**30), "its sequence is 1000"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused_by_name_and_the_next_best_is_taken(tmp_path: Path, damage: str) -> None:
    spoil, reason = DAMAGES[damage]
    files.write(tmp_path, make(1.0), keep=3)
    path = files.write(tmp_path, make(2.0), keep=3)
    spoil(path)
    with pytest.raises(CommandError) as refusal:
        files.read(path, None, lambda _: None)
    assert refusal.value.code is Exit.STATE_DIR
    for part in (f"{path} cannot be used: ", reason, f"`psserver restore {tmp_path}` uses"):
        assert part in refusal.value.message
    told: list[str] = []
    chosen, _ = files.read(tmp_path, None, told.append)
    assert chosen.name == "run_1-00000001"
    (sentence,) = told
    assert str(path) in sentence
    assert sentence.endswith("; the next newest is used")
    assert files.write(tmp_path, make(3.0), keep=1).name == "run_1-00000003"
    assert value_of(tmp_path) == 3.0


def test_a_file_of_other_tensors_is_refused(tmp_path: Path) -> None:
    """Also one whose hash is right."""
    wrong = make(1.0)
    wrong.tables[0].arrays = {"weights": {"w": np.zeros((2, 3), np.float32)}}
    path = files.write(tmp_path, wrong, keep=1)
    with pytest.raises(CommandError, match=r"'w' in model.safetensors is not of shape \[3, 2\]"):
        files.read(path, None, lambda _: None)


def test_with_none_that_is_whole_all_are_named(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        flip(files.write(tmp_path, make(value), keep=3) / "model.safetensors")
    told: list[str] = []
    with pytest.raises(CommandError, match=r"none of the 2 .* run_1-00000001, run_1-00000002"):
        files.read(tmp_path, None, told.append)
    assert len(told) == 2
    with pytest.raises(CommandError, match="there is no checkpoint in"):
        files.read(tmp_path / "nothing", None, told.append)
    (tmp_path / "old" / "step-000000001200").mkdir(parents=True)
    (tmp_path / "old" / "step-000000001200" / files.MANIFEST).write_text('{"format": 1}')
    with pytest.raises(CommandError, match=r"step-000000001200 cannot be used: its format is 1"):
        files.read(tmp_path / "old", None, told.append)


def test_a_copy_without_its_newest_files_is_not_taken_for_whole(tmp_path: Path) -> None:
    """As `cp -r` leaves it that ran while the checkpoint was deleted."""
    files.write(tmp_path / "a", make(1.0), keep=1)
    files.write(tmp_path / "a", make(2.0), keep=1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (copied,) = (path for path in (tmp_path / "b").iterdir() if path.is_dir())
    (copied / "momentum_buffer.safetensors").unlink()
    with pytest.raises(CommandError, match="none of the 1 checkpoints"):
        files.read(tmp_path / "b", None, lambda _: None)


def test_an_export_replaces_no_device_and_no_link(tmp_path: Path) -> None:
    """As root it replaced /dev/null by a file."""
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    unnamed = os.pipe()  # As /dev/stdout in a pipeline: its link leads to no path.
    for path in (pipe, link, tmp_path, Path(f"/dev/fd/{unnamed[1]}")):
        with pytest.raises(OSError, match="it is no file that can be replaced"):
            files.export(path, make(1.0))
    for number in unnamed:
        os.close(number)
    link.unlink()
    link.symlink_to(file)
    files.export(link, make(1.0))
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["file", "link", "pipe"]


def test_exports_at_once_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    files.export(path, make(1.0))
    files.export(path, make(2.0))
    assert os.listdir(tmp_path) == ["model.safetensors"]
