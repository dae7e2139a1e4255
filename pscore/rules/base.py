"""The protocol of an update rule: one paper, one file, both halves.

A rule is an immutable value: its fields are the mode's hyper-parameters, and they are sent when a
job is made. The server half decides which pushes make one update and when a pull may be answered;
the worker half plans the worker's steps. Defaults are those of asynchronous SGD, so that a file
holds only its paper's difference. The memory of a rule on a shard is in `Memory.state`, by name, so
that checkpoints and restarts need not know the rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from pscore.compressors.base import Compressor
from pscore.errors import ConfigError
from pscore.fragments import Schedule
from pscore.plugins import Plugin
from pscore.types import FloatArray, Role

UNBOUNDED = 1 << 62  # A bound that is never reached, in steps.


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The actions of a worker at one step, per slice and in this order.

    1. With `lands`, a pull that is still on its way from an earlier step is waited for and becomes
       the base.
    2. With `local` (or `inner`), the weights move by this step's gradient.
    3. With `push`, the gradient (or the change of the weights) is sent; it may leave earlier. With
       `inner` and `local` the local update then makes the start of the next round of that change.
    4. With `pull`, the weights that hold this step's update are requested.
    5. With `block`, that pull is waited for now; else it lands in item 1 of a later step.
    """

    push: Role | None = Role.GRADIENT
    compress: bool = True
    flush: bool = False  # Full precision, and the residual goes along and becomes zero.
    local: bool = False
    inner: bool = False  # The user's own torch optimizer makes a step.
    lands: bool = True
    pull: bool = True
    block: bool = True
    turn: int = 0  # With `pull`: of the slices of a shard, the i-th where i is `turn` modulo
    turns: int = 1  # `turns`: all of them.

    def pulls(self, place: int) -> bool:
        """Returns whether a slice is pulled, by its place among those of its shard."""
        return self.pull and place % self.turns == self.turn


class SliceClocks(Protocol):
    """The state of a slice by which a rule decides whether a pull can be answered."""

    @property
    def version(self) -> int:
        """Updates decided so far."""

    def clock(self, worker: int) -> int:
        """Returns the number of steps received from `worker` without a gap."""

    def clock_min(self) -> int:
        """Returns the smallest `clock` of all workers that are still expected."""


@dataclass(slots=True, kw_only=True)
class Memory:
    """The memory of a rule on a shard, for one slice."""

    weights: FloatArray  # (numel,): the newest weights; read only.
    state: dict[str, FloatArray] = field(default_factory=dict)


