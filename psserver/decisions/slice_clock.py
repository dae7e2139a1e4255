"""One slice: the decisions on the effect of each push and on the time of each answer to a pull.

Theory of operation. A `SliceClock` is a state machine without I/O, threads or a clock: a message
goes in, actions come out (orders.py), in the order in which they must be executed for this slice.
It holds no numbers of the model. Its driver keeps the payloads under the tokens that it passed in,
executes the actions of one slice one after the other, and may work on many slices at once. An
answer to a pull comes in that order behind the update that it waits for, so "decided" and "done"
are the same here.

A push is counted once: by (worker, step), even if it arrives twice or late. In a mode that
collects by step, each open step collects its own pushes (open_steps.py). Gradients are added in the
order of the ranks, so that the sum has the same bits in every run; one that arrives before a lower
rank's is held, and acknowledged all the same. Steps close in order, and closing step t makes
version t+1. With a quorum a step may close when its window is over (window.py), of which `tick`
tells the time; a push that comes later enters the step that is open. In an asynchronous mode there
is one collection, and it closes after `fan_in` arrivals.

A push may name its minibatch: where that is counted already, because another worker has pushed it
before it was lost, the push takes part in its step and adds nothing.

A push is parked (parking.py), neither counted nor acknowledged, if it is too far ahead, if an
elastic job has too few workers, or if it may wait for the others of its step. No step waits for a
worker that joins a job under way until it has pulled (newcomers.py). A step that no worker is left
to push is skipped: the weights as they are get the next version.

An example: two workers push step 0 of a synchronous job. Both are added, then comes the update.

>>> import numpy as np
>>> from pscore.rules import SSGD
>>> from psserver.decisions.membership import Membership
>>> from psserver.decisions.participants import TableParticipants
>>> clock = SliceClock(SSGD(), TableParticipants(Membership(2, lease_s=10.0)))
>>> def push(worker, token, role=Role.GRADIENT):
...     hyper = np.array([[0.1]])  # One parameter group; sgd has the learning rate alone.
...     sent = Push(worker=worker, step=0, base_version=0, role=role, hyper=hyper)
...     return [type(action).__name__ for action in clock.push(sent, token)]
>>> push(0, "weights", Role.WEIGHTS)
['Load', 'Acknowledge']
>>> push(0, "a")
['Add', 'Acknowledge']
>>> clock.missing()  # Step 0 misses worker 1.
(0, [1])
>>> push(1, "b")
['Add', 'Acknowledge', 'Update']
>>> clock.version
1
>>> push(1, "again")  # The network has repeated it.
['Acknowledge']
"""

from __future__ import annotations

from collections.abc import Mapping

from pscore.errors import RemoteProtocolError
from pscore.rules.base import Rule
from pscore.types import Pull, Push, Role, Verdict
from psserver.decisions.open_step import OpenStep
from psserver.decisions.orders import Acknowledge, Action, Answer, Load, Skip
from psserver.decisions.progress import Progress, Token
from psserver.decisions.slice_state import SliceState
from psserver.decisions.window import Window

LOADS = (Role.WEIGHTS, Role.STATE, Role.REFILL)
AHEAD_MAX = 4096  # Steps received from a worker while an earlier one is missing.


