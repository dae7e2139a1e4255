"""A shard has compiled the loops of row slices before the first push."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import contextlib, sys
from pathlib import Path

import numpy as np
from numba.core.registry import CPUDispatcher
from tests.unit.psserver.ordered import last_of

with contextlib.redirect_stdout(sys.stderr):
    from pscore.rows.optimizers import ROW_OPTIMIZERS
    from psserver.engine.resume import recover
    from psserver.rows import kernels
    from psserver.stores import kind_of
    from tests.unit.psserver.rows.test_row_journal import ALL, push, pushes, trained
    from pscore.rules import SSGD

    def compiled():
        modules = [m for n, m in sys.modules.items() if n.startswith(("pscore.", "psserver."))]
        found = {v for m in modules for v in vars(m).values() if isinstance(v, CPUDispatcher)}
        return {kernel.py_func.__qualname__: len(kernel.signatures) for kernel in found}

    kind_of("rows").warm_up(ROW_OPTIMIZERS["sparse_adam"]())
    before = compiled()
    shards = trained(SSGD(), Path(sys.argv[1]))
    for step, worker in pushes():
        push(shards, step, worker)
    shards.pull(ALL, with_state=True)
    shards.pull(ALL, since=1)
    shards.kill(0)
    shards.stores()[0].restore(last_of(shards.stores()[0].export()), 9)
    after = compiled()
print(sorted(name for name in after if after[name] != before.get(name, 0)))
"""


@pytest.mark.slow
def test_no_loop_is_compiled_by_a_push_a_pull_or_a_restart(tmp_path: Path) -> None:
    """Neither is a second kind of array: payloads arrive read-only or not."""
    line = [sys.executable, "-c", CODE, str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
