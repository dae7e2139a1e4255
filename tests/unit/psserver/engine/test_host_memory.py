"""Free memory in a container: the limit of its cgroup counts, not the memory of the host."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from pscore.errors import LimitError
from psserver.engine import host_memory

HOST = 64 << 30
GIB = 1 << 30


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with 64 GiB left, and control groups below a folder of the test."""
    left = SimpleNamespace(available=HOST)
    monkeypatch.setattr("psserver.engine.host_memory.psutil.virtual_memory", lambda: left)
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(host_memory, "OWN_CGROUPS", tmp_path / "own")
    return tmp_path


def cgroup(folder: Path, limit: str, used: int, cache: int, *, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = host_memory.FILES_V2 if version == 2 else host_memory.FILES_V1
    (folder / names[0]).write_text(limit + "\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\nfile 7\n")


def test_without_cgroups_the_host_counts() -> None:
    assert host_memory.available_nbytes() == HOST


def test_a_container_has_what_its_limit_leaves(machine: Path) -> None:
    """Its cgroup is the root that it sees, and page cache can be reclaimed."""
    (machine / "own").write_text("0::/\n")
    cgroup(machine, str(4 * GIB), 3 * GIB, GIB)
    assert host_memory.available_nbytes() == 2 * GIB
    with pytest.raises(LimitError, match=f"x needs {3 * GIB} bytes of memory, {2 * GIB} are left"):
        host_memory.require_host_memory("x", 3 * GIB, lambda: False)


def test_the_tightest_of_nested_groups_counts(machine: Path) -> None:
    (machine / "own").write_text("0::/pod/shard\n")
    cgroup(machine / "pod", str(2 * GIB), GIB, 0)
    cgroup(machine / "pod" / "shard", "max", GIB, 0)
    assert host_memory.available_nbytes() == GIB


def test_the_first_version_of_cgroups_is_read_too(machine: Path) -> None:
    """The path may be the host's, which a container does not see: then the root is its own."""
    (machine / "own").write_text("9:name=systemd:/x\n4:cpu,memory:/docker/abc\n0::/\n")
    cgroup(machine / "memory", str(GIB), GIB // 2, 0, version=1)
    assert host_memory.available_nbytes() == GIB // 2


def test_more_used_than_allowed_is_nothing_left(machine: Path) -> None:
    (machine / "own").write_text("0::/\n")
    cgroup(machine, str(GIB), 2 * GIB, 0)
    assert host_memory.available_nbytes() == 0
