"""The choice of a job's mode by its own measurements (`mode="auto"`); no I/O, no clock.

measuring     workers report their sums at every n-th step; the newest two reports of each are kept
window        between two reports of all workers: the seconds of a step in each mode, as estimated
choice        at the first window the mode that advice names; later one that two windows in a row
              name, if the job has lost `LOSS (1 + s)` of its time in the present mode; s: switches
return        the first window of a new mode took no less than the last one before: the job goes
              back, and counts on no less time for that mode from then on

The loss to another mode is the sum of the differences, 0 or more, since the present one was taken:
small gains do not make a job change back and forth, and a large loss ends soon. The links are those
under which the closed form of the present mode takes as long as its steps took; where computing
hides them, those seen before, if they are faster. The forms of all modes are then compared under
the same links. If no link explains the time, nothing else is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from pscore.errors import ConfigError
from pscore.rules import parse_mode
from pscore.rules.base import Rule
from pscore.timing.auto import FIRST, auto_candidates
from pscore.timing.choice import NEARLY, RISKS, AdviceRow, choose, row_of
from pscore.timing.closed import COMPUTING, StepTime, closed_form
from pscore.timing.deployment import Deployment, TimedSlice
from pscore.timing.plans import warmup_of
from pscore.timing.shown import in_ms
from psserver.decisions.worker_reports import ReportedPace

SLOWEST, FASTEST = 1e3, 1e12  # Bytes per second of a link.
HALVINGS = 60
WRONG_MAX = 1.4  # Times the form's seconds beside computing: beyond it no mode is compared.
STEPS_MAX = 1 << 48
OTHERS = "others"  # All parts of a step but computing.
HIDDEN = 1.05  # Times a step without links: one that takes less says nothing of them.
LOSS = 0.02  # Share of the time of a job.


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeReport:
    """A worker's report at a step."""

    incarnation: int  # The worker's; reports of two incarnations have no difference.
    pace: ReportedPace  # Its sums.
    near: tuple[bool, ...]  # By shard: whether that is on the worker's host.
    possible: frozenset[str]  # Modes that it can take.
    overlaps: bool  # Whether its pushes leave during backward.
    host: str = ""  # Its host.


@dataclass(frozen=True, slots=True)
class _Before:
    """The last window of the mode before the present one."""

    mode: str
    step_s: float
    computing_s: float  # The slowest worker's.

    def took_less(self, step_s: float, computing_s: float) -> bool:
        """Returns whether a step took no longer before, but for computing that takes longer."""
        return step_s - max(0.0, computing_s - self.computing_s) >= self.step_s


