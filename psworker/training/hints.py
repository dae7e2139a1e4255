"""Hints about mistakes of a script that raise no error, and about its waits, each given once.

A step without any gradient usually means that `backward` was left out, or came before `zero_grad`.
And a gradient that was changed between `backward` and `step` was usually clipped with torch's
function, which sees one worker's gradient: DDP's scripts clip the mean with the same line.
"""

from __future__ import annotations

import logging
from typing import Any

import grpc
import torch

from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.rules.base import takes_all
from pscore.timing.waiting import PaceSums, advice_line
from psworker.connection.accounts.pace import sums_of
from psworker.connection.membership.session import Session
from psworker.job.phases import graph_nodes
from psworker.model.dtensors import is_dtensor, local
from psworker.training.gradients.gradients import Gradients
from psworker.training.table import TrainingTable

log = logging.getLogger("paceline")
ASK_TIMEOUT_S = 2.0
KNOWN = ("live", "left")  # States of workers whose sums count.
WATCHED_MAX = 10  # Passes of a sharded model: a GPU has to be waited for in each.
NO_GRADIENT = (
    "step() found no gradient in any parameter: did backward() run since zero_grad(), or does the "
    "model have other parameters by now (fully_shard(), load_state_dict(assign=True))? The step "
    "counts, and this worker adds nothing to it; skip_step() ends a step whose batch cannot be used"
)
CHANGED = (
    "a gradient was changed between backward() and step(): if that is "
    "torch.nn.utils.clip_grad_norm_, it clips the gradient of each worker before the mean is "
    "taken, where DDP clips the mean; psworker.clip_grad_norm_(optimizer, max_norm) does as DDP "
    "(docs/training.md)"
)


class Hints:
    """The hints of one wrapper."""

    def __init__(self, model: torch.nn.Module | None) -> None:
        """Starts without a table.

        Args:
            model: The module, if the script has given it; FSDP sets the gradients of a sharded one
                at the end of its backward pass, without a hook of their own.
        """
        self._model = model
        self._given: set[str] = set()
        self._handle: torch.utils.hooks.RemovableHandle | None = None
        self._made: int | torch.Tensor | None = None  # The first gradient, as backward made it.
        self._num_watched = 0  # Backward passes of a sharded model.
        self._is_beside = False  # Whether tables beside the model's are trained too.

    def follow(self, table: TrainingTable, gradients: Gradients) -> None:
        """Watches the gradients of a table from now on, instead of those of a former one.

        Args:
            gradients: Its gradients; with overlap each change of them is an error, not a hint.
        """
        self.end()
        self._table, self._gradients = table, gradients
        session, is_sharded = table.session, table.flat.is_sharded
        others = session.num_workers if is_sharded else session.num_processes
        if others == 1 or gradients.overlap.is_wanted:
            return
        if not is_sharded:
            first: Any = table.flat.parameters[0]
            self._handle = first.register_post_accumulate_grad_hook(self._note)
        elif self._model is not None:
            self._handle = self._model.register_forward_hook(self._watch_backward)

    def check(self, *, is_beside: bool) -> None:
        """Gives the hints that apply to the step that begins.

        Args:
            is_beside: Whether tables beside the model's have a gradient.
        """
        parameters, made = self._table.flat.parameters, self._made
        self._made = None
        self._is_beside |= is_beside
        if all(parameter.grad is None for parameter in parameters):
            if not is_beside:
                self._give(NO_GRADIENT)
        elif made is not None and takes_all(self._table.rule):
            grad, attempts = parameters[0].grad, self._gradients.attempts
            is_changed = grad is not None and bool(_mark(grad) != made)
            if is_changed and attempts.clipped != attempts.number:
                self._give(CHANGED)

    def sum_up(self) -> None:
        """Warns, on the first worker, of the share of waits, with a mode that would take less.

        The sums are of all wrappers: of several that end together, the first does it.
        """
        session = self._table.session
        if session.process_rank or not session.pace.has_new_steps():
            return
        paces = _paces(session)
        # One worker cannot tell a slow network from a slow worker, and modes with a delay are
        # refused for row tables, whose lookups wait in any mode.
        names_mode = len(paces) == session.num_workers and not self._is_beside
        mode = str(self._table.rule) if names_mode else ""
        if line := advice_line(mode, paces):
            log.warning("%s", line)

    def end(self) -> None:
        """Watches no gradient any more."""
        if self._handle is not None:
            self._handle.remove()

    def _watch_backward(self, module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        """Notes the first gradient when a backward pass through these outputs has ended.

        FSDP has registered its own end of the pass before: its hooks are older than this one.
        """
        if self._num_watched >= WATCHED_MAX or torch.compiler.is_compiling():
            return
        self._num_watched += 1

        def await_end(grads: Any) -> None:
            first = self._table.flat.parameters[0]
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._note(first))

        for node in graph_nodes(outputs):
            node.register_prehook(await_end)

    def _note(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._made = _mark(parameter.grad)

    def _give(self, hint: str) -> None:
        if hint not in self._given:
            self._given.add(hint)
            log.warning("%s", hint)


def _paces(session: Session) -> list[PaceSums]:
    """Returns the sums of this worker, and those of others that the first shard knows."""
    own = sums_of(session.rank, session.pace.message())
    if session.num_workers == 1:
        return [own]
    try:
        status = session.links[0].control.Status(pb.StatusRequest(), timeout=ASK_TIMEOUT_S)
    except grpc.RpcError:
        return [own]
    others = [
        sums_of(worker.rank, worker.pace)
        for job in status.jobs
        for worker in job.workers
        if job.job == session.job and worker.rank != session.rank and worker.state in KNOWN
    ]
    return [own, *others]


def _mark(grad: torch.Tensor) -> int | torch.Tensor:
    """Returns a value that differs after a change of a gradient in place.

    Torch counts no change of a DTensor, so there it is the norm of this process's part.
    """
    return torch.linalg.vector_norm(local(grad)) if is_dtensor(grad) else grad._version
