"""Runs a mode with two workers and one shard, and returns its events, for drawings and tables."""

from dataclasses import replace

from pscore.rules import parse_mode
from pssim.case import ONE_SLICE, Case
from pssim.events import Event, What
from pssim.faulty import simulate
from pssim.network import MessageFaults

COMPUTE_S = (1.0, 1.3)  # Workers 0 and 1: a little apart, so that one of them waits.
LATENCY_S = 0.1  # Latency of every message, one way.
STEPS = 3
BEGIN_LATENCIES = 20  # All workers have joined and have the first weights by then.


def transcript(
    mode: str,
    *,
    steps: int = STEPS,
    compute_s: tuple[float, ...] = COMPUTE_S,
    latency_s: float = LATENCY_S,
    shapes: tuple[tuple[int, ...], ...] = ONE_SLICE,
) -> list[Event]:
    """Runs a mode on a small model, with as many workers as there are computing times.

    Args:
        mode: A mode as on the command line, such as `ssd(steps=2, warmup=1)`.
        compute_s: Seconds of one forward and backward pass, for each worker.
        latency_s: Seconds of each message, one way.
        shapes: Shapes of the model's tensors; without them it has one slice.

    Returns:
        The events in the order of time. Time 0 is when the first worker starts its first step.
        Joining, the upload of the first weights and each worker's last pull, of the final weights,
        are left out.

    Raises:
        ConfigError: The mode is not one.
    """
    case = Case(
        seed=0,
        rule=parse_mode(mode),
        num_shards=1,
        steps=(steps,) * len(compute_s),
        compute_s=compute_s,
        begins_s=BEGIN_LATENCIES * latency_s,
        is_steady=True,
        dies_s=(None,) * len(compute_s),
        back_s=(None,) * len(compute_s),
        samples=(1.0,) * len(compute_s),
        faults=MessageFaults(delay_s_min=latency_s),
        shapes=shapes,
    )
    events = simulate(case).events
    begins = [event.what is What.COMPUTE_STARTED for event in events].index(True)
    zero_s = events[begins].time_s
    return [replace(event, time_s=round(event.time_s - zero_s, 9)) for event in events[begins:]]


def text(events: list[Event]) -> str:
    """Returns events as lines: time in seconds, place and kind."""
    lines = []
    for event in events:
        parts = {"worker": event.worker, "step": event.step, "version": event.version}
        if event.who.startswith("worker"):
            del parts["worker"]
        about = ", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)
        lines.append(f"{event.time_s:7.3f}  {event.who}: {event.what}, {about}\n")
    return "".join(lines)
