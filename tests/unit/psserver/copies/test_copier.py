"""Copies of checkpoints at a second place: made, pruned, brought back; broken places."""

import shutil
import uuid
from pathlib import Path
from queue import SimpleQueue

import pytest

from psserver.copies.copier import Copier, copy, fetch
from psserver.copies.places import FolderPlace, SecondPlace, place_of
from psserver.remote.checkpoint_files import MANIFEST, newest, read, set_aside, verified, write
from tests.unit.psserver.remote.test_checkpoint_files import make

KEEP = 2


@pytest.fixture(params=["folder", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> SecondPlace:
    if request.param == "folder":
        return place_of(str(tmp_path / "second"))
    pytest.importorskip("fsspec")
    return place_of(f"memory://{uuid.uuid4().hex}/night")


def value_in(folder: Path, job: str = "a") -> float:
    _, checkpoint = read(folder, job, print)
    return float(checkpoint.tables[0].arrays["weights"]["w"].flat[0])


def test_the_newest_are_copied_and_come_back_when_the_folder_is_lost(
    place: SecondPlace, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    for value in range(4):
        write(first, make(float(value), "a"), keep=3)
        write(first, make(10.0 + value, "b"), keep=3)
        assert copy(first, place, KEEP) == 2 * min(value + 1, KEEP)
    assert copy(first, place, KEEP) == 2 * KEEP
    shutil.rmtree(first)
    brought = fetch(first, place)
    assert sorted(path.name for path in brought) == ["a-00000004", "b-00000004"]
    assert (value_in(first, "a"), value_in(first, "b")) == (3.0, 13.0)
    assert fetch(first, place) == []
    write(first, make(9.0, "a"), keep=3)
    assert newest(first)["a"][0].sequence == 5


def test_a_damaged_copy_is_passed_over(place: SecondPlace, tmp_path: Path) -> None:
    first = tmp_path / "first"
    for value in (1.0, 2.0):
        write(first, make(value, "a"), keep=3)
        copy(first, place, KEEP)
    damaged = tmp_path / "a-00000002"
    place.fetch("a-00000002", damaged)
    place.delete("a-00000002")
    content = bytearray((damaged / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (damaged / "model.safetensors").write_bytes(content)
    if isinstance(place, FolderPlace):
        with pytest.raises(ValueError, match="has changed"):
            place.send(damaged)
        damaged.rename(tmp_path / "second" / damaged.name)
    else:
        place.send(damaged)
    shutil.rmtree(first)
    assert [path.name for path in fetch(first, place)] == ["a-00000001"]


def test_a_copy_without_a_manifest_is_none(place: SecondPlace, tmp_path: Path) -> None:
    half = tmp_path / "a-00000001"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    if isinstance(place, FolderPlace):
        shutil.copytree(half, tmp_path / "second" / half.name)
    else:
        place.send(half)
    assert fetch(tmp_path / "first", place) == []


@pytest.mark.parametrize(
    "manifest", ["{", "{}", "[" * 100_000, '{"job": "a", "digest": "x", "sequence": Infinity}']
)
def test_a_damaged_manifest_keeps_no_other_job_waiting(tmp_path: Path, manifest: str) -> None:
    first, place = tmp_path / "first", place_of(str(tmp_path / "second"))
    write(first, make(1.0, "a"), keep=3)
    write(first, make(2.0, "b"), keep=3)
    assert copy(first, place, KEEP) == 2
    (tmp_path / "second" / "a-00000001" / MANIFEST).write_text(manifest)
    write(first, make(3.0, "b"), keep=3)
    assert copy(first, place, KEEP) == 3  # That of job "a" was copied again.
    (tmp_path / "second" / "a-00000001" / MANIFEST).write_text(manifest)
    shutil.rmtree(first)
    assert [path.name for path in fetch(first, place)] == ["b-00000002"]


def test_forgotten_and_expired_ones_are_deleted_and_do_not_come_back(
    place: SecondPlace, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    write(first, make(1.0, "a"), keep=3)
    write(first, make(2.0, "b"), keep=3)
    assert copy(first, place, KEEP) == 2
    set_aside(first, "a")
    assert fetch(first, place) == []
    assert copy(first, place, KEEP) == 1
    assert copy(first, place, KEEP, ["b-00000001"]) == 1  # It is still here, so it is sent again.
    shutil.rmtree(first / "b-00000001")
    assert copy(first, place, KEEP, ["b-00000001"]) == 0


def test_newer_ones_of_another_start_are_not_covered(place: SecondPlace, tmp_path: Path) -> None:
    first = tmp_path / "first"
    for value in (1.0, 2.0):
        write(first, make(value, "a"), keep=3)
    copy(first, place, KEEP)
    shutil.rmtree(first)
    write(first, make(3.0, "a"), keep=3)
    write(first, make(4.0, "b"), keep=3)
    with pytest.raises(ValueError, match="a-00000002, that is newer"):
        copy(first, place, KEEP)
    shutil.rmtree(first)
    assert [path.name for path in fetch(first, place)] == ["a-00000002", "b-00000001"]


def test_a_checkpoint_is_copied_whole_while_newer_ones_replace_it(tmp_path: Path) -> None:
    first = tmp_path / "first"
    path = write(first, make(1.0, "a"), keep=1)

    class Slow(FolderPlace):
        def send(self, source: Path) -> None:
            write(first, make(2.0, "a"), keep=1)
            assert not path.exists()
            super().send(source)

    place = Slow(tmp_path / "second")
    assert copy(first, place, KEEP) == 1
    (found,) = newest(tmp_path / "second")["a"]
    assert float(verified(found).tables[0].arrays["weights"]["w"].flat[0]) == 1.0
    assert not list(first.glob(".copying-*"))


def test_a_broken_place_is_reported_until_it_works_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write(first, make(1.0, "a"), keep=3)
    second.write_text("no folder")
    told: list[tuple[str, int]] = []
    copier = Copier(first, str(second), KEEP, lambda *it: told.append(it))

    def attempt() -> tuple[str, int]:
        copier.begin()
        copier.finish()
        return told[-1]

    for _ in range(2):
        problem, count = attempt()
        assert "second" in problem
        assert count == 0
    second.unlink()
    assert attempt() == ("", 1)
    written = capsys.readouterr()
    lines = written.out + written.err
    assert lines.count("are not copied") == 1
    assert lines.count("are copied to the second place again") == 1


def test_an_unexpected_error_of_a_store_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise RuntimeError("the client of the store broke")

    monkeypatch.setattr("psserver.copies.copier.copy", refuse)
    told: SimpleQueue[str] = SimpleQueue()
    Copier(tmp_path, "anywhere", KEEP, lambda problem, _: told.put(problem)).begin()
    assert told.get(timeout=60) == "RuntimeError: the client of the store broke"


def test_a_store_that_is_not_installed_is_named(tmp_path: Path) -> None:
    told: list[str] = []
    copier = Copier(tmp_path, "nothing9://x", KEEP, lambda problem, _: told.append(problem))
    copier.begin()
    copier.finish()
    assert "install fsspec" in told[0]
