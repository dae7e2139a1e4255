"""A pipeline that goes on when workers are lost and when they come back.

Every stage is a job of its own on the shards, also a stage of one replica, so the weights outlive
each worker. A push names its minibatch, and each slice counts a minibatch once
(psserver/decisions/minibatches.py). When the members change, every worker drops what it has in
flight and steps aside, so that no step of a stage waits for it. All meet (psworker/peers), each
with the first minibatch that some slice of some stage has not counted; the smallest of these is
where all begin again, with the newest weights. A stage that has counted a minibatch before takes
part in its step without a weight. So every minibatch counts once at each stage, and none is lost.

The gradient of a minibatch that is computed again is taken at newer weights than the first time.
The replicas of a stage share its minibatches among those that are there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol

import torch

from pscore.errors import PacelineError, TransportError
from psworker.connection.session import Session
from psworker.gossip.base import Meet, Waits, Want
from psworker.peers.peers import Peers
from psworker.pipeline import wire
from psworker.pipeline.checkpoint import from_numbers, to_numbers
from psworker.pipeline.driver import Driver, Parts, Work, Write, unwritten
from psworker.pipeline.members import Members, MembersChangedError
from psworker.pipeline.schedule import Place
from psworker.pipeline.stage import Receive, Update

log = logging.getLogger("paceline")
KEPT_MAX = 64  # Minibatches kept for another time, for each worker, before the shards are asked.


class Steps(Protocol):
    """The steps of a stage on the shards (psworker/training/absence.py)."""

    def step_aside(self) -> None:
        """Asks the shards not to wait for this worker's gradients."""

    def come_back(self, minibatch: int) -> None:
        """Returns to the steps, with the global weights.

        Args:
            minibatch: All minibatches before it are in the weights with which the job began.
        """

    def step(self, minibatch: int, share: float) -> None:
        """Makes a step with the gradient of a minibatch.

        Args:
            minibatch: Its number.
            share: Factor of the learning rates of this step.
        """

    def end(self) -> None:
        """Leaves the stage's job."""


