"""What a shard records in its timeline, if it has one (pscore/observe/timeline.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pscore.observe.timeline import Timeline
from pscore.types import FloatArray, Push
from psserver.decisions.orders import Update
from psserver.decisions.shard import Address
from psserver.slices.base import WeightedGrad
from psserver.slices.pool import Buffer, Cell
from psserver.slices.store import SliceStore


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

    def _sum(self, former: Cell | None, grads: Sequence[WeightedGrad], out: FloatArray) -> None:
        begin_ns = self._timeline.now_ns()
        super()._sum(former, grads, out)
        add, payload = grads[0]
        about: dict[str, Any] = {
            "workers": [add.worker for add, _ in grads],
            "step": add.push.step,
            "nbytes": sum(payload.data.nbytes for _, payload in grads),
        }
        self._timeline.span(
            "aggregate", begin_ns, **self._about, **about, compressor=payload.compressor.name
        )

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
