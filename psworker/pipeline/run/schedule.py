"""The order of forwards and backwards of a stage's replica, and the weight version of each.

One forward, one backward, without a flush, of Deepak Narayanan, Aaron Harlap et al., "PipeDream:
Generalized Pipeline Parallelism for DNN Training", SOSP 2019, sections 3.2 and 3.3. With R_s
replicas of stage s and N workers in all, minibatch m is on replica m mod R_s, where it is number
j = m // R_s. A replica has w_s = (N - 1 - workers of the stages before) // R_s forwards ahead of
its backwards. W_s^(v) are the weights after v updates:

    stash      v_s(m) = max(0, j - w_s): the newest at the forward; the backward uses them too
    vertical   the version of the first stage, counted in minibatches, at all stages
    none       forward as with stash, backward at the newest: no gradient of any function

In mode `ssgd` an update holds the mean gradient of one minibatch of each replica. In a mode without
common steps (`asgd`, ...) a version is what the replica has pulled behind its own gradient, so
`stash` counts its own pulls. `TwoVersions` is 2BW, of Deepak
Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, section 3.1: an
update holds the mean of M minibatches and is delayed by one update at every stage.

Differs from the papers: vertical sync with unequal replicas rounds down to whole updates, and the
last update holds the minibatches that there are.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pscore.errors import ConfigError
from pscore.rules import SSGD
from pscore.rules.base import Rule
from psworker.pipeline.plan.partition import in_flight

ALIKE = SSGD()  # All replicas of a stage have the same weights.


@dataclass(frozen=True, slots=True)
class Place:
    """A replica of a stage."""

    stage: int  # Index of the stage.
    replica: int  # Index among its replicas.
    replicas: tuple[int, ...]  # Numbers of replicas of all stages.

    @classmethod
    def of_rank(cls, rank: int, replicas: Sequence[int]) -> Place:
        """Returns the place of a rank: those of the first stage come first."""
        left = rank
        for stage, number in enumerate(replicas):
            if left < number:
                return cls(stage, left, tuple(replicas))
            left -= number
        raise ConfigError(f"rank {rank} in a pipeline of {sum(replicas)} workers")

    @property
    def rank(self) -> int:
        """Rank among the workers of all stages."""
        return sum(self.replicas[: self.stage]) + self.replica

    @property
    def is_first(self) -> bool:
        """Whether the stage has the inputs."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage has the loss."""
        return self.stage == len(self.replicas) - 1

    @property
    def num_replicas(self) -> int:
        """Replicas of the stage."""
        return self.replicas[self.stage]

    def depth(self, stage: int | None = None) -> int:
        """Returns w of a stage, of this one by default: forwards ahead of the backwards."""
        stage = self.stage if stage is None else stage
        before = sum(self.replicas[:stage])
        return in_flight(before, self.replicas[stage], sum(self.replicas)) - 1

    def has(self, minibatch: int) -> bool:
        """Returns whether a minibatch is on this replica."""
        return minibatch % self.num_replicas == self.replica

    def rank_at(self, offset: int, minibatch: int) -> int:
        """Returns the rank that has a minibatch at the next stage (1), or the last one (-1)."""
        stage = self.stage + offset
        return sum(self.replicas[:stage]) + minibatch % self.replicas[stage]


