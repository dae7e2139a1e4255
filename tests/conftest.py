"""Parts that all tests share: one thread for each process, reproducible examples, the data sets."""

import gc
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# Before anything imports torch or numba: the suite runs one process on each core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")
os.environ.setdefault("PACELINE_SPARE", "false")  # The children of a supervisor are its shards.

# A shell without job control has what it starts in the background ignore SIGINT, and all that this
# starts; there are tests that end a script by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
COMPILES = pytest.StashKey[subprocess.Popen[bytes]]()
LIBRARIES = ("accelerate", "lightning", "transformers")

settings.register_profile("paceline", derandomize=True, deadline=None, database=None)
settings.load_profile("paceline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` or `recipes` where there is no CUDA device, or no such library."""
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    for item in items:
        if missing and item.get_closest_marker("recipes"):
            reason = f"no {', '.join(missing)} here; `make test-recipes` installs them"
            item.add_marker(pytest.mark.skip(reason=reason))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # Takes seconds, so only where a test needs it.

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Starts to compile the kernels while the processes that run the tests collect them.

    Each process that they start would compile them otherwise, where no earlier run has done so. A
    few folders need them seldom.
    """
    if session.config.getoption("numprocesses", None) and session.config.args == ["tests"]:
        command = [sys.executable, str(ROOT / "tests" / "kernels.py")]
        session.config.stash[COMPILES] = subprocess.Popen(command, cwd=ROOT)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Waits for that process, which has ended long ago."""
    if process := session.config.stash.get(COMPILES, None):
        process.wait()


gc.disable()  # Until all tests are collected: each collection would visit thousands of them.


def pytest_collection_finish() -> None:
    """Excludes the thousands of tests from garbage collections."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of the full data sets: $PACELINE_DATA, or ../shared/data beside the repository."""
    folder = Path(os.environ.get("PACELINE_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data sets at {folder}; set PACELINE_DATA")
    return folder
