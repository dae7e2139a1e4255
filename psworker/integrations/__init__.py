"""Paceline in the training loops of other libraries: one file for each, imported by its users.

No library is a requirement: without it the module can be imported, and its class is refused when an
instance is made.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

from psworker.job.environment import Environment
from psworker.training.changes.recovery import BEGINS_LATE

# Variables of torchrun, and ours that mean the same and come first.
PLACES = {
    "RANK": "PACELINE_RANK",
    "WORLD_SIZE": "PACELINE_NUM_WORKERS",
    "LOCAL_RANK": "PACELINE_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "PACELINE_LOCAL_WORKERS",
    "TORCHELASTIC_RUN_ID": "PACELINE_JOB",
}
DEVICES = "CUDA_VISIBLE_DEVICES"

log = logging.getLogger("paceline")

__all__ = ["hide_launcher"]


def hide_launcher() -> None:
    """Renames torchrun's variables to Paceline's, before a library makes a process group of them.

    Accelerate and Transformers put DDP around the model where RANK and WORLD_SIZE are set. After
    this call each worker is one process to them, on the GPU of its local rank, and only the shards
    see more than one. It must be called before their first object is made.

    Raises:
        ConfigError: A variable has a wrong value.
    """
    environment = Environment.read()
    if environment.local_workers > 1 and not _has_cuda():
        devices = [name for name in os.environ.get(DEVICES, "").split(",") if name]
        index = environment.local_rank
        if devices:
            os.environ[DEVICES] = devices[index % len(devices)]
        else:
            os.environ[DEVICES] = str(index)
    for name, ours in PLACES.items():
        value = os.environ.pop(name, None)
        if value is not None and (name, value) != ("TORCHELASTIC_RUN_ID", "none"):
            os.environ.setdefault(ours, value)


@contextlib.contextmanager
def counts_steps() -> Iterator[None]:
    """Context manager: advice to loop by the job's steps is not logged, where a library does so."""

    def keeps(record: logging.LogRecord) -> bool:
        return record.msg != BEGINS_LATE

    log.addFilter(keeps)
    try:
        yield
    finally:
        log.removeFilter(keeps)


def _has_cuda() -> bool:
    """Returns whether this process uses a GPU already, so that the choice comes too late."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def register_vllm() -> None:
    """Registers the weight transfer engine `paceline` with vLLM, which calls this in each process.

    Its module is imported only with the engine: when vLLM's workers for CPUs begin, they look into
    all modules, and fail at those of llvmlite.
    """
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # It is there already.
        WeightTransferEngineFactory.register_engine(
            "paceline", "psworker.integrations.vllm", "PacelineEngine"
        )
