"""Invariants, checked at every event: each push once, in the right update, in the right order.

The ledger sees the shards' decisions and the workers' messages, keeps books of its own
and replays every update from the payloads as they were sent. It knows nothing of how a shard works.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from pscore.compressors.none import NoCompression
from pscore.optimizers.base import Optimizer, SliceStep
from pscore.types import FloatArray, Role, SegmentTable, SliceSpec, Verdict
from psserver.decisions.membership import Member, Presence
from psserver.decisions.orders import Acknowledge, Add, Answer, Skip, Update
from psserver.decisions.slice_clock import SliceClock
from psserver.slices.base import Payload
from pssim.case import Case
from pssim.shard import Decision, Sender

Identity: TypeAlias = tuple[int, int, int]  # Worker, step on the wire, incarnation.
Stepped: TypeAlias = tuple[int, int, int]  # Worker, incarnation, step as its own program counts.
MARGIN = 0.5  # An element is a whole number but for rounding.
PLAIN = {"lr": 1.0, "slow_lr": 1.0}  # An optimizer with these and zeros subtracts the mean.


@dataclass(slots=True, kw_only=True)
class SentPush:
    """One push as its worker sent it."""

    payload: Payload
    base_version: int
    samples: float
    elements: list[int]  # Those that only this push touches.
    made: int  # The step of its worker's own program.
    verdict: Verdict | None = None  # As the worker was told.


class SliceBook:
    """The books of one slice."""

    def __init__(
        self, case: Case, spec: SliceSpec, optimizer: Optimizer, start: FloatArray
    ) -> None:
        self.case = case
        self.spec = spec
        self.optimizer = optimizer
        self.sent: dict[Identity, SentPush] = {}
        self.entered: dict[Identity, int] = {}  # The version that each push is first in.
        self.accepted: dict[tuple[int, int], Identity] = {}  # By worker and step, the last one.
        self.weights = [start]  # Weights of each version.
        self.estimates: dict[int, FloatArray] = {}  # By version, if pulls are compressed.
        self.is_exact = True  # Every update so far was a plain subtraction of a mean.
        self.counts = np.zeros(len(spec.segments), dtype=np.int64)
        self.lead_max = 0  # Steps that an accepted push was beyond the newest update.
        self.ahead_max = 0  # Steps that a worker was ahead of the slowest.
        self._open: dict[int, list[Identity]] = {}
        self._sums: dict[int, FloatArray] = {}
        self._state = [np.zeros_like(start) for _ in optimizer.state_names]

    @property
    def version(self) -> int:
        """The newest version."""
        return len(self.weights) - 1

    # ----- decisions

    def identify(self, sender: Sender | None) -> tuple[Identity, Role]:
        """Returns which push or pull a sender means, and its role."""
        if sender is None:
            return (-1, -1, -1), Role.GRADIENT
        if sender.incarnation is None:
            return self.accepted[sender.worker, sender.step], sender.role
        return (sender.worker, sender.step, sender.incarnation), sender.role

    def added(self, action: Add, identity: Identity) -> None:
        """A gradient enters a sum."""
        former = identity in self.entered or any(
            identity in open_step for open_step in self._open.values()
        )
        assert not former, f"push {identity} is counted twice"
        sent, rule = self.sent[identity], self.case.rule
        if rule.by_step:
            is_late = rule.window_s is not None and identity[1] < self.version
            step = self.version if is_late else identity[1]
            assert action.open_step == step, f"push {identity} entered step {action.open_step}"
            weight = sent.samples
        else:
            weight = rule.scale(self.version - sent.base_version)
            weight *= sent.samples if rule.fan_in(*[self.case.num_workers] * 2) > 1 else 1.0
        open_step = self._open.setdefault(action.open_step, [])
        assert action.is_first == (not open_step)
        open_step.append(identity)
        if action.is_first:
            self._sums[action.open_step] = np.zeros_like(self.weights[0])
        # A worker alone needs no weight: its mean is its gradient.
        assert action.weight in ((weight, 1.0) if rule.by_step else (weight,))
        payload, total = sent.payload, self._sums[action.open_step]
        if isinstance(payload.compressor, NoCompression) and payload.data.nbytes:
            total += payload.data.view("<f4") * np.float32(action.weight)
        elif payload.data.nbytes:
            payload.compressor.decode_add(
                payload.data, total, action.weight, assign=action.is_first
            )

    def updated(self, action: Update) -> None:
        """A sum becomes an update."""
        assert action.version == self.version + 1, f"version {action.version} made out of order"
        identities = self._open.pop(action.open_step)
        if self.case.rule.by_step:
            steps = {step for _, step, _ in identities}
            if self.case.rule.window_s is not None:  # `added` has checked the late ones.
                steps = {max(step, self.version) for step in steps}
            assert steps == {self.version}, f"steps {steps} in the update of step {self.version}"
        for identity in identities:
            self.entered[identity] = action.version
        grad = self._sums.pop(action.open_step)
        row = dict(zip(self.optimizer.hyper_names, action.hyper[0].tolist(), strict=True))
        self.is_exact &= all(value == PLAIN.get(name, 0.0) for name, value in row.items())
        before = self.weights[-1]
        after = np.empty_like(before)
        active = [action.present >> i & 1 for i in range(len(self.spec.segments))]
        self.optimizer.step(
            SliceStep(
                weights=before,
                out=after,
                grad=grad,
                scale=action.scale,
                state=self._state,
                segments=SegmentTable.of(self.spec),
                counts=self.counts,
                active=np.array(active, dtype=np.int64),
                hyper=action.hyper,
            )
        )
        if self.is_exact:
            assert np.array_equal(after, before - grad * np.float32(action.scale))
        self.weights.append(after)

    def skipped(self, action: Skip) -> None:
        """Steps are left out: nothing of them is in."""
        assert action.former == self.version < action.version
        assert not [step for step in self._open if step < action.version]
        self.weights += [self.weights[-1]] * (action.version - action.former)

    def acknowledged(self, action: Acknowledge, identity: Identity, clocks: SliceClock) -> None:
        """A push is answered: from here on its worker relies on it."""
        held = any(identity in open_step for open_step in self._open.values())
        if action.verdict is Verdict.ACCEPTED:
            self.accepted[identity[0], identity[1]] = identity
            self.ahead_max = max(self.ahead_max, identity[1] + 1 - clocks.clock_min())
        if action.verdict is Verdict.ACCEPTED and self.case.rule.by_step:
            lead = identity[1] - action.version
            self.lead_max = max(self.lead_max, lead)
            assert lead < self.case.rule.steps_open(), f"push {identity} is {lead} steps ahead"
        if action.verdict is Verdict.TOO_LATE:
            assert identity not in self.entered
            assert not held, f"push {identity} is too late and in a sum"

    # ----- answers to workers

    def landed(
        self,
        worker: int,
        incarnation: int,
        clock: int,
        version: int,
        weights: FloatArray,
        *,
        is_estimate: bool = False,
    ) -> None:
        """A pull that a worker made after `clock` pushes brings these weights, or an estimate."""
        assert version <= self.version, f"version {version} is not made yet"
        wanted = self.weights[version]
        if is_estimate:  # All workers have the same one.
            wanted = self.estimates.setdefault(version, weights)
        assert np.array_equal(weights, wanted), (
            f"worker {worker} got other weights than those of version {version} of slice "
            f"{self.spec.index}: {np.flatnonzero(weights != wanted)} differ"
        )
        rule = self.case.rule
        if rule.by_step:
            assert version >= clock or clock == 0
        if rule.fan_in(*[self.case.num_workers] * 2) > 1 and not rule.by_step:
            return  # An own gradient may still wait for company.
        if rule.window_s is not None:
            return  # An own move that came late is in the next update.
        for identity, sent in self.sent.items():
            owner, step, life = identity
            is_own = owner == worker and life == incarnation and step < clock
            if is_own and sent.verdict is Verdict.ACCEPTED:
                entered = self.entered.get(identity, version + 1)
                assert entered <= version, f"worker {worker} misses its step {step}"

    def answered(
        self, clocks: SliceClock, worker: int, clock: int, expected: Iterable[int]
    ) -> None:
        """A pull is answered: ssp's read bound, for any rule that has a `bound`."""
        bound = getattr(self.case.rule, "bound", -1)
        if bound < 0:
            return
        steps_in = {(rank, step) for rank, step, _ in self.entered}
        for rank in expected:
            behind = [step for step in range(clock - bound) if (rank, step) not in steps_in]
            assert not behind, f"worker {worker} at clock {clock} reads without {rank}'s {behind}"
        assert self.case.rule.by_step or clocks.clock_min() >= clock - bound

    # ----- the end

    def settled(self, left: FloatArray) -> None:
        """Nothing is under way any more; the shard has these weights."""
        assert not self._open, f"{self._open} never entered an update"
        assert np.array_equal(left, self.weights[-1])
        for identity, sent in self.sent.items():
            is_in = identity in self.entered
            if sent.verdict in (Verdict.ACCEPTED, Verdict.DUPLICATE):
                assert is_in, f"push {identity} was acknowledged and is lost"
            elif sent.verdict is Verdict.TOO_LATE:
                assert not is_in, f"push {identity} was refused and is counted"
        is_raw = isinstance(self.case.compressor, NoCompression)
        if self.is_exact and is_raw and self.case.has_units:
            self._check_units(left)

    def _check_units(self, left: FloatArray) -> None:
        """To the unit, from the answers to workers alone: each element has one owner."""
        totals: dict[int, float] = {}
        for identity, version in self.entered.items():
            totals[version] = totals.get(version, 0.0) + self.sent[identity].samples
        moved = self.weights[0] - left
        is_single = self.case.rule.fan_in(*[self.case.num_workers] * 2) == 1
        for identity, sent in self.sent.items():
            unit = sent.payload.data.view("<f4") if sent.payload.data.nbytes else None
            for element in sent.elements if unit is not None else ():
                assert unit is not None
                if identity not in self.entered:
                    expected = 0.0
                elif self.case.rule.by_step:
                    expected = float(unit[element]) * sent.samples / totals[self.entered[identity]]
                elif is_single:
                    staleness = self.entered[identity] - 1 - sent.base_version
                    expected = float(unit[element]) * self.case.rule.scale(staleness)
                else:
                    continue
                assert abs(float(moved[element]) - expected) < MARGIN, (
                    f"push {identity} moved element {element} by {moved[element]}, not {expected}"
                )


