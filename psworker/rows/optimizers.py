"""Optimizers of row tables that torch does not have; they carry hyper-parameters, no more.

The shards make the steps. So these objects have the parameter groups, for a script and its learning
rate schedulers, and no step of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from pscore.errors import ConfigError
from pscore.plugins import require_range


class _OnShards(torch.optim.Optimizer):
    """An optimizer whose steps only the shards make."""

    def step(self, closure: Callable[[], Any] | None = None) -> NoReturn:
        """Refuses to make a step here.

        Raises:
            ConfigError: Always.
        """
        name = type(self).__name__
        raise ConfigError(
            f"the shards make the steps of {name}: pass it as rows= to DistributedOptimizer, and "
            "call step() of that"
        )


class RowwiseAdagrad(_OnShards):
    """Adagrad with one sum a row in place of one an element, as FBGEMM makes it.

        s += mean_j g_j^2
        w -= lr * g / (sqrt(s) + eps)

    It needs 4 bytes of state a row. Source: Dheevatsa Mudigere et al., "Software-Hardware Co-design
    for Fast and Scalable Training of Deep Learning Recommendation Models", ISCA 2022.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, eps: float = 1e-8) -> None:
        """Sets the hyper-parameters.

        Args:
            params: The placeholders of row tables (`table.weight`), or groups of them.
            lr: Learning rate.
            eps: Added to the root.

        Raises:
            ConfigError: A number is negative.
        """
        for name, value in {"lr": lr, "eps": eps}.items():
            require_range(name, value, 0.0, math.inf)
        super().__init__(params, {"lr": lr, "eps": eps})


class FTRL(_OnShards):
    """FTRL-Proximal, which keeps elements of rarely seen rows at exactly zero.

        n' = n + g^2
        z += g - (sqrt(n') - sqrt(n)) / lr * w
        w = 0 where |z| <= l1, else -(z - sign(z) l1) / ((beta + sqrt(n')) / lr + l2)

    Source: H. Brendan McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013,
    algorithm 1.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-1,
        beta: float = 1.0,
        l1: float = 0.0,
        l2: float = 0.0,
    ) -> None:
        """Sets the hyper-parameters.

        Args:
            params: The placeholders of row tables (`table.weight`), or groups of them.
            lr: Learning rate, above 0; alpha in the paper.
            beta: Added to the root.
            l1: Weight of the absolute values in the loss, 0 or more.
            l2: Half the weight of the squares in the loss, 0 or more.

        Raises:
            ConfigError: A number is negative.
        """
        for name, value in {"lr": lr, "beta": beta, "l1": l1, "l2": l2}.items():
            require_range(name, value, 0.0, math.inf)
        super().__init__(params, {"lr": lr, "beta": beta, "l1": l1, "l2": l2})
