"""Spans that a shard records in its timeline, if it has one (pscore/observe/timeline.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pscore.observe.timeline import Timeline
from pscore.types import Push
from psserver.decisions.orders import Update
from psserver.decisions.shard import Address
from psserver.decisions.window import Times
from psserver.slices.base import Observer, WeightedGrad


class Tracer(Observer):
    """Records the additions, optimizer steps and publications of one slice as spans."""

    def __init__(self, timeline: Timeline, address: Address, numel: int) -> None:
        self._timeline = timeline
        self._nbytes = 4 * numel
        self._about: dict[str, Any] = {
            "job": address.job,
            "table": address.table,
            "slice": address.slice,
        }

    @contextmanager
    def adding(self, grads: Sequence[WeightedGrad]) -> Iterator[None]:
        """Records the span `aggregate`, with the workers whose gradients are added."""
        begin_ns = self._timeline.now_ns()
        yield
        add, payload = grads[0]
        self._timeline.span(
            "aggregate",
            begin_ns,
            **self._about,
            workers=[add.worker for add, _ in grads],
            step=add.push.step,
            nbytes=sum(payload.data.nbytes for _, payload in grads),
            compressor=payload.compressor.name,
        )

    @contextmanager
    def stepping(self, update: Update) -> Iterator[None]:
        """Records the span `step`, with the version that it makes."""
        begin_ns = self._timeline.now_ns()
        yield
        version = update.version
        self._timeline.span("step", begin_ns, **self._about, version=version, nbytes=self._nbytes)

    @contextmanager
    def publishing(self, version: int) -> Iterator[None]:
        """Records the span `publish`."""
        begin_ns = self._timeline.now_ns()
        yield
        self._timeline.span("publish", begin_ns, **self._about, version=version)


def note_push(timeline: Timeline, begin_ns: int, address: Address, push: Push, nbytes: int) -> None:
    """Records how a push was read, checked and decided about."""
    timeline.span(
        "decode",
        begin_ns,
        job=address.job,
        table=address.table,
        slice=address.slice,
        worker=push.worker,
        step=push.step,
        role=push.role.name.lower(),
        nbytes=nbytes,
    )


def note_round(timeline: Timeline, address: Address, version: int, times: Times) -> None:
    """Records a round with a quorum that has closed: all of it, and its window.

    Args:
        timeline: Where spans are recorded; on the clock of `times`.
        version: Version that the round makes.
    """
    begins_s = {"round": times.opened_s, "window": times.quorum_s}
    for name, begin_s in begins_s.items():
        if begin_s is not None:
            timeline.span(
                name,
                round(1e9 * begin_s),
                end_ns=round(1e9 * times.closed_s),
                track=f"{name}, slice {address.slice}",
                job=address.job,
                table=address.table,
                slice=address.slice,
                version=version,
            )
