"""The choice of a job's mode by its own measurements (`mode="auto"`); no I/O, no clock.

measuring     workers report their sums at every n-th step; the newest two reports of each are kept
kept          behind the second report of all workers advice names no other mode: they go on
              reporting, and another mode has to be named twice in a row
decided       advice names another mode: it is taken, and for ever

The links are those under which the closed form of `ssgd` takes as long as the steps between the two
reports took. Then the forms of all modes are compared under the same links, and a mode has to be a
tenth faster than `ssgd` to be taken. If no link explains the time, nothing is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from pscore.errors import ConfigError
from pscore.rules import parse_mode
from pscore.timing.auto import FIRST, auto_candidates
from pscore.timing.choice import RISKS, WORTH, AdviceRow, choose, row_of
from pscore.timing.closed import COMPUTING, StepTime, closed_form
from pscore.timing.deployment import Deployment, TimedSlice
from psserver.decisions.worker_reports import ReportedPace

SLOWEST, FASTEST = 1e3, 1e12  # Bytes per second of a link.
HALVINGS = 60
WRONG_MAX = 1.4  # Times the form's seconds beside computing: beyond it no mode is compared.
STEPS_MAX = 1 << 48
OTHERS = "others"  # All parts of a step but computing.


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeReport:
    """A worker's report at a step.

    Attributes:
        incarnation: The worker's; reports of two incarnations have no difference.
        pace: Its sums.
        near: By shard: whether that is on the worker's host.
        possible: Modes that it can take.
        overlaps: Whether its pushes leave during backward.
        host: Its host.
    """

    incarnation: int
    pace: ReportedPace
    near: tuple[bool, ...]
    possible: frozenset[str]
    overlaps: bool
    host: str = ""


class ModeChoice:
    """The choice of one job.

    Attributes:
        mode: The mode that was taken; empty: none yet.
        text: The choice and its reason, as a sentence; with no mode: it was to keep the first one.
    """

    def __init__(self, mode: str = "", text: str = "") -> None:
        """Starts with a choice of a former process, if there is one."""
        self.mode, self.text = mode, text
        self._named = ""  # The mode that the report before this one has named.
        self._step = 0  # Step of that report; each worker asks for the decision.
        self._by_step: dict[int, dict[int, ModeReport]] = {}

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
            ranks: The live workers.
            risk: One of `pscore.timing.choice.RISKS`.

        Raises:
            ConfigError: There is no such risk.
        """
        if risk not in RISKS:
            raise ConfigError(f"risk is {risk!r}, must be one of {', '.join(RISKS)}")
        windows = self._windows(step, ranks)
        if self.mode or not windows or step == self._step:
            return
        self._step = step
        reports = [self._by_step[step][rank] for rank in ranks]
        deployment = replace(_deployment(reports, windows, slices), num_state=num_state)
        step_s = max(window.steps_s / window.num_steps for window in windows)
        rows = _rows(deployment, step_s, reports)
        now, best = rows[0], choose(rows, risk)
        took = f"{1e3 * step_s:,.0f} ms a step in {now.mode}"
        is_first, former, self._named = not self.text, self._named, ""
        if best.time.step_s * WORTH > now.time.step_s:
            self.text = self.text or (
                f"auto keeps {now.mode} at step {step}: {took}, and no mode that risk {risk!r} "
                "allows would clearly take less"
            )
        elif not is_first and former != best.mode:
            self._named = best.mode  # A shard that was started again looks like a slow link.
        else:
            self.mode = best.mode
            self.text = f"auto takes {best.mode} at step {step}: {took}, about "
            self.text += f"{1e3 * best.time.step_s:,.0f} ms in it; {best.evidence.text}"
            self._by_step.clear()

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


def _rows(deployment: Deployment, step_s: float, reports: Sequence[ModeReport]) -> list[AdviceRow]:
    """Returns a row of each mode that all workers can take; the present one is the first."""
    present = parse_mode(FIRST.mode)

    def took(link: float) -> float:
        return closed_form(replace(deployment, link=link), present).step_s

    measured = replace(deployment, link=_meet(took, step_s))
    now = closed_form(measured, present)
    computed_s, others_s = _divide(now)
    # Not 1 where links cannot explain the time: the machines are faster or slower than assumed.
    wrong = max(0.0, step_s - computed_s) / others_s if others_s else 1.0
    found: list[AdviceRow] = []
    for candidate in auto_candidates(deployment.num_workers):
        mode = str(parse_mode(candidate.mode))
        is_possible = wrong <= WRONG_MAX and all(mode in one.possible for one in reports)
        if found and not is_possible:
            continue
        row = row_of(measured, candidate)
        if row is not None:
            computed_s, others_s = _divide(row.time)
            least_s = max(0.0, deployment.compute_s - computed_s)
            parts_s = {COMPUTING: computed_s, OTHERS: max(least_s, wrong * others_s)}
            found.append(replace(row, time=replace(row.time, parts_s=parts_s)))
    return found


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
