"""Simulated time, and a network that reorders, duplicates, drops and delays; one thread."""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

DELAY_MIN_S = 0.001
SLOWED_S = 0.2


class StuckError(AssertionError):
    """Simulated time ran out: somebody waits for something that never comes."""


class Loop:
    """Events in the order of their time; those of one time in the order of their scheduling."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Schedules a call."""
        heapq.heappush(self._events, (self.now_s + delay_s, self._number, call))
        self._number += 1

    def run(self, limit_s: float, explain: Callable[[], str]) -> None:
        """Runs until nothing is left to happen."""
        while self._events:
            self.now_s, _, call = heapq.heappop(self._events)
            if self.now_s > limit_s:
                raise StuckError(f"not over after {limit_s:g} simulated seconds: {explain()}")
            self.num_events += 1
            call()


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What the network does to each message until `until_s`; later it only delays."""

    drop: float = 0.0  # Probability.
    duplicate: float = 0.0  # Probability of a second copy, delayed on its own.
    delay_s_min: float = DELAY_MIN_S
    delay_s_max: float = 0.0  # Beyond that, delays are uniform up to this, which is what reorders.
    until_s: float = 0.0
    doubled: tuple[str, ...] = ()  # Messages by name, for scenarios: these have two copies,
    slowed: tuple[str, ...] = ()  # and these take `SLOWED_S` longer.


NO_FAULTS = Faults()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A time in which nothing passes between a worker and a shard, or all of them."""

    worker: int
    shard: int | None
    from_s: float
    until_s: float


class Network:
    """Carries closures: a message is what happens when it arrives."""

    def __init__(self, loop: Loop, faults: Faults, cuts: Sequence[Cut], rng: random.Random) -> None:
        self._loop = loop
        self._faults = faults
        self._cuts = cuts
        self._rng = rng
        self.trace: list[str] | None = None
        self.num_dropped = 0
        self.num_duplicated = 0

    def send(
        self,
        worker: int,
        shard: int,
        deliver: Callable[[], None],
        what: str = "",
        *,
        surely: bool = False,
    ) -> None:
        """Delivers once, twice or, unless `surely`, not at all."""
        faults, rng = self._faults, self._rng
        copies = 1
        if not surely and self._is_cut(worker, shard):
            self.num_dropped += 1
            self.note(f"{what} does not get through")
            return
        if self._loop.now_s < faults.until_s:
            if rng.random() < faults.drop and not surely:
                self.num_dropped += 1
                self.note(f"{what} is lost")
                return
            if rng.random() < faults.duplicate:
                self.num_duplicated += 1
                self.note(f"{what} is doubled")
                copies = 2
        if what in faults.doubled:
            self.note(f"{what} is doubled")
            copies = 2
        for _ in range(copies):
            delay_s = faults.delay_s_min + faults.delay_s_max * rng.random()
            delay_s += SLOWED_S * (what in faults.slowed)
            self._loop.after(delay_s, deliver)

    def _is_cut(self, worker: int, shard: int) -> bool:
        return any(
            cut.worker == worker
            and cut.shard in (shard, None)
            and cut.from_s <= self._loop.now_s < cut.until_s
            for cut in self._cuts
        )

    def note(self, text: str) -> None:
        """Writes a line of the transcript, if there is one."""
        if self.trace is not None:
            self.trace.append(f"{self._loop.now_s:7.3f}  {text}")