class SliceClock(SliceState):
    """The decisions of one slice."""

    # ----- messages

    def push(self, push: Push, token: Token, now_s: float = 0.0) -> list[Action]:
        """Decides on one push.

        Args:
            now_s: The time, in seconds; only windows ask for it.

        Raises:
            RemoteProtocolError: There are no weights yet, the push claims a version to come, or too
                many pushes of its worker are parked or ahead of a missing one; or it would fill a
                slice that is in use.
        """
        if push.role in LOADS:
            return (
                self._refill(push, token) if push.role is Role.REFILL else self._load(push, token)
            )
        if self.version < 0:
            raise RemoteProtocolError(
                f"worker {push.worker} pushed step {push.step} before the weights were initialised"
            )
        if push.base_version > self.version:
            raise RemoteProtocolError(
                f"worker {push.worker} pushed step {push.step} on version {push.base_version}, "
                f"the newest is {self.version}"
            )
        self.window.tick(now_s)
        counted = self._workers.progress(push.worker)
        self._workers.anew.discard(push.worker)
        if push.step in counted:
            late = push.step in counted.late
            return [self._acknowledge(token, Verdict.TOO_LATE if late else Verdict.DUPLICATE)]
        self.parking.discard(push)  # The repeated push replaces it.
        if self._workers.is_short or not self._open.admits(push, self.version, self.parking):
            self.parking.add(push, token, self.version)
            is_last = push.may_wait and not self._open.missing(push.step, self.parking)
            return self._proceed() if is_last else []
        if len(counted.ahead) >= AHEAD_MAX:
            raise RemoteProtocolError(
                f"worker {push.worker} pushed step {push.step}, {AHEAD_MAX} steps since "
                f"{counted.clock} have arrived and others between them have not"
            )
        return self._count(push, token) + self._proceed()

    def tick(self, now_s: float) -> list[Action]:
        """Records the time, in seconds, and closes a step whose window is over."""
        self.window.tick(now_s)
        is_due = self.version in self._open.steps or self.window.is_behind(self.version)
        return self._proceed() if is_due and self._open.rule.window_s is not None else []

    def pull(self, pull: Pull, token: Token) -> list[Action]:
        """Decides on one pull: it is answered now, or by the actions of a later message."""
        if pull.begins and not self._open.rule.by_step:
            self._workers.progress(pull.worker).skip_to(pull.clock)
            pull = pull._replace(clock=0)  # It waits for nobody.
        self._pulls[token] = pull
        if not (pull.begins and self._open.rule.by_step):
            return self._answers()
        self._workers.newcomers.start(pull.worker, pull.clock)
        if self._open.rule.window_s is not None:
            self.window.closed_elsewhere(pull.clock)
        return self.recheck()

    def forget(self, token: Token) -> bool:
        """Drops a pull whose requester no longer waits; False if it is answered already."""
        return self._pulls.pop(token, None) is not None

    # ----- changes of the job

    def recheck(self) -> list[Action]:
        """Decides again after the participants have changed."""
        if self._workers.is_short:
            return self._answers()
        if self.rule.by_step:
            actions = [
                action for step in sorted(self._open.steps) for action in self._open.fill(step)
            ]
        else:
            actions = self._close_if_full()
        return actions + self._proceed()

    def resume(
        self,
        version: int,
        counted: Mapping[int, Progress],
        open_steps: Mapping[int, OpenStep],
        rule: Rule | None = None,
    ) -> list[Action]:
        """Resumes from the journal of a killed process; returns the actions that were still due.

        Args:
            open_steps: Contents of the open steps, by key.
            rule: The mode of these steps, if the process was killed during a change of the mode,
                before this slice had made it.
        """
        if rule is not None:
            self._open.rule = rule
        self.version = version
        self._workers.resume(counted)
        self._open.resume(open_steps)
        return self.recheck()

    def restore(self, version: int, clocks: Mapping[int, int]) -> None:
        """Restores a checkpoint's version, and the clock of each worker.

        The contents of open steps are not in the checkpoint's weights, so they are not counted.
        """
        self.version = version
        for rank, clock in clocks.items():
            self._workers.counted[rank] = Progress(clock=version if self.rule.by_step else clock)

    def begin_again(self, *, closes: bool) -> None:
        """Begins another life of the job, whose workers were all lost.

        Workers that join before the next update are expected at once, as at the start of a job.
        Parked pushes came from the lost workers, whose memory may be in use again: they are
        dropped.

        Args:
            closes: Whether a step with the pushes of some closes without the others, as for models
                and named tensors: workers all do the same from now on, and those whose push is in
                would be one round ahead.
        """
        self.parking.clear()
        self._first_version = max(self.version, 0)
        self._workers.begin_again(by_step=self.rule.by_step)
        if closes and self.rule.by_step and self._open.steps:
            for rank in range(self._workers.participants.num_workers):
                self._workers.newcomers.start(rank, max(self._open.steps) + 1)

    def is_under_way(self, *, came_back: bool) -> bool:
        """Returns whether a worker that joins has to catch up with others.

        In a mode by step it has not before the first update, of the job or of its present life:
        also those in the place of others that died begin together, as a launcher may have started
        all of them again.

        Args:
            came_back: Whether a worker of its rank was there before.
        """
        may_come = came_back or self._workers.participants.is_elastic
        if may_come and self.version > self._first_version:
            return True
        return not self.rule.by_step and (came_back or self._first_version > 0)

    def welcome(self, worker: int) -> None:
        """Prepares for a worker that joins a job under way: no step waits for it until it pulls.

        Its parked pushes came from the previous process, whose memory may have been reused: they
        are dropped.
        """
        if self.version >= 0:
            self._workers.newcomers.join(worker)
            self.parking.discard_worker(worker)

    def excuse(self, worker: int) -> None:
        """Records that no step waits for a worker until it pulls, unless it has pushed before."""
        if self._workers.num_counted(worker) == 0:
            self.welcome(worker)

    def knows_pushes(self, worker: int) -> None:
        """Records that the process of a worker has made its pushes itself: it makes none again."""
        self._workers.anew.discard(worker)

    def change(self, rule: Rule) -> list[Action]:
        """Changes the mode while no worker is expected; pushes that are in enter an update.

        Versions continue, and every worker's next push is that of the newest version. Parked pushes
        are dropped: they came from lost workers, as one that steps aside has waited for its
        acknowledgements.

        Raises:
            ConfigError: The mode's arguments do not fit the number of workers.
        """
        rule.require_workers(self._workers.participants.num_workers)
        actions = self.recheck()
        for key in sorted(self._open.steps):  # Steps that lost workers had left out.
            self.version = max(self.version, key)
            actions.append(self._close(key))
        self._open.rule = rule
        self.window = Window.of(rule)
        self.parking.clear()
        self._workers.restart(max(self.version, 0))
        return actions + self._answers()

    # ----- pushes

    def _load(self, push: Push, token: Token) -> list[Action]:
        """Accepts initial weights once; restored ones, with their state, at any time."""
        if push.role is Role.WEIGHTS and self.version >= 0:
            return [self._acknowledge(token, Verdict.DUPLICATE)]
        self.version = max(self.version, 0)
        return [
            Load(token=token, role=push.role, version=self.version),
            self._acknowledge(token, Verdict.ACCEPTED),
            *self._proceed(),
        ]

    def _refill(self, push: Push, token: Token) -> list[Action]:
        """Accepts a slice as a worker has it, unless another had one as new: the shard is new.

        Every worker was counted up to that version. No step is open: workers push again when all of
        them have brought what they have.
        """
        if push.base_version <= self.version:
            return [self._acknowledge(token, Verdict.DUPLICATE)]
        if self._open.steps or not self.rule.by_step:
            raise RemoteProtocolError(
                f"worker {push.worker} would fill a slice with version {push.base_version}, and it "
                f"is in use at version {self.version}"
            )
        self.version = push.base_version
        clocks = dict.fromkeys(range(self._workers.participants.num_workers), self.version)
        self._workers.resume({rank: Progress(clock=clock) for rank, clock in clocks.items()})
        return [
            Load(token=token, role=push.role, version=self.version, clocks=clocks),
            self._acknowledge(token, Verdict.ACCEPTED),
            *self._proceed(),
        ]

    def _count(self, push: Push, token: Token) -> list[Action]:
        """Counts a push; its gradient enters an open step, or is too late."""
        counted = self._workers.counted[push.worker]
        counted.add(push.step)
        self.staleness[push.worker] = self.version - push.base_version
        if not self._open.rule.by_step:
            return self._arrive(push, token)
        if self._open.rule.window_s is not None:
            self.window.arrived(push.worker, push.step, self.version)
            if push.step < self.version:
                joined = self._open.join(push, token, self.version)
                return [*joined, self._acknowledge(token, Verdict.ACCEPTED)]
        own = self.minibatches.once(push)
        actions = None if push.step < self.version else self._open.collect(own, token)
        if actions is None:
            counted.add_late(push.step)
            return [self._acknowledge(token, Verdict.TOO_LATE, push)]
        self.minibatches.note(push)
        return [*actions, self._acknowledge(token, Verdict.ACCEPTED)]

    def _arrive(self, push: Push, token: Token) -> list[Action]:
        """Asynchronous mode: adds a push to those that have arrived since the last update.

        The last models of workers that have ended are collected until all have ended. A worker that
        continues is left out once; with its next push those who have ended make an average of
        their own.
        """
        actions: list[Action] = []
        open_step = self._open.steps.get(0)
        is_last = push.role is Role.LAST_MODEL
        if self.minibatches.is_repeated(push):
            return [self._acknowledge(token, Verdict.ACCEPTED, push)]
        self.minibatches.note(push)
        if open_step is not None and open_step.is_last != is_last:
            if not (is_last or push.worker in open_step.passed):
                open_step.passed.add(push.worker)
                return [self._acknowledge(token, Verdict.ACCEPTED, push)]
            actions.append(self._close(0))
        actions.append(self._open.arrive(push, token, self.version))
        return [*actions, *self._close_if_full(), self._acknowledge(token, Verdict.ACCEPTED)]

    def _close_if_full(self) -> list[Action]:
        """Asynchronous mode: updates if there are as many pushes as there are workers left."""
        return [self._close(0)] if self._open.has_arrivals() else []

    # ----- steps

    def _proceed(self) -> list[Action]:
        """Closes the steps that are complete, counts parked pushes, and answers pulls."""
        if self.version < 0 or self._workers.is_short:
            return self._answers()
        actions: list[Action] = []
        by_step = self._open.rule.by_step
        while True:
            if by_step and self._may_close():
                actions.append(self._close(self.version))
            elif not (self._unpark(actions) or self._skip(actions)):
                return actions + self._answers()

    def _may_close(self) -> bool:
        """Returns whether all are in the open step, or its quorum is and its window is over."""
        step = self.version
        if (is_complete := self._open.is_complete(step)) or self._open.rule.window_s is None:
            return is_complete
        is_met = self.window.is_behind(step)
        return self._open.has_quorum(step, is_met=is_met) and self.window.is_over(step)

    def _unpark(self, actions: list[Action]) -> bool:
        """Counts the parked pushes that have room now; returns whether there were any."""
        if not (was := len(self.parking)):
            return False
        admits = self._open.admits
        for push, token in self.parking.take(lambda it: admits(it, self.version, self.parking)):
            actions += self._count(push, token)
        return len(self.parking) < was

    def _skip(self, actions: list[Action]) -> bool:
        """Skips the steps that no worker is left to push; returns whether there were any.

        With a window also those without a push that have closed in other slices: one that is late
        counts in the next step.
        """
        step, is_empty = self._open.first_of_newcomers(), self.version not in self._open.steps
        if is_empty and self.window.is_behind(self.version) and self.window.is_over(self.version):
            step = min([self.window.elsewhere, *self._open.steps])
        if step <= self.version:
            return False
        actions.append(Skip(former=self.version, version=step))
        self._advance(step)
        return True

    def _close(self, key: int) -> Action:
        """Turns an open step into one update by the weighted mean of its pushes."""
        open_step = self._open.steps.pop(key)
        if self._open.rule.window_s is not None:
            self.window.close(self.version)
        self._advance(self.version + 1)
        if self.unlike is None and self._open.rule.by_step:
            self.unlike = open_step.unlike()
        return open_step.update(self.version)

    def _advance(self, version: int) -> None:
        self.version = version
        self._workers.newcomers.reach(version)

    # ----- answers

    def _answers(self) -> list[Action]:
        """Answers the pulls that have become readable, in the order of their arrival."""
        if self.version < 0 or not self._pulls:
            return []
        workers, rule, by_step = self._workers, self._open.rule, self._open.rule.by_step
        ready = [
            (token, pull)
            for token, pull in self._pulls.items()
            if rule.readable(self, pull.worker, pull.clock, pull.min_version)
            and not self._holds(pull)
        ]
        for token, _ in ready:
            del self._pulls[token]
        for _, pull in ready if workers.newcomers.starts else ():
            if workers.newcomers.has_not_pulled(pull.worker) and not pull.is_look:
                workers.start(pull.worker, self.version, by_step=by_step)
        return [
            Answer(
                token=token,
                worker=pull.worker,
                version=self.version,
                with_state=pull.with_state,
                clock=workers.next_step(pull.worker, self.version, by_step=by_step),
                counted=-1 if pull.clock else workers.num_counted(pull.worker),
                is_look=pull.is_look,
            )
            for token, pull in ready
        ]

    def _holds(self, pull: Pull) -> bool:
        """Returns whether a pull waits for a move of its worker that may enter a later round.

        It waits until the move is in, which another connection may bring later than the pull, and
        then for the round that a late move has entered.
        """
        is_exempt = pull.is_look or pull.begins or not pull.clock
        if is_exempt or self._open.rule.window_s is None:
            return False
        is_in = self._workers.has(pull.worker, pull.clock - 1)
        return not is_in or self.window.holds(pull.worker)

    def _acknowledge(self, token: Token, verdict: Verdict, push: Push | None = None) -> Acknowledge:
        return Acknowledge(token=token, verdict=verdict, version=self.version, push=push)
