"""What a shard records in its timeline, if it has one (pscore/timeline.py)."""

from __future__ import annotations

from typing import Any

from pscore.timeline import Timeline
from pscore.types import FloatArray, Push
from psserver.clock import Add, Update
from psserver.pool import Buffer, Cell
from psserver.shard import Address
from psserver.store import Payload, SliceStore


class TimedStore(SliceStore):
    """A slice whose additions, steps and publications are recorded."""

    def __init__(self, *what: Any, timeline: Timeline, address: Address) -> None:
        """Starts as `SliceStore(*what)`.

        Args:
            *what: Its arguments.
            timeline: Where spans are recorded.
            address: Which slice it is.
        """
        self._timeline = timeline
        self._about: dict[str, Any] = {
            "job": address.job,
            "table": address.table,
            "slice": address.slice,
        }
        super().__init__(*what)

    def _add(self, action: Add, payload: Payload) -> Cell | None:
        begin_ns, nbytes = self._timeline.now_ns(), payload.data.nbytes
        cell = super()._add(action, payload)
        about: dict[str, Any] = {
            "worker": action.worker,
            "step": action.push.step,
            "nbytes": nbytes,
        }
        self._timeline.span(
            "aggregate", begin_ns, **self._about, **about, compressor=payload.compressor.name
        )
        return cell

    def _step(self, grad: FloatArray, update: Update) -> None:
        begin_ns = self._timeline.now_ns()
        super()._step(grad, update)
        self._timeline.span(
            "step", begin_ns, **self._about, version=update.version, nbytes=grad.nbytes
        )

    def _publish(self, buffer: Buffer, version: int, state: list[Cell]) -> None:
        begin_ns = self._timeline.now_ns()
        super()._publish(buffer, version, state)
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