@dataclass(frozen=True)
class Rule(Plugin):
    """A mode: the way from pushes to updates, and the steps of a worker.

    Attributes:
        by_step: Only pushes of one step go into one update, and steps close in order.
        compensates: `compensate` has to be called for each push.
        remembers_pulls: `on_pull` has to be called before a pull is answered.
        remembers_updates: `on_update` has to be called after each update, which is then never made
            in place.
        outer_optimizer: Name of the shards' optimizer in a mode whose workers run the user's own
            torch optimizer between rounds; empty if the shards run the user's.
        round_role: The push that ends a round of such a mode: `DELTA` or `MODEL`.
        gossip: Name of the workers' exchange with each other (psworker/gossip); empty: none.
        alike: Whether all workers make the same steps with the wrapped optimizer, so that their
            models stay equal. It demands that its states are equal too when the mode begins.
    """

    compensates: ClassVar[bool] = False
    remembers_pulls: ClassVar[bool] = False
    remembers_updates: ClassVar[bool] = False
    outer_optimizer: ClassVar[str] = ""
    round_role: ClassVar[Role] = Role.DELTA
    gossip: ClassVar[str] = ""
    alike: ClassVar[bool] = False

    # ----- server half

    def require_workers(self, num_workers: int) -> None:
        """Checks the arguments when a job is made for `num_workers` workers.

        Raises:
            ConfigError: The arguments do not fit that number.
        """

    @property
    def by_step(self) -> bool:
        """Whether only pushes of one step go into one update."""
        return False

    @property
    def workers_may_step(self) -> bool:
        """Whether every worker pulls each update, of all gradients, before its next step.

        Then the shards may return the mean gradient, and the workers run the optimizer.
        """
        return False

    def fan_in(self, num_expected: int, num_workers: int) -> int:
        """Returns how many pushes make one update.

        Args:
            num_expected: Workers whose push is in or still expected, 1 or more.
            num_workers: Workers that the job was made for.
        """
        return 1

    def steps_open(self) -> int:
        """Returns how many steps beyond the newest update a push may be; more waits (in steps)."""
        return UNBOUNDED

    def least(self, num_expected: int, num_workers: int) -> int:
        """Returns how many workers have to be in before the window of a step begins.

        A step with `fan_in` pushes closes at once. The arguments are those of `fan_in`.
        """
        return self.fan_in(num_expected, num_workers)

    @property
    def window_s(self) -> float | None:
        """Seconds that a step with its least number of workers stays open; negative: it adapts.

        A push whose step has closed enters the step that is open then. None: there is no window,
        and such a push does not count.
        """
        return None

    def scale(self, staleness: int) -> float:
        """Returns the factor on a gradient that is `staleness` updates old."""
        return 1.0

    def compensate(self, grad: FloatArray, worker: int, memory: Memory) -> None:
        """Corrects one gradient `(numel,) float32` in place, before it is added to others."""

    def on_pull(self, worker: int, memory: Memory) -> None:
        """Notes that `memory.weights` are about to be sent to `worker`, which trains on them.

        Not called for a look at the weights (`Pull.is_look`): no worker trains on its answer.
        """

    def on_update(self, weights: FloatArray, memory: Memory) -> None:
        """Notes an update that has just been made.

        Args:
            weights: `(numel,) float32`, those after the update; read only.
            memory: Its `weights` are those before the update.
        """

    def readable(self, clocks: SliceClocks, worker: int, clock: int, min_version: int) -> bool:
        """Returns whether a pull of `worker`, which has pushed `clock` steps, can be answered."""
        return clocks.version >= min_version and clocks.clock(worker) >= clock

    # ----- worker half

    def plan(self, step: int) -> Plan:
        """Returns the actions of a worker at 0-based `step`."""
        return Plan()

    @property
    def schedule(self) -> Schedule | None:
        """The ends of the rounds of each fragment of the model; None: the mode has no fragments."""
        return None

    def plan_of(self, step: int, fragment: int) -> Plan:
        """Returns the actions of a worker at 0-based `step`, for the slices of one fragment."""
        return self.plan(step)

    def local_update(self) -> Any:
        """Returns the `LocalUpdate` of this rule, or None."""
        return None

    def min_version(self, step: int) -> int:
        """Returns the oldest version that answers the pull issued at `step`; 0 is any."""
        return step + 1 if self.by_step else 0

    def step_after(self, step: int, num_pushes: int) -> int:
        """Returns the step of a worker that was at `step` and has made `num_pushes` pushes since.

        Args:
            step: 0-based.
            num_pushes: Its pushes since then, 0 or more; each is the last act of its step.
        """
        return step + num_pushes

    def outer_group(
        self, step: int, group: Mapping[str, Any], num_workers: int
    ) -> Mapping[str, Any]:
        """Returns the shards' optimizer's parameter group at `step`, as torch would have it.

        Args:
            step: 0-based.
            group: The user's own parameter group, as it is now.
            num_workers: Workers that the job was made for.
        """
        return group

    def caution(self, compressor: Compressor) -> str:
        """Returns the reason not to use a compressor of pushes with this rule; empty: none."""
        if compressor.needs_origin:
            return f"{compressor.name} sends all of a gradient: it is for the moves of rounds"
        return ""


def require_sizes(rule: Rule, num_workers: int, min_workers: int) -> None:
    """Raises a `ConfigError` unless a rule fits a job of every size that it may have.

    Args:
        num_workers: Number of workers of the job; the most of an elastic one.
        min_workers: The least of an elastic job; 0: it is not elastic.
    """
    rule.require_workers(num_workers)
    if min_workers:
        try:
            rule.require_workers(min_workers)
        except ConfigError as problem:
            raise ConfigError(
                f"{problem}: the job may have {min_workers} to {num_workers}"
            ) from None


def require_slices(rule: Rule, num_slices: int) -> None:
    """Raises ConfigError if a mode has more fragments than the model has slices."""
    number = 1 if rule.schedule is None else rule.schedule.number
    if number > num_slices:
        many = "1 slice" if num_slices == 1 else f"{num_slices} slices"
        raise ConfigError(
            f"{rule.name}.fragments is {number}, and the model has {many} "
            f"(`psworker plan` shows them); choose at most {num_slices}"
        )


def takes_all(rule: Rule) -> bool:
    """Returns whether an update takes each worker's gradient of its step: all make it or none.

    In a mode with rounds a worker makes its steps by itself.
    """
    everybody = 2
    is_mean = rule.fan_in(everybody, everybody) == everybody
    return rule.by_step and is_mean and not rule.outer_optimizer


def waits_for_all(rule: Rule, num_workers: int) -> bool:
    """Returns whether every step of a job of so many workers waits for each of them."""
    is_mean = rule.by_step and rule.fan_in(num_workers, num_workers) == num_workers
    return bool(rule.gossip) or (is_mean and rule.window_s is None)


def rounds_wait(rule: Rule) -> bool:
    """Returns whether each worker waits at the end of a round for its answer, of all moves.

    Then workers can hold all that the shards have: these have no memory of the rule.
    """
    everybody = 2
    is_of_moves = bool(rule.outer_optimizer) and rule.round_role is Role.DELTA
    is_mean = rule.by_step and rule.fan_in(everybody, everybody) == everybody
    is_over = rule.window_s is None and rule.local_update() is None
    remembers = rule.compensates or rule.remembers_pulls or rule.remembers_updates
    return is_of_moves and is_mean and is_over and not remembers
