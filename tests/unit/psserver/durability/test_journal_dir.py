"""The journals: one process at a time, one boot of the machine, and nothing left behind."""

import errno
import fcntl
import json
from pathlib import Path

import numpy as np
import pytest

from psserver.decisions.lifetime import digest
from psserver.durability import journal_dir
from psserver.durability.journal_dir import (
    JobJournal,
    JournalDir,
    TemporaryJournalDir,
    lock_folder,
)
from psserver.durability.sealed import read_json, write_json


def test_a_second_process_is_kept_out(tmp_path: Path) -> None:
    first = JournalDir(tmp_path / "v")
    with pytest.raises(BlockingIOError):
        JournalDir(tmp_path / "v")
    first.close()
    assert JournalDir(tmp_path / "v").instance == first.instance


def test_a_lock_that_cannot_be_opened_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system without locks has none to give."""
    with pytest.raises(IsADirectoryError, match="cannot open the lock"):
        lock_folder(tmp_path, "busy")

    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert lock_folder(tmp_path / "lock", "busy") is None


def test_a_written_job_is_found_again(tmp_path: Path) -> None:
    first = JournalDir(tmp_path / "v")
    job = first.make("a")
    job.write_job({"name": "a"})
    job.write_table(0, {"spec": 1})
    made = job.make_weights(0, 4096, 1)
    made.segment.integers(0, 1)[0] = 7
    made.stamps(0)[:] = 7, 8
    place = job.arena.allocate(64)
    job.arena.integers_at(place, 1)[0] = 9
    first.close()
    (folder,) = JournalDir(tmp_path / "v").found()
    found = JobJournal(folder)
    assert found.read_job() == {"name": "a", "seal": job.seal}
    assert found.read_tables(1) == {0: {"spec": 1}}
    weights = found.open_weights(0, 4096, 1)
    assert weights.segment.integers(0, 1)[0] == 7
    assert weights.stamps(0).tolist() == [7, 8]
    assert found.arena.integers_at(place, 1)[0] == 9


def test_the_newest_job_is_found_first_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time_ns", iter(range(100, 0, -1)).__next__)
    first = JournalDir(tmp_path / "v")
    for name in "abc":
        first.make(name).write_job({"name": name})
    first.close()
    second = JournalDir(tmp_path / "v")
    second.make("d").write_job({"name": "d"})
    found = [JobJournal(folder).read_job()["name"] for folder in second.found()]
    assert found == ["d", "c", "b", "a"]


@pytest.mark.parametrize("is_over", [True, False])
def test_after_a_boot_nothing_is_believed_but_that_there_was_a_job(
    tmp_path: Path, is_over: bool
) -> None:
    first = JournalDir(tmp_path / "v")
    job = first.make("a")
    job.write_job({"name": "a", "num_tables": 1, "ended": is_over})
    job.make_weights(0, 4096, 1)
    first.close()
    stamp = tmp_path / "v" / "stamp.json"
    write_json(stamp, {**read_json(stamp), "boot": "another"})
    second = JournalDir(tmp_path / "v")
    assert second.instance != first.instance
    if is_over:
        assert second.found() == []
        return
    (folder,) = second.found()
    assert sorted(path.name for path in folder.iterdir()) == ["job.json", "lost.json"]
    with pytest.raises(ValueError, match="machine has been restarted"):
        JobJournal(folder)
    second.remove_job("a")
    assert second.found() == []


@pytest.mark.parametrize("roots", [{}, {"3": 64}, None], ids=["none", "one", "not known"])
def test_of_a_job_without_slices_here_nothing_is_lost_with_the_boot(
    tmp_path: Path, roots: dict[str, int] | None
) -> None:
    """All shards would be set back to a checkpoint for a job that is refused."""
    first = JournalDir(tmp_path / "v")
    job = first.make("a")
    job.make_weights(0, 4096, 0)
    if roots is not None:
        job.write_table(0, {"roots": roots})
    job.write_job({"name": "a", "num_tables": 1, "ended": False})
    first.close()
    other_boot(tmp_path / "v")
    second = JournalDir(tmp_path / "v")
    assert second.instance != first.instance
    assert bool(second.found()) is (roots != {})


def test_the_number_of_recoveries_outlives_the_process_and_not_the_boot(tmp_path: Path) -> None:
    for number in range(2):
        folder = JournalDir(tmp_path / "v")
        assert folder.num_recoveries == number
        folder.note_recovered()
        assert folder.nbytes() > 0
        folder.close()
    stamp = tmp_path / "v" / "stamp.json"
    write_json(stamp, {**read_json(stamp), "boot": "another"})
    assert JournalDir(tmp_path / "v").num_recoveries == 0


def other_boot(folder: Path) -> None:
    """Makes the journals those of another boot, or of another machine."""
    write_json(folder / "stamp.json", {**read_json(folder / "stamp.json"), "boot": "another"})


def test_after_an_orderly_end_another_boot_finds_everything(tmp_path: Path) -> None:
    first = JournalDir(tmp_path / "v")
    job = first.make("a")
    job.write_job({"name": "a", "num_tables": 1, "ended": False})
    first.note_recovered()
    first.seal()
    first.close()
    other_boot(tmp_path / "v")
    second = JournalDir(tmp_path / "v")
    assert (second.instance, second.num_recoveries) == (first.instance, 0)
    assert second.found() == [job.folder]
    assert JobJournal(job.folder).read_job()["name"] == "a"
    second.close()
    other_boot(tmp_path / "v")  # The mark is for one start: this one did not end in order.
    assert JournalDir(tmp_path / "v").instance != first.instance
    assert (job.folder / "lost.json").exists()


def test_the_mark_of_an_orderly_end_is_gone_after_a_start_in_the_same_boot(tmp_path: Path) -> None:
    first = JournalDir(tmp_path / "v")
    first.seal()
    first.close()
    second = JournalDir(tmp_path / "v")
    assert second.instance == first.instance
    assert not (tmp_path / "v" / "closed.json").exists()


@pytest.mark.parametrize("mark", ["", "{", '{"meta": 1, "sha256": 2}', "of another shard"])
def test_a_mark_that_is_damaged_or_of_other_journals_is_not_believed(
    tmp_path: Path, mark: str
) -> None:
    first = JournalDir(tmp_path / "v")
    first.seal()
    first.close()
    closed = tmp_path / "v" / "closed.json"
    if mark == "of another shard":
        write_json(closed, {"instance": first.instance + 1})
    else:
        closed.write_text(mark)
    other_boot(tmp_path / "v")
    assert JournalDir(tmp_path / "v").instance != first.instance
    assert not closed.exists()


def test_a_disk_that_fails_leaves_no_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = JournalDir(tmp_path / "v")

    def fail(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal_dir, "sync", fail)
    with pytest.raises(OSError, match="No space"):
        first.seal()
    assert not (tmp_path / "v" / "closed.json").exists()


def test_a_job_that_is_given_up_changes_what_workers_know_the_shard_by(tmp_path: Path) -> None:
    first = JournalDir(tmp_path / "v")
    job = first.make("a")
    job.write_job({"name": "a", "num_tables": 1, "ended": False})
    key, name, reason = first.give_up(job.folder, ValueError("it is damaged"))
    assert (key, name, "it is damaged" in reason) == (digest("a"), "a", True)
    first.close()
    second = JournalDir(tmp_path / "v")
    assert second.instance == first.instance
    assert second.found() == [job.folder]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"meta": 1, "sha256": 2}', '{"format": "x"}', "[" * 100_000]
)
def test_a_stamp_that_is_damaged_is_written_again(tmp_path: Path, content: str) -> None:
    first = JournalDir(tmp_path / "v")
    first.make("a").write_job({"name": "a", "num_tables": 0, "ended": False})
    first.close()
    (tmp_path / "v" / "stamp.json").write_text(content)
    second = JournalDir(tmp_path / "v")
    assert second.found() == []
    assert second.instance != first.instance


def test_journals_of_another_format_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "v" / "00001-0123456789abcdef"
    folder.mkdir(parents=True)
    (folder / "arena").write_bytes(b"PLARENA1")
    (tmp_path / "v" / "stamp.json").write_text(json.dumps({"format": 1, "boot": "b"}))
    assert JournalDir(tmp_path / "v").found() == [folder]
    assert (folder / "arena").read_bytes() == b"PLARENA1"


def test_residuals_are_found_again_or_refused(tmp_path: Path) -> None:
    job = JournalDir(tmp_path / "v").make("a")
    assert job.read_residuals() == {}
    job.write_residuals({"0/1/2/worker.0.residual": np.ones(3, np.float32)})
    assert job.read_residuals()["0/1/2/worker.0.residual"].tolist() == [1, 1, 1]
    path = job.folder / "residuals"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        job.read_residuals()
    job.write_residuals({})
    assert not path.exists()


def test_files_of_killed_starts_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_dir, "SHM", tmp_path)
    killed, running = TemporaryJournalDir("killed"), TemporaryJournalDir("running")
    assert killed.path is not None
    assert running.path is not None
    killed._lock.close()  # As when its process is gone.
    third = TemporaryJournalDir("third")
    assert not killed.path.exists()
    assert running.path.exists()
    assert third.path is not None
    third.remove()
    assert not third.path.exists()
