"""One slice: every rule about what a push changes and when a pull is answered starts here.

Theory of operation. A `SliceClock` is a state machine without I/O, threads or a clock: a message
goes in, actions come out (orders.py), in the order in which they must be executed for this slice.
It holds no numbers of the model. Its driver keeps the payloads under the tokens that it passed in,
executes the actions of one slice one after the other, and may work on many slices at once. An
answer to a pull stands in the same order behind the update that it waits for, so "decided" and
"done" need not be told apart in here.

A push is counted once: by (worker, step), whatever the network repeats or reorders. In a mode that
collects by step, each open step collects its own pushes (open_step.py). Gradients are added in the
order of the ranks, so that the sum has the same bits in every run; one that arrives before a lower
rank's is held, and acknowledged all the same. Steps close in order, and closing step t makes
version t+1. In an asynchronous mode there is one collection, and it closes after `fan_in` arrivals.

A push is parked (parking.py), neither counted nor acknowledged, if it is too far ahead, if an
elastic job has too few workers, or if it may wait for the others of its step. No step waits for a
worker that joins a job under way until it has pulled (newcomers.py). A step that no worker is left
to push is skipped: the weights as they are get the next version.
"""

from __future__ import annotations

from collections.abc import Mapping

from pscore.errors import RemoteProtocolError
from pscore.rules.base import Rule
from pscore.types import Pull, Push, Role, Verdict
from psserver.decisions.newcomers import Newcomers
from psserver.decisions.open_step import OpenStep
from psserver.decisions.orders import Acknowledge, Action, Answer, Hold, Load, Skip
from psserver.decisions.parking import Parking
from psserver.decisions.participants import Participants
from psserver.decisions.progress import Progress, Token

AHEAD_MAX = 4096  # Steps received from a worker while an earlier one is missing.


