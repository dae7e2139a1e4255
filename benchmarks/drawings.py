"""Draws the modes, each from a simulated run, and the data planes: `python -m benchmarks.drawings`.

Two workers and one shard with one slice go through a few steps of the mode in simulated time: the
real state machines, a fixed time for each gradient, and a fixed time for each message. The events
of that run are drawn as SVG, all at the same scale. Nothing is measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.drawing import fragments, overview, peers, planes
from benchmarks.drawing.svg import HEAD, INK, LINE, PALE, arrow, words
from pscore.rules import RULES, parse_mode
from pssim.events import Event, What
from pssim.transcript import transcript

COMPUTE_S = (0.9, 1.35)  # Of worker 0 and worker 1: the second is 1.5 times as slow.
LATENCY_S = 0.12  # Of each message, one way.
# The mode that stands for a rule, and the steps of each worker; others have their defaults.
MODES: dict[str, tuple[str, int]] = {
    **{name: (name, 3) for name, rule in RULES.own.items() if not rule.gossip},
    "staleness": ("staleness(splits=1)", 3),
    "ssp": ("ssp(bound=1)", 4),
    "od": ("od(warmup=0)", 3),
    "ssd": ("ssd(steps=2, warmup=0)", 4),
    "cd": ("cd(steps=3, warmup=0)", 3),
    "local": ("local(steps=2)", 4),
    "slowmo": ("slowmo(steps=2)", 4),
    "diloco": ("diloco(steps=2)", 4),
    "delayed_nesterov": ("delayed_nesterov(steps=2)", 4),
}
# Arguments that have a page of their own.
VARIANTS: dict[str, tuple[str, int]] = {"overlap": ("diloco(steps=2, overlap=mirror)", 4)}

WIDTH, HEIGHT = 760, 236
LEFT, SCALE = 86, 101  # Pixels: where time 0 is, and a second.
WORKER_YS = (46, 174)
SHARD_Y = 110
BAR, BAND = 26, 22  # Heights of a worker's bars and of the shard's band.
LEGEND_Y = 220
COLORS = ("#0072b2", "#d55e00", "#009e73", "#a8518a")  # Of the steps.
VERSIONS = ("#dfe8f1", "#c3d4e6")
LABEL_WIDTH = 40  # The least width of a box with a word in it.


def draw(rule: str) -> str:
    """Returns the drawing of a rule, or of a variant, as SVG; the same at each call."""
    if rule in peers.MODES:
        return peers.draw(rule)
    if rule in fragments.MODES:
        return fragments.draw(rule)
    mode, steps = (MODES | VARIANTS)[rule]
    events = transcript(mode, steps=steps, compute_s=COMPUTE_S, latency_s=LATENCY_S)
    return _svg(mode, "\n".join([*_lanes(events), *_shard(events), *_arrows(mode, events)]))


# ----- parts of a drawing


def _lanes(events: Sequence[Event]) -> Iterator[str]:
    """Yields each worker's gradients as bars, and the waits between them."""
    for rank, y in enumerate(WORKER_YS):
        own = [event for event in events if event.worker == rank]
        spans = list(_spans(own))
        for index, (begin_s, end_s, step) in enumerate(spans):
            yield _box(begin_s, end_s, y, BAR, COLORS[step % len(COLORS)])
            yield words(_mid(begin_s, end_s), y, f"step {step}", "white", weight="bold")
            if index + 1 < len(spans):
                next_s = spans[index + 1][0]
            else:
                next_s = max([end_s, *(e.time_s for e in own if e.what is What.PULL_LANDED)])
            if SCALE * (next_s - end_s) > 1:
                yield _box(end_s, next_s, y, BAR - 8, PALE, LINE)
                if SCALE * (next_s - end_s) >= LABEL_WIDTH:
                    yield words(_mid(end_s, next_s), y, "waits", INK)


def _spans(events: Sequence[Event]) -> Iterator[tuple[float, float, int]]:
    """Yields begin, end and step of each gradient of one worker."""
    begins = {e.step: e.time_s for e in events if e.what is What.COMPUTE_STARTED}
    for event in events:
        if event.what is What.COMPUTE_ENDED and event.step is not None:
            yield begins[event.step], event.time_s, event.step


def _shard(events: Sequence[Event]) -> Iterator[str]:
    """Yields the shard's versions as a band, from the update that makes each."""
    updates = [event for event in events if event.what is What.UPDATED]
    end_s = max(event.time_s for event in events) + LATENCY_S
    begins = [(0.0, 0), *((event.time_s, event.version or 0) for event in updates)]
    for index, (begin_s, version) in enumerate(begins):
        until_s = begins[index + 1][0] if index + 1 < len(begins) else end_s
        if until_s <= begin_s:
            continue
        yield _box(begin_s, until_s, SHARD_Y, BAND, VERSIONS[version % 2], radius=0)
        yield words(_x(begin_s) + 4, SHARD_Y, f"v{version}", INK, anchor="start", size=10)