class ContinuingDriver(Driver):
    """A replica of a stage whose neighbours may be lost and come back.

    Attributes:
        next: The minibatch that the stage takes next; those before it are given to it or counted.
    """

    def __init__(
        self, work: Work, place: Place, session: Session, peers: Peers, first: int, steps: Steps
    ) -> None:
        """Meets the workers of all stages, and begins where the slices of all stages are.

        Args:
            work: The layers, and how they are trained.
            place: Stage and replica of this worker, when all are there.
            session: Its part in the job of all stages.
            peers: Its connections to the workers of that job.
            first: Minibatches that the weights had behind them when the job began.
            steps: The steps of its stage.

        Raises:
            PacelineError: This worker is no longer part of the job, or a shard does not answer.
        """
        self._planned, self._loaded, self.next = place, first, first
        self._kept: dict[int, tuple[Any, Any]] = {}  # Minibatches that may be needed again.
        self._members = Members(session, peers, place.replicas, first)
        self._total: int | None = None  # Minibatches of the whole training, once it ends.
        self._steps = steps
        super().__init__(work, place, session, peers, first)

    def step(self, number: int, inputs: Any, targets: Any) -> None:
        """Trains on a minibatch; begins again where the workers have changed.

        Raises:
            PacelineError: This worker is no longer part of the job, or a shard does not answer.
        """
        self._kept[number] = inputs, targets
        with self._leaves_on_error():
            if len(self._kept) > KEPT_MAX * sum(self._planned.replicas):
                self._forget(self._members.counted())
            while self._again(lambda: self._run_to(number + 1)):
                pass

    def end_all(self, number: int) -> None:
        """Ends the minibatches in flight on all workers; `number` of them are then counted.

        Raises:
            PacelineError: This worker is no longer part of the job, or a shard does not answer.
        """
        with self._leaves_on_error():
            while self._again(lambda: self._end(number)):
                pass

    def finish(self, number: int) -> None:
        """Ends the minibatches in flight on all workers, and leaves the job."""
        self._total = number
        self.end_all(number)
        self._steps.end()
        self._leave()

    def require_whole(self, number: int) -> None:
        """Accepts any: the last update holds the minibatches that there are."""

    def save(self, number: int, parts: Parts, write: Write) -> None:
        """Brings the parts of all stages to the first member, which writes them.

        Args:
            number: Minibatches behind the weights.
            parts: Returns those of this worker's stage.
            write: Writes those of all stages, or raises an OSError.

        Raises:
            PacelineError: The first member could not write; training may go on.
        """
        problem: list[Exception | None] = []
        with self._leaves_on_error():
            while True:
                self.end_all(number)
                self._steps.come_back(self._loaded)  # With the newest weights.
                self.begin(number)
                if not self._again(lambda: problem.append(self._write(number, parts, write))):
                    break
        if problem[-1] is not None:
            raise unwritten(number, problem[-1])

    # ----- minibatches

    def _run_to(self, end: int) -> None:
        """Gives the stage the minibatches before `end` that it has not got yet."""
        if self._members.has_moved:
            raise MembersChangedError
        while self.next < end:
            number = self.next
            if number not in self._kept:
                raise TransportError(
                    f"minibatch {number} is to be computed again, and is no longer kept here: "
                    "start all workers again, with resume="
                )
            self._peers.run(self._waits(self._stage.step(number - self.first, *self._kept[number])))
            self.next = number + 1
            self._note_losses()

    def _end(self, number: int) -> None:
        """Ends the minibatches before `number`, and waits until all others have done so."""
        self._run_to(number)
        if self._members.ranks:
            self._peers.run(self._waits(self._stage.finish()))
            self._note_losses()
        self._steps.step_aside()  # The last round of others may be without this one.
        if self._members.agree(self._members.counted) < number:
            self._members.begin_epoch()
            raise MembersChangedError

    def _update(self, wait: Update) -> None:
        """Makes the stage's update; where replicas are missing it holds fewer minibatches."""
        share = self.place.num_replicas / self._planned.num_replicas
        self._steps.step(self.first + wait.minibatch, share)

    # ----- members

    def _again(self, action: Callable[[], object]) -> bool:
        """Runs an action; returns whether the workers have changed, so that it is to run again."""
        try:
            action()
        except MembersChangedError:
            self._meet()
            return True
        return False

    def _meet(self) -> None:
        """Drops what is in flight, meets the others, and begins with them."""
        self._steps.step_aside()
        self.place = self._members.meet(self._total)
        self._steps.come_back(self._loaded)
        self.next = self._members.first
        self._forget(self.next)
        if self._members.ranks:
            self.begin(self.next)

    def _write(self, number: int, parts: Parts, write: Write) -> Exception | None:
        """Collects the parts at the first member; returns why it could not write them."""
        problem: Exception | None = None
        if self.place.rank:
            if self.place.replica == 0:
                self._members.send(0, wire.STATE, number, to_numbers(*parts()))
        else:
            whole = parts()

            def script() -> Waits:
                for stage in range(1, len(self.place.replicas)):
                    source = sum(self.place.replicas[:stage])
                    numbers = yield from self._members.receive(source, wire.STATE, number)
                    for mine, part in zip(whole, from_numbers(numbers), strict=True):
                        mine.update(part)

            self._peers.run(script())
            try:
                write(*whole)
            except OSError as found:
                problem = found
        is_written = self._members.agree(lambda: self.first + (problem is None)) > self.first
        return problem or (None if is_written else OSError("the first worker says why"))

    def _forget(self, counted: int) -> None:
        """Forgets the minibatches before one: all stages have counted them."""
        self._kept = {number: kept for number, kept in self._kept.items() if number >= counted}

    # ----- messages

    def _send(self, to: int, kind: int, minibatch: int, values: torch.Tensor) -> None:
        self._members.send(to, kind, self.first + minibatch, values)

    def _receive(self, wait: Receive) -> Generator[Want | Meet, Any, torch.Tensor]:
        minibatch = self.first + wait.minibatch
        return (yield from self._members.receive(wait.source, wait.kind, minibatch))

    @contextlib.contextmanager
    def _leaves_on_error(self) -> Iterator[None]:
        """Leaves the job on an error, so that the others go on without this worker."""
        is_done = False
        try:
            yield
            is_done = True
        except PacelineError as problem:
            log.warning("worker %d leaves its pipeline: %s", self._members.rank, problem)
            raise
        finally:
            if not is_done:
                self._give_up()
