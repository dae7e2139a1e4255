"""What a worker records in its timeline, if it has one (pscore/observe/timeline.py)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import torch
from torch.nn.modules import module as modules

from pscore.observe.timeline import Timeline
from pscore.pb.ps.v1 import data_pb2
from pscore.types import Push
from psworker.transports import PullCall, PushCall


class Phases:
    """Forward and backward, from torch's own hooks: of whatever module is called from outside.

    Forward is the outermost call of a module, of a loss too. Backward begins where it comes to the
    output of such a call, and ends with autograd's last work.
    """

    def __init__(self, timeline: Timeline) -> None:
        """Begins to watch all modules of this process."""
        self._timeline = timeline
        self._here = threading.local()
        self._is_behind = False  # Backward is under way; autograd has threads of its own.
        self._handles = [
            modules.register_module_forward_pre_hook(self._enter),
            modules.register_module_forward_hook(self._leave, always_call=True),
        ]

    def close(self) -> None:
        """Ends it."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: torch.nn.Module, inputs: Any) -> None:
        depth = getattr(self._here, "depth", 0)
        if depth == 0:
            self._here.begin_ns = self._timeline.now_ns()
        self._here.depth = depth + 1

    def _leave(self, module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        self._here.depth -= 1
        if self._here.depth == 0:
            self._timeline.span("forward", self._here.begin_ns, module=type(module).__name__)
            for node in _nodes(outputs):
                node.register_prehook(self._turn)

    def _turn(self, grads: Any) -> None:
        """Is called by autograd before it works on an output."""
        if self._is_behind:
            return
        self._is_behind, begin_ns = True, self._timeline.now_ns()

        def end() -> None:
            self._is_behind = False
            self._timeline.span("backward", begin_ns)

        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(end)


def note_push(
    timeline: Timeline,
    call: PushCall,
    sender: data_pb2.Sender,
    index: int,
    push: Push,
    nbytes: int,
) -> None:
    """Records a push from now until it is acknowledged; `nbytes` are those of its gradient."""
    begin_ns = timeline.now_ns()

    def end(_: Future[data_pb2.PushReply]) -> None:
        timeline.span(
            "push",
            begin_ns,
            track="push",
            job=sender.job,
            table=sender.table,
            slice=index,
            worker=push.worker,
            step=push.step,
            role=push.role.name.lower(),
            nbytes=nbytes,
        )

    call.done.add_done_callback(end)


def note_payload(
    timeline: Timeline, begin_ns: int, index: int, push: Push, nbytes: int, compressor: str
) -> None:
    """Records how the payload of a push was made, from `begin_ns` till now."""
    timeline.span(
        "compress", begin_ns, slice=index, step=push.step, nbytes=nbytes, compressor=compressor
    )


def note_pull(timeline: Timeline, call: PullCall) -> None:
    """Records a pull from now until it has landed."""
    begin_ns, header = timeline.now_ns(), call.header

    def end(future: Future[data_pb2.PullReply]) -> None:
        version = -1 if future.cancelled() or future.exception() else future.result().version
        timeline.span(
            "pull",
            begin_ns,
            track="pull",
            job=header.sender.job,
            table=header.sender.table,
            slice=header.slice,
            worker=header.sender.worker,
            min_version=header.min_version,
            version=version,
            nbytes=call.weights.nbytes,
        )

    call.done.add_done_callback(end)


def timed_step(optimizer: torch.optim.Optimizer, timeline: Timeline | None, step: int) -> None:
    """Makes a step of the user's own optimizer."""
    begin_ns = 0 if timeline is None else timeline.now_ns()
    optimizer.step()
    if timeline is not None:
        timeline.span("local update", begin_ns, step=step)


def _nodes(outputs: Any) -> Iterator[Any]:
    """Yields the nodes of the graph that made what a module returned."""
    if isinstance(outputs, torch.Tensor):
        if outputs.grad_fn is not None:
            yield outputs.grad_fn
    elif isinstance(outputs, dict | list | tuple):
        for output in outputs.values() if isinstance(outputs, dict) else outputs:
            yield from _nodes(output)
