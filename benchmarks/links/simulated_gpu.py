"""A model whose computing is simulated by sleeping, for benchmarks of step time.

A third of a step's compute time is forward, two thirds are backward, spread over the tensors by
their size, so that gradients become ready one after the other, the last tensor's first, as in a
real model. It sleeps up to moments of its own clock, so that being late does not add up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

FORWARD_SHARE = 1 / 3


class SimulatedModel(torch.nn.Module):
    """Parameters of given shapes; backward gives each its gradient, always the same one."""

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], compute_s: float, seed: int | None = None
    ) -> None:
        """Fills parameters with zeros.

        Args:
            shapes: Shapes of the parameters.
            compute_s: Seconds of forward and backward together.
            seed: Seed of gradients that are drawn; None: all their elements are equal.
        """
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.zeros(shape) for shape in shapes])
        self._grads = [torch.full(shape, 1e-3) for shape in shapes]
        self._copies = seed is not None  # DDP averages in place; equal elements stay as they are.
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            for grad in self._grads:
                grad.normal_(std=1e-3, generator=generator)
        self._compute_s = compute_s
        total = sum(grad.numel() for grad in self._grads)
        left, self._ready_s = 0, []
        for grad in reversed(self._grads):
            left += grad.numel()
            share = FORWARD_SHARE + (1 - FORWARD_SHARE) * left / total
            self._ready_s.append(share * compute_s)
        self._ready_s.reverse()

    def forward(self, start_s: float) -> torch.Tensor:
        """Sleeps for the forward part; the result's backward sleeps for the rest.

        Args:
            start_s: When the step began, of `time.perf_counter`.
        """
        sleep_until(start_s + FORWARD_SHARE * self._compute_s)
        chain = torch.zeros(1, requires_grad=True)
        for part, grad, ready_s in zip(self.parts, self._grads, self._ready_s, strict=True):
            chain = _Layer.apply(chain, part, grad, start_s + ready_s, self._copies)
        return chain.sum()


class _Layer(torch.autograd.Function):
    """Passes its input on; in backward the gradient is ready at a given moment."""

    @staticmethod
    def forward(
        ctx: Any, chain: Any, parameter: Any, grad: Any, ready_s: float, copies: bool
    ) -> Any:
        ctx.grad, ctx.ready_s, ctx.copies = grad, ready_s, copies
        return chain + 0.0

    @staticmethod
    def backward(ctx: Any, upstream: Any) -> Any:
        sleep_until(ctx.ready_s)
        # Autograd takes either as it is. It would copy a tensor that others have too, into fresh
        # memory: up to a tenth of a second for 50 MB. A GPU's gradients cost the host nothing.
        return upstream, ctx.grad.clone() if ctx.copies else ctx.grad.detach(), None, None, None


def sleep_until(moment_s: float) -> None:
    """Sleeps until a moment of `time.perf_counter`."""
    left_s = moment_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)
