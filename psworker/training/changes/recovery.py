"""A worker's state after an error in a step, so that a script may catch the error and continue.

A counted push stays counted, and a gradient that has not left has changed nothing. There are two
kinds of error:

- **The shards know nothing of it**: a gradient with NaN or Inf, one that float32 cannot add to the
  residual, one that was changed after it had left, a wrong setting; or they have agreed with this
  worker that rows of the last step do not count. The step is still to be made.
  Slices that have left keep the gradient with which they left; the next `step()` reads the others
  anew. Usually nothing has left, and then the script may also leave the step out.
- **The shards may know of it**: one of them refused something, did not answer, or has declared this
  worker lost, or the step was almost over. Each slice of the step may have been counted or not.
  This worker joins again before it does anything else, and continues after that step from the
  global weights. The next `step()` does only that, because its gradient belongs to older weights.

A gradient on a GPU is checked while its step continues. Slices with NaN or Inf are then pushed as
absent, so that the step ends on every worker; afterwards `step()` raises.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from pscore.errors import (
    LOST,
    OWN,
    JobMismatchError,
    PacelineError,
    ReplacedError,
)
from psworker.connection.accounts.left_out import LeftOut
from psworker.job.companions import Companion
from psworker.model.tracing import not_traced
from psworker.training.companions import begin_beside, begin_together
from psworker.training.gradients.gradients import Gradients
from psworker.training.state.buffers import Buffers
from psworker.training.table import GlobalState, TrainingTable

log = logging.getLogger("paceline")
T = TypeVar("T")
BEGINS_LATE = (
    "worker %d begins at step %d, where its job is: loop by optimizer.steps, because with a count "
    "of its own the script makes these steps once more"
)


@dataclass(slots=True)
class Failure:
    """An error that shards may know of."""

    problem: BaseException
    step: int  # The step under way, or the next one.
    is_between: bool = False  # Whether no step was under way.
    is_given_up: bool = False  # Whether that step was given up; rejoining may need more attempts.


class WorkerRecovery:
    """Returns one worker to training after errors.

    Attributes:
        failure: The error after which this worker has yet to rejoin; None: there is none.
    """

    def __init__(
        self,
        table: TrainingTable,
        gradients: Gradients,
        buffers: Buffers,
        left_out: LeftOut,
        companions: Sequence[Companion],
    ) -> None:
        self.failure: Failure | None = None
        self._table = table
        self._gradients = gradients
        self._buffers = buffers
        self._left_out = left_out
        self._companions = companions

    def note(
        self, problem: BaseException, step: int | None = None, *, is_between: bool = False
    ) -> None:
        """Records an error that shards may know of; `step` is the one under way."""
        number = self._table.replica.step if step is None else step
        self.failure = Failure(problem, number, is_between)

    @contextlib.contextmanager
    def recovers(self) -> Iterator[None]:
        """Leaves the optimizer usable when a part of a step raises."""
        step = self._table.replica.step
        try:
            yield
        except BaseException as problem:  # Also one of a signal's handler, or of the optimizer.
            is_own = isinstance(problem, OWN)
            if not isinstance(problem, PacelineError):
                is_own = not self._gradients.have_left
            if is_own and not self._table.replica.is_ending:
                self._gradients.begin_again()
                self._table.show_weights()
            else:
                if self.failure is None:
                    self.note(problem, step)
                self._left_out.given_up()
            raise

    @not_traced
    def hook(self, parameter: torch.Tensor) -> None:
        """Pushes the slices that `parameter` completes; autograd calls it for each gradient."""
        if self.failure is not None:
            return
        with self.recovers():
            try:
                self._gradients.made(parameter)
            except LOST as problem:
                self.note(problem)  # `step` rejoins; backward continues undisturbed.

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Rejoins first if the last step failed, and records a failure of the block.

        A push of the last step may be refused only now: that is such a failure too. A mismatch
        with the job is none, for a worker that rejoined would be refused again.

        Raises:
            PacelineError: This worker cannot rejoin, or the block raised the error.
        """
        if self.failure is not None:
            if not self._table.group.is_alone:  # All of its processes come back in `step`.
                raise self.failure.problem
            self.come_back()
        try:
            yield
        except PacelineError as problem:
            is_own = isinstance(problem, (*OWN, JobMismatchError))
            if not is_own and self.failure is None:
                self.note(problem, is_between=not self._gradients.have_left)
            raise

    def look_around(self) -> None:
        """Joins again, between two steps, where a shard no longer has this worker.

        A step notices that itself if it waits, or sends something there; a short one on other
        shards does neither. Processes of a group look when they begin a step, as they may not part.
        """
        table = self._table
        if not table.group.is_alone:
            return
        try:
            table.session.check()
        except LOST as problem:
            try:
                table.session.refilling.mend(problem)
            except LOST:
                if table.means is None:
                    self.note(problem, is_between=True)
                    self.come_back()
        except PacelineError:
            return  # The next wait raises it.

    def require_place(self) -> None:
        """Raises the error after which this worker has to rejoin; its group then does so too.

        Raises:
            PacelineError: One of `LOST`: the last step has failed, or a shard has not this worker.
        """
        if self.failure is not None:
            raise ReplacedError(str(self.failure.problem))
        try:
            self._table.session.check()
        except LOST:
            raise
        except PacelineError:
            return  # The next wait raises it.

    def come_back(self) -> None:
        """Joins the job again; the slices that shards have counted of the failed step stay counted.

        Raises:
            StateLostError: This worker's weights may be without a step (worker_steps.py).
            PacelineError: It failed; the failure stays, for another attempt.
        """
        failure, table = self.failure, self._table
        assert failure is not None
        if table.means is not None:
            raise table.means.refuse(failure.step, "has lost its place in") from failure.problem
        if not failure.is_given_up:
            step = None if failure.is_between else table.replica.next_push
            table.exchange.give_up_step(step, failure.problem)
            for companion in self._companions if step is not None else ():
                companion.give_up_step()
            failure.is_given_up = True

        def rejoin() -> None:
            table.rejoin()
            self._buffers.restart()
            for companion in self._companions:
                companion.begin_again()
            begin_together(
                table, self._companions, lambda agree: table.come_back(failure.step, agree)
            )

        self._repeat(rejoin)
        self._say_if_back(failure.step)
        self.failure = None
        self._gradients.end()
        self._gradients.begin_again()

    def begin_anew(self, reason: str) -> None:
        """Joins again between two steps: the job's weights count, and not those of the model here.

        Raises:
            PacelineError: As from `come_back`.
        """
        self.note(ReplacedError(reason), is_between=True)
        self.come_back()

    def start(self, begin: Callable[[], None]) -> None:
        """Starts training; a worker that is lost meanwhile rejoins and starts again.

        Args:
            begin: The start, which may begin again: the first weights of a table count once.

        Raises:
            PacelineError: A shard does not answer, or this worker cannot rejoin.
        """

        def start_again() -> None:
            self._table.rejoin()
            self._buffers.restart()
            begin()

        try:
            begin()
        except LOST as problem:
            self._say_again(problem)
            self._repeat(start_again)
        session, step = self._table.session, self._table.replica.step
        if session.passed.at_start and step > 0 and session.group.is_leader:
            log.warning(BEGINS_LATE, session.rank, step)

    def _repeat(self, rejoin: Callable[[], None]) -> None:
        """Rejoins, again if this worker is lost meanwhile; a group leaves that to its script."""
        while True:
            try:
                return rejoin()
            except LOST as problem:
                self._say_again(problem)

    def _say_again(self, problem: PacelineError) -> None:
        """Logs that this worker was lost while it joined.

        Raises:
            PacelineError: It is a group (`WorkerGroup.require_alone`).
        """
        self._table.group.require_alone(problem)
        log.warning(
            "worker %d rejoins, it was lost meanwhile: %s", self._table.session.rank, problem
        )

    def _say_if_back(self, former: int) -> None:
        """Logs that the job is behind the step at which this worker was."""
        table = self._table
        if table.replica.step < former:
            log.warning(
                "worker %d goes back from step %d to step %d, from which the job continues",
                table.session.rank,
                former,
                table.replica.step,
            )

    def peek(self, num_state: int | None = None) -> GlobalState:
        """Returns `TrainingTable.peek`; a worker that the shards have declared lost rejoins first.

        Args:
            num_state: Number of the optimizer's state arrays, copied too; None: weights only.

        Raises:
            PacelineError: A shard does not answer, or this worker cannot rejoin.
        """
        return self.run_between_steps(lambda: self._table.peek(num_state))

    def run_between_steps(self, action: Callable[[], T]) -> T:
        """Runs an action; a worker that the shards have declared lost rejoins and runs it again.

        Args:
            action: It may begin a second time.

        Raises:
            PacelineError: A shard does not answer, or this worker cannot rejoin.
        """
        try:
            with self.guard():
                return action()
        except LOST:
            if self._gradients.have_left:  # `step` rejoins before it returns.
                raise
            with self.guard():
                return action()

    def run_in_forward(self, action: Callable[[], T]) -> T:
        """Runs an action of the model's forward; a worker that was declared lost joins again.

        Its dense weights stay as they are, because autograd needs those of the forward: `step`
        brings new ones, and gives the gradient up, as after every other loss.

        Args:
            action: It may begin a second time.

        Raises:
            PacelineError: A shard does not answer, or this worker cannot rejoin.
        """
        if not torch.is_grad_enabled():
            return self.run_between_steps(action)
        while True:
            try:
                return action()
            except LOST as problem:
                if self._gradients.have_left or not self._table.group.is_alone:
                    raise
                if self.failure is None:
                    self.note(problem, is_between=True)
                self._repeat(self._join_beside)

    def _join_beside(self) -> None:
        """Joins again, and begins only with the tables beside the model's."""
        self._table.rejoin()
        for companion in self._companions:
            companion.begin_again()
        begin_beside(self._table, self._companions)