class ModeChoice:
    """The choices of one job.

    Attributes:
        mode: The mode that was taken last; empty: none yet.
        text: That choice and its reason, as a sentence; with no mode: it was to keep the first one.
    """

    def __init__(self, mode: str = "", text: str = "") -> None:
        """Starts with a choice of a former process, if there is one."""
        self.mode, self.text = mode, text
        self._step = 0  # Step of the last decision; each worker asks for it.
        self._by_step: dict[int, dict[int, ModeReport]] = {}
        self._former: dict[str, AdviceRow] = {}  # The rows of the last window, by mode.
        self._lost_s: dict[str, float] = {}  # The loss to each other mode.
        self._num_switches = 0
        self._link = 0.0  # Bytes per second of a link, where it was seen last.
        self._before: _Before | None = None  # In the first window of a mode.
        self._least_s: dict[str, float] = {}  # Seconds in modes that were no faster.

    def report(self, step: int, rank: int, report: ModeReport) -> None:
        """Keeps the report of a worker; those of the newest two steps are kept.

        Raises:
            ConfigError: The step is out of its range.
        """
        if not 0 < step <= STEPS_MAX:
            raise ConfigError(f"worker {rank} reports at step {step}")
        self._by_step.setdefault(step, {})[rank] = report
        for old in sorted(self._by_step)[:-2]:
            del self._by_step[old]

    def decide(
        self,
        step: int,
        ranks: Sequence[int],
        slices: Sequence[TimedSlice],
        num_state: int,
        risk: str,
    ) -> None:
        """Decides at a step, if each worker has reported there and at the report before.

        Args:
            risk: One of `pscore.timing.choice.RISKS`.

        Raises:
            ConfigError: There is no such risk.
        """
        if risk not in RISKS:
            raise ConfigError(f"risk is {risk!r}, must be one of {', '.join(RISKS)}")
        windows = self._windows(step, ranks)
        now, since = self.mode or FIRST.mode, min(self._by_step, default=step)
        rule = parse_mode(now)
        warmup = warmup_of(rule)
        if not windows or step == self._step or since < warmup < step:
            return
        if since < warmup:
            self._before, rule = None, parse_mode(FIRST.mode)  # Its steps are as those of this one.
        self._step = step
        reports = [self._by_step[step][rank] for rank in ranks]
        deployment = replace(_deployment(reports, windows, slices), num_state=num_state)
        step_s = max(window.steps_s for window in windows) / (step - since)
        before, self._before = self._before, None
        self._least_s.pop(now, None)
        if before is not None and before.took_less(step_s, deployment.computing_s()):
            self._least_s[now] = step_s
            self._take(before.mode, f"auto returns to {before.mode} at step {step}: "
                       f"{in_ms(step_s)} a step in {now}, no less than before")  # fmt: skip
            return
        rows = self._rows(deployment, now, rule, step_s, reports)
        lasted_s = max(one.pace.steps_s for one in reports)
        best = self._named(now, rows, step - since, LOSS * lasted_s, risk)
        self._former = rows
        if best is None:
            self.text = self.text or (
                f"auto keeps {now} at step {step}: {in_ms(step_s)} a step, and no mode that risk "
                f"{risk!r} allows would clearly take less"
            )
            return
        self._before = _Before(now, step_s, deployment.computing_s())
        text = f"auto takes {best.mode} at step {step}: {in_ms(step_s)} a step in {now}, about "
        self._take(best.mode, f"{text}{in_ms(best.time.step_s)} in it; {best.evidence.text}")

    def _take(self, mode: str, text: str) -> None:
        self.mode, self.text = mode, text
        self._num_switches += 1
        self._by_step.clear()  # The change itself takes time.
        self._lost_s.clear()

    def _named(
        self, now: str, rows: Mapping[str, AdviceRow], steps: int, loss_s: float, risk: str
    ) -> AdviceRow | None:
        """Returns the mode to take instead of the present one; None: there is none."""
        present_s = rows[now].time.step_s
        self._lost_s = {
            mode: max(0.0, self._lost_s.get(mode, 0.0) + steps * (present_s - row.time.step_s))
            for mode, row in rows.items()
        }
        if all(row.evidence.points for row in rows.values()):
            return None  # Advice begins with the updates of one large batch.
        best = choose(list(rows.values()), risk, NEARLY)
        if best.time.step_s * NEARLY > present_s:
            return None
        if not self.text:
            return best
        former, before = self._former.get(best.mode), self._former.get(now)
        if former is None or before is None or former.time.step_s * NEARLY > before.time.step_s:
            return None  # A shard that was started again looks like a slow link.
        return best if self._lost_s[best.mode] >= loss_s * (1 + self._num_switches) else None

    def _rows(
        self,
        deployment: Deployment,
        now: str,
        rule: Rule,
        step_s: float,
        reports: Sequence[ModeReport],
    ) -> dict[str, AdviceRow]:
        """Returns the rows of the module's `_rows` under the links that explain a step, by mode."""

        def took(link: float) -> float:
            return closed_form(replace(deployment, link=link), rule).step_s

        link = _meet(took, step_s)
        if step_s > HIDDEN * took(FASTEST):
            self._link = link
        measured = replace(deployment, link=max(link, self._link))
        rows = _rows(measured, now, rule, step_s, reports)
        return {row.mode: _at_least(row, self._least_s.get(row.mode, 0.0)) for row in rows}

    def _windows(self, step: int, ranks: Sequence[int]) -> list[ReportedPace]:
        """Returns the sums of each worker between its reports; empty: some are missing."""
        newest: Mapping[int, ModeReport] = self._by_step.get(step, {})
        before = min(self._by_step, default=step)
        former: Mapping[int, ModeReport] = self._by_step.get(before, {}) if before < step else {}
        found = []
        for rank in ranks:
            one, other = newest.get(rank), former.get(rank)
            if one is None or other is None or one.incarnation != other.incarnation:
                return []
            number = one.pace.num_steps - other.pace.num_steps
            if number < 1:
                return []
            found.append(
                ReportedPace(
                    num_steps=number,
                    steps_s=one.pace.steps_s - other.pace.steps_s,
                    waits_s=one.pace.waits_s - other.pace.waits_s,
                )
            )
        return found


