"""Mirror: between two pulls a worker runs the shard's own optimizer on its own gradient.

Paceline's own; there is no paper. OPT is the shard's optimizer with the hyper-parameters of the
step, S its state (the momentum of SGD, the two moments of Adam).

    local step:         (w, S_i) = OPT(w, g_i; S_i)
    pull, exact:        w = W;  S_i = S         the shard's state travels with the weights
    pull, kept:         w = W;  S_i unchanged   no extra bytes
    end of the warm-up: S_i = S                 in both forms

With momentum m a shard moves about 1 / (1 - m) times as far per unit of gradient as a step without
it. A local step without momentum therefore lags behind, each pull makes a jump, and gradients are
taken far from where they are applied; a local step with the shard's own dynamics makes no jump in
expectation. That was seen in toy runs and in one-seed runs of a small network only; unlike data on
many workers has not been tried. `exact` costs one more array per pull with SGD, two with Adam.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pscore.errors import ConfigError
from pscore.local.base import LocalSlice, LocalUpdate, optimizer_state
from pscore.optimizers.base import DeviceStep, SliceStep

FORMS = ("exact", "kept")


class Mirror(LocalUpdate):
    """The shard's optimizer, run by the worker.

    Args:
        mirror: `exact` takes the shard's optimizer state with each pull. `kept` continues with the
            worker's own, seeded once: `pulls_state` is False, and the driver requests the state
            with each blocking pull of the last step of the warm-up, as `wants_state` says.
    """

    name: ClassVar[str] = "mirror"

    def __init__(self, mirror: str = "exact") -> None:
        if mirror not in FORMS:
            raise ConfigError(f"mirror.mirror is {mirror!r}, must be one of {', '.join(FORMS)}")
        self.mirror = mirror
        self.pulls_state = mirror == "exact"

    def wants_state(self, *, last_of_warmup: bool) -> bool:
        """Returns whether the optimizer's state has to travel with a pull.

        Args:
            last_of_warmup: The pull is a blocking one of the last step of the warm-up.
        """
        return self.pulls_state or last_of_warmup

    def update(self, part: LocalSlice, grad: Any) -> None:
        """Makes one step of the shard's optimizer in place."""
        state = optimizer_state(part)
        if part.kernels is not None or part.weights.device.type != "cpu":
            part.optimizer.step_device(
                DeviceStep(
                    weights=part.weights,
                    grad=grad,
                    state=state,
                    segments=part.segments,
                    counts=part.counts,
                    active=part.active,
                    hyper=part.hyper,
                    kernels=part.kernels,
                )
            )
            return
        weights = part.weights.numpy()
        part.optimizer.step(
            SliceStep(
                weights=weights,
                out=weights,
                grad=grad.numpy(),
                scale=1.0,
                state=[array.numpy() for array in state],
                segments=part.segments,
                counts=part.counts,
                active=part.active,
                hyper=part.hyper,
            )
        )

    def state_room(self, part: LocalSlice) -> Sequence[Any]:
        """Returns S_i, which a pull replaces."""
        return optimizer_state(part)

    def rebase(self, part: LocalSlice, weights: Any, state: Sequence[Any], version: int) -> None:
        """Stores the pull, and the state if it came along."""
        part.weights.copy_(weights)
        if state:
            for kept, pulled in zip(optimizer_state(part), state, strict=True):
                kept.copy_(pulled)
