"""Torch's schedules with a flush: M minibatches go through all stages, then each stage updates.

`torch.distributed.pipelining.schedules` has the order of forwards and backwards: GPipe (Yanping
Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
NeurIPS 2019) as `ScheduleGPipe`, and 1F1B with a flush (Shiqing Fan et al., "DAPPLE: A Pipelined
Data Parallel Approach for Training Large Models", PPoPP 2021) as `Schedule1F1B`. The schedule runs
as it is. Its stage is ours: it sends and receives by the frames of this job in place of Gloo or
NCCL, so torch.distributed is not initialised.

There is one version of the weights, and an update has the exact mean gradient of its minibatches.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import schedules

from pscore.errors import ConfigError
from psworker.pipeline.run.entry import make_entry, require_tensor
from psworker.pipeline.run.kept import Activations
from psworker.pipeline.run.schedule import Place, Stash
from psworker.pipeline.run.stage import (
    ACTIVATION,
    GRADIENT,
    Around,
    Loss,
    OptimizerWait,
    Receive,
    Send,
    StageWaits,
    unobserved,
)

Take = Callable[[Receive], torch.Tensor]
Schedule = type[schedules.PipelineScheduleSingle]


def schedule_named(name: str) -> Schedule | None:
    """Returns torch's schedule of a class name; None: it has none of this name.

    Raises:
        ConfigError: It runs several stages on a rank.
    """
    schedule = getattr(schedules, name, None) if name.startswith("Schedule") else None
    if not inspect.isclass(schedule):
        return None
    if issubclass(schedule, schedules.PipelineScheduleMulti):
        raise ConfigError(
            f"schedule {name!r} runs several stages on a worker; a plan has one stage on each: "
            f"use one of {', '.join(torch_schedules())}"
        )
    return schedule if issubclass(schedule, schedules.PipelineScheduleSingle) else None


def torch_schedules() -> list[str]:
    """Returns the names of torch's schedules with one stage on a worker."""
    return [
        name
        for name, schedule in vars(schedules).items()
        if name.startswith("Schedule")
        and inspect.isclass(schedule)
        and issubclass(schedule, schedules.PipelineScheduleSingle)
    ]


class Flush(Stash):
    """One version: all minibatches of an update are at the weights of the update before."""

    flushes = True
    rate = 1.0  # All stages make as many updates.

    def __init__(self, place: Place, schedule: Schedule, minibatches: int | None) -> None:
        """Counts for one replica.

        Args:
            minibatches: M; None: as few as give each replica one for each stage.

        Raises:
            ConfigError: M is not a multiple of the replicas of each stage, or a stage has more
                replicas than the one before it.
        """
        super().__init__(place)
        number = math.lcm(*place.replicas)
        self.schedule = schedule
        self.minibatches = len(place.replicas) * number if minibatches is None else minibatches
        if self.minibatches < 1 or self.minibatches % number:
            raise ConfigError(
                f"{schedule.__name__} has {self.minibatches} minibatches in an update, must be a "
                f"multiple of {number}, so that all replicas of a stage have as many"
            )
        if list(place.replicas) != sorted(place.replicas, reverse=True):
            raise ConfigError(
                f"the stages have {'-'.join(map(str, place.replicas))} replicas; with "
                f"{schedule.__name__} no stage can have more than the one before it, because its "
                "replicas would wait for minibatches that are not begun yet"
            )

    @property
    def updates_every(self) -> int:
        """Backwards of a replica in an update."""
        return self.minibatches // self.place.num_replicas

    @property
    def whole(self) -> int:
        """Minibatches of an update."""
        return self.minibatches

    def version(self, minibatch: int) -> int:
        """Returns the newest version: the updates before this minibatch."""
        return minibatch // self.minibatches


class FrameStage:
    """A stage as torch's schedules drive it: those of its methods that they call.

    A schedule asks for operations of torch.distributed before and after each forward and backward;
    there are none, because these receive and send themselves.
    """

    has_backward = True

    def __init__(
        self, module: nn.Module, place: Place, send: Send, take: Take, around: Around
    ) -> None:
        """Begins without minibatches.

        Args:
            send: Sends values to another rank, and does not wait.
            take: Waits for values of another rank.
            around: Records forwards and backwards.
        """
        self._module, self._place, self._send, self._take = module, place, send, take
        self._around = around
        self.stage_index, self.num_stages = place.stage, len(place.replicas)
        self.is_first, self.is_last = place.is_first, place.is_last
        self.device = next(module.parameters()).device
        self.output_chunks: list[torch.Tensor] = []  # The schedule joins them; nobody reads them.
        self._numbers: Sequence[int] = ()
        self._inputs: Sequence[Any] = ()
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.activations = Activations()

    @property
    def num_flying(self) -> int:
        """Minibatches between forward and backward."""
        return len(self._kept)

    def begin(self, numbers: Sequence[int], inputs: Sequence[Any]) -> None:
        """Begins an update of some minibatches; `inputs` are those of the first stage."""
        self._numbers, self._inputs = numbers, inputs

    def forward_one_chunk(self, chunk: int, *_: Any, **__: Any) -> torch.Tensor:
        """Runs a minibatch forward, and sends the result to the next stage."""
        number = self._numbers[chunk]
        if self.is_first:
            leaf = entry = self._inputs[chunk]
        else:
            source = self._place.rank_at(-1, number)
            leaf, entry = make_entry(self._take(Receive(source, ACTIVATION, number)))
        weights = [*self._module.parameters()]
        with self._around("forward", number), self.activations.count(entry, weights):
            result: torch.Tensor = self._module(entry)
        if not self.is_last:
            require_tensor(result, f"stage {self._place.stage}")
            self._send(self._place.rank_at(1, number), ACTIVATION, number, result.detach())
        self._kept[chunk] = leaf, result
        self.output_chunks.append(torch.zeros(1, dtype=torch.float32, device="cpu"))
        return result

    def backward_one_chunk(self, chunk: int, loss: torch.Tensor | None = None, **_: Any) -> None:
        """Runs a minibatch backward, and sends the gradient of its input to the stage before."""
        number = self._numbers[chunk]
        leaf, result = self._kept.pop(chunk)
        if self.is_last:
            assert loss is not None
            result, grad = loss, None
        else:
            source = self._place.rank_at(1, number)
            grad = self._take(Receive(source, GRADIENT, number))
        with self._around("backward", number):
            torch.autograd.backward(result, grad)
        self.activations.drop(leaf)
        if not self.is_first:
            own = (
                torch.zeros(leaf.shape, dtype=torch.float32, device="cpu")
                if leaf.grad is None
                else leaf.grad
            )
            self._send(self._place.rank_at(-1, number), GRADIENT, number, own)

    def perform_reduce_grad(self, _scale: float) -> None:
        """Leaves the sum of the gradients as it is: `FlushReplica` divides it."""

    def clear_runtime_states(self) -> None:
        """Forgets the last update."""
        self._kept.clear()
        self.output_chunks.clear()

    def no_operations(self, *_: Any, **__: Any) -> list[Any]:
        """Returns no operations of torch.distributed."""
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_operations
    _get_init_p2p_neighbors_ops = no_operations

    def _prepare_forward_infra(self, *_: Any, **__: Any) -> tuple[Any, ...]:
        """Prepares nothing: a frame has its shape with it."""
        return ()

    _prepare_backward_infra = _prepare_forward_infra


