"""The pace of a worker: its steps, its requests to the shards, and its waits for their answers.

Most are sums that only rise, so that a reader takes the difference of two moments. They travel with
the heartbeats to the first shard, for status and metrics. Only rounds by speed depend on them: on
the seconds of a step without its waits, beside those of the fastest worker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.timing.waiting import PaceSums

SMOOTHING = 0.1  # Share of the newest step in the seconds of a step.


class Pace:
    """The sums of one worker since it joined; used from any thread.

    Attributes:
        now: Returns seconds.
        fastest_s: Seconds of a step of the fastest worker without its waits, as the first shard
            has returned them; 0: not known yet.
        round_steps: Steps of the round under way, in a mode with rounds by speed; else 0.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Starts at zero; `now` returns seconds."""
        self.now = now
        self._lock = threading.Lock()
        self._num_steps = self._num_told = 0
        self._steps_s = self._waits_s = self._requests_s = 0.0
        self._stepped_s: float | None = None  # End of the last step.
        self._waited_s = 0.0  # `_waits_s` at that time.
        self._step_s = 0.0  # Of one step without its waits, smoothed; 0: not known yet.
        self.fastest_s = 0.0
        self.round_steps = 0
        self._under_way: set[Future[Any]] = set()
        self._busy_s = 0.0  # Begin of the time with requests under way, if there are any.

    def end_step(self) -> None:
        """Counts a step: from the end of the one before, so the first has no time."""
        with self._lock:
            now_s = self.now()
            if self._stepped_s is not None:
                self._num_steps += 1
                took_s = now_s - self._stepped_s
                self._steps_s += took_s
                computed_s = took_s - (self._waits_s - self._waited_s)
                former_s = self._step_s or computed_s
                self._step_s = max(0.0, former_s + SMOOTHING * (computed_s - former_s))
            else:  # All sums are of the steps that have a time.
                self._requests_s, self._busy_s = 0.0, now_s
            self._stepped_s, self._waited_s = now_s, self._waits_s

    @property
    def share(self) -> float:
        """This worker's speed over that of the fastest one, above 0 to 1; 1: not known yet."""
        with self._lock:
            own_s, fastest_s = self._step_s, self.fastest_s
        return min(1.0, fastest_s / own_s) if own_s > 0.0 and fastest_s > 0.0 else 1.0

    def follow(self, answer: Future[Any]) -> None:
        """Counts the time until a push or pull is answered; times that overlap count once."""
        with self._lock:
            if not self._under_way:
                self._busy_s = self.now()
            self._under_way.add(answer)
        answer.add_done_callback(self._done)

    def _done(self, answer: Future[Any]) -> None:
        with self._lock:
            if answer in self._under_way:
                self._under_way.remove(answer)
                self._end_busy()

    def forget(self) -> None:
        """Forgets the requests under way, some of which may never be answered."""
        with self._lock:
            if self._under_way:
                self._under_way.clear()
                self._end_busy()

    def _end_busy(self) -> None:
        if not self._under_way:
            self._requests_s += self.now() - self._busy_s

    def waited(self, seconds: float) -> None:
        """Counts a wait for the answer of a shard, if it is after the first step."""
        with self._lock:
            self._waits_s += seconds if self._stepped_s is not None else 0.0

    def waited_for_peer(self, seconds: float) -> None:
        """Counts a wait for another worker, if it is after the first step, as one for an answer."""
        with self._lock:
            if self._stepped_s is not None:
                self._waits_s += seconds
                self._requests_s += seconds

    def pause(self, seconds: float) -> None:
        """Leaves out seconds that have passed between two steps, as part of neither."""
        with self._lock:
            if self._stepped_s is not None:
                self._stepped_s += seconds

    def has_new_steps(self) -> bool:
        """Returns whether a step was counted since the last call."""
        with self._lock:
            told, self._num_told = self._num_told, self._num_steps
            return told != self._num_steps

    def message(self) -> pb.Pace:
        """Returns the sums of this moment."""
        with self._lock:
            requests_s = self._requests_s
            if self._under_way:
                requests_s += self.now() - self._busy_s
            return pb.Pace(
                num_steps=self._num_steps,
                steps_s=self._steps_s,
                waits_s=min(self._waited_s, requests_s),  # Those after the last step are of none.
                requests_s=requests_s,
                step_s=self._step_s,
                round_steps=self.round_steps,
            )


def sums_of(rank: int, pace: pb.Pace) -> PaceSums:
    """Returns the sums of a worker's pace."""
    return PaceSums(
        rank=rank,
        num_steps=pace.num_steps,
        steps_s=pace.steps_s,
        waits_s=pace.waits_s,
        requests_s=pace.requests_s,
        step_s=pace.step_s,
    )
