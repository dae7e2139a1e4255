"""The row tables of one optimizer as a companion of the dense part: prepared, pushed and pulled.

A forward pass pulls the rows of its batch, as they are after this worker's last push; a step pushes
the gradient of these rows to every row slice. The hyper-parameters travel with each push.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import numpy as np
import torch

from pscore.compressors.none import NoCompression
from pscore.errors import ConfigError
from pscore.rows.batches import distinct, divide
from pscore.rows.payload import OCCURRENCES_MAX, encode_push
from pscore.rows.spec import Rows
from pscore.rules.base import Rule
from pscore.table_spec import TableSpec
from pscore.types import FloatArray, IntArray, Role, TensorSpec
from psworker.connection.membership import taking_part
from psworker.connection.membership.session import Session
from psworker.rows.ahead import Division, RowsAhead
from psworker.rows.gradients import RowGradient
from psworker.rows.hyper import counterpart, hyper_of
from psworker.rows.lookups import IdArray
from psworker.rows.modules import EmbeddingTable
from psworker.rows.row_exchange import RowExchange

Run = Callable[[Callable[[], None]], None]
Places = IntArray | slice
LOADED_NBYTES = 1 << 25  # Length of a message with given rows.
AHEAD_MAX = 2  # Batches: the one that is computed now, and the next.
NOWHERE = slice(0, 0)
NO_IDS: IdArray = np.zeros(0, np.uint64)
NO_BATCH = torch.zeros(0, dtype=torch.int64)


class ShardRows:
    """The rows of one table on the shards, as its module looks them up."""

    def __init__(self, tables: RowTables, index: int) -> None:
        self.tables = tables  # The row tables of one optimizer, which it is one of.
        self.index = index  # Its number among them.

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Returns itself: a copy of a model looks its rows up in the same table."""
        return self

    def __reduce__(self) -> str:
        """Refuses to be pickled.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "a model with row tables cannot be pickled, its rows are on the shards; save "
            "model.state_dict(), and take a checkpoint of the job for the rows"
        )

    def read(self, ids: IdArray, out: FloatArray, *, is_look: bool) -> None:
        """Pulls the rows of `ids`, `(u,) uint64`, ascending, into `out`."""
        self.tables.read(self.index, ids, out, is_look=is_look)


class EndedRows:
    """The rows of a table of a job that this worker has left."""

    def __init__(self, name: str) -> None:
        self._name = name

    def read(self, ids: IdArray, out: FloatArray, *, is_look: bool) -> None:
        """Refuses to read.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"this worker has left the job, and the rows of table {self._name!r} are on its "
            "shards; look rows up before psworker.shutdown()"
        )