@dataclass(slots=True)
class Ledger:
    """The books of all slices."""

    books: dict[int, SliceBook] = field(default_factory=dict)
    came_back: set[int] = field(default_factory=set)  # Their clocks have jumped over steps.
    min_workers: int = 0  # Minimum of an elastic job.
    # Steps that ended without an error, with the slices that they pushed.
    stepped: dict[Stepped, set[int]] = field(default_factory=dict)

    def whole(self, *, may_be_late: bool) -> None:
        """Checks that a step which ended without an error counts in all its slices or in none.

        Args:
            may_be_late: A slice may close without somebody (backup workers): that one is told so,
                of each slice. Else a step that ended is in.
        """
        sent: dict[Stepped, dict[int, tuple[Identity, SentPush]]] = {}
        for index, book in self.books.items():
            for identity, push in book.sent.items():
                worker, _, incarnation = identity
                sent.setdefault((worker, incarnation, push.made), {})[index] = (identity, push)
        for stepped, slices in self.stepped.items():
            pushes = sent.get(stepped, {})
            left_out = sorted(slices - set(pushes))
            assert not left_out, f"step {stepped} was never sent to slices {left_out}"
            if any(push.verdict is None for _, push in pushes.values()):
                continue  # Its worker died, or was lost, before it knew.
            late = [i for i, (_, push) in pushes.items() if push.verdict is Verdict.TOO_LATE]
            missing = [i for i, (key, _) in pushes.items() if key not in self.books[i].entered]
            assert missing == late, f"step {stepped} is not in slices {missing}, told of {late}"
            assert may_be_late or not missing, f"step {stepped} is not in slices {missing}"

    def late(self, worker: int, incarnation: int) -> int:
        """Returns how many steps of a worker were too late, at least in one slice."""
        steps = {
            identity[1]
            for book in self.books.values()
            for identity, push in book.sent.items()
            if (identity[0], identity[2]) == (worker, incarnation)
            and push.verdict is Verdict.TOO_LATE
        }
        return len(steps)

    def enough(self, members: Iterable[Member]) -> None:
        """A step closes: enough workers are there, or have come to their end; or all have gone."""
        states = [member.presence for member in members]
        there = len(states) - states.count(Presence.LOST)
        if Presence.LIVE in states:
            assert there >= self.min_workers, f"a step closed with {there} workers"

    def decided(self, decision: Decision) -> None:
        """Checks one decision of a shard, and enters it in the books."""
        book, action, clocks = self.books[decision.slice], decision.action, decision.clock
        membership = decision.job.membership
        identity, role = book.identify(decision.sender)
        if isinstance(action, Add):
            book.added(action, identity)
        elif isinstance(action, Update):
            self.enough(membership.members.values())
            book.updated(action)
        elif isinstance(action, Skip):
            book.skipped(action)
        elif isinstance(action, Acknowledge) and role not in (Role.WEIGHTS, Role.STATE):
            book.acknowledged(action, identity, clocks)
        elif isinstance(action, Answer):
            worker, clock, _ = identity
            book.answered(clocks, worker, clock, set(membership.expected()) - self.came_back)
