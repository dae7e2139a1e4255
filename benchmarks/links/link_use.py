"""When the links of a lab are busy: counted at the switch every few milliseconds, and drawn.

    with watch(lab) as watched:
        ...
    use = LinkUse(watched, starts_s)   # folded over the steps of one worker

A port of the switch sees a host's bytes out as received and its bytes in as sent.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import kit, measured
from benchmarks.netlab import Lab
from pscore.types import FloatArray

MODULE = "benchmarks.links.link_use"
PERIOD_S = 4e-3
BINS = 100  # Of a step.


class Counters(NamedTuple):
    """Bytes of one network device so far."""

    received: int
    sent: int


def counters() -> dict[str, Counters]:
    """Returns the counters of every device in this process's network namespace."""
    with open("/proc/net/dev", encoding="ascii") as file:
        lines = file.readlines()[2:]
    split = (line.partition(":") for line in lines)
    return {
        name.strip(): Counters(int(rest.split()[0]), int(rest.split()[8]))
        for name, _, rest in split
    }


def record(num_hosts: int) -> dict[str, Any]:
    """Returns samples of all ports' counters, taken until standard input says to end."""
    print("{}", flush=True)
    samples: list[list[float]] = []
    while not select.select([sys.stdin], [], [], PERIOD_S)[0]:
        now_s, ports = time.perf_counter(), counters()
        values = [ports[f"port{host}"] for host in range(num_hosts)]
        samples.append([now_s, *(count for port in values for count in port)])
    return {"samples": samples}


@contextlib.contextmanager
def watch(lab: Lab) -> Iterator[list[list[float]]]:
    """Records the counters of a lab's switch; the yielded list is filled at the end.

    A row is a moment of `time.perf_counter`, then bytes out and bytes in of each host.
    """
    rows: list[list[float]] = []
    prefix = ["ip", "netns", "exec", lab.name("switch")]
    role = kit.Role(MODULE, "record", {"num_hosts": lab.num_hosts}, prefix=prefix)
    with kit.roles(role):
        role.line()
        yield rows
        role.tell("end")
        rows += role.line()["samples"]


class LinkUse:
    """Bytes a second of each host, out and in, over the steps of one worker.

    Attributes:
        step_s: Mean seconds of a step.
        rates: `(num_hosts, 2, BINS) float32`, bytes a second by host, out and in, and share of the
            step that has passed; the mean of all steps.
    """

    def __init__(self, rows: Sequence[Sequence[float]], starts_s: Sequence[float]) -> None:
        """Folds samples of `watch` over steps that begin at `starts_s`, the end included."""
        table = np.array(rows)
        moments, counts = table[:, 0], table[:, 1:]
        steps = np.asarray(starts_s)
        edges = np.concatenate(
            [np.linspace(*pair, BINS, endpoint=False) for pair in itertools.pairwise(steps)]
            + [steps[-1:]]
        )
        self.step_s = float(np.diff(steps).mean())
        folded = []
        for column in counts.T:
            rates = np.diff(np.interp(edges, moments, column)) / np.diff(edges)
            folded.append(rates.reshape(-1, BINS).mean(axis=0))
        self.rates: FloatArray = np.array(folded, dtype=np.float32).reshape(-1, 2, BINS)


def draw(path: Path, uses: Mapping[str, LinkUse], bytes_per_s: float) -> None:
    """Draws the share of each link's bandwidth that is used, out and in, over a step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    num_hosts = len(next(iter(uses.values())).rates)
    figure, rows = pyplot.subplots(
        num_hosts, len(uses), figsize=(4 * len(uses), 1.5 * num_hosts), squeeze=False, sharey=True
    )
    for column, (mode, use) in enumerate(uses.items()):
        at_ms = 1e3 * use.step_s * np.arange(BINS) / BINS
        for host in range(num_hosts):
            axes = rows[host][column]
            for way, name in enumerate(("out", "in")):
                axes.plot(at_ms, 100 * use.rates[host, way] / bytes_per_s, label=name)
            axes.set_ylim(0, 110)
            axes.set_ylabel(f"host {host}, %" if column == 0 else "")
        rows[0][column].set_title(f"{mode}: {1e3 * use.step_s:.0f} ms")
        rows[-1][column].set_xlabel("ms since the step began")
    rows[0][0].legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
    print(f"plot: {path}")


ROLES = {"record": record}

if __name__ == "__main__":
    measured.serve(sys.argv[1:], ROLES)