class RowTables:
    """The row tables of one optimizer."""

    exchange: RowExchange

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        tables: Sequence[EmbeddingTable],
        groups: Sequence[int],
        rule: Rule,
        session: Session,
        run: Run,
    ) -> None:
        """Declares the tables at every shard.

        Args:
            name: Name of the job's table that they are together.
            optimizer: The optimizer whose groups hold their placeholders.
            run: Runs a function; if this worker was declared lost, it rejoins and runs it again.

        Raises:
            ConfigError: An argument of a table, or the mode, cannot be.
            JobMismatchError: The job has other row tables; names the difference.
        """
        self._optimizer, self._tables, self._run = optimizer, list(tables), run
        self._hyper = hyper_of(counterpart(optimizer), optimizer.param_groups)
        self._gradients: list[RowGradient | None] = []  # Gradients of the step under way, by table.
        spec = TableSpec(
            name=name,
            tensors=tuple(map(_describe, tables, groups)),
            num_shards=len(session.links),
            rule=rule,
            compressor=NoCompression(),
            optimizer=counterpart(optimizer),
            num_groups=len(optimizer.param_groups),
            content=Rows(tables=tuple(table.declaration(table.seed_number) for table in tables)),
        )
        self.exchange = RowExchange(session, spec)  # Pushes and pulls.
        self._seeds = [table.seed_number for table in tables]
        self._ahead: list[RowsAhead] = []  # Batches to come, the oldest first.
        self._divided: dict[int, tuple[IdArray, dict[int, Places]]] = {}  # By table.
        self._num_steps = 0  # Steps of this worker: the age of rows in caches.

    # ----- as a companion: psworker/job/companions.py describes arguments and errors

    @property
    def by_step(self) -> bool:
        """Whether the rows' mode is one by step."""
        return self.exchange.spec.rule.by_step

    @property
    def has_gradient(self) -> bool:
        """Whether backward has made a gradient of any row since they were cleared."""
        return any(table.weight.grad is not None for table in self._tables)

    def start(self) -> None:
        """Uploads the first rows from the lowest rank."""
        self.exchange.follow()
        session, name = self.exchange.session, self.exchange.spec.name
        is_new = name not in session.known.tables
        if is_new and any(table.pretrained is not None for table in self._tables):
            # Parts of them are no first rows for anybody.
            bring = functools.partial(self._upload, given=True)
            is_mine = taking_part.is_lowest(session, name)
            taking_part.bring_once(session, name, bring, is_mine=is_mine)
        elif is_new and session.process_rank == 0:
            self._upload(given=False)
        elif is_new and session.group.is_leader:
            self.exchange.first_answers.upload = functools.partial(self._upload, given=False)

    def ask(self) -> int:
        """Asks every slice with which step this worker begins; from its answer on it waits for it.

        It brings the first version of every slice, which another worker may upload.
        """
        step = self.exchange.ask()
        self.exchange.first_answers.upload = None
        for index, table in enumerate(self._tables):
            table.source = ShardRows(self, index)
        return step

    def begin_at(self, step: int | None) -> Callable[[], None]:
        """Announces to every slice the step with which this worker begins, after `ask`."""
        return self.exchange.begin_at(step)

    def give_up_step(self) -> None:
        """Records that the step under way is given up, of which rows may have left."""
        self.exchange.missed.give_up_rest(self.exchange.counts)

    def begin_again(self) -> None:
        """Forgets pushes under way and rows, after this worker has joined the job again.

        A job without an update may have begun anew: then its first rows come from here too.
        """
        self.exchange.follow()
        if not (self.exchange.has_weights or self.exchange.has_updates):
            self.start()
        self._ahead.clear()
        for table in self._tables:
            if table.cache is not None:
                table.cache.clear()

    def zero_grad(self) -> None:
        """Clears the gradients."""
        for table in self._tables:
            table.gradients.clear(table.weight)

    def prepare(self) -> None:
        """Reads hyper-parameters and gradients of the step under way, before anything has left.

        Raises:
            TableFullError: A table had no room for rows of the last step.
        """
        self.exchange.flush()
        groups = self._optimizer.param_groups
        if len(groups) != len(self._hyper):
            raise ConfigError(
                f"the optimizer of rows has {len(groups)} parameter groups, and training began "
                f"with {len(self._hyper)}; make DistributedOptimizer with all of them"
            )
        self._hyper = hyper_of(self.exchange.spec.optimizer, groups)
        self._gradients = [table.gradients.read(table.weight, table.name) for table in self._tables]

    def push(self, samples: float, *, skips: bool) -> None:
        """Pushes the gradients to every slice, also those without rows."""
        if skips and not self.exchange.spec.rule.by_step:
            return  # No worker waits for its push.
        gradients = [None for _ in self._tables] if skips else self._gradients
        present = sum((gradient is not None) << i for i, gradient in enumerate(gradients))
        rows = [
            RowGradient.of_none(dim) if gradient is None else gradient
            for gradient, dim in zip(gradients, self.exchange.dims, strict=True)
        ]
        places = [self._divide(index, each.ids) for index, each in enumerate(rows)]
        for spec in self.exchange.layout.slices:
            pairs = zip(rows, places, strict=True)
            parts = [each.take(of.get(spec.index, NOWHERE)) for each, of in pairs]
            self.exchange.push(
                spec.index,
                _encode(parts),
                hyper=self._hyper,
                present=present,
                samples=0.0 if skips else samples,
            )
        self._num_steps += 1
        self._ahead = [ahead for ahead in self._ahead if not ahead.is_used]
        for ahead in self._ahead:
            ahead.confirm()

    def finish(self) -> None:
        """Ends the step: a scheduler of the optimizer may follow."""
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        for table in self._tables:
            table.pretrained = None
        self.exchange.missed.end_step()

    def flush(self) -> None:
        """Waits until the last pushes are counted."""
        self.exchange.flush()

    def locate(self, step: int) -> None:
        """Sets the step at which all workers are, of a state that was loaded; rows stay."""
        for spec in self.exchange.layout.slices:
            self.exchange.load(spec.index, Role.STATE, step=step)
        self.exchange.flush()

    def end(self) -> None:
        """Ends all lookups: this worker leaves the job."""
        for table in self._tables:
            table.source = EndedRows(table.name)

    # ----- rows

    def read(self, index: int, ids: IdArray, out: FloatArray, *, is_look: bool) -> None:
        """Pulls rows of one table, as they are after this worker's last push.

        Args:
            ids: `(u,) uint64`, ascending.
            out: `(u, dim) float32`.

        Raises:
            PacelineError: A shard refused something, or does not answer.
        """
        cache = self._tables[index].cache
        pull = functools.partial(self._pull, index, is_look=is_look)

        def read() -> None:
            if is_look:
                pull(ids, out)
            elif any(ahead.read(index, ids, out) for ahead in self._ahead):
                return
            elif cache is None:
                pull(ids, out)
            else:
                cache.read(ids, out, self._num_steps, pull)

        self._run(read)

    def _pull(self, index: int, ids: IdArray, out: FloatArray, *, is_look: bool) -> None:
        """Pulls rows of one table; as `read`, without what this worker has already."""
        calls = []
        for number, places in self._divide(index, ids).items():
            wanted = [NO_IDS] * len(self._tables)
            wanted[index] = ids[places]
            rows = out
            if not isinstance(places, slice):
                rows = np.empty((len(places), out.shape[1]), np.float32)
            call = self.exchange.request(number, wanted, rows.reshape(-1), is_look=is_look)
            calls.append((number, places, rows, call))
        for number, places, rows, call in calls:
            self.exchange.wait(number, call)
            if rows is not out:
                out[places] = rows

    def prefetch(self, batches: Mapping[int, torch.Tensor]) -> None:
        """Requests the rows of a batch to come.

        Args:
            batches: By table: ids, `(n,) int64`.

        Raises:
            PacelineError: A shard refused something, or does not answer.
        """
        wanted, divisions = [], []
        for index, table in enumerate(self._tables):
            batch = batches.get(index, NO_BATCH).contiguous().numpy().view(np.uint64)
            ids, _, _ = distinct(batch, table.padding_idx)
            wanted.append(ids)
            divisions.append(self._order(index, ids))

        def request() -> None:
            self._ahead.append(RowsAhead(self.exchange, wanted, divisions))

        self._run(request)
        del self._ahead[:-AHEAD_MAX]

    def _order(self, index: int, ids: IdArray) -> Division:
        """Returns the places of the ids of a table by slice, and the bounds of each slice."""
        return divide(ids, self._seeds[index], len(self.exchange.layout.slices))

    def _divide(self, index: int, ids: IdArray) -> dict[int, Places]:
        """Returns the places of the ids that each slice owns, where it owns some.

        Those of the last ids of each table are kept: a push is mostly of the ids of a pull.
        """
        known = self._divided.get(index)
        if known is None or known[0] is not ids:
            order, edges = self._order(index, ids)
            bounds = enumerate(itertools.pairwise(edges))
            parts: dict[int, Places] = {
                owner: order[start:stop] for owner, (start, stop) in bounds if start < stop
            }
            if len(edges) == 2:  # noqa: PLR2004  # One slice.
                parts = dict.fromkeys(parts, slice(None))
            self._divided[index] = known = ids, parts
        return known[1]

    def _upload(self, *, given: bool) -> None:
        """Makes the first version of every slice, with given rows if a table has some."""
        for spec in self.exchange.layout.slices if not given else ():
            self.exchange.load(spec.index, Role.WEIGHTS)
        for index, table in enumerate(self._tables if given else ()):
            rows = table.pretrained
            ids = np.arange(0 if rows is None else len(rows), dtype=np.uint64)
            places = self._divide(index, ids)
            for spec in self.exchange.layout.slices:
                self._load(index, spec.index, ids[places.get(spec.index, NOWHERE)], rows)
        self.exchange.flush()

    def _load(self, index: int, slice_: int, ids: IdArray, rows: FloatArray | None) -> None:
        """Sends given rows of one table and slice, in messages of bounded length."""
        dim = self.exchange.dims[index]
        size = max(1, LOADED_NBYTES // (4 * dim))
        for start in range(0, max(1, len(ids)), size):
            wanted = ids[start : start + size]
            parts = [RowGradient.of_none(each) for each in self.exchange.dims]
            if rows is not None:
                counts = np.ones(len(wanted), np.int64)
                parts[index] = RowGradient(wanted, counts, rows[wanted.view(np.int64)])
            self.exchange.load(slice_, Role.STATE, _encode(parts))


def _encode(parts: Sequence[RowGradient]) -> list[memoryview]:
    """Returns the payload of one slice: some rows of each table."""
    occurrences = [np.minimum(each.counts, OCCURRENCES_MAX).astype(np.uint16) for each in parts]
    return encode_push([each.ids for each in parts], [each.values for each in parts], occurrences)


def _describe(table: EmbeddingTable, group: int) -> TensorSpec:
    shape = (table.num_embeddings or 0, table.embedding_dim)
    return TensorSpec(name=table.name, shape=shape, dtype="float32", group=group)
