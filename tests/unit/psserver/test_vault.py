"""The vault: one process at a time, one boot of the machine, and nothing left behind."""

import json
from pathlib import Path

import pytest

from psserver import vault
from psserver.vault import ShortLived, Vault


def test_a_second_process_is_kept_out(tmp_path: Path) -> None:
    first = Vault(tmp_path / "v")
    with pytest.raises(BlockingIOError):
        Vault(tmp_path / "v")
    first.close()
    assert Vault(tmp_path / "v").instance == first.instance


def test_what_was_written_is_found_again(tmp_path: Path) -> None:
    first = Vault(tmp_path / "v")
    job = first.make()
    job.write_job({"name": "a"})
    job.write_table(0, {"spec": 1})
    job.weights(0, 4096).integers(0, 1)[0] = 7
    place = job.arena.allocate(64)
    job.arena.integers_at(place, 1)[0] = 9
    first.close()
    (found,) = Vault(tmp_path / "v").found()
    assert found.read_job() == {"name": "a"}
    assert found.read_tables() == [{"spec": 1}]
    assert found.weights(0, 4096).integers(0, 1)[0] == 7
    assert found.arena.integers_at(place, 1)[0] == 9


def test_the_newest_job_is_found_first_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time_ns", iter(range(100, 0, -1)).__next__)
    first = Vault(tmp_path / "v")
    for name in "abc":
        first.make().write_job({"name": name})
    first.close()
    second = Vault(tmp_path / "v")
    second.make().write_job({"name": "d"})
    assert [job.read_job()["name"] for job in second.found()] == ["d", "c", "b", "a"]


def test_after_a_boot_nothing_is_believed(tmp_path: Path) -> None:
    first = Vault(tmp_path / "v")
    first.make().write_job({"name": "a"})
    first.close()
    stamp = tmp_path / "v" / "stamp.json"
    values = json.loads(stamp.read_text())
    stamp.write_text(json.dumps({**values, "boot": "another"}))
    second = Vault(tmp_path / "v")
    assert list(second.found()) == []
    assert second.instance != first.instance


def test_a_job_that_cannot_be_read_is_dropped_and_workers_can_tell(tmp_path: Path) -> None:
    first = Vault(tmp_path / "v")
    job = first.make()
    job.arena.close()
    (job.folder / "arena").write_bytes(b"x" * 8192)
    first.close()
    second = Vault(tmp_path / "v")
    assert list(second.found()) == []
    assert not job.folder.exists()
    assert second.instance != first.instance


def test_what_killed_starts_have_left_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vault, "SHM", tmp_path)
    killed, running = ShortLived("killed"), ShortLived("running")
    assert killed.path is not None
    assert running.path is not None
    killed._lock.close()  # As when its process is gone.
    third = ShortLived("third")
    assert not killed.path.exists()
    assert running.path.exists()
    assert third.path is not None
    third.remove()
    assert not third.path.exists()
