"""Shares BatchNorm's running statistics and other float buffers between workers, for evaluation.

`local`: each worker evaluates with its own. `rank0`: rank 0 posts its buffers after each step, and
all workers evaluate with them. `mean`: every process posts, and evaluation uses the mean of the
newest posts. Training always uses the worker's own buffers. Integer buffers (`num_batches_tracked`)
stay local.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from pscore.compressors.none import NoCompression
from pscore.errors import ConfigError
from pscore.optimizers.assign import Assign
from pscore.rules.asgd import ASGD
from pscore.rules.base import Rule
from pscore.rules.decentralised import Decentralised
from pscore.table_spec import TableSpec
from pscore.types import FloatArray, Push, Role, TensorSpec
from psworker.connection.exchange.exchange import Exchange
from psworker.connection.membership.session import Session
from psworker.replica.ports import PullBuffer

CHOICES = ("rank0", "mean", "local")


def require_policy(model: torch.nn.Module | None, policy: str) -> None:
    """Raises ConfigError for a policy that does not exist, or does not fit the model."""
    if policy not in CHOICES:
        raise ConfigError(f"buffers is {policy!r}, must be one of {', '.join(CHOICES)}")
    if model is None and policy != CHOICES[0]:
        raise ConfigError(f"buffers={policy!r} has no effect without model=")


class Buffers:
    """The float buffers of a model, shared as `policy` says."""

    def __init__(self, model: torch.nn.Module | None, policy: str, session: Session) -> None:
        """Declares a table for each worker whose buffers others may read.

        Raises:
            ConfigError: The policy does not fit the job.
        """
        named = [] if model is None else list(model.named_buffers())
        kept = [(name, buffer) for name, buffer in named if buffer.is_floating_point()]
        self._buffers = [buffer for _, buffer in kept]
        self._policy = policy if kept else "local"
        self._session = session
        self._tables: dict[int, Exchange] = {}
        self._step = 0
        if self._policy == "local":
            return
        if self._policy == "mean" and session.min_workers:
            raise ConfigError(
                "buffers is 'mean', but workers of this job may join and leave; use 'rank0' or "
                "'local'"
            )
        tensors = [
            TensorSpec(name=name, shape=tuple(buffer.shape), dtype="float32")
            for name, buffer in kept
            if buffer.numel()
        ]
        self._buffers = [buffer for buffer in self._buffers if buffer.numel()]
        table = TableSpec(
            name="",
            tensors=tuple(tensors),
            num_shards=len(session.links),
            rule=ASGD(),
            compressor=NoCompression(),
            optimizer=Assign.name,
            num_groups=1,
        )
        for owner in range(session.num_processes) if policy == "mean" else (0,):
            self._tables[owner] = Exchange(session, replace(table, name=f"buffers.{owner}"))
            self._tables[owner].refills.start(self._held)
        self._layout = layout = self._tables[0].layout
        own = self._own()
        if own is not None:
            flat = self._gather()
            for spec in layout.slices:
                own.load(spec.index, Role.WEIGHTS, [flat[spec.start : spec.stop]], [])
            own.flush()
        self._count_on()

    def caution(self, rule: Rule) -> str:
        """Returns the reason not to evaluate with these buffers in a mode; empty: there is none."""
        if self._policy != "rank0" or not isinstance(rule, Decentralised) or rule.alike:
            return ""
        return (
            f"in mode {rule.name} each worker has a model of its own, and global_weights() has the "
            "mean of the models beside the BatchNorm statistics of rank 0: pass buffers='mean', or "
            "compute them anew there (torch.optim.swa_utils.update_bn)"
        )

    def post(self, samples: float) -> None:
        """Posts this worker's buffers, unless the previous post is still under way."""
        own = self._own()
        if own is not None and samples > 0 and not own.is_busy():
            self._post(own)

    def restart(self) -> None:
        """Forgets posts under way, after this worker has rejoined."""
        for table in self._tables.values():
            table.restart()
        self._count_on()

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Context manager: loads the shared buffers and restores this worker's own on exit."""
        own = self._own()
        if own is not None:
            own.flush()
            self._post(own)
            own.flush()
        if self._policy == "local" or (self._policy == "rank0" and own is not None):
            yield
            return
        kept = self._gather()
        self._scatter(np.mean([self._pull(owner)[0] for owner in self._tables], axis=0))
        try:
            yield
        finally:
            self._scatter(kept)

    def _own(self) -> Exchange | None:
        """Returns the table that this process posts to; None: it posts nothing."""
        return self._tables.get(self._session.process_rank)

    def _count_on(self) -> None:
        """Continues after the posts that the shards have counted of this process."""
        if self._own() is not None:
            _, self._step = self._pull(self._session.process_rank)

    def _post(self, own: Exchange) -> None:
        flat = self._flat()
        for spec in self._layout.slices:
            push = Push(
                worker=self._session.rank,
                step=self._step,
                base_version=0,
                hyper=np.zeros((1, len(Assign.hyper_names))),
            )
            own.push(spec.index, push, flat[spec.start : spec.stop], compress=False)
        self._step += 1

    def _pull(self, owner: int) -> tuple[FloatArray, int]:
        """Returns the values that `owner` has posted, and the number of this worker's posts."""
        flat = torch.zeros(self._layout.numel, dtype=torch.float32, device="cpu")
        table, pull_buffers = self._tables[owner], []
        for spec in self._layout.slices:
            pull_buffers.append(
                PullBuffer(weights=flat[spec.start : spec.stop], state=[], is_look=True)
            )
            table.pull(spec.index, 0, 0, pull_buffers[-1], with_state=False)
        table.run(spec.index for spec in self._layout.slices)
        return flat.numpy(), max(pull_buffer.clock for pull_buffer in pull_buffers)

    def _held(self, index: int) -> tuple[int, list[FloatArray], list[int]]:
        """Returns this worker's buffers in a slice; their owner sends its last post again too."""
        spec = self._layout.slices[index]
        return 0, [self._gather()[spec.start : spec.stop]], []

    def _gather(self) -> FloatArray:
        """Returns a copy of the buffers, `(layout.numel,)`, on the host."""
        values: FloatArray = self._flat().cpu().numpy()
        return values

    def _flat(self) -> torch.Tensor:
        """Returns a copy of the buffers, `(layout.numel,) float32`, on their device."""
        flat = torch.zeros(self._layout.numel, device=self._buffers[0].device, dtype=torch.float32)
        places = [
            flat[offset : offset + buffer.numel()].view(buffer.shape)
            for offset, buffer in zip(self._layout.offsets, self._buffers, strict=True)
        ]
        with torch.no_grad():
            torch._foreach_copy_(places, self._buffers)
        return flat

    def _scatter(self, flat: FloatArray) -> None:
        with torch.no_grad():
            for offset, buffer in zip(self._layout.offsets, self._buffers, strict=True):
                part = torch.from_numpy(np.array(flat[offset : offset + buffer.numel()]))
                buffer.copy_(part.view(buffer.shape))