def _deployment(
    reports: Sequence[ModeReport], windows: Sequence[ReportedPace], slices: Sequence[TimedSlice]
) -> Deployment:
    """Returns the job as it was measured; the links are not known yet.

    A shard is on the host of a worker that reaches it through memory, and else on one of its own.
    """
    names = list(dict.fromkeys(report.host for report in reports))
    num_shards = max(each.shard for each in slices) + 1
    shards = []
    for shard in range(num_shards):
        near = [one.host for one in reports if one.near[shard : shard + 1] == (True,)]
        shards.append(names.index(near[0]) if near else len(names) + shard)
    computed = [max(1e-6, (one.steps_s - one.waits_s) / one.num_steps) for one in windows]
    usual = median_low(computed)
    return Deployment(
        worker_hosts=tuple(names.index(report.host) for report in reports),
        shard_hosts=tuple(shards),
        slices=tuple(slices),
        link=FASTEST,
        compute_s=usual,
        slow={rank: seconds / usual for rank, seconds in enumerate(computed)},
        overlap=all(report.overlaps for report in reports),
    )


def _rows(
    measured: Deployment, now: str, rule: Rule, step_s: float, reports: Sequence[ModeReport]
) -> list[AdviceRow]:
    """Returns a row of each mode that all workers can take, and of the present one.

    Args:
        now: The present mode.
        rule: The mode whose steps take `step_s`: in a warm-up another one.
    """
    computed_s, others_s = _divide(closed_form(measured, rule))
    # Not 1 where links cannot explain the time: the machines are faster or slower than assumed.
    wrong = max(0.0, step_s - computed_s) / others_s if others_s else 1.0
    is_explained = wrong <= WRONG_MAX or step_s <= HIDDEN * (computed_s + others_s)
    found: list[AdviceRow] = []
    for candidate in auto_candidates(measured.num_workers):
        mode = str(parse_mode(candidate.mode))
        is_possible = is_explained and all(mode in one.possible for one in reports)
        row = row_of(measured, candidate) if is_possible or candidate.mode == now else None
        if row is not None:
            computed_s, others_s = _divide(row.time)
            least_s = max(0.0, measured.compute_s - computed_s)
            parts_s = {COMPUTING: computed_s, OTHERS: max(least_s, wrong * others_s)}
            found.append(replace(row, time=replace(row.time, parts_s=parts_s)))
    return found


def _at_least(row: AdviceRow, least_s: float) -> AdviceRow:
    """Returns a row whose step takes some seconds or more."""
    if row.time.step_s >= least_s:
        return row
    return replace(row, time=replace(row.time, parts_s={OTHERS: least_s}))


def _divide(time: StepTime) -> tuple[float, float]:
    """Returns the seconds of a step that are computing, and those of all else."""
    computed_s = sum(s for name, s in time.parts_s.items() if name.startswith(COMPUTING))
    return computed_s, time.step_s - computed_s


def _meet(took: Callable[[float], float], step_s: float) -> float:
    """Returns the rate at which a step takes `step_s`; its time falls with the rate."""
    low, high = SLOWEST, FASTEST
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if took(middle) > step_s else (low, middle)
    return high
