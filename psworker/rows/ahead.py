"""The rows of the next batch, pulled while this one is computed, and exact when they are used.

They are pulled early, at the version v that the shards have then. Once this worker has pushed its
step, it asks for those that have changed since v, and waits for them as for any rows of that step.
So the rows have the same bits as without prefetching, and most of their bytes came while the worker
computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pscore.rows.payload import decode_values
from pscore.types import FloatArray, IntArray
from psworker.rows.lookups import IdArray
from psworker.rows.row_exchange import RowExchange, RowPull


class RowsAhead:
    """The rows of one batch, of all tables of one optimizer.

    Attributes:
        is_used: Whether a lookup has read from them.
    """

    def __init__(
        self, exchange: RowExchange, ids: Sequence[IdArray], slices: Sequence[IntArray]
    ) -> None:
        """Requests the rows as they are now.

        Args:
            ids: By table: `(u,) uint64`, those of each slice together and ascending.
            slices: By table: the slice of each id.
        """
        self.is_used = False
        self._exchange = exchange
        self._ids = ids
        self._rows = [
            np.empty((len(each), dim), np.float32)
            for each, dim in zip(ids, exchange.dims, strict=True)
        ]
        self._sorted: dict[int, IntArray] = {}
        self._pulls: dict[int, RowPull] = {}  # Under way, by slice.
        self._spans: dict[int, list[slice]] = {}  # By slice: the range of each table's rows.
        self._versions: dict[int, int] = {}  # By slice: of the rows here.
        self._counts: list[int] | None = None  # Pushes that they are exact after; None: any.
        for spec in exchange.layout.slices:
            ends = [np.searchsorted(of, [spec.index, spec.index + 1]).tolist() for of in slices]
            spans = [slice(start, stop) for start, stop in ends]
            if any(span.stop > span.start for span in spans):
                self._spans[spec.index] = spans
                room = np.empty(sum(rows.size for rows in self._rows_of(spans)), np.float32)
                wanted = self._ids_of(spans)
                self._pulls[spec.index] = exchange.request(
                    spec.index, wanted, room, is_look=True, is_early=True
                )

    def confirm(self) -> None:
        """Requests the rows that have changed, as they are after this worker's last push.

        Raises:
            PacelineError: A shard refused something, or does not answer.
        """
        self._land()
        self._counts = list(self._exchange.counts)
        for index, spans in self._spans.items():
            since, nothing = self._versions[index], np.zeros(0, np.float32)
            self._pulls[index] = self._exchange.request(
                index, self._ids_of(spans), nothing, since=since
            )

    def read(self, table: int, ids: IdArray, out: FloatArray) -> bool:
        """Copies rows into `out`, as they are after this worker's last push.

        Args:
            ids: `(u,) uint64`, distinct, in any order.
            out: `(u, dim) float32`.

        Returns:
            Whether all of them are among the rows of the batch; else nothing is copied.

        Raises:
            PacelineError: A shard refused something, or does not answer.
        """
        known = self._ids[table]
        if len(ids) > len(known):
            return False
        places = self._find(table, ids)
        if (known[places] != ids).any():
            return False
        if self._counts != self._exchange.counts:
            self.confirm()
        self._land()
        self.is_used = True
        np.take(self._rows[table], places, axis=0, out=out, mode="clip")
        return True

    # ----- inside

    def _find(self, table: int, ids: IdArray) -> IntArray:
        """Returns the places of ids among those of a table; of one that is not here any place."""
        known = self._ids[table]
        if len(known) == len(ids) and (known == ids).all():
            return np.arange(len(ids))
        if table not in self._sorted:
            self._sorted[table] = np.argsort(known)
        order = self._sorted[table]
        places = np.searchsorted(known, ids, sorter=order)
        return order[np.minimum(places, len(known) - 1)]

    def _land(self) -> None:
        """Waits for the pulls under way, and applies their answers."""
        for index, pull in self._pulls.items():
            reply = self._exchange.wait(index, pull)
            payload = np.frombuffer(pull.answer, np.uint8)
            rows = self._rows_of(self._spans[index])
            decode_values(payload, pull.since, self._exchange.dims, rows)
            self._versions[index] = int(reply.version)
        self._pulls.clear()

    def _rows_of(self, spans: Sequence[slice]) -> list[FloatArray]:
        return [rows[span] for rows, span in zip(self._rows, spans, strict=True)]

    def _ids_of(self, spans: Sequence[slice]) -> list[IdArray]:
        return [ids[span] for ids, span in zip(self._ids, spans, strict=True)]
