"""Draws the rounds of two fragments, from a simulated run; see drawings.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.drawing.svg import HEAD, INK, LINE, PALE, arrow, words
from pssim.case import TWO_SLICES
from pssim.events import Event, What
from pssim.transcript import transcript

# The variants of the modes with fragments, and the steps of each worker.
MODES: dict[str, tuple[str, int]] = {
    "fragments": ("diloco(steps=4, fragments=2, overlap=mirror, delay=1)", 9)
}
COMPUTE_S = (0.62, 0.7)  # Of worker 0 and worker 1.
LATENCY_S = 0.1  # Of each message, one way.

WIDTH, HEIGHT, LEFT, SCALE = 760, 276, 86, 98
WORKER_YS, BAND_YS = (42, 212), (105, 149)
BAR, BAND, LEGEND_Y = 26, 22, 258
BARS = "#707070"
LABEL_WIDTH = 48  # The least width of a band with a word in it.
COLORS = ("#0072b2", "#d55e00")  # Of the fragments' moves.
VERSIONS = (("#dfe8f1", "#c3d4e6"), ("#f9e6d9", "#f2cdb4"))  # Of the fragments' rounds.


def draw(variant: str) -> str:
    """Returns the drawing as SVG; the same at each call."""
    mode, steps = MODES[variant]
    events = transcript(
        mode, steps=steps, compute_s=COMPUTE_S, latency_s=LATENCY_S, shapes=TWO_SLICES
    )
    body = [*_lanes(events), *_bands(events), *_arrows(events), *_legend()]
    names = [
        *(words(12, y, f"worker {n}", INK, anchor="start") for n, y in enumerate(WORKER_YS)),
        *(words(12, y, f"fragment {n}", INK, anchor="start") for n, y in enumerate(BAND_YS)),
        words(WIDTH - 12, 16, mode, INK, anchor="end", weight="bold"),
        words(LEFT, 16, "time &#8594;", INK, anchor="start", size=10),
    ]
    title = f"{mode}: two workers, and two fragments on one shard"
    head = HEAD.format(width=WIDTH, height=HEIGHT, title=title)
    return head + "\n".join([*names, *body, "</svg>\n"])


def _x(time_s: float) -> float:
    return LEFT + SCALE * time_s


def _lanes(events: Sequence[Event]) -> Iterator[str]:
    """Yields each worker's gradients as bars, and the waits between them."""
    for rank, y in enumerate(WORKER_YS):
        own = [event for event in events if event.worker == rank]
        begins = [event for event in own if event.what is What.COMPUTE_STARTED]
        ends = [event.time_s for event in own if event.what is What.COMPUTE_ENDED]
        after = [*(event.time_s for event in begins[1:]), ends[-1]]
        for event, end_s, next_s in zip(begins, ends, after, strict=True):
            yield _box(event.time_s, end_s, y, BAR, BARS, radius=3)
            middle = _x((event.time_s + end_s) / 2)
            yield words(middle, y, f"step {event.step}", "white", weight="bold")
            if SCALE * (next_s - end_s) > 1:
                yield _box(end_s, next_s, y, BAR - 8, PALE, LINE, radius=3)


def _bands(events: Sequence[Event]) -> Iterator[str]:
    """Yields the rounds of each fragment as a band, from the update that makes each."""
    until_s = max(event.time_s for event in events) + LATENCY_S
    for fragment, y in enumerate(BAND_YS):
        updates = [e for e in events if e.what is What.UPDATED and e.slice == fragment]
        begins = [(0.0, 0), *((event.time_s, event.version or 0) for event in updates)]
        ends = [*(begin_s for begin_s, _ in begins[1:]), until_s]
        for (begin_s, version), end_s in zip(begins, ends, strict=True):
            yield _box(begin_s, end_s, y, BAND, VERSIONS[fragment][version % 2])
            if SCALE * (end_s - begin_s) >= LABEL_WIDTH:
                yield words(_x(begin_s) + 4, y, f"round {version}", INK, anchor="start", size=10)


def _arrows(events: Sequence[Event]) -> Iterator[str]:
    """Yields the moves that are pushed, and the weights that are pulled."""
    sent: dict[tuple[What, int | None, int | None], list[Event]] = {}
    for event in events:
        if event.what in (What.PUSH_SENT, What.PULL_ANSWERED):
            sent.setdefault((event.what, event.worker, event.slice), []).append(event)
        elif event.what in (What.PUSH_COUNTED, What.PULL_LANDED):
            is_push = event.what is What.PUSH_COUNTED
            kind = What.PUSH_SENT if is_push else What.PULL_ANSWERED
            waiting = sent.get((kind, event.worker, event.slice), [])
            if waiting and event.worker is not None and event.slice is not None:
                yield _arrow(waiting.pop(0), event, is_push=is_push)


def _arrow(begin: Event, end: Event, *, is_push: bool) -> str:
    assert end.worker is not None
    assert end.slice is not None
    worker, band = WORKER_YS[end.worker], BAND_YS[end.slice]
    side = 1 if worker < band else -1
    worker, band = worker + side * BAR // 2, band - side * BAND // 2
    color = COLORS[end.slice]
    if is_push:
        return arrow(_x(begin.time_s), worker, _x(end.time_s), band, color, 2.2)
    return arrow(_x(begin.time_s), band, _x(end.time_s), worker, color, 1.3, "4 3")


def _box(
    begin_s: float,
    end_s: float,
    y: float,
    height: float,
    fill: str,
    line: str = "none",
    *,
    radius: int = 0,
) -> str:
    return (
        f'<rect x="{_x(begin_s):.1f}" y="{y - height / 2:.1f}" '
        f'width="{SCALE * (end_s - begin_s):.1f}" height="{height}" rx="{radius}" '
        f'fill="{fill}" stroke="{line}"/>'
    )


def _legend() -> Iterator[str]:
    y = LEGEND_Y
    for fragment, x in enumerate((LEFT, LEFT + 170)):
        yield arrow(x, y, x + 26, y, COLORS[fragment], 2.2)
        yield words(x + 34, y, f"move of fragment {fragment}", INK, anchor="start")
    yield arrow(LEFT + 340, y, LEFT + 366, y, INK, 1.3, "4 3")
    yield words(LEFT + 374, y, "pulled weights, landing", INK, anchor="start")
    x = LEFT + 530
    yield f'<rect x="{x}" y="{y - 6}" width="22" height="12" rx="3" fill="{PALE}" stroke="{LINE}"/>'
    yield words(x + 30, y, "waits", INK, anchor="start")
