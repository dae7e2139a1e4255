"""Compiles the optimizers' kernels once for all processes of a test run."""

import fcntl
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "build" / "kernels.lock"


def compile_kernels() -> None:
    """Loads the kernels of all optimizers; another process that compiles them is waited for."""
    from pscore.optimizers import OPTIMIZERS, warm_up

    LOCK.parent.mkdir(exist_ok=True)
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for optimizer in OPTIMIZERS.own.values():
            warm_up(optimizer())


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    compile_kernels()
