"""Runs one replica of a stage among the workers of all stages: sends, receives, and updates."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pscore.errors import ConfigError, PacelineError, TransportError
from pscore.observe.timeline import recorded
from pscore.pb.ps.v1 import control_pb2
from psworker.connection.membership.session import Session
from psworker.gossip.base import Meet, Waits, Want
from psworker.job import context
from psworker.peers.peers import Peers
from psworker.pipeline.run import wire
from psworker.pipeline.run.checkpoint import Tensors, from_numbers, to_numbers
from psworker.pipeline.run.schedule import Place, Stash
from psworker.pipeline.run.stage import (
    ACTIVATION,
    GRADIENT,
    Around,
    Loss,
    OptimizerWait,
    Receive,
    Send,
    StageReplica,
    StageWaits,
)

if TYPE_CHECKING:
    from psworker.pipeline.run.flush import FlushReplica

KINDS = {ACTIVATION: "activation", GRADIENT: "gradient", wire.STATE: "state"}
LOOK_S = 0.25  # From one look to the next, where the directory of the workers was lost.
Write = Callable[[Tensors, Tensors], None]  # Writes those of all stages, or raises an OSError.


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The part of the training that is this worker's."""

    module: nn.Module  # The layers of its stage.
    optimizer: torch.optim.Optimizer  # Their optimizer.
    loss: Loss  # Loss of the last stage's output and the targets.
    versions: Callable[[Place], Stash]  # Returns the versions of the weights for a place.
    # Returns the stage's weights and optimizer state, for a checkpoint.
    parts: Callable[[], tuple[Tensors, Tensors]]
    # Asks the shards not to wait for this replica's gradients any more.
    step_aside: Callable[[], None] = lambda: None
    # Multiplies the weight of this replica's next gradient in the replicas' mean.
    weigh: Callable[[float], None] = lambda _: None
    # Whether the optimizer is on the shards, and weights have a place for pulls.
    is_shared: bool = False


