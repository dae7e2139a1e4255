"""Spans of forward and backward passes in a worker's timeline (pscore/observe/timeline.py)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules import module as modules

from pscore.observe.timeline import Timeline


class Phases:
    """Records forward and backward passes with torch's global module hooks.

    A forward pass is the outermost call of a module, of a loss too. A backward pass begins when
    autograd reaches the output of such a call, and ends with its last work.
    """

    def __init__(self, timeline: Timeline) -> None:
        """Starts to watch all modules of this process."""
        self._timeline = timeline
        self._here = threading.local()
        self._in_backward = False  # Also set by autograd's own threads.
        self._handles = [
            modules.register_module_forward_pre_hook(self._enter),
            modules.register_module_forward_hook(self._leave, always_call=True),
        ]

    def close(self) -> None:
        """Stops watching."""
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
            for node in graph_nodes(outputs):
                node.register_prehook(self._start_backward)

    def _start_backward(self, grads: Any) -> None:
        """Records the start of backward; autograd calls it before it works on an output."""
        if self._in_backward:
            return
        self._in_backward, begin_ns = True, self._timeline.now_ns()

        def end() -> None:
            self._in_backward = False
            self._timeline.span("backward", begin_ns)

        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(end)


def graph_nodes(outputs: Any) -> Iterator[Any]:
    """Yields the graph nodes of a module's outputs."""
    if isinstance(outputs, torch.Tensor):
        if outputs.grad_fn is not None:
            yield outputs.grad_fn
    elif isinstance(outputs, dict | list | tuple):
        for output in outputs.values() if isinstance(outputs, dict) else outputs:
            yield from graph_nodes(output)
