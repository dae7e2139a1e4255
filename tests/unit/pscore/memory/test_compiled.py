"""Compiled loops that an image brings: used by the same processor, and ignored by another."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pscore.memory.compiled import take_compiled

CALL = """
import sys
from pathlib import Path
from pscore.memory.compiled import take_compiled
place, stock = map(Path, sys.argv[1:])
take_compiled(place, stock)
import numpy
from pscore.memory import kernels
assert not kernels.all_finite(numpy.array([1.0, numpy.nan], numpy.float32))
print(sum(kernels.all_finite_loop.stats.cache_hits.values()))
"""


def call(place: Path, stock: Path, **variables: str) -> int:
    """Calls a loop in a process of its own; returns how often it found compiled code."""
    done = subprocess.run(
        [sys.executable, "-c", CALL, place, stock],
        env={**os.environ, "NUMBA_CACHE_DIR": str(place), **variables},
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    return int(done.stdout)


@pytest.mark.slow
def test_code_of_this_processor_is_used_and_that_of_another_is_not(tmp_path: Path) -> None:
    none, mine, other = tmp_path / "none", tmp_path / "mine", tmp_path / "other"
    assert call(mine, none) == 0
    assert call(other, none, NUMBA_CPU_NAME="generic") == 0
    for stock, hits in ((mine, 1), (other, 0)):
        place = tmp_path / f"taken-{stock.name}"
        assert call(place, stock) == hits
        assert call(place, none) == 1
    assert {path.name for path in tmp_path.iterdir()} == {
        "mine", "other", "taken-mine", "taken-other"
    }  # fmt: skip


def test_code_that_is_there_already_is_kept_and_a_full_disk_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, place = tmp_path / "stock", tmp_path / "place"
    (stock / "memory").mkdir(parents=True)
    (stock / "memory" / "loop.nbi").write_text("new")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("shutil.copytree", full)
        take_compiled(place, stock)
    assert not place.exists()
    take_compiled(place, stock)
    assert (place / "memory" / "loop.nbi").read_text() == "new"
    (stock / "memory" / "loop.nbi").write_text("newer")
    take_compiled(place, stock)
    assert (place / "memory" / "loop.nbi").read_text() == "new"
    assert sorted(tmp_path.iterdir()) == [place, stock]