def _arrows(mode: str, events: Sequence[Event]) -> Iterator[str]:
    """Yields pushes and the weights that are pulled."""
    rule = parse_mode(mode)
    steps = {event.step or 0 for event in events}
    mixes = len({rule.plan(step).compress for step in steps}) > 1  # Thin are the compressed ones.
    sent = {(e.worker, e.step): e for e in events if e.what is What.PUSH_SENT}
    answered: dict[int, list[Event]] = {0: [], 1: []}
    for event in events:
        rank = event.worker
        if rank is None:
            continue
        edge, shard = _edges(rank)
        if event.what in (What.PUSH_COUNTED, What.PUSH_TOO_LATE):
            push = sent[rank, event.step]
            color = COLORS[_last_step(events, push) % len(COLORS)]
            is_thin = mixes and rule.plan(event.step or 0).compress
            yield _arrow(push.time_s, edge, event.time_s, shard, color, 1.2 if is_thin else 2.2)
        elif event.what is What.PULL_ANSWERED:
            answered[rank].append(event)
        elif event.what is What.PULL_LANDED and answered[rank]:
            reply = answered[rank].pop(0)
            yield _arrow(reply.time_s, shard, event.time_s, edge, INK, 1.3, dash="4 3")


def _last_step(events: Sequence[Event], push: Event) -> int:
    """Returns the step whose gradient a worker had just computed when it sent a push."""
    return max(
        event.step or 0
        for event in events
        if event.what is What.COMPUTE_ENDED
        and event.worker == push.worker
        and event.time_s <= push.time_s
    )


def _edges(rank: int) -> tuple[float, float]:
    """Returns where arrows meet a worker's bars and the shard's band, in pixels."""
    y = WORKER_YS[rank]
    side = 1 if y < SHARD_Y else -1
    return y + side * BAR / 2, SHARD_Y - side * BAND / 2


# ----- SVG


def _x(time_s: float) -> float:
    return LEFT + SCALE * time_s


def _mid(begin_s: float, end_s: float) -> float:
    return _x((begin_s + end_s) / 2)


def _box(
    begin_s: float, end_s: float, y: float, height: float, fill: str, line: str = "none",
    radius: int = 3,
) -> str:  # fmt: skip
    return (
        f'<rect x="{_x(begin_s):.1f}" y="{y - height / 2:.1f}" '
        f'width="{SCALE * (end_s - begin_s):.1f}" height="{height:.1f}" rx="{radius}" '
        f'fill="{fill}" stroke="{line}"/>'
    )


def _arrow(
    begin_s: float, y: float, end_s: float, end_y: float, color: str, width: float,
    *, dash: str = "none",
) -> str:  # fmt: skip
    return arrow(_x(begin_s), y, _x(end_s), end_y, color, width, dash)


@dataclass(frozen=True, slots=True)
class _Sign:
    """An entry of the legend."""

    mark: str
    text: str
    width: int


def _legend() -> Iterator[str]:
    y = LEGEND_Y
    signs = (
        _Sign(f'<rect x="0" y="{y - 6}" width="22" height="12" rx="3" fill="{COLORS[0]}"/>',
              "computes a gradient", 172),
        _Sign(f'<rect x="0" y="{y - 6}" width="22" height="12" rx="3" fill="{PALE}" '
              f'stroke="{LINE}"/>', "waits", 86),
        _Sign(arrow(0, y, 26, y, COLORS[0], 2.2, "none"), "push", 82),
        _Sign(arrow(0, y, 26, y, INK, 1.3, "4 3"), "pulled weights", 142),
        _Sign(f'<rect x="0" y="{y - 6}" width="22" height="12" fill="{VERSIONS[1]}"/>',
              "version on the shard", 0),
    )  # fmt: skip
    x = LEFT
    for sign in signs:
        about = words(32, y, sign.text, INK, anchor="start")
        yield f'<g transform="translate({x} 0)">{sign.mark}{about}</g>'
        x += sign.width


def _svg(title: str, body: str) -> str:
    names = ("worker 0", "worker 1")
    labels = [
        *(words(12, y, n, INK, anchor="start") for n, y in zip(names, WORKER_YS, strict=True)),
        words(12, SHARD_Y, "shard", INK, anchor="start"),
        words(WIDTH - 12, 16, title, INK, anchor="end", weight="bold"),
        words(LEFT, 16, "time &#8594;", INK, anchor="start", size=10),
    ]
    head = HEAD.format(width=WIDTH, height=HEIGHT, title=f"{title}: two workers and one shard")
    return head + "\n".join([*labels, body, *_legend()]) + "\n</svg>\n"


def main() -> None:
    """Draws all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"), help="their folder")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rules = (*MODES, *VARIANTS, *peers.MODES, *fragments.MODES)
    texts = {f"rule-{rule}.svg": draw(rule) for rule in rules}
    texts |= {f"plane-{plane}.svg": planes.draw(plane) for plane in planes.PLANES}
    texts["overview.svg"] = overview.draw()
    paths = []
    for file, text in texts.items():
        path = args.out / file
        path.write_text(text, encoding="utf-8")
        paths.append(path)
        print(f"drawing: {path}, {path.stat().st_size} bytes")
    if args.json:
        print(json.dumps({path.name: path.stat().st_size for path in paths}))


if __name__ == "__main__":
    main()