class SliceClock:
    """The decisions of one slice."""

    def __init__(self, rule: Rule, participants: Participants) -> None:
        """Starts without weights.

        Args:
            rule: The table's mode.
            participants: The workers whose pushes its steps wait for.

        Raises:
            ConfigError: The mode's arguments do not fit the number of workers.
        """
        rule.require_workers(participants.num_workers)
        self.rule = rule
        # Updates decided; -1 until the initial weights are here. Invariant: never falls.
        self.version = -1
        # By rank. Invariant: contains every push of an open step, and no parked one.
        self.counted: dict[int, Progress] = {}
        # Of each worker's newest push, in updates. Invariant: not negative.
        self.staleness: dict[int, int] = {}
        # By step, or under 0 in an asynchronous mode. Invariant: in a mode by step, every key is in
        # version .. version + steps_open() - 1; empty without weights.
        self.open_steps: dict[int, OpenStep] = {}
        # Pushes not counted. Invariant: empty without weights.
        self.parking = Parking()
        self._participants = participants
        self._newcomers = Newcomers()
        # When the job began, or last went on with other workers. Invariant: not above `version`,
        # but for a version of 0 before there are weights.
        self._first_version = 0
        self._first_clock = 0  # The largest clock of any worker then.
        # Pulls not answered yet, in the order of their arrival. Invariant: none is readable.
        self._pulls: dict[Token, Pull] = {}

    # ----- messages

    def push(self, push: Push, token: Token) -> list[Action]:
        """Decides on one push.

        Raises:
            RemoteProtocolError: There are no weights yet, the push claims a version to come, or too
                many pushes of its worker are parked or ahead of a missing one.
        """
        if push.role in (Role.WEIGHTS, Role.STATE):
            return self._load(push, token)
        if self.version < 0:
            raise RemoteProtocolError(
                f"worker {push.worker} pushed step {push.step} before there were weights"
            )
        if push.base_version > self.version:
            raise RemoteProtocolError(
                f"worker {push.worker} pushed step {push.step} on version {push.base_version}, "
                f"the newest is {self.version}"
            )
        counted = self.counted.setdefault(push.worker, Progress())
        if push.step in counted:
            late = push.step in counted.late
            return [self._acknowledge(token, Verdict.TOO_LATE if late else Verdict.DUPLICATE)]
        self.parking.discard(push)  # The repeated push replaces it.
        if self.is_short or not self._has_room(push):
            self.parking.add(push, token, self.version)
            is_last = push.may_wait and not self._missing(push.step)
            return self._proceed() if is_last else []
        if len(counted.ahead) >= AHEAD_MAX:
            raise RemoteProtocolError(
                f"worker {push.worker} pushed step {push.step}, {AHEAD_MAX} steps since "
                f"{counted.clock} are in and others between them are not"
            )
        return self._count(push, token) + self._proceed()

    def pull(self, pull: Pull, token: Token) -> list[Action]:
        """Decides on one pull: it is answered now, or by the actions of a later message."""
        self._pulls[token] = pull
        if not (pull.begins and self.rule.by_step):
            return self._answers()
        self._newcomers.start(pull.worker, pull.clock)
        return self.recheck()

    def forget(self, token: Token) -> bool:
        """Drops a pull whose requester no longer waits; False if it is answered already."""
        return self._pulls.pop(token, None) is not None

    # ----- changes of the job

    def recheck(self) -> list[Action]:
        """Decides again after the participants have changed."""
        if self.is_short:
            return self._answers()
        if self.rule.by_step:
            actions = [action for step in sorted(self.open_steps) for action in self._fill(step)]
        else:
            actions = self._close_if_full()
        return actions + self._proceed()

    def resume(
        self, version: int, counted: Mapping[int, Progress], open_steps: Mapping[int, OpenStep]
    ) -> list[Action]:
        """Resumes from the journal of a killed process; returns the actions that were still due.

        Args:
            version: Updates made.
            counted: Progress of each worker, by rank.
            open_steps: Contents of the open steps, by key.
        """
        self.version = version
        self.counted = dict(counted)
        self.open_steps = dict(open_steps)
        return self.recheck()

    def restore(self, version: int, clocks: Mapping[int, int]) -> None:
        """Restores a checkpoint's version, and the clock of each worker.

        The contents of open steps are not in the checkpoint's weights, so they are not counted.
        """
        self.version = version
        for rank, clock in clocks.items():
            self.counted[rank] = Progress(clock=version if self.rule.by_step else clock)

    def begin_again(self) -> None:
        """Begins another life of the job, whose workers were all lost.

        Workers that join before the next update are expected at once, as at the start of a job.
        Parked pushes came from the lost workers, whose memory may be in use again: they are
        dropped.
        """
        self.parking.clear()
        self._newcomers.clear()
        self._first_version = max(self.version, 0)
        self._first_clock = max((steps.clock for steps in self.counted.values()), default=0)
        if self.rule.by_step:  # All workers begin at the newest version.
            for rank in range(self._participants.num_workers):
                self.counted.setdefault(rank, Progress())

    def is_under_way(self) -> bool:
        """Returns whether a worker that joins for the first time has to catch up with others."""
        if self._first_version and not self.rule.by_step:
            return True
        return self._participants.is_elastic and self.version > self._first_version

    def welcome(self, worker: int) -> None:
        """Prepares for a worker that joins a job under way: no step waits for it until it pulls.

        Its parked pushes came from the previous process, whose memory may have been reused: they
        are dropped.
        """
        if self.version >= 0:
            self._newcomers.join(worker)
            self.parking.discard_worker(worker)

    def change(self, rule: Rule) -> list[Action]:
        """Changes the mode while no worker is expected; pushes that are in enter an update.

        Versions go on, and every worker's next push is that of the newest version. Parked pushes
        are dropped: they came from lost workers, as one that steps aside has waited for its
        acknowledgements.

        Raises:
            ConfigError: The mode's arguments do not fit the number of workers.
        """
        rule.require_workers(self._participants.num_workers)
        actions = self.recheck()
        for key in sorted(self.open_steps):  # Of lost workers, which had left out steps.
            self.version = max(self.version, key)
            actions.append(self._close(key))
        self.rule = rule
        self.parking.clear()
        self._newcomers.clear()
        for rank in {*self._participants.ranks(), *self.counted}:
            self.counted[rank] = Progress(clock=max(self.version, 0))
        return actions + self._answers()

    # ----- what a rule may ask

    def clock(self, worker: int) -> int:
        """Returns the number of steps received from `worker` without a gap."""
        counted = self.counted.get(worker)
        return 0 if counted is None else counted.clock

    def clock_min(self) -> int:
        """Returns the smallest clock of all workers that are still expected."""
        expected = self._expected(max(self.version, 0))
        return min((self.clock(rank) for rank in expected), default=0)

    def progress(self) -> int:
        """Returns the pushes that lie behind the job: the slowest worker's, or the last one's."""
        if self.rule.by_step:
            return max(self.version, 0)
        if self._expected(max(self.version, 0)):
            return self.clock_min()
        return max((counted.clock for counted in self.counted.values()), default=0)

    # ----- for people and tests

    @property
    def is_short(self) -> bool:
        """Whether there are fewer workers than the job needs: nothing is counted meanwhile."""
        least = self._participants.least()
        return least > 0 and len(self._participants.ranks()) < least

    def missing(self) -> tuple[int, list[int]]:
        """Returns the step that is open, and the expected ranks that have not pushed it."""
        if not self.rule.by_step:
            slowest = self.clock_min()
            return slowest, [rank for rank in self._expected(0) if self.clock(rank) <= slowest]
        step = max(self.version, 0)
        return step, self._missing(step)

    @property
    def num_waiting(self) -> int:
        """Pulls that are not answered yet."""
        return len(self._pulls)

    @property
    def is_awaited(self) -> bool:
        """Whether a worker waits: for the answer to a pull, or with a parked push."""
        return bool(self._pulls or self.parking)

    def check_invariants(self) -> None:
        """Asserts what the comments at the fields say, for tests and the simulator."""
        has_weights = self.version >= 0
        assert self.version >= -1
        assert has_weights or not (self.open_steps or self.parking)
        assert all(updates >= 0 for updates in self.staleness.values()), self.staleness
        by_step = self.rule.by_step
        keys = range(self.version, self.version + self.rule.steps_open()) if by_step else (0,)
        for key, open_step in self.open_steps.items():
            assert key == open_step.key
            assert key in keys, f"step {key} is open at version {self.version}"
            open_step.check_invariants(by_step=by_step)
            for rank in open_step.ranks() if by_step else ():
                assert key in self.counted[rank]
                assert (key, rank) not in self.parking
        for counted in self.counted.values():
            counted.check_invariants()
        self.parking.check_invariants()

    # ----- participants

    def _expected(self, step: int) -> list[int]:
        """Returns the ranks that a step waits for, in order; in an asynchronous mode any step."""
        return self._newcomers.expected(self._participants.ranks(), step)

    def _missing(self, step: int) -> list[int]:
        """Returns the ranks that a step waits for and whose push is neither in nor parked."""
        arrived = self.parking.ranks(step)
        if step in self.open_steps:
            arrived |= self.open_steps[step].ranks()
        return [rank for rank in self._expected(step) if rank not in arrived]

    def _fan_in(self, num_expected: int) -> int:
        """Returns how many pushes make one update; an elastic job is as large as it is now."""
        num_expected = max(1, num_expected)
        everyone = self._participants
        return self.rule.fan_in(
            num_expected, num_expected if everyone.is_elastic else everyone.num_workers
        )

    def _start_now(self, worker: int) -> None:
        """Expects pushes from a returning worker, from the version on that it will receive."""
        if self.rule.by_step:
            self._newcomers.start(worker, self._next_step(worker))
            return
        self._newcomers.start_now(worker)
        counted = self.counted.setdefault(worker, Progress())
        others = [self.clock(rank) for rank in self._expected(0) if rank != worker]
        counted.clock = max(counted.clock, min(others, default=self._first_clock))
        counted.ahead.clear()

    def _next_step(self, worker: int) -> int:
        """Returns the next step of a worker that is not in: a previous process may have sent some.

        In a mode by step, workers may have left out steps that have closed.
        """
        step = self.clock(worker)
        if self.rule.by_step:
            step, counted = max(step, self.version), self.counted.get(worker, Progress())
            while step in counted:
                step += 1
        return step

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

    def _has_room(self, push: Push) -> bool:
        """Returns whether a push can be counted: not too far ahead, and no longer to wait."""
        if push.step >= self.version + self.rule.steps_open():
            return False
        if not (push.may_wait and self.rule.by_step) or push.step < self.version:
            return True
        open_step = self.open_steps.get(push.step, OpenStep(push.step))
        expected = open_step.ranks().union(self._expected(push.step), [push.worker])
        if self._fan_in(len(expected)) < len(expected):
            return True  # Gradients are added in the order of their arrival.
        return self.parking.admits(push, open_step, expected)

    def _count(self, push: Push, token: Token) -> list[Action]:
        """Counts a push; its gradient enters an open step, or is too late."""
        counted = self.counted[push.worker]
        counted.add(push.step)
        self.staleness[push.worker] = self.version - push.base_version
        if not self.rule.by_step:
            return self._arrive(push, token)
        open_step = self.open_steps.get(push.step, OpenStep(push.step))
        if push.step < self.version or self._is_full(open_step, push.worker):
            counted.add_late(push.step)
            late = Verdict.TOO_LATE
            return [Acknowledge(token=token, verdict=late, version=self.version, push=push)]
        self.open_steps[push.step] = open_step
        open_step.held[push.worker] = (push, token)
        actions = self._fill(push.step)
        if push.worker in open_step.held:
            actions.append(Hold(token=token, push=push))
        return [*actions, self._acknowledge(token, Verdict.ACCEPTED)]

    def _arrive(self, push: Push, token: Token) -> list[Action]:
        """Asynchronous mode: adds on arrival, and updates after `fan_in` arrivals."""
        open_step = self.open_steps.setdefault(0, OpenStep(0))
        num_workers = self._participants.num_workers
        is_mean = self.rule.fan_in(num_workers, num_workers) > 1
        factor = self.rule.scale(self.version - push.base_version)
        add = open_step.add(push, token, push.samples if is_mean else 1.0, factor)
        return [add, *self._close_if_full(), self._acknowledge(token, Verdict.ACCEPTED)]

    def _close_if_full(self) -> list[Action]:
        """Asynchronous mode: updates if there are as many pushes as there are workers left."""
        open_step = self.open_steps.get(0)
        fan_in = self._fan_in(len(self._expected(0)))
        is_full = open_step is not None and len(open_step.added) >= fan_in
        return [self._close(0)] if is_full else []

    def _is_full(self, open_step: OpenStep, *others: int) -> bool:
        """Returns whether as many pushes are added as a step takes."""
        num_expected = len(open_step.ranks().union(others, self._expected(open_step.key)))
        return len(open_step.added) >= self._fan_in(num_expected)

    def _fill(self, step: int) -> list[Action]:
        """Adds the held pushes of a step whose turn has come."""
        open_step = self.open_steps[step]
        ranks = sorted(open_step.ranks() | set(self._expected(step)))
        is_alone = len(ranks) == 1 and not self._participants.is_elastic  # Else others may join.
        return open_step.fill(ranks, self._fan_in(len(ranks)), is_weighted=not is_alone)

    # ----- steps

    def _proceed(self) -> list[Action]:
        """Closes the steps that are complete, counts parked pushes, and answers pulls."""
        actions: list[Action] = []
        while self.version >= 0 and not self.is_short:
            open_step = self.open_steps.get(self.version) if self.rule.by_step else None
            if open_step is not None and open_step.added and self._is_full(open_step):
                actions.append(self._close(self.version))
            elif not (self._unpark(actions) or self._skip(actions)):
                break
        return actions + self._answers()

    def _unpark(self, actions: list[Action]) -> bool:
        """Counts the parked pushes that have room now; returns whether there were any."""
        was = len(self.parking)
        for push, token in self.parking.take(self._has_room):
            actions += self._count(push, token)
        return len(self.parking) < was

    def _skip(self, actions: list[Action]) -> bool:
        """Skips the steps that no worker is left to push; returns whether there were any."""
        if not (self.rule.by_step and self._newcomers):
            return False
        starts = self._newcomers.steps_to_come(self._participants.ranks())
        step = min([*starts, *self.open_steps], default=0)
        if step <= self.version:
            return False
        actions.append(Skip(former=self.version, version=step))
        self._advance(step)
        return True

    def _close(self, key: int) -> Action:
        """Turns an open step into one update by the weighted mean of its pushes."""
        open_step = self.open_steps.pop(key)
        self._advance(self.version + 1)
        return open_step.update(self.version)

    def _advance(self, version: int) -> None:
        self.version = version
        self._newcomers.reach(version)

    # ----- answers

    def _answers(self) -> list[Action]:
        """Answers the pulls that have become readable, in the order of their arrival."""
        if self.version < 0 or not self._pulls:
            return []
        ready = [
            (token, pull)
            for token, pull in self._pulls.items()
            if self.rule.readable(self, pull.worker, pull.clock, pull.min_version)
        ]
        for token, pull in ready:
            del self._pulls[token]
            if self._newcomers.has_not_pulled(pull.worker) and not pull.is_look:
                self._start_now(pull.worker)
        return [
            Answer(
                token=token,
                worker=pull.worker,
                version=self.version,
                with_state=pull.with_state,
                clock=self._next_step(pull.worker),
                is_look=pull.is_look,
            )
            for token, pull in ready
        ]

    def _acknowledge(self, token: Token, verdict: Verdict) -> Acknowledge:
        return Acknowledge(token=token, verdict=verdict, version=self.version)