class Stash:
    """The newest version at the forward, for the backward too."""

    in_place = False  # Whether an update overwrites the weights of minibatches in flight.
    flushes = False  # Whether no minibatch is in flight between updates.

    def __init__(self, place: Place, rule: Rule = ALIKE) -> None:
        self.place = place
        self._rule = rule

    @property
    def rate(self) -> float:
        """Factor of the learning rate: where an update takes more minibatches, there are fewer."""
        return self._taken(self.place.num_replicas) / self._taken(self.place.replicas[0])

    def _taken(self, replicas: int) -> int:
        """Returns the minibatches from one update of a stage to the next."""
        return replicas if self._rule.by_step else self._rule.fan_in(replicas, replicas)

    @property
    def is_single(self) -> bool:
        """Whether no minibatch uses a version when the next one is there."""
        return self.place.depth() == 0

    @property
    def updates_every(self) -> int:
        """Backwards of a replica in an update."""
        return 1

    @property
    def whole(self) -> int:
        """Minibatches after which the updates of all stages are whole."""
        return math.lcm(*self.place.replicas)

    def version(self, minibatch: int) -> int:
        """Returns the version of the weights for a minibatch."""
        return max(0, minibatch // self.place.num_replicas - self.place.depth())


class Vertical(Stash):
    """The version that the first stage had, at all stages."""

    @property
    def is_single(self) -> bool:
        """Whether there is one worker."""
        return self.place.depth(0) == 0

    def version(self, minibatch: int) -> int:
        """Returns the version that holds the same minibatches as the first stage's."""
        replicas = self.place.replicas
        first = max(0, minibatch // replicas[0] - self.place.depth(0))
        return first * replicas[0] // self.place.num_replicas


class TwoVersions(Stash):
    """One update of M minibatches, at weights that are one update old."""

    rate = 1.0  # All stages make as many updates.
    is_single = False  # An update is delayed by one.

    def __init__(self, place: Place, minibatches: int) -> None:
        """Counts for one replica.

        Args:
            minibatches: M.

        Raises:
            ConfigError: M is not a multiple of the replicas of each stage, or smaller than the
                minibatches in flight.
        """
        super().__init__(place)
        for stage, number in enumerate(place.replicas):
            if minibatches % number or minibatches < max(1, place.depth(stage)) * number:
                raise ConfigError(
                    f"2bw sums {minibatches} minibatches, must be a multiple of the {number} "
                    f"replicas of stage {stage}, and at least {place.depth(stage)} of each"
                )
        self._own = minibatches // place.num_replicas

    @property
    def updates_every(self) -> int:
        """Backwards of a replica in an update."""
        return self._own

    @property
    def whole(self) -> int:
        """Minibatches of an update."""
        return self._own * self.place.num_replicas

    def version(self, minibatch: int) -> int:
        """Returns the version before the last one that can be there."""
        return max(0, minibatch // self.place.num_replicas // self._own - 1)


class Order:
    """One replica's minibatches in flight: a state machine."""

    def __init__(self, versions: Stash) -> None:
        self._versions = versions
        self._place = versions.place
        self._flying: deque[tuple[int, int]] = deque()  # Minibatch and version, oldest first.
        self._next = versions.place.replica
        self._ended = 0  # Backwards since the last update.
        self.newest = 0  # Updates made.

    @property
    def num_flying(self) -> int:
        """Minibatches between forward and backward."""
        return len(self._flying)

    def begin(self, minibatch: int) -> int:
        """Begins a forward; returns the version of its weights.

        Raises:
            ConfigError: It is not the next minibatch of this replica.
        """
        if minibatch != self._next:
            raise ConfigError(f"minibatch {minibatch} came, {self._next} is the next one here")
        version = self._versions.version(minibatch)
        assert version <= self.newest, (version, self.newest)
        self._next += self._place.num_replicas
        self._flying.append((minibatch, version))
        return version

    def due(self, *, is_over: bool = False) -> int | None:
        """Returns the minibatch whose backward is next; None: a forward is.

        Args:
            is_over: Whether no more minibatches come.
        """
        if not self._flying or not (is_over or len(self._flying) > self._place.depth()):
            return None
        return self._flying[0][0]

    def end(self) -> bool:
        """Ends the backward of the oldest minibatch; returns whether an update is due."""
        self._flying.popleft()
        self._ended += 1
        return self._ended == self._versions.updates_every

    def updated(self) -> tuple[int, float]:
        """Counts an update.

        Returns:
            The backwards of this replica in it, and their number over that of a full update: the
            weight of their mean, as the last update may hold more minibatches on other replicas.
        """
        held, self._ended = self._ended, 0
        self.newest += 1
        return held, held / self._versions.updates_every

    @property
    def has_rest(self) -> bool:
        """Whether backwards wait for an update that is not full."""
        return self._ended > 0

    def oldest(self) -> int:
        """Returns the oldest version that a minibatch in flight, or the next one, uses."""
        return min([version for _, version in self._flying] + [self._versions.version(self._next)])
