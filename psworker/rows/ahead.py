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

Division = tuple[IntArray, list[int]]  # Places by slice, and where those of each slice begin.


class RowsAhead:
    """The rows of one batch, of all tables of one optimizer."""

    def __init__(
        self, exchange: RowExchange, ids: Sequence[IdArray], divisions: Sequence[Division]
    ) -> None:
        """Requests the rows as they are now.

        Args:
            ids: By table: `(u,) uint64`, ascending.
            divisions: By table: the places of the ids of each slice.
        """
        self.is_used = False  # Whether a lookup has read from them.
        self._exchange = exchange
        self._ids, self._orders = ids, [order for order, _ in divisions]
        self._wanted = [each[order] for each, (order, _) in zip(ids, divisions, strict=True)]
        self._rows = [  # In the order of `_wanted`.
            np.empty((len(each), dim), np.float32)
            for each, dim in zip(ids, exchange.dims, strict=True)
        ]
        self._pulls: dict[int, RowPull] = {}  # Under way, by slice.
        self._spans: dict[int, list[slice]] = {}  # By slice: the range of each table's rows.
        self._versions: dict[int, int] = {}  # By slice: of the rows here.
        self._counts: list[int] | None = None  # Pushes that they are exact after; None: any.
        for spec in exchange.layout.slices:
            index = spec.index
            spans = [slice(edges[index], edges[index + 1]) for _, edges in divisions]
            if any(span.stop > span.start for span in spans):
                self._spans[index] = spans
                room = np.empty(sum(rows.size for rows in self._rows_of(spans)), np.float32)
                wanted = self._ids_of(spans)
                self._pulls[index] = exchange.request(
                    index, wanted, room, is_look=True, is_early=True
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
        known, order = self._ids[table], self._orders[table]
        is_whole = len(known) == len(ids) and bool((known == ids).all())
        places: IntArray | None = None
        if not is_whole:
            places = np.searchsorted(known, ids)
            if not len(known) or (known[np.minimum(places, len(known) - 1)] != ids).any():
                return False
        if self._counts != self._exchange.counts:
            self.confirm()
        self._land()
        self.is_used = True
        if places is None:
            out[order] = self._rows[table]
            return True
        where = np.empty(len(order), np.int64)
        where[order] = np.arange(len(order))
        np.take(self._rows[table], where[places], axis=0, out=out, mode="clip")
        return True

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
        return [ids[span] for ids, span in zip(self._wanted, spans, strict=True)]
