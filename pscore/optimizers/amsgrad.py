"""AMSGrad, as `torch.optim.Adam` and `torch.optim.AdamW` make their steps with `amsgrad=True`.

Sashank Reddi, Satyen Kale and Sanjiv Kumar, "On the Convergence of Adam and Beyond", ICLR 2018,
arXiv:1904.09237, algorithm 2; t counts the steps of each parameter from 1.

    d, m and v as in `adam.py`
    x = max(x, v)
    w = w - lr / (1 - beta1^t) * m / (sqrt(x) / sqrt(1 - beta2^t) + eps)

Differs from the paper: the corrections of the bias, weight decay and eps, as in torch.
"""

from __future__ import annotations

import numpy as np

from pscore.memory.kernels import kernel
from pscore.optimizers.adam import Adam, compute_factors
from pscore.optimizers.base import SliceStep
from pscore.optimizers.driver import Arrays, Factors, KernelStep, change_blocks
from pscore.types import FloatArray


class AMSGrad(Adam):
    """`torch.optim.Adam` with `amsgrad=True` in every group."""

    name = "amsgrad"
    torch_classes = {"Adam": frozenset({"amsgrad"})}
    state_names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    keeps_largest = True

    def step(self, step: SliceStep) -> None:
        """Makes one step on the CPU in one pass over memory."""
        _step(step.for_kernel(self.decoupled))


class AMSGradW(AMSGrad):
    """`torch.optim.AdamW` with `amsgrad=True`, and `Adam` with decoupled weight decay as well."""

    name = "amsgradw"
    torch_classes = {
        "AdamW": frozenset({"amsgrad"}),
        "Adam": frozenset({"amsgrad", "decoupled_weight_decay"}),
    }
    decoupled = True


@kernel
def _step(step: KernelStep) -> None:
    change_blocks(step, compute_factors, _change)


@kernel
def _change(w: FloatArray, g: FloatArray, state: Arrays, factors: Factors) -> None:
    m, v, x = state
    factor, decay, shrink, take1, keep2, take2, step_size, correction2, eps = factors
    for i in range(w.size):
        weight = w[i] * shrink
        d = g[i] * factor + decay * weight
        mean = m[i] + take1 * (d - m[i])
        square = keep2 * v[i] + take2 * (d * d)
        largest = square if square > x[i] else x[i]
        m[i] = mean
        v[i] = square
        x[i] = largest
        w[i] = weight - step_size * (mean / (np.sqrt(largest) / correction2 + eps))
