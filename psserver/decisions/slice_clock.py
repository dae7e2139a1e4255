"""One slice: every rule about what a push changes and when a pull is answered lives in this file.

Theory of operation. A `SliceClock` is a state machine without I/O, threads or clock: a message goes
in, actions come out, in the order in which they must be carried out for this slice; it holds no
numbers of the model. Whoever drives it (the daemon's lanes, the simulator) keeps the payloads under
the tokens it passed in, carries out the actions of one slice one after the other, and may work on
many slices at once. Because an answer to a pull stands in the same order behind the update it
waits for, "decided" and "done" need not be told apart in here.

A push is counted once: by (worker, step), whatever the network repeats or reorders. In a mode that
collects by step, each step still open has a bin of its own; gradients enter a bin in the order of
the ranks, so that the sum has the same bits in every run; one that has to wait for a lower rank is
held, and acknowledged all the same. One that may wait where it lies (shared memory, in a mode whose
step ends with a pull) is parked until all that the step expects are there: then they are added up
and the step is made in two passes over memory, without a sum that is kept. Steps close in order,
and closing step t makes version t+1. In an asynchronous mode there is one bin, and it closes after
`fan_in` arrivals. A push too far ahead is parked: its worker gets no acknowledgement, and so it
waits (back-pressure, not memory). So is any push while an elastic job has fewer workers than it
needs; pulls of what there is are answered.

A worker that comes to a job which has begun is waited for from its first pull on. The open steps
of slices and shards differ, and a step of a worker counts in all slices or in none. So the worker
takes the newest of the steps that the answers name, says so with a second pull (`Pull.begins`), and
no slice waits for it before. A step that nobody is left to push is left out: the weights as they
are get the next version. The worker pushes when every slice has come to its step, so nothing of
this has to outlive a shard's process: until then that pull is unanswered, and is sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pscore.errors import RemoteProtocolError
from pscore.rules.base import UNBOUNDED, Rule
from pscore.types import Pull, Push, Role, Verdict
from psserver.decisions.orders import Acknowledge, Action, Add, Answer, Hold, Load, Skip, Update
from psserver.decisions.progress import LATE_KEPT, Bin, Counted, Token

AHEAD_MAX = 4096  # Steps of a worker that are in while an earlier one is not.
PARKED_MAX = 64  # Parked pushes per worker; a worker waits for its acknowledgement long before.


class SliceClock:
    """The decisions of one slice."""

    def __init__(
        self,
        rule: Rule,
        expected: Callable[[], list[int]],
        num_workers: int,
        wanted: Callable[[], int] | None = None,
    ) -> None:
        """Starts without weights.

        Args:
            rule: The job's mode.
            expected: Returns the ranks that a step waits for, in order.
            num_workers: Workers that the job was made for; the most of an elastic one.
            wanted: Returns how many must be expected for anything to be counted; None: the job is
                not elastic, and nothing of it waits for more workers.

        Raises:
            ConfigError: The mode's arguments do not fit that number.
        """
        rule.require_workers(num_workers)
        self.rule = rule
        self.version = -1  # Updates decided; -1 until the initial weights are here.
        self.counted: dict[int, Counted] = {}
        self.staleness: dict[int, int] = {}  # Of each worker's newest push, in updates.
        self._members = expected
        self._wanted = wanted
        # The first step that waits for a worker which has come anew; UNBOUNDED until it pulls.
        self._begins: dict[int, int] = {}
        self._first_version = 0  # At which the job began, or went on with other workers.
        self._first_clock = 0  # The newest of any worker then.
        self._num_workers = num_workers
        self._bins: dict[int, Bin] = {}  # By step, or under 0 in an asynchronous mode.
        self._parked: dict[tuple[int, int], tuple[Push, Token]] = {}  # By (step, worker).
        self._waiting: dict[Token, Pull] = {}

    # ----- messages

    def push(self, push: Push, token: Token) -> list[Action]:
        """Takes one push.

        Raises:
            RemoteProtocolError: There are no weights yet, or the push claims a version to come.
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
        counted = self.counted.setdefault(push.worker, Counted())
        if push.step in counted:
            late = push.step in counted.late
            return [self._acknowledge(token, Verdict.TOO_LATE if late else Verdict.DUPLICATE)]
        self._parked.pop((push.step, push.worker), None)  # This one takes its place.
        if self.is_short or not self._has_room(push):
            self._park(push, token)
            expected = self._expected(push.step)
            is_last = push.may_wait and self._arrived(push.step).issuperset(expected)
            return self._proceed() if is_last else []
        if len(counted.ahead) >= AHEAD_MAX:
            raise RemoteProtocolError(
                f"worker {push.worker} pushed step {push.step}, {AHEAD_MAX} steps since "
                f"{counted.clock} are in and others between them are not"
            )
        return self._count(push, token) + self._proceed()

    def pull(self, pull: Pull, token: Token) -> list[Action]:
        """Takes one pull: answered now, or by a later message's actions."""
        self._waiting[token] = pull
        if not (pull.begins and self.rule.by_step):
            return self._answers()
        known = self._begins.get(pull.worker, 0)
        self._begins[pull.worker] = pull.clock if known == UNBOUNDED else max(known, pull.clock)
        return self.recheck()

    def resume(
        self, version: int, counted: Mapping[int, Counted], bins: Mapping[int, Bin]
    ) -> list[Action]:
        """Goes on where a former process was killed; returns what it had not come to.

        Args:
            version: Updates made.
            counted: Which steps of each worker are in, by rank.
            bins: What of them is in no update yet.
        """
        self.version = version
        self.counted = dict(counted)
        self._bins = dict(bins)
        return self.recheck()

    def restore(self, version: int, clocks: Mapping[int, int]) -> None:
        """Restores a checkpoint's version, and the clock of each worker.

        What had entered an open step is not in the checkpoint's weights, so it is not counted.
        """
        self.version = version
        for rank, clock in clocks.items():
            self.counted[rank] = Counted(clock=version if self.rule.by_step else clock)

    def begin_again(self) -> None:
        """Begins another life of the job, whose workers were all lost.

        Those that come before the next update are waited for, as at the start of a job. What is
        parked was sent by a former worker, whose memory may be in use again.
        """
        self._parked.clear()
        self._begins.clear()
        self._first_version = max(self.version, 0)
        self._first_clock = max((steps.clock for steps in self.counted.values()), default=0)
        if self.rule.by_step:  # Whoever comes begins at the newest version.
            for rank in range(self._num_workers):
                self.counted.setdefault(rank, Counted())

    def is_under_way(self, *, is_elastic: bool) -> bool:
        """Returns whether a worker that joins for the first time has to catch up with others."""
        if self._first_version and not self.rule.by_step:
            return True
        return is_elastic and self.version > self._first_version

    def welcome(self, worker: int) -> None:
        """Lets a worker come to a job that has begun: nobody waits for it until it pulls.

        What waits for room was sent by its former self, whose memory may be in use again.
        """
        if self.version >= 0:
            self._begins[worker] = UNBOUNDED
            for key in [key for key in self._parked if key[1] == worker]:
                del self._parked[key]

    def forget(self, token: Token) -> bool:
        """Drops a pull whose requester no longer waits; False if its answer is under way."""
        return self._waiting.pop(token, None) is not None

    def change(self, rule: Rule) -> list[Action]:
        """Goes on under another rule, while nobody is expected; what is in enters an update.

        Versions go on, and every worker's next push is that of the newest version. What is parked
        is of somebody who was lost: whoever steps aside has waited for its acknowledgements.

        Raises:
            ConfigError: The rule's arguments do not fit the number of workers.
        """
        rule.require_workers(self._num_workers)
        actions = self.recheck()
        for key in sorted(self._bins):  # Of somebody who was lost, and had left out steps.
            self.version = max(self.version, key)
            actions.append(self._close(key))
        self.rule = rule
        self._parked.clear()
        self._begins.clear()
        for rank in {*self._members(), *self.counted}:
            self.counted[rank] = Counted(clock=max(self.version, 0))
        return actions + self._answers()

    def recheck(self) -> list[Action]:
        """Decides again after the membership has changed."""
        if self.is_short:
            return self._answers()
        if self.rule.by_step:
            actions = [action for step in sorted(self._bins) for action in self._fill(step)]
        else:
            actions = self._close_if_full()
        return actions + self._proceed()

    # ----- what a rule may ask

    def clock(self, worker: int) -> int:
        """Returns the steps of `worker` that are in, counted without a gap."""
        counted = self.counted.get(worker)
        return 0 if counted is None else counted.clock

    def clock_min(self) -> int:
        """Returns the smallest clock of all workers that are still expected."""
        expected = self._expected(max(self.version, 0))
        return min((self.clock(rank) for rank in expected), default=0)

    def progress(self) -> int:
        """Returns how many pushes lie behind the job: its slowest worker's, or the last one's."""
        if self.rule.by_step:
            return max(self.version, 0)
        if self._expected(max(self.version, 0)):
            return self.clock_min()
        return max((counted.clock for counted in self.counted.values()), default=0)

    # ----- for people

    @property
    def is_short(self) -> bool:
        """Whether there are fewer workers than the job needs: nothing is counted meanwhile."""
        return self._wanted is not None and len(self._members()) < self._wanted()

    def missing(self) -> tuple[int, list[int]]:
        """Returns the step that is open, and the expected ranks that have not pushed it."""
        if not self.rule.by_step:
            slowest = self.clock_min()
            return slowest, [rank for rank in self._expected(0) if self.clock(rank) <= slowest]
        step = max(self.version, 0)
        ranks = self._arrived(step)
        return step, [rank for rank in self._expected(step) if rank not in ranks]

    @property
    def num_waiting(self) -> int:
        """Pulls that are not answered yet."""
        return len(self._waiting)

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits: for an answer to a pull, or with a push for room."""
        return bool(self._waiting or self._parked)

    # ----- decisions

    def _expected(self, step: int) -> list[int]:
        """Returns the ranks that a step waits for, in order; in an asynchronous mode any step."""
        ranks = self._members()
        return [r for r in ranks if self._begins.get(r, 0) <= step] if self._begins else ranks

    def _begin(self, worker: int) -> None:
        """Counts on a worker that has come back, from the weights on that it is about to get."""
        if self.rule.by_step:
            self._begins[worker] = self._next_step(worker)
            return
        del self._begins[worker]
        counted = self.counted.setdefault(worker, Counted())
        others = [self.clock(rank) for rank in self._expected(0) if rank != worker]
        counted.clock = max(counted.clock, min(others, default=self._first_clock))
        counted.ahead.clear()

    def _next_step(self, worker: int) -> int:
        """Returns the step of the next push that is not in: its former life may have sent some.

        In a mode by step that life, or this one, may have left out steps that have closed.
        """
        step = self.clock(worker)
        if self.rule.by_step:
            step, counted = max(step, self.version), self.counted.get(worker, Counted())
            while step in counted:
                step += 1
        return step

    def _load(self, push: Push, token: Token) -> list[Action]:
        """Takes initial weights once; restored ones, with their state, at any time."""
        if push.role is Role.WEIGHTS and self.version >= 0:
            return [self._acknowledge(token, Verdict.DUPLICATE)]
        self.version = max(self.version, 0)
        return [
            Load(token=token, role=push.role, version=self.version),
            self._acknowledge(token, Verdict.ACCEPTED),
            *self._proceed(),
        ]

    def _park(self, push: Push, token: Token) -> None:
        """Keeps a push that is too far ahead; a repeated one takes the place of the first.

        The first is not answered: whoever sent it again waits for the second, and an answer now
        would say that the push is counted.
        """
        if sum(worker == push.worker for _, worker in self._parked) >= PARKED_MAX:
            raise RemoteProtocolError(
                f"worker {push.worker} pushed step {push.step}, {PARKED_MAX} of its pushes wait "
                f"already for version {self.version}"
            )
        self._parked[push.step, push.worker] = (push, token)

    def _count(self, push: Push, token: Token) -> list[Action]:
        """Counts a push that has not been counted; its gradient enters a bin, or is too late."""
        counted = self.counted[push.worker]
        counted.add(push.step)
        self.staleness[push.worker] = self.version - push.base_version
        if not self.rule.by_step:
            return self._arrive(push, token)
        bin_ = self._bins.get(push.step, Bin())
        if push.step < self.version or self._is_full(push.step, bin_, push.worker):
            counted.late.add(push.step)
            counted.late -= {step for step in counted.late if step < push.step - LATE_KEPT}
            late = Verdict.TOO_LATE
            return [Acknowledge(token=token, verdict=late, version=self.version, push=push)]
        self._bins[push.step] = bin_
        bin_.held[push.worker] = (push, token)
        actions = self._fill(push.step)
        if push.worker in bin_.held:
            actions.append(Hold(token=token, push=push))
        return [*actions, self._acknowledge(token, Verdict.ACCEPTED)]

    def _arrive(self, push: Push, token: Token) -> list[Action]:
        """An asynchronous mode: adds on arrival, updates after `fan_in` of them."""
        bin_ = self._bins.setdefault(0, Bin())
        is_mean = self.rule.fan_in(self._num_workers, self._num_workers) > 1
        weight = push.samples if is_mean else 1.0
        factor = self.rule.scale(self.version - push.base_version)
        bin_.added.append((push, weight))
        actions: list[Action] = [
            Add(
                token=token,
                bin=0,
                push=push,
                weight=weight * factor,
                is_first=len(bin_.added) == 1,
            )
        ]
        actions += self._close_if_full()
        return [*actions, self._acknowledge(token, Verdict.ACCEPTED)]

    def _close_if_full(self) -> list[Action]:
        """An asynchronous mode: updates if the bin holds as many as there are workers left."""
        bin_ = self._bins.get(0)
        fan_in = self._fan_in(len(self._expected(0)))
        return [self._close(0)] if bin_ is not None and len(bin_.added) >= fan_in else []

    def _fan_in(self, num_expected: int) -> int:
        """Returns how many pushes make one update; an elastic job is as large as it is now."""
        num_expected = max(1, num_expected)
        return self.rule.fan_in(
            num_expected, self._num_workers if self._wanted is None else num_expected
        )

    def _is_full(self, step: int, bin_: Bin, *others: int) -> bool:
        """Whether a step has all that it takes."""
        num_expected = len(bin_.ranks().union(others, self._expected(step)))
        return len(bin_.added) >= self._fan_in(num_expected)

    def _fill(self, step: int) -> list[Action]:
        """Adds what is held of a step: in the order of the ranks if all of them are waited for."""
        bin_ = self._bins[step]
        ranks = sorted(bin_.ranks() | set(self._expected(step)))
        fan_in = self._fan_in(len(ranks))
        in_order = fan_in >= len(ranks)
        added = {push.worker for push, _ in bin_.added}
        actions: list[Action] = []
        for rank in ranks if in_order else list(bin_.held):
            if rank in bin_.held and len(bin_.added) < fan_in:
                push, token = bin_.held.pop(rank)
                is_alone = len(ranks) == 1 and self._wanted is None  # Else others may still join.
                weight = 1.0 if is_alone else push.samples
                actions.append(
                    Add(
                        token=token,
                        bin=step,
                        push=push,
                        weight=weight,
                        is_first=not bin_.added,
                    )
                )
                bin_.added.append((push, weight))
            elif in_order and rank not in added:
                break
        return actions

    def _proceed(self) -> list[Action]:
        """Closes the steps that are complete, lets parked pushes in, and answers pulls."""
        actions: list[Action] = []
        while self.version >= 0 and not self.is_short:
            bin_ = self._bins.get(self.version) if self.rule.by_step else None
            if bin_ is not None and bin_.added and self._is_full(self.version, bin_):
                actions.append(self._close(self.version))
            elif not (self._unpark(actions) or self._skip(actions)):
                break
        return actions + self._answers()

    def _skip(self, actions: list[Action]) -> bool:
        """Leaves out the steps that nobody pushes any more; returns whether there were any."""
        if not (self.rule.by_step and self._begins):
            return False
        begins = [self._begins.get(rank, 0) for rank in self._members()]
        step = min([*(begin for begin in begins if begin < UNBOUNDED), *self._bins], default=0)
        if step <= self.version:
            return False
        actions.append(Skip(former=self.version, version=step))
        self._advance(step)
        return True

    def _advance(self, version: int) -> None:
        """Sets the version; workers that begin there, or before, are waited for like others."""
        self.version = version
        if self._begins:
            self._begins = {rank: step for rank, step in self._begins.items() if step > version}

    def _has_room(self, push: Push) -> bool:
        """Whether a push can be counted: it is not too far ahead, and would not have to be kept.

        Who may wait does so where its gradient lies, and not in memory of the shard: until all that
        its step expects are there, so that they are added up in one pass, or one that may not wait
        is held until its turn comes.
        """
        if push.step >= self.version + self.rule.steps_open():
            return False
        if not (push.may_wait and self.rule.by_step) or push.step < self.version:
            return True
        bin_ = self._bins.get(push.step, Bin())
        ranks = bin_.ranks()
        expected = ranks.union(self._expected(push.step), [push.worker])
        if self._fan_in(len(expected)) < len(expected):
            return True  # The order is that of arrival.
        if any(rank not in ranks for rank in expected if rank < push.worker):
            return False
        return bool(bin_.held) or expected <= self._arrived(push.step) | {push.worker}

    def _arrived(self, step: int) -> set[int]:
        """Returns the workers whose push of a step is in, or parked."""
        ranks = self._bins[step].ranks() if step in self._bins else set()
        return ranks | {rank for parked, rank in self._parked if parked == step}

    def _unpark(self, actions: list[Action]) -> bool:
        """Counts the parked pushes that are no longer too far ahead; returns whether any was."""
        was = len(self._parked)
        waiting: set[int] = set()  # Steps in which a lower rank has not its turn yet.
        for key in sorted(self._parked):  # A lower rank can make room for the next.
            push = self._parked[key][0]
            if push.may_wait and push.step in waiting:
                continue
            if self._has_room(push):
                actions += self._count(*self._parked.pop(key))
            elif push.may_wait:
                waiting.add(push.step)
        return len(self._parked) < was

    def _close(self, key: int) -> Action:
        """Turns a bin into one update of the weighted mean."""
        bin_ = self._bins.pop(key)
        assert not bin_.held, f"step {key} closed without {sorted(bin_.held)}"
        self._advance(self.version + 1)
        return _update_of(key, bin_, self.version)

    def _answers(self) -> list[Action]:
        """Answers the pulls that have become answerable, in the order in which they came."""
        if self.version < 0 or not self._waiting:
            return []
        ready = [
            (token, pull)
            for token, pull in self._waiting.items()
            if self.rule.readable(self, pull.worker, pull.clock, pull.min_version)
        ]
        for token, pull in ready:
            del self._waiting[token]
            if self._begins.get(pull.worker) == UNBOUNDED and not pull.is_look:
                self._begin(pull.worker)
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


def _update_of(key: int, bin_: Bin, version: int) -> Update:
    """Returns the update by the weighted mean of what is in a bin."""
    first = min((push for push, _ in bin_.added), key=lambda push: push.worker)
    assert first.hyper is not None
    total = sum(weight for _, weight in bin_.added)
    present = 0
    for push, weight in bin_.added:
        present |= push.present if weight > 0 else 0
    return Update(
        bin=key,
        scale=1.0 / total if total > 0 else 0.0,
        present=present,
        hyper=first.hyper,
        version=version,
    )
