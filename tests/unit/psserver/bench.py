"""A slice and its membership, driven in words: events in, actions out as short sentences."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pscore.rules import ASGD, SSD
from pscore.rules.base import Rule
from pscore.types import Pull, Push, Role
from psserver.decisions.orders import Acknowledge, Action, Add, Answer, Hold, Load, Skip, Update
from psserver.decisions.slice_clock import SliceClock
from tests.participants import Listed


@dataclass(frozen=True)
class Pairs(Rule):
    """Asynchronous, two arrivals an update; old gradients count for a quarter."""

    name: ClassVar[str] = "pairs"

    def fan_in(self, num_expected: int, num_workers: int) -> int:
        return min(2, num_expected)

    def scale(self, staleness: int) -> float:
        return 0.25 if staleness else 1.0


@dataclass(frozen=True)
class FirstOfOpen(SSD):
    """By step with one push enough, several steps open: backup workers under delay."""

    steps: int = 2
    warmup: int = 0
    local: str = "sgd"

    def fan_in(self, num_expected: int, num_workers: int) -> int:
        return 1


@dataclass(frozen=True)
class Bounded(ASGD):
    """Reads wait for the slowest worker, as in ssp with bound 1."""

    def readable(self, clocks: object, worker: int, clock: int, min_version: int) -> bool:
        assert isinstance(clocks, SliceClock)
        return clocks.clock_min() >= clock - 1


class Bench:
    """A slice and its job's membership, driven in words."""

    def __init__(
        self, rule: Rule, num_workers: int, *, loaded: bool = True, wanted: int = 0
    ) -> None:
        self.expected = list(range(num_workers))
        self.wanted = wanted  # By an elastic job, of which one more worker may be than there are.
        self.participants = (
            Listed(lambda: self.expected, num_workers + 1, lambda: self.wanted)
            if wanted
            else Listed(lambda: self.expected, num_workers)
        )
        self.clock = SliceClock(rule, self.participants)
        if loaded:
            assert self.load() == ["load WEIGHTS v0", "ack init ACCEPTED v0"]

    def load(self, role: Role = Role.WEIGHTS, token: str = "init") -> list[str]:
        push = Push(worker=0, step=0, base_version=0, role=role)
        return words(self.clock.push(push, token))

    def refill(self, worker: int, version: int) -> list[str]:
        push = Push(worker=worker, step=0, base_version=version, role=Role.REFILL)
        return words(self.clock.push(push, f"fill{worker}"))

    def push(
        self,
        worker: int,
        step: int,
        *,
        base: int = 0,
        samples: float = 1.0,
        present: int = -1,
        lr: float = 0.5,
        mark: str = "",
        may_wait: bool = False,
        role: Role = Role.GRADIENT,
    ) -> list[str]:
        push = Push(
            worker=worker,
            step=step,
            base_version=base,
            samples=samples,
            present=present,
            hyper=np.array([[lr]]),
            may_wait=may_wait,
            role=role,
        )
        return words(self.clock.push(push, f"{worker}@{step}{mark}"))

    def pull(self, worker: int, clock: int, min_version: int, mark: str = "") -> list[str]:
        pull = Pull(worker=worker, clock=clock, min_version=min_version, with_state=mark == "state")
        return words(self.clock.pull(pull, f"pull{worker}{mark}"))

    def begin(self, worker: int, step: int, min_version: int | None = None) -> list[str]:
        oldest = step if min_version is None else min_version
        pull = Pull(worker=worker, clock=step, min_version=oldest, begins=True)
        return words(self.clock.pull(pull, f"begin{worker}"))

    def leave(self, worker: int) -> list[str]:
        self.expected.remove(worker)
        return words(self.clock.recheck())

    def come_back(self, worker: int) -> list[str]:
        self.expected = sorted({*self.expected, worker})
        self.clock.welcome(worker)
        return words(self.clock.recheck())


def words(actions: list[Action]) -> list[str]:
    return [word(action) for action in actions]


def word(action: Action) -> str:
    match action:
        case Load():
            return f"load {action.role.name} v{action.version}"
        case Hold():
            return f"hold {action.token}"
        case Add():
            how = "set" if action.is_first else "add"
            return f"{how} {action.token} x{action.weight:g} in {action.open_step}"
        case Update():
            return f"update {action.open_step} x{action.scale:g} -> v{action.version}"
        case Skip():
            return f"skip v{action.former} -> v{action.version}"
        case Acknowledge():
            return f"ack {action.token} {action.verdict.name} v{action.version}"
        case Answer():
            state = " with state" if action.with_state else ""
            return f"answer {action.token} v{action.version}{state}"
