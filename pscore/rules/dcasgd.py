"""Delay-compensated ASGD: a first-order correction for the weights having moved on.

Shuxin Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017,
arXiv:1609.08326; the adaptive form also as in the authors' code (repository
microsoft/Delayed-Compensation-Asynchronous-Stochastic-Gradient-Descent-for-Multiverso).

    g~ = g + lambda * g * g * (W - W_bak[m])                W <- opt(W, g~)
    adaptive: MS[m] <- decay * MS[m] + (1 - decay) * g * g  lambda = lambda_0 / sqrt(MS[m] + e)

W_bak[m] is the weights that worker m computed g from, e = 1e-7. It is kept per worker, and taken
when the worker's pull is answered, not when it pushes: other workers' updates may land in between.

Differs from the paper: the mean square is kept per worker, as in the authors' code; whether the
paper keeps one for all was not read. The authors' code takes W_bak at the push; one published copy
(MXNet's) keeps a single W_bak for all workers. The gradient is squared without weight decay, and
the optimizer is the user's, where the paper has plain SGD. With `maximize` the sign of the
correction would have to turn, which a rule cannot see: do not combine them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pscore.memory.kernels import kernel, read_only
from pscore.plugins import require_range
from pscore.rules.base import Memory, Rule
from pscore.types import FloatArray

EPSILON = 1e-7


@dataclass(frozen=True)
class DCASGD(Rule):
    """Delay-compensated asynchronous SGD.

    Attributes:
        adaptive: Whether lambda follows the mean square of the gradients (DC-ASGD-a).
        variance_control: lambda of the constant form, 0 or more, without unit.
        adaptive_control: lambda_0 of the adaptive form, 0 or more, in units of the gradient.
        decay: How much of the mean square is kept from one gradient to the next, 0 to below 1.
    """

    adaptive: bool = False
    variance_control: float = 0.04
    adaptive_control: float = 2.0
    decay: float = 0.95

    name = "dcasgd"
    source = "Zheng et al., arXiv:1609.08326"
    examples = ("(variance_control=0.5)", "(adaptive=True)")
    compensates = True
    remembers_pulls = True

    def __post_init__(self) -> None:
        require_range("dcasgd.variance_control", self.variance_control, 0.0, 1e6)
        require_range("dcasgd.adaptive_control", self.adaptive_control, 0.0, 1e6)
        require_range("dcasgd.decay", self.decay, 0.0, 1.0 - 1e-9)

    def on_pull(self, worker: int, memory: Memory) -> None:
        """Keeps W_bak[worker]: one more copy of the slice for each worker."""
        name = f"weights_backup.{worker}"
        if name not in memory.state:
            memory.state[name] = np.empty_like(memory.weights)
        np.copyto(memory.state[name], memory.weights)

    def compensate(self, grad: FloatArray, worker: int, memory: Memory) -> None:
        """Makes g~ of g, in place; a worker that has pulled nothing has nothing to correct."""
        weights = read_only(memory.weights)
        backup = read_only(memory.state.get(f"weights_backup.{worker}", weights))
        if not self.adaptive:
            _constant(grad, weights, backup, np.float32(self.variance_control))
            return
        name = f"mean_square.{worker}"
        if name not in memory.state:
            memory.state[name] = np.zeros_like(grad)
        _adaptive(
            grad,
            weights,
            backup,
            memory.state[name],
            np.float32(self.adaptive_control),
            np.float32(self.decay),
            np.float32(1.0 - self.decay),
        )


@kernel
def _constant(
    grad: FloatArray, weights: FloatArray, backup: FloatArray, control: np.float32
) -> None:
    for i in range(len(grad)):
        g = grad[i]
        grad[i] = g + control * g * g * (weights[i] - backup[i])


@kernel
def _adaptive(
    grad: FloatArray,
    weights: FloatArray,
    backup: FloatArray,
    square: FloatArray,
    control: np.float32,
    keep: np.float32,
    take: np.float32,
) -> None:
    for i in range(len(grad)):
        g = grad[i]
        square[i] = keep * square[i] + take * g * g
        spread = np.sqrt(square[i] + np.float32(EPSILON))
        grad[i] = g + control / spread * g * g * (weights[i] - backup[i])
