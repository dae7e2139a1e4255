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
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from pscore.errors import LOST, ConfigError, PacelineError, TransportError
from psworker.connection.membership.session import Session
from psworker.gossip.base import Meet, Want
from psworker.peers.peers import Peers
from psworker.pipeline.run import wire
from psworker.pipeline.run.checkpoint import to_numbers
from psworker.pipeline.run.driver import Driver, Work, Write, explain_unwritten
from psworker.pipeline.run.members import Members, MembersChangedError
from psworker.pipeline.run.schedule import Place
from psworker.pipeline.run.stage import OptimizerWait, Receive

log = logging.getLogger("paceline")
KEPT_MAX = 64  # Minibatches kept for another time, for each worker, before the shards are asked.


class ShardSteps(Protocol):
    """The steps of a stage on the shards (psworker/pipeline/run/stage_steps.py).

    Each raises PacelineError where a shard does not answer, or no longer counts this worker in.
    """

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
            share: Factor of the learning rates of this step.
        """

    def end(self) -> None:
        """Leaves the stage's job."""


@dataclass(slots=True)
class _Save:
    """A checkpoint that this worker's script asks for."""

    number: int  # Minibatches behind it.
    write: Write  # Writes it.
    is_over: bool = False  # Whether this worker knows the outcome.
    is_written: bool = False  # Whether it is on the disk.
    problem: OSError | None = None  # The reason, if this worker could not write it.


class ContinuingDriver(Driver):
    """A replica of a stage whose neighbours may be lost and come back."""

    def __init__(
        self,
        work: Work,
        place: Place,
        session: Session,
        peers: Peers,
        first: int,
        steps: ShardSteps,
        declare: Callable[[], int],
    ) -> None:
        """Meets the workers of all stages, and begins where the slices of all stages are.

        Args:
            place: Stage and replica of this worker, when all are there.
            session: Its part in the job of all stages.
            peers: Its connections to the workers of that job.
            first: Minibatches that the weights had behind them when the job began.
            declare: Declares the directory of the workers, and returns its table.

        Raises:
            PacelineError: Another process has this worker's rank, or a shard does not answer.
        """
        self._planned, self._loaded, self.next = place, first, first
        self._kept: dict[int, tuple[Any, Any]] = {}  # Minibatches that may be needed again.
        self._members = Members(session, peers, place.replicas, first, declare)
        self._total: int | None = None  # Minibatches of the whole training, once it ends.
        self._own_save: _Save | None = None
        self._save_of_others: _Save | None = None  # By other workers, with the part of this one.
        self._saved_at = -1  # Minibatches behind the last checkpoint of this worker's script.
        self._steps = steps
        super().__init__(work, place, session, peers, first)
        if self.next > first:  # Its script begins behind a checkpoint of these minibatches.
            self._members.saved = max(self._members.saved, self.next)

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

    def save(self, number: int, write: Write) -> None:
        """Brings the parts of all stages to one member, which writes them.

        Args:
            number: Minibatches behind the weights.
            write: Writes the parts of all stages, or raises an OSError.

        Raises:
            ConfigError: There is one of this minibatch already.
            PacelineError: That member could not write; training may go on.
        """
        if number == self._saved_at:  # A worker may have come back behind the first one.
            raise ConfigError(
                f"minibatch {number} was saved before, or could not be: with on_lost='continue' "
                "copy the folder, or save behind a later minibatch"
            )
        # The others may have saved while this worker was about to end the last minibatch.
        save, self._save_of_others = self._save_of_others, None
        if save is None or save.number != number:
            self._own_save = save = _Save(number, write)
            self._members.saves = number
            with self._leaves_on_error():
                # Workers that meet meanwhile may bring it to its end (`_meet`).
                while not (save.is_over or self._was_saved_without(number)):
                    if not self._again(partial(self._end, number)):
                        self._again(partial(self._write_from, number))
            self._own_save = self._members.saves = None
        self._saved_at = number
        self._members.saved = max(self._members.saved, number)
        if not save.is_over:
            log.warning(
                "worker %d was away when the others came to the checkpoint of minibatch %d, and "
                "leaves it to them",
                self._members.rank,
                number,
            )
        elif not save.is_written:
            raise explain_unwritten(number, save.problem)

    def _was_saved_without(self, number: int) -> bool:
        """Returns whether the others came to a checkpoint while this worker was declared lost."""
        is_over = not self._members.ranks  # They have finished, and saved all before that.
        return is_over or number < self._members.first or number == self._members.saved

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
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        """Makes all workers meet: raises MembersChangedError."""
        self._members.begin_epoch()
        raise MembersChangedError

    def _update(self, wait: OptimizerWait) -> None:
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
        except LOST as problem:  # It was stopped for longer than its lease.
            self._members.rejoin(problem)
            self._meet()
            return True
        return False

    def _meet(self) -> None:
        """Drops what is in flight, meets the others, and begins with them; rejoins if it is lost.

        If some of them save a checkpoint, this worker brings its part: it may have come back, so
        that its script begins behind that checkpoint, or may be about to save it too.
        """
        while True:
            try:
                self._steps.step_aside()
                self.place = self._members.meet(self._total)
                self._steps.come_back(self._loaded)
                self.next = self._members.first
                self._forget(self.next)
                if self._members.ranks:
                    self.begin(self.next)
                if self._members.savers:
                    self._write(self._members.savers[0])
                return
            except MembersChangedError:
                continue
            except LOST as problem:
                self._members.rejoin(problem)

    def _write_from(self, number: int) -> None:
        """Returns to the steps with the newest weights, and writes them with all others."""
        self._steps.come_back(self._loaded)
        self.begin(number)
        self._write(0)

    def _write(self, writer: int) -> None:
        """Brings the parts to a member, which writes them; returns when all know the outcome.

        No worker makes a step before that, so the weights stay those of the checkpoint.
        """
        members, stage, written = self._members, self.place.stage, False
        save, parts = self._own_save, self._work.parts()
        if members.index == writer:
            assert save is not None
            self._peers.run(self._waits(self._collect(self.first, parts)))
            try:
                save.write(*parts)
                written = True
            except OSError as problem:
                save.problem = problem
        elif self.place.replica == 0 and Place.of_rank(writer, self.place.replicas).stage != stage:
            members.send(writer, wire.STATE, self.first, to_numbers(*parts))
        is_written = bool(members.agree(lambda: int(written), writer))
        if save is None or save.number != self.first:  # One that was away may save an older one.
            save = self._save_of_others = _Save(self.first, lambda weights, state: None)
        save.is_written, save.is_over = is_written, True
        members.saves = None
        with contextlib.suppress(MembersChangedError):  # The next minibatch finds it, or the end.
            members.agree(lambda: 0, writer)

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
        """Leaves the job on an error, which it logs: the others go on without this worker."""
        with super()._leaves_on_error():
            try:
                yield
            except PacelineError as problem:
                log.warning("worker %d leaves its pipeline: %s", self._members.rank, problem)
                raise
