"""A replica of a stage: runs its minibatches forward and backward, on the versions they need.

A generator, without threads and network: it yields what it waits for, and its driver resumes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from psworker.pipeline.run.entry import make_entry, require_tensor
from psworker.pipeline.run.kept import Activations
from psworker.pipeline.run.ring import WeightRing
from psworker.pipeline.run.schedule import Order, Stash

ACTIVATION, GRADIENT = 1, 2
Send = Callable[[int, int, int, torch.Tensor], None]  # Rank, kind, minibatch, values.
Loss = Callable[[torch.Tensor, Any], torch.Tensor]
# Records the body of a `with` block: a name of the work, and the minibatch.
Around = Callable[[str, int], contextlib.AbstractContextManager[None]]


class Receive(NamedTuple):
    """Waits for the activation or the gradient of a minibatch; resumed with it."""

    source: int  # Rank.
    kind: int
    minibatch: int


class OptimizerWait(NamedTuple):
    """Waits for the optimizer's step; resumed when the parameters hold the new weights."""

    number: int
    minibatch: int = -1  # The last one in it.
    weight: float = 1.0  # Of this replica's gradient in the mean over the replicas.


StageWaits = Generator[Receive | OptimizerWait, Any, None]


def unobserved(what: str, minibatch: int) -> contextlib.AbstractContextManager[None]:
    """Records nothing."""
    return contextlib.nullcontext()


class StageReplica:
    """The layers of a stage on one worker.

    Attributes:
        losses: Losses of the minibatches that this replica has ended, if it has the loss.
        ring: Its weight versions.
        activations: Those of the minibatches in flight.
    """

    def __init__(
        self,
        module: nn.Module,
        versions: Stash,
        loss: Loss,
        send: Send,
        around: Around = unobserved,
        *,
        moves: bool = True,
    ) -> None:
        """Begins at minibatch 0.

        Args:
            module: The layers; an update writes into their parameters.
            versions: Versions of the weights, and the place of the replica.
            loss: Loss function of the last stage's output and the targets.
            send: Sends values to another rank, and does not wait.
            around: Records forwards and backwards.
            moves: Whether the parameters may get other memory.
        """
        self._module = module
        self._place = versions.place
        self._names = [name for name, p in module.named_parameters() if p.requires_grad]
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._order = Order(versions)
        self._loss, self._send, self._around = loss, send, around
        # Inputs and results of the minibatches in flight, and the weights that they used.
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]] = {}
        self.ring = WeightRing(self._parameters, moves=moves, in_place=versions.in_place)
        self.losses: dict[int, float] = {}
        self.activations = Activations()
        self._last = -1  # Minibatch of the last backward.

    @property
    def num_flying(self) -> int:
        """Minibatches between forward and backward."""
        return self._order.num_flying

    @property
    def versions_held(self) -> int:
        """Weight versions in memory."""
        return self.ring.held

    def step(self, minibatch: int, inputs: Any, targets: Any) -> StageWaits:
        """Runs a minibatch forward, and the oldest one in flight backward if it is its turn.

        Args:
            minibatch: Its number; nothing happens if it is on another replica.
            inputs: Inputs of the first stage; others do not read it.
            targets: Targets of the last stage; others do not read it.
        """
        if not self._place.has(minibatch):
            return
        version = self._order.begin(minibatch)
        if self._place.is_first:
            leaf = entry = inputs
        else:
            source = self._place.rank_at(-1, minibatch)
            leaf, entry = make_entry((yield Receive(source, ACTIVATION, minibatch)))
        weights = self.ring.weights(version)
        with self._around("forward", minibatch), self.activations.count(entry, weights):
            result = torch.func.functional_call(
                self._module, dict(zip(self._names, weights, strict=True)), (entry,)
            )
            if self._place.is_last:
                result = self._loss(result, targets)
            else:
                require_tensor(result, f"stage {self._place.stage}")
        if self._place.is_last:
            self.losses[minibatch] = float(result.detach())
        else:
            self._send(self._place.rank_at(1, minibatch), ACTIVATION, minibatch, result.detach())
        self._kept[minibatch] = leaf, result, weights
        due = self._order.due()
        if due is not None:
            yield from self._backward(due)

    def finish(self) -> StageWaits:
        """Runs the minibatches in flight backward, and makes an update of the rest."""
        while (due := self._order.due(is_over=True)) is not None:
            yield from self._backward(due)
        if self._order.has_rest:
            yield from self._update()

    def _backward(self, minibatch: int) -> StageWaits:
        """Adds the gradients of a minibatch up, sends that of its input, maybe makes an update."""
        leaf, result, weights = self._kept.pop(minibatch)
        grad = None
        if not self._place.is_last:
            source = self._place.rank_at(1, minibatch)
            grad = yield Receive(source, GRADIENT, minibatch)
        wanted = weights if self._place.is_first else [*weights, leaf]
        with self._around("backward", minibatch):
            grads: Sequence[torch.Tensor | None] = torch.autograd.grad(
                result, wanted, grad, allow_unused=True
            )
        if not self._place.is_first:
            own = (
                grads[-1]
                if grads[-1] is not None
                else torch.zeros(leaf.shape, dtype=torch.float32, device="cpu")
            )
            self._send(self._place.rank_at(-1, minibatch), GRADIENT, minibatch, own)
        self._gather(grads[: len(weights)])
        self.activations.drop(leaf)
        self._last = minibatch
        if self._order.end():
            yield from self._update()

    def _gather(self, grads: Sequence[torch.Tensor | None]) -> None:
        for parameter, own in zip(self._parameters, grads, strict=True):
            grad = torch.zeros_like(parameter) if own is None else own
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad

    def _update(self) -> StageWaits:
        held, weight = self._order.updated()
        for parameter in self._parameters:
            if held > 1 and parameter.grad is not None:
                parameter.grad /= held
        self.ring.update(self._order.oldest())
        yield OptimizerWait(self._order.newest, self._last, weight)
        for parameter in self._parameters:
            parameter.grad = None
        self.ring.add(self._order.newest)
