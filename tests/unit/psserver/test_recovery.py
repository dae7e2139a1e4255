"""Jobs in a vault: the newest of a name counts, whatever an older one holds."""

from pathlib import Path

from psserver.membership import Member
from psserver.recovery import Recovery
from psserver.shard import Job, Shard
from psserver.vault import JobVault, Vault


def begin(shard: Shard) -> Job:
    member = Member(rank=0, incarnation=7, restart=0, host="a", pid=1, heard_s=0.0)
    return shard.join("run", 3, member, 1)


def test_an_older_folder_of_the_same_name_takes_nothing_from_the_newer(tmp_path: Path) -> None:
    vault, shard = Vault(tmp_path), Shard(0, 1, 10.0)
    Recovery(vault, shard).note(begin(shard))
    older = JobVault(tmp_path / "0")
    older.write_job({"name": "run"})
    (older.folder / "0.json").write_text("half a fi")
    vault.close()
    again, shard = Vault(tmp_path), Shard(0, 1, 10.0)
    (job,) = Recovery(again, shard).take_up(0.0, lambda *_: None)
    assert shard.jobs == {"run": job}
    assert job.membership.members[0].incarnation == 7
    assert job.membership.size == "1 to 3"
    assert not older.folder.exists()
    assert again.instance == vault.instance


def test_who_takes_part_is_written_when_it_changes(tmp_path: Path) -> None:
    vault, shard = Vault(tmp_path), Shard(0, 1, 10.0)
    recovery, job = Recovery(vault, shard), begin(shard)
    recovery.note(job)
    (path,) = tmp_path.glob("*/job.json")
    path.write_text("as it was")
    recovery.note(job)
    assert path.read_text() == "as it was"
    shard.barrier(job, "end", 0, 0)
    recovery.note(job)
    assert '"barriers": [["end", 0, [0]' in path.read_text()