class FlushReplica:
    """The layers of a stage on one worker, updated after M minibatches.

    Attributes:
        losses: Losses of the minibatches that this replica has ended, if it has the loss.
    """

    versions_held = 1  # Weight versions in memory.

    def __init__(
        self,
        module: nn.Module,
        versions: Flush,
        loss: Loss,
        send: Send,
        take: Take,
        around: Around = unobserved,
    ) -> None:
        """Begins at minibatch 0.

        Args:
            module: The layers; an update writes into their parameters.
            versions: Minibatches of an update, and the place of the replica.
            loss: Loss function of the last stage's output and the targets.
            send: Sends values to another rank, and does not wait.
            take: Waits for values of another rank.
            around: Records forwards and backwards.

        Raises:
            ConfigError: The schedule refuses the number of minibatches.
        """
        self._module, self._versions, self._loss = module, versions, loss
        self._place = versions.place
        self._stage = FrameStage(module, self._place, send, take, around)
        self.activations = self._stage.activations  # Those of the minibatches in flight.
        self._held: list[tuple[int, Any, Any]] = []  # Number, inputs and targets.
        self._seen = 0  # Minibatches of this update, those on other replicas too.
        self._updates = 0
        self._full = self._make(versions.schedule, versions.updates_every)
        self.losses: dict[int, float] = {}

    @property
    def num_flying(self) -> int:
        """Minibatches between forward and backward."""
        return self._stage.num_flying

    def step(self, minibatch: int, inputs: Any, targets: Any) -> StageWaits:
        """Keeps a minibatch; with the last one of an update, runs all of them and updates.

        Args:
            minibatch: Its number; nothing happens if it is on another replica.
            inputs: Inputs of the first stage; others do not read it.
            targets: Targets of the last stage; others do not read it.
        """
        self._seen += 1
        if self._place.has(minibatch):
            self._held.append((minibatch, inputs, targets))
        if self._seen == self._versions.minibatches:
            yield from self._flush(self._full)

    def finish(self) -> StageWaits:
        """Runs the minibatches that are left, and makes an update of them."""
        if self._held:
            # A schedule may want more minibatches than there are; the sum is that of any order.
            yield from self._flush(self._make(schedules.ScheduleGPipe, len(self._held)))
        self._seen = 0

    def _flush(self, schedule: schedules.PipelineScheduleSingle) -> StageWaits:
        numbers = [number for number, _, _ in self._held]
        self._stage.begin(numbers, [inputs for _, inputs, _ in self._held])
        # The schedule splits them; each is its own index.
        chunks = torch.arange(len(numbers), device="cpu")
        losses: list[torch.Tensor] = []
        target = chunks if self._place.is_last else None
        schedule.step(*([chunks] if self._place.is_first else []), target=target, losses=losses)
        self.losses.update(
            (number, float(loss.detach())) for number, loss in zip(numbers, losses, strict=False)
        )
        self._scale(min(self._place.num_replicas, self._seen) / self._seen)
        self._held.clear()
        self._seen = 0
        self._updates += 1
        yield OptimizerWait(self._updates)
        for parameter in self._module.parameters():
            parameter.grad = None

    def _scale(self, factor: float) -> None:
        """Multiplies the sums of gradients, so that the mean over the replicas is that of all."""
        for parameter in self._module.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad is not None:
                parameter.grad *= factor

    def _make(self, schedule: Schedule, number: int) -> schedules.PipelineScheduleSingle:
        """Returns a schedule over minibatches; raises ConfigError if it refuses their number."""

        def loss_fn(output: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return self._loss(output, self._held[int(index)][2])

        try:
            return schedule(self._stage, number, loss_fn=loss_fn)  # type: ignore[arg-type]
        except (ValueError, TypeError) as problem:
            raise ConfigError(
                f"{schedule.__name__} refuses {number} minibatches of a replica in an update: "
                f"{problem}"
            ) from problem
