"""Virtual time, and networks between simulated workers and shards; all in one thread.

A message is a call that happens when it arrives. `Network` delivers at once, `FaultyNetwork`
reorders, duplicates, drops and delays, `LinkNetwork` has latency and bandwidth.
"""

import heapq
import math
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import astuple, dataclass

DELAY_MIN_S = 0.001
SLOWED_S = 0.2


class StuckError(AssertionError):
    """Virtual time ran out: a worker waits for something that never comes."""


class Loop:
    """Events in the order of their time; those of one time in the order of their scheduling."""

    def __init__(self) -> None:
        self.now_s = 0.0  # Virtual time in seconds.
        self.num_events = 0  # Events so far.
        self.is_stopped = False  # Whether `stop` was called.
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, time_s: float, call: Callable[[], None], queue: Hashable = None) -> None:
        """Schedules a call; `queue` matters to other orders of events only."""
        heapq.heappush(self._events, (time_s, self._number, call))
        self._number += 1

    def after(self, delay_s: float, call: Callable[[], None], queue: Hashable = None) -> None:
        """Schedules a call in `delay_s` seconds."""
        self.at(self.now_s + delay_s, call, queue)

    def run(self, until_s: float = math.inf) -> bool:
        """Runs until nothing is left to happen; returns False if that is not before `until_s`."""
        while self._events and not self.is_stopped:
            if self._events[0][0] > until_s:
                return False
            self.now_s, _, call = heapq.heappop(self._events)
            self.num_events += 1
            call()
        return True

    def stop(self) -> None:
        """Ends `run` after the current event."""
        self.is_stopped = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message as the network sees it."""

    worker: int  # Rank at one end.
    shard: int  # Index of the shard at the other end.
    is_answer: bool  # Whether it goes to the worker.
    what: str = ""  # Description for the transcript.
    nbytes: int | None = None  # Its size; None: it passes beside others and takes no bandwidth.
    slice: int = -1  # Slice that it is about; -1 for none.
    # Whether it belongs to a worker's start, before its first weights have come.
    is_first: bool = False
    surely: bool = False  # Whether it always arrives.


class Network:
    """Delivers every message at once.

    Attributes:
        trace: Lines of the transcript; None: nothing is written down.
    """

    def __init__(self, loop: Loop) -> None:
        self.trace: list[str] | None = None
        self._loop = loop

    def send(self, message: Message, deliver: Callable[[], None]) -> None:
        """Sends a message; `deliver` is called when it arrives."""
        deliver()

    def note(self, text: str) -> None:
        """Writes a line of the transcript, if there is one."""
        if self.trace is not None:
            self.trace.append(f"{self._loop.now_s:7.3f}  {text}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLink:
    """One link of a worker or shard, full duplex."""

    latency_s: float = 0.5e-3
    bandwidth: float = 125e6  # Bytes per second: 1 Gbit/s.


class LinkNetwork(Network):
    """Gives every worker and every shard one link, which carries one message after the other."""

    def __init__(self, loop: Loop, link: NetworkLink, num_workers: int, num_shards: int) -> None:
        super().__init__(loop)
        self._link = link
        # When each link is free again, by direction and by worker or shard.
        self._from_worker, self._to_worker = [0.0] * num_workers, [0.0] * num_workers
        self._to_shard, self._from_shard = [0.0] * num_shards, [0.0] * num_shards

    def send(self, message: Message, deliver: Callable[[], None]) -> None:
        """Delivers when both links have carried the message, and a latency later."""
        if message.nbytes is None:
            self._loop.after(self._link.latency_s, deliver)
        elif message.is_answer:
            ends = self._from_shard, message.shard, self._to_worker, message.worker
            self._loop.at(self._arrival_s(*ends, message.nbytes), deliver)
        else:
            ends = self._from_worker, message.worker, self._to_shard, message.shard
            self._loop.at(self._arrival_s(*ends, message.nbytes), deliver)

    def _arrival_s(
        self, first: list[float], source: int, second: list[float], target: int, nbytes: int
    ) -> float:
        seconds = nbytes / self._link.bandwidth
        first[source] = max(self._loop.now_s, first[source]) + seconds
        second[target] = max(first[source], second[target] + seconds)
        return second[target] + self._link.latency_s


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFaults:
    """Faults on each message until `until_s`; later messages are only delayed."""

    drop: float = 0.0  # Probability.
    drop_first: float = 0.0  # The same for messages of a worker's start.
    duplicate: float = 0.0  # Probability of a second copy, delayed on its own.
    delay_s_min: float = DELAY_MIN_S
    delay_s_max: float = 0.0  # Added to it: uniform up to this, so that messages are reordered.
    until_s: float = 0.0
    doubled: tuple[str, ...] = ()  # Messages by name, for scenarios: each has two copies.
    slowed: tuple[str, ...] = ()  # Messages by name that take `SLOWED_S` longer.


NO_FAULTS = MessageFaults()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A time in which nothing passes between a worker and a shard, or all of them."""

    worker: int
    shard: int | None
    from_s: float
    until_s: float


class FaultyNetwork(Network):
    """Reorders, duplicates, drops and delays messages, as a seed has it."""

    def __init__(
        self, loop: Loop, faults: MessageFaults, cuts: Sequence[Cut], rng: random.Random
    ) -> None:
        """Starts at time 0."""
        super().__init__(loop)
        self._faults = faults
        self._cuts = cuts
        self._rng = rng
        self._rng_first = random.Random(f"first {astuple(faults)}")

    def send(self, message: Message, deliver: Callable[[], None]) -> None:
        """Delivers once, twice or not at all."""
        if self._is_cut(message):
            self.note(f"{message.what} does not get through")
            return
        if self._is_lost(message):
            self.note(f"{message.what} is lost")
            return
        copies = 1
        if self._is_on and self._rng.random() < self._faults.duplicate:
            copies = 2
        if message.what in self._faults.doubled:
            copies = 2
        if copies > 1:
            self.note(f"{message.what} is doubled")
        for _ in range(copies):
            delay_s = self._faults.delay_s_min + self._faults.delay_s_max * self._rng.random()
            delay_s += SLOWED_S * (message.what in self._faults.slowed)
            self._loop.after(delay_s, deliver)

    @property
    def _is_on(self) -> bool:
        return self._loop.now_s < self._faults.until_s

    def _is_lost(self, message: Message) -> bool:
        if not self._is_on:
            return False
        is_drawn = self._rng.random() < self._faults.drop
        if message.is_first and not message.surely:
            return self._rng_first.random() < self._faults.drop_first
        return is_drawn and not message.surely

    def _is_cut(self, message: Message) -> bool:
        return not (message.is_first or message.surely) and any(
            cut.worker == message.worker
            and cut.shard in (message.shard, None)
            and cut.from_s <= self._loop.now_s < cut.until_s
            for cut in self._cuts
        )
