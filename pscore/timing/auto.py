"""`mode="auto"`: a job begins in `ssgd`, and from time to time takes the mode that advice names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from pscore.errors import ConfigError
from pscore.plugins import Plugin, make_plugin, parse_plugin, require_one_of, require_range
from pscore.registry import Registry
from pscore.rules import parse_mode
from pscore.rules.base import Rule
from pscore.timing.choice import CANDIDATES, RISKS, Candidate, backup_candidate
from pscore.timing.evidence import DDP

FIRST = CANDIDATES[0]  # The mode in which the job measures at first.
RARE = 4
TAKES = r"auto (?:takes|returns to) (?P<mode>\w.*?) at step (?P<step>\d+): "


@dataclass(frozen=True)
class AutoMode(Plugin):
    """The wish that a job takes faster modes by itself.

    Attributes:
        steps: Steps between two reports of the workers; the second one decides first, so that slow
            first steps do not count.
        risk: As of `psworker advise`: `none` allows only modes with the updates of `ssgd`.
        replay: A log of such a job, whose changes are made again at the same steps, without
            measuring; empty: there is none.
    """

    steps: int = 25
    risk: str = "none"
    replay: str = ""

    name = "auto"

    def __post_init__(self) -> None:
        require_range("auto.steps", self.steps, 2, 1 << 20)
        require_one_of("auto.risk", self.risk, dict.fromkeys(RISKS))

    def is_due(self, step: int, *, passes_slow: bool = False) -> bool:
        """Returns whether the workers report before 0-based step `step`.

        Args:
            passes_slow: Whether steps do not wait for slow workers. A report does, and so only one
                of `RARE` is made.
        """
        number, rest = divmod(step, self.steps)
        return number > 0 and not rest and (not passes_slow or number % RARE == 0)


WISHES: Registry[AutoMode] = Registry("mode", "paceline.wishes", AutoMode, [AutoMode])


def parse_wish(mode: str | Rule) -> AutoMode | None:
    """Returns the wish that the argument `mode=` expresses; None: it names a mode.

    Raises:
        ConfigError: It is such a wish, and an argument is wrong.
    """
    if not isinstance(mode, str) or not mode.strip().startswith(AutoMode.name):
        return None
    name, arguments = parse_plugin("mode", mode)
    return make_plugin(WISHES, name, arguments) if name in WISHES.own else None


def first_mode(mode: str | Rule) -> Rule:
    """Returns the mode in which a job begins whose argument `mode=` this is.

    Raises:
        ConfigError: There is no such mode, or an argument is wrong.
    """
    return parse_mode(FIRST.mode if parse_wish(mode) else mode)


def read_switches(lines: Iterable[str]) -> dict[int, str]:
    """Returns the modes that a job has taken by itself, by step, as its log says."""
    found = (re.search(TAKES, line) for line in lines)
    return {int(one["step"]): one["mode"] for one in found if one is not None}


def parse_fixed_mode(mode: str | Rule) -> Rule:
    """Returns the mode that a text names, where a job cannot choose it.

    Raises:
        ConfigError: There is none, an argument is wrong, or it is a wish.
    """
    if parse_wish(mode) is not None:
        raise ConfigError(
            f"mode is {mode!r}, by which a job that runs chooses its mode from the beginning: it "
            "goes to DistributedOptimizer(); here, name a mode"
        )
    return parse_mode(mode)


def auto_candidates(num_workers: int) -> tuple[Candidate, ...]:
    """Returns the modes among which a job may choose, `FIRST` at first.

    In each of them a learning rate means the same as in `ssgd`.
    """
    kin = [each for each in CANDIDATES if each.is_kin and each.compression == "none"]
    return (*kin, Candidate("allreduce", DDP), backup_candidate(num_workers))