class Driver:
    """A replica of a stage whose neighbours stay: when one is lost, this one ends with an error.

    Attributes:
        losses: Losses of the minibatches that this replica has ended, by number.
        first: The minibatch at which the stage has begun with the newest weights.
        next: The minibatch that the stage takes next; those before it are given to it or counted.
        waits_s: Seconds in which it has waited for its neighbours.
    """

    def __init__(
        self, work: Work, place: Place, session: Session, peers: Peers, first: int
    ) -> None:
        """Waits until the workers of all stages are there, and begins.

        Args:
            session: Part of this worker in the job of all stages.
            peers: Its connections to the workers of that job.
            first: Minibatches that the weights have behind them.

        Raises:
            PacelineError: This worker is no longer part of the job, or the shard does not answer.
        """
        self._work, self.place = work, place
        self._session, self._peers = session, peers
        self._device = next(work.module.parameters()).device
        self.losses: dict[int, float] = {}
        self.waits_s = 0.0
        self._updates = 0
        self.begin(first)
        self._meet()

    def begin(self, first: int) -> None:
        """Begins with no minibatch in flight, at the newest weights."""
        self.first = self.next = first
        self._stage = _replica(self._work, self.place, self._send, self._take, self._around)

    def step(self, number: int, inputs: Any, targets: Any) -> None:
        """Trains on a minibatch; raises TransportError if a worker of another stage is gone."""
        self.next = number + 1
        self._session.passed.at_start = False
        self._drive(self._stage.step(number - self.first, inputs, targets))
        self._note_losses()

    def end_all(self, number: int) -> None:
        """Ends the minibatches in flight; `number` of them have been given to `step`.

        Raises:
            TransportError: A worker of another stage is gone.
        """
        self._drive(self._stage.finish())
        self._note_losses()

    def finish(self, number: int) -> None:
        """Ends the minibatches in flight, and leaves the job; replicas get the same weights."""
        self.end_all(number)
        self._work.step_aside()  # The others' last round waits no longer for this replica.
        self._session.barrier("pipeline")
        if self.place.num_replicas > 1:
            context.shutdown()
        self._leave()

    def require_whole(self, number: int) -> None:
        """Raises ConfigError for a checkpoint behind minibatches whose last update is not full."""
        every = self._work.versions(self.place).whole
        if (number - self.first) % every:
            raise ConfigError(
                f"a checkpoint behind {number - self.first} minibatches would cut an update: save "
                f"behind a multiple of {every}"
            )

    def save(self, number: int, write: Write) -> None:
        """Brings the parts of all stages to the first worker, which writes them.

        Args:
            number: Minibatches behind the weights.
            write: Writes the parts of all stages.

        Raises:
            PacelineError: The first worker could not write; training may go on.
            TransportError: A worker of another stage is gone.
        """
        self.end_all(number)
        self.begin(number)
        self._session.barrier("checkpoint")  # The gradients of all replicas are on the shards.
        problem: Exception | None = None
        if self.place.rank:
            if self.place.replica == 0:
                wire.send(self._peers, 0, wire.STATE, number, to_numbers(*self._work.parts()))
        else:
            whole = self._work.parts()
            self._drive(self._collect(number, whole))
            try:
                write(*whole)
            except OSError as found:
                problem = found
        if self._session.agree("checkpoint", float(problem is not None)):
            raise explain_unwritten(number, problem)

    def report(self) -> control_pb2.StageReport:
        """Returns what the replica does now, for status; another thread may call it."""
        stage = self._stage
        return control_pb2.StageReport(
            stage=self.place.stage,
            replica=self.place.replica,
            minibatch=self.next,
            version=self._updates,
            in_flight=stage.num_flying,
            activation_nbytes=stage.activations.nbytes,
            versions_held=stage.versions_held,
            waits_s=self.waits_s,
        )

    def _meet(self) -> None:
        """Waits for the workers of all stages."""
        self._peers.run(self._gather())

    def _gather(self) -> Waits:
        yield Meet(-1, needs_all=sum(self.place.replicas))
        self._met = dict(self._peers.incarnations)
        # Since all have met, one may have ended, or the first shard may have started anew.
        while missing := (yield from self._missing()):
            pass
        if missing is None:
            gone = set(range(sum(self.place.replicas))) - set(self._peers.members())
            raise self._changed("all were beginning, by the loss of", min(gone, default=0))

    def _missing(self) -> Generator[Meet, Any, int | None]:
        """Returns how many workers the directory does not list yet; None: one of them is gone.

        The directory of the members may have been lost with the first shard. Each worker enters
        itself again when it waits for another one; until then it is there if it is live.
        """
        yield Meet(self.next, waits=False)
        missing = set(range(sum(self.place.replicas))) - set(self._peers.members())
        if self._peers.incarnations != self._met or not missing <= set(self._session.live()):
            return None
        if missing:
            time.sleep(LOOK_S)
        return len(missing)

    def _leave(self) -> None:
        self._peers.close()
        self._session.leave()

    def _note_losses(self) -> None:
        for number, loss in self._stage.losses.items():
            self.losses[self.first + number] = loss
        self._stage.losses.clear()

    def _take(self, wait: Receive) -> torch.Tensor:
        """Waits for a tensor inside a schedule of torch, which does not yield."""
        return self._peers.run(self._await(wait))

    def _send(self, to: int, kind: int, minibatch: int, values: torch.Tensor) -> None:
        wire.send(self._peers, to, kind, self.first + minibatch, values)

    def _drive(self, script: StageWaits) -> None:
        """Runs what the stage has to do."""
        with self._leaves_on_error():
            self._peers.run(self._waits(script))

    @contextlib.contextmanager
    def _leaves_on_error(self) -> Iterator[None]:
        """Leaves the job on an error, so that the others learn it."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._give_up)
            yield
            stack.pop_all()

    def _give_up(self) -> None:
        """Leaves the job after an error."""
        self._peers.close()
        self._session.leave("its pipeline failed", failed=True)

    def _waits(self, script: StageWaits) -> Waits:
        """Answers what the stage waits for, from its neighbours and its optimizer."""
        timeline = self._session.timeline
        answer: torch.Tensor | None = None
        with contextlib.suppress(StopIteration):
            while True:
                wait = script.send(answer)
                answer = None
                if isinstance(wait, OptimizerWait):
                    with recorded(timeline, f"update {wait.number}", number=wait.number):
                        self._update(wait)
                    self._updates += 1
                else:
                    answer = yield from self._await(wait)

    def _around(
        self, what: str, minibatch: int, **args: Any
    ) -> contextlib.AbstractContextManager[None]:
        """Records the body of a `with` block in the timeline, if there is one."""
        number = self.first + minibatch  # Also in the name, which the picture shows.
        return recorded(self._session.timeline, f"{what} {number}", number=number, **args)

    def _await(self, wait: Receive) -> Generator[Want | Meet, Any, torch.Tensor]:
        """Returns a tensor of a neighbour when it is here; the timeline shows the wait."""
        begin_s = time.monotonic()
        with self._around("wait", wait.minibatch, awaits=KINDS[wait.kind], worker=wait.source):
            values = yield from self._receive(wait)
        if wait.kind != wire.STATE:
            values = values.to(self._device)
        self.waits_s += time.monotonic() - begin_s
        return values

    def _update(self, wait: OptimizerWait) -> None:
        self._work.weigh(wait.weight)
        self._work.optimizer.step()

    def _collect(self, number: int, whole: tuple[Tensors, Tensors]) -> StageWaits:
        """Adds the parts of the other stages' first replicas to a checkpoint."""
        for stage in range(len(self.place.replicas)):
            if stage != self.place.stage:
                source = sum(self.place.replicas[:stage])
                numbers = yield Receive(source, wire.STATE, number - self.first)
                for mine, part in zip(whole, from_numbers(numbers), strict=True):
                    mine.update(part)

    def _receive(self, wait: Receive) -> Generator[Want | Meet, Any, torch.Tensor]:
        minibatch = self.first + wait.minibatch
        values = yield from wire.receive(wait.source, wait.kind, minibatch, missing=self._missing)
        if values is None:
            raise self._changed(f"minibatch {minibatch} was awaited from", wait.source)
        return values

    def _changed(self, doing: str, rank: int) -> TransportError:
        """Returns the error for a worker that is gone, which another stage or all waited for."""
        place = Place.of_rank(rank, self.place.replicas)
        return TransportError(
            f"the workers of the pipeline have changed while {doing} "
            f"replica {place.replica} of stage {place.stage}; start all again"
        )


def explain_unwritten(number: int, problem: Exception | None) -> PacelineError:
    """Returns the error for a checkpoint that the first worker could not write."""
    error = PacelineError(
        f"the checkpoint of minibatch {number} was not written: {problem or 'rank 0 says why'}"
    )
    error.__cause__ = problem
    return error


def _replica(
    work: Work, place: Place, send: Send, take: Callable[..., torch.Tensor], around: Around
) -> StageReplica | FlushReplica:
    """Returns a replica at minibatch 0."""
    versions = work.versions(place)
    if not versions.flushes:
        moves = not work.is_shared or versions.is_single
        return StageReplica(work.module, versions, work.loss, send, around, moves=moves)
    from psworker.pipeline.run.flush import Flush, FlushReplica

    assert isinstance(versions, Flush)
    return FlushReplica(work.module, versions, work.loss, send, take, around)
