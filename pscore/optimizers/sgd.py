"""Stochastic gradient descent with momentum, as `torch.optim.SGD` makes its steps.

Ilya Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML
2013, in the form that torch documents; `scale` turns a sum of gradients into their mean.

    d = scale * g + weight_decay * w              (maximize: -g)
    v = d                                         in the first step of a parameter, else
    v = momentum * v + (1 - dampening) * d
    w = w - lr * v                                (nesterov: lr * (d + momentum * v))

Differs from the paper: momentum is applied to the gradient and not to `lr * gradient`, as in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pscore.memory.kernels import kernel
from pscore.optimizers.base import DeviceStep, Optimizer, SliceStep
from pscore.optimizers.driver import Arrays, Factors, KernelStep, change_blocks
from pscore.types import FloatArray, HyperArray, SegmentTable

LR, MOMENTUM, DAMPENING, WEIGHT_DECAY, NESTEROV, MAXIMIZE = range(6)


class SGD(Optimizer):
    """`torch.optim.SGD`: momentum, dampening, Nesterov, weight decay, maximize."""

    name = "sgd"
    adds = True
    torch_classes = {"SGD": frozenset()}
    hyper_names = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
    state_names = ("momentum_buffer",)

    def keeps_state(self, hyper: HyperArray) -> bool:
        """Returns whether there is no momentum in any group."""
        return not hyper[:, MOMENTUM].any()

    def step(self, step: SliceStep) -> None:
        """Makes one step on the CPU in one pass over memory."""
        _step(step.for_kernel())

    def step_device(self, step: DeviceStep) -> None:
        """Makes one step in place on torch tensors of any device."""
        if step.kernels is not None:
            step.kernels.sgd_step(step)
            return
        for index, row, part, direction, (buffer,) in step.parts():
            lr, momentum, dampening, weight_decay, nesterov, maximize = row
            if maximize:
                direction = direction.neg()
            if weight_decay:
                direction = direction.add(part, alpha=weight_decay)
            if momentum:
                if step.counts[index] == 0:
                    buffer.copy_(direction)
                else:
                    buffer.mul_(momentum).add_(direction, alpha=1.0 - dampening)
                direction = direction.add(buffer, alpha=momentum) if nesterov else buffer
            part.add_(direction, alpha=-lr)
            step.counts[index] += 1

    def infer(
        self,
        before: Any,
        after: Any,
        state: Sequence[Any],
        segments: SegmentTable,
        hyper: HyperArray,
    ) -> Any:
        """Solves a step without dampening and weight decay, as outer steps are, for its gradient.

        `u = (before - after) / lr` is `d` without momentum, `v` with it, and
        `d + momentum * v = (1 + momentum) * v - momentum * v_before` with Nesterov's. A step with a
        rate of 0 shows nothing: its gradient counts as zero.
        """
        mean = before.new_zeros(before.shape)
        for (start, stop), group in zip(segments.bounds, segments.groups, strict=True):
            row = hyper[group]
            lr, momentum, velocity = row[LR], row[MOMENTUM], state[0][start:stop]
            made = mean[start:stop]
            if lr:
                made.copy_(before[start:stop]).sub_(after[start:stop]).mul_(1.0 / lr)
            if momentum:
                old = velocity * momentum
                if row[NESTEROV] and lr:
                    made.add_(old).mul_(1.0 / (1.0 + momentum))
                velocity.copy_(made if lr else old)
                made.copy_(velocity).sub_(old)
        return mean


@kernel
def _compute_factors(step: KernelStep, index: int) -> Factors:
    row = step.hyper[step.groups[index]]
    momentum = np.float32(row[MOMENTUM])
    # The first step is v = 0 * v + 1 * d; without Nesterov the step is 0 * d + 1 * v.
    is_first, is_ahead = step.counts[index] == 0, row[NESTEROV] != 0.0
    return (
        np.float32(-step.scale if row[MAXIMIZE] != 0.0 else step.scale),
        np.float32(row[WEIGHT_DECAY]),
        np.float32(row[LR]),
        momentum != 0.0,
        np.float32(0.0) if is_first else momentum,
        np.float32(1.0) if is_first else np.float32(1.0 - row[DAMPENING]),
        np.float32(1.0) if is_ahead else np.float32(0.0),
        momentum if is_ahead else np.float32(1.0),
    )


@kernel
def _step(step: KernelStep) -> None:
    change_blocks(step, _compute_factors, _change)


@kernel
def _change(w: FloatArray, g: FloatArray, state: Arrays, factors: Factors) -> None:
    v = state[0]
    factor, weight_decay, lr, has_momentum, keep, take, ahead, along = factors
    if not has_momentum:
        for i in range(w.size):
            d = g[i] * factor + weight_decay * w[i]
            w[i] -= lr * d
        return
    for i in range(w.size):
        d = g[i] * factor + weight_decay * w[i]
        velocity = keep * v[i] + take * d
        v[i] = velocity
        w[i] -= lr * (ahead * d + along * velocity)
