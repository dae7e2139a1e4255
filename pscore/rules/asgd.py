"""Asynchronous SGD: every gradient is an update of its own, on arrival.

Jeffrey Dean et al., "Large Scale Distributed Deep Networks" (Downpour SGD), NeurIPS
2012, section 4.1.

    W <- opt(W, g_i)

A worker waits for its own update only. The learning rate is that of one update: N workers make N
updates in the time of one synchronous step, so divide it by about N, and lower the momentum.

Differs from the paper: a worker pulls after each push (n_fetch = n_push = 1), and the optimizer is
the user's, where the paper has Adagrad.
"""

from __future__ import annotations

from dataclasses import dataclass

from pscore.rules.base import Rule


@dataclass(frozen=True)
class ASGD(Rule):
    """Asynchronous SGD."""

    name = "asgd"
    source = "Dean et al., NeurIPS 2012"
