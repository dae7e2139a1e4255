"""Events of a short run, as drawings of the modes are made of them."""

import pytest

from pscore.rules import RULES
from pssim.events import Event, What
from pssim.transcript import COMPUTE_S, LATENCY_S, STEPS, transcript

# Modes whose workers exchange models are in tests/paper/test_decentralised.py.
SERVED = sorted(name for name, rule in RULES.items() if not rule.gossip)

KEYS = ("time_s", "who", "what", "worker", "step", "slice", "version")


def of(events: list[Event], what: What, who: str = "") -> list[Event]:
    return [event for event in events if event.what is what and event.who.startswith(who)]


@pytest.mark.parametrize("mode", SERVED)
def test_every_mode_has_events_in_the_order_of_time(mode: str) -> None:
    events = transcript(mode)
    assert [event.time_s for event in events] == sorted(event.time_s for event in events)
    for rank, compute_s in enumerate(COMPUTE_S):
        started, ended = (
            of(events, what, f"worker {rank}")
            for what in (What.COMPUTE_STARTED, What.COMPUTE_ENDED)
        )
        assert [event.step for event in started] == [*range(STEPS)]
        for begin, end in zip(started, ended, strict=True):
            assert end.time_s - begin.time_s == pytest.approx(compute_s)
    assert len(of(events, What.PUSH_SENT)) == len(of(events, What.PUSH_COUNTED))
    assert len(of(events, What.PULL_SENT)) == len(of(events, What.PULL_LANDED))


def test_a_synchronous_step_waits_for_the_slower_worker() -> None:
    events = transcript("ssgd", steps=1)
    seen = [tuple(getattr(event, key) for key in KEYS) for event in events]
    fast_s, slow_s = (round(compute_s, 9) for compute_s in COMPUTE_S)
    counted_s, landed_s = round(slow_s + LATENCY_S, 9), round(slow_s + 2 * LATENCY_S, 9)
    assert (fast_s, "worker 0", What.PUSH_SENT, 0, 0, 0, None) in seen
    assert (counted_s, "shard 0", What.UPDATED, None, None, 0, 1) in seen
    assert seen[-1] == (landed_s, "worker 1", What.PULL_LANDED, 1, None, 0, 1)


def test_a_delayed_mode_computes_while_its_push_is_on_its_way() -> None:
    events = transcript("od(warmup=0)")
    started = of(events, What.COMPUTE_STARTED, "worker 0")[1]
    assert started.time_s < of(events, What.UPDATED)[0].time_s
