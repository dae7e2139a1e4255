"""deploy/compile_loops.py: an image has the compiled code of the loops that its processes call."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
# The script of the image, and then what workers and shards call in modes with loops of their own.
CALLS = """
import runpy
from numba.core.dispatcher import Dispatcher
runpy.run_path("deploy/compile_loops.py")

import gc
import numpy as np
import torch
from pscore.compressors import parse_compressor
from pscore.local import LOCAL_UPDATES
from pscore.publish import codec
from pscore.rules import make_rule
from pscore.rules.base import Memory
from tests.paper.quadratic import make_part, rebase

loops = [loop for loop in gc.get_objects() if isinstance(loop, Dispatcher)]
before = {loop: len(loop.signatures) for loop in loops}
assert sum(before.values()) > 50
for local in LOCAL_UPDATES.values():
    update, part = local(), make_part([0.1, 0.9, 0.0, 0.0, 0.0, 0.0], 8)
    for version in (1, 2):
        rebase(update, part, [1.0 * version] * 8, version)
        update.update(part, torch.ones(8))
for adaptive in (False, True):
    rule = make_rule("dcasgd", {"adaptive": adaptive})
    memory = Memory(weights=np.ones(8, np.float32))
    rule.on_pull(0, memory)
    rule.compensate(np.ones(8, np.float32), 0, memory)
for form, write in codec.WRITERS.items():
    payload = np.zeros(64, np.uint8)
    nbytes = write(np.ones(8, np.int16), payload)
    codec.apply(codec.Delta(form=form, payload=payload[:nbytes]), np.zeros(8, np.uint16))
for name in ("2bit(threshold=0.02)", "dgc(clip=1.0)", "dgc(nesterov=True)"):
    compressor = parse_compressor(name)
    state = {n: np.zeros(64, np.float32) for n in compressor.state_names}
    state["largest"] = np.ones(1, np.float32)
    compressor.encode(np.ones(64, np.float32), state, np.zeros(4096, np.uint8), seed=1)
print(sorted(loop.py_func.__qualname__ for loop in loops if len(loop.signatures) > before[loop]))
"""


@pytest.mark.slow
def test_no_worker_of_an_image_compiles_a_loop_that_the_image_could_have_had() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CALLS], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
