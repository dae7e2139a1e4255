"""Measurement inside a process of a case, with the standard library only.

A peer has an environment of its own, in which nothing of ours is installed (benchmarks/peers).
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

WARM_ROUNDS = 3


def serve(argv: Sequence[str], table: Mapping[str, Callable[..., Any]]) -> bool:
    """If this process was started as a role, runs it and prints its result; returns whether."""
    if len(argv) < 2 or argv[0] != "--role":
        return False
    value = table[argv[1]](**json.loads(argv[2]))
    if value is not None:
        print(json.dumps(value), flush=True)
    return True


def report(value: Mapping[str, Any]) -> None:
    """Prints a result, and waits until all of this case have printed theirs."""
    print(json.dumps(value), flush=True)
    sys.stdin.read()


def await_go() -> None:
    """Reports to the measuring process that this one is warm, and waits for all others."""
    print("{}", flush=True)
    sys.stdin.readline()


def own_cpu_s() -> float:
    """Returns the CPU seconds of this process, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def timed(one_round: Callable[[], object], rounds: int) -> dict[str, Any]:
    """Returns the seconds of each round, after some to warm up, and CPU seconds of all."""
    for _ in range(WARM_ROUNDS):
        one_round()
    await_go()
    cpu_s, times_s = own_cpu_s(), []
    for _ in range(rounds):
        start_s = time.perf_counter()
        one_round()
        times_s.append(time.perf_counter() - start_s)
    return {"times_s": times_s, "cpu_s": own_cpu_s() - cpu_s}
