"""The open steps of one slice: which pushes each collects, and when it is full.

In a mode by step, each open step collects its own pushes, and adds their gradients in the order of
the ranks. In an asynchronous mode there is one collection, under the key 0, which adds gradients in
the order of their arrival.
"""

from __future__ import annotations

from collections.abc import Mapping

from pscore.rules.base import UNBOUNDED, Rule
from pscore.types import Push
from psserver.decisions.open_step import OpenStep
from psserver.decisions.orders import Action, Add, Hold
from psserver.decisions.parking import Parking
from psserver.decisions.progress import Token
from psserver.decisions.slice_workers import SliceWorkers


class OpenSteps:
    """The steps of one slice that have pushes and no update yet."""

    def __init__(self, rule: Rule, workers: SliceWorkers) -> None:
        self.rule = rule
        # By step, or under 0 in an asynchronous mode. Invariant: in a mode by step, every key is in
        # version .. version + steps_open() - 1; empty without weights.
        self.steps: dict[int, OpenStep] = {}
        self._workers = workers

    # ----- pushes

    def admits(self, push: Push, version: int, parking: Parking) -> bool:
        """Returns whether a push can be counted: not too far ahead, and no longer to wait."""
        if push.step >= version + self.rule.steps_open():
            return False
        if not (push.may_wait and self.rule.by_step) or push.step < version:
            return True
        open_step, workers = self.steps.get(push.step), self._workers
        ranks = set() if open_step is None else open_step.ranks()
        awaited = {*workers.expected(push.step), push.worker} - ranks
        num_expected = len(ranks) + len(awaited)
        if workers.least(self.rule, num_expected) < num_expected:
            return True  # Gradients are added in the order of their arrival.
        is_held = open_step is not None and bool(open_step.held)
        return parking.admits(push, awaited, is_held=is_held)

    def collect(self, push: Push, token: Token) -> list[Action] | None:
        """Mode by step: returns the orders for a push of an open step; None if the step is full."""
        open_step = self.steps.get(push.step) or OpenStep(push.step)
        if self.rule.window_s is None and self._is_full(open_step, push.worker):
            return None
        self.steps[push.step] = open_step
        open_step.held[push.worker] = (push, token)
        actions = self.fill(push.step)
        if push.worker in open_step.held:
            actions.append(Hold(token=token, push=push))
        return actions

    def join(self, push: Push, token: Token, version: int) -> list[Action]:
        """Mode by step: adds a push whose step has closed to the open step, `version`.

        Held pushes of that step follow, if they have waited for this worker.
        """
        open_step = self.steps.get(version) or self.steps.setdefault(version, OpenStep(version))
        return [open_step.add(push, token, push.samples), *self.fill(version)]

    def arrive(self, push: Push, token: Token, version: int) -> Add:
        """Asynchronous mode: adds a push on arrival."""
        open_step = self.steps.get(0) or self.steps.setdefault(0, OpenStep(0))
        num_workers = self._workers.participants.num_workers
        is_mean = self.rule.fan_in(num_workers, num_workers) > 1
        factor = self.rule.scale(version - push.base_version)
        return open_step.add(push, token, push.samples if is_mean else 1.0, factor)

    def fill(self, step: int) -> list[Action]:
        """Mode by step: adds the held pushes of a step whose turn has come."""
        open_step, workers = self.steps[step], self._workers
        ranks = sorted(open_step.ranks().union(self._expected(step)))
        # Else others may join, or an own late push is in already.
        is_alone = len(ranks) == 1 and not (workers.participants.is_elastic or open_step.added)
        fan_in, least = workers.fan_in(self.rule, len(ranks)), workers.least(self.rule, len(ranks))
        if self.rule.window_s is not None:
            fan_in = UNBOUNDED  # A worker may be in with a late push, and with this step's.
        return open_step.fill(ranks, fan_in, in_order=least >= len(ranks), is_weighted=not is_alone)

    # ----- full steps

    def is_complete(self, step: int) -> bool:
        """Mode by step: returns whether `step` can be closed."""
        open_step = self.steps.get(step)
        return open_step is not None and self._is_full(open_step)

    def has_quorum(self, step: int, *, is_met: bool = False) -> bool:
        """Mode by step: returns whether the window of `step` may begin.

        Args:
            is_met: Whether any push is enough: the step had its quorum in another slice.
        """
        open_step = self.steps.get(step)
        if open_step is None or open_step.held or not open_step.added:
            return False
        num_expected = len(open_step.ranks().union(self._expected(step)))
        return is_met or len(open_step.workers) >= self._workers.least(self.rule, num_expected)

    def has_arrivals(self) -> bool:
        """Asynchronous mode: returns whether as many pushes are added as one update takes."""
        open_step, workers = self.steps.get(0), self._workers
        expected = workers.expected(0)
        if open_step is None or open_step.is_last:
            return open_step is not None and open_step.ranks().issuperset(expected)
        return len(open_step.added) >= workers.fan_in(self.rule, len(expected))

    def first_of_newcomers(self) -> int:
        """Mode by step: returns the first step that a worker pushes or has pushed; 0: not known."""
        workers = self._workers
        if not (self.rule.by_step and workers.newcomers.starts):
            return 0
        starts = workers.newcomers.steps_to_come(workers.participants.ranks())
        return min([*starts, *self.steps], default=0)

    def _expected(self, step: int) -> list[int]:
        """Returns the ranks that a step waits for.

        One that need not wait for everybody does not wait for those that wait for others: they
        push nothing before a worker that may be behind has come to a barrier.
        """
        ranks, everyone = self._workers.expected(step), self._workers.participants
        resting, most = everyone.resting(), everyone.num_workers
        if not resting or self.rule.least(most, most) == most:
            return ranks
        return [rank for rank in ranks if rank not in resting]

    def _is_full(self, open_step: OpenStep, *others: int) -> bool:
        """Returns whether as many pushes are added as a step takes, which is one or more."""
        if not open_step.added:
            return False
        workers = self._workers
        num_expected = len(open_step.ranks().union(others, self._expected(open_step.key)))
        return len(open_step.workers) >= workers.fan_in(self.rule, num_expected)

    # ----- state

    def missing(self, step: int, parking: Parking) -> list[int]:
        """Returns the ranks that a step waits for, without those whose push is in or parked."""
        arrived = parking.ranks(step)
        if step in self.steps:
            arrived |= self.steps[step].ranks()
        return [rank for rank in self._expected(step) if rank not in arrived]

    def resume(self, steps: Mapping[int, OpenStep]) -> None:
        """Restores the open steps that a journal holds, by key."""
        self.steps = dict(steps)

    def check_invariants(self, version: int, parking: Parking) -> None:
        """Asserts the invariants of the fields, for tests and the simulator.

        Args:
            version: The newest version; negative: there are no weights.
        """
        by_step = self.rule.by_step
        keys = range(version, version + self.rule.steps_open()) if by_step else (0,)
        assert version >= 0 or not self.steps
        for key, open_step in self.steps.items():
            assert key == open_step.key
            assert key in keys, f"step {key} is open at version {version}"
            open_step.check_invariants(by_step=by_step)
            pushes = [push for push, _ in (*open_step.held.values(), *open_step.added)]
            for push in pushes if by_step else ():
                assert self.rule.window_s is not None or push.step == key
                assert push.step in self._workers.counted[push.worker]
                assert (push.step, push.worker) not in parking
