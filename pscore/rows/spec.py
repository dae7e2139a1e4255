"""The declaration of a table of rows: one job's table with one row slice or more on each shard.

A table has one or more *row tables*, each declared as a tensor of shape (num_rows, dim); num_rows
0 says that any 64-bit id is a row. A row that was never updated is a pure function of the seed and
its id (init.py), so memory is needed for updated rows only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from pscore.compressors.base import Compressor
from pscore.content import Content, Stepping
from pscore.errors import ConfigError
from pscore.net.wire import PAYLOAD_NBYTES_MAX
from pscore.partition import Layout, fingerprint
from pscore.rows.init import parse_init
from pscore.rows.optimizers import ROW_OPTIMIZERS, RowOptimizer, RowSGD
from pscore.rows.partition import BUCKETS, bucket_range, shares_of
from pscore.rows.payload import Owned, RowRequest, decode_pull
from pscore.rules.base import Rule
from pscore.types import ByteArray, SliceSpec, TensorSegment, TensorSpec

ROW_TABLE = "paceline.row_table"  # In the metadata of an exported table: its declaration.
ROWS_MAX_DEFAULT = 1 << 20  # For a table without a bound on its ids.
ROWS_MAX = 1 << 31  # In one slice; places of rows are int32.
TABLES_MAX = 1024
DIMENSIONS = 2
DIM_MAX = 1 << 16
PARTS_MAX = 64
RULES = ("ssgd", "asgd", "ssp")
HEADER_NBYTES = 16  # A row's header in a slab: id, version, flags and times seen.
INDEX_NBYTES = 49  # The most that a row takes in index and notes.
FLOAT_NBYTES = 4
COUNT_MAX, TTL_MAX = 1 << 16, 1 << 31
WAITING_MIN = 4  # Ids of a bucket that may wait.
LRU_MIN = 4 * BUCKETS  # Four rows a bucket.
COUNTER: RowOptimizer = RowSGD()  # An id that waits is a row of one number: pushes add to it.
MARGIN_DEVIATIONS, MARGIN_ROWS = 6.0, 64  # Above the mean number of rows in a slice.


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTable:
    """The declaration of a row table beside its name and shape."""

    seed: int = 0  # Seed of the first values and of the buckets.
    init: str = "normal(1)"  # First values: `zeros`, `uniform(a)` for U(-a, a), or `normal(std)`.
    max_rows: int = 0  # Most updated rows on all shards; 0: `num_rows` of a fixed table, else 2^20.
    max_norm: float = 0.0  # Largest Euclidean norm of a row; 0: none.
    min_count: int = 0  # Pushes with an id's gradient that make its row; 0 and 1: the first.
    ttl: int = 0  # Updates after which a row goes that none of them has changed; 0: it stays.
    # Most updated rows on all shards, above which the oldest go, in each bucket those above its
    # share; 0: there is no bound.
    lru: int = 0
    # The id that workers look up as zero and send no gradient of; None: there is none.
    padding_idx: int | None = None


@dataclass(frozen=True)
class Rows(Content):
    """Rows of one or more tables, by id."""

    name = "rows"
    tables: tuple[RowTable, ...] = ()  # One for each tensor of the declaration, in its order.
    # Row slices on each shard: more than one where a push of one step to one shard would be longer
    # than a frame's payload.
    parts: int = 1

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Returns the content that `arguments` describes.

        Raises:
            ConfigError: An argument is unknown, or of another type.
        """
        if unknown := arguments.keys() - {"tables", "parts"}:
            raise ConfigError(f"content 'rows' has no argument {min(unknown)!r}")
        tables, parts = arguments.get("tables", []), arguments.get("parts", 1)
        if not isinstance(tables, list) or type(parts) is not int:
            raise ConfigError("content 'rows' needs a list of tables and a number of parts")
        return cls(tuple(_table_of(entry) for entry in tables), parts)

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `of`."""
        return {"tables": [asdict(table) for table in self.tables], "parts": self.parts}

    def difference(self, theirs: Content, tensors: Sequence[TensorSpec]) -> str | None:
        """Returns a sentence about the first argument of a row table that differs, or None."""
        ours, yours = self.tables, theirs.tables if isinstance(theirs, Rows) else ()
        for tensor, mine, given in zip(tensors, ours, yours, strict=False):
            for field in fields(RowTable):
                one, other = (getattr(table, field.name) for table in (mine, given))
                if one != other:
                    return (
                        f"row table {tensor.name!r} has {field.name} {one!r} here and {other!r} "
                        "in the job"
                    )
        return super().difference(theirs, tensors)

    def layout(self, tensors: Sequence[TensorSpec], num_shards: int) -> Layout:
        """Returns the row slices: each owns a range of buckets, the same of all row tables.

        Raises:
            ConfigError: The tensors are not those of the row tables.
        """
        self._require(tensors, num_shards)
        num_slices = num_shards * self.parts
        slices = []
        for index in range(num_slices):
            start, stop = bucket_range(index, num_slices)
            segments = tuple(
                TensorSegment(
                    tensor=number,
                    group=tensor.group,
                    start=0,
                    stop=stop - start,
                    tensor_start=start,
                )
                for number, tensor in enumerate(tensors)
            )
            slices.append(
                SliceSpec(
                    index=index,
                    shard=index // self.parts,
                    start=start,
                    stop=stop,
                    segments=segments,
                    compress=False,
                )
            )
        return Layout(
            tensors=tuple(tensors),
            offsets=(0,) * len(tensors),
            numel=BUCKETS,
            num_shards=num_shards,
            slices=tuple(slices),
            fingerprint=fingerprint(tensors, num_shards),
        )

    def optimizer(self, name: str) -> RowOptimizer:
        """Returns an optimizer of rows (optimizers.py)."""
        if name not in ROW_OPTIMIZERS:
            listed = ", ".join(sorted(ROW_OPTIMIZERS))
            raise ConfigError(f"no optimizer {name!r} of rows on the shards; there are {listed}")
        return ROW_OPTIMIZERS[name]()

    def require_rule(self, rule: Rule) -> None:
        """Raises ConfigError for the modes that need whole gradients or models."""
        if rule.name not in RULES:
            raise ConfigError(f"rows cannot be trained in {rule.name}; use {', '.join(RULES)}")

    def rows_max(self, table: int, tensor: TensorSpec, part: SliceSpec) -> int:
        """Returns the most rows of a row table in a slice: its share, and a margin.

        With `lru` the margin is for steps with more new rows of a bucket than its share.
        """
        total = self.room(table, tensor)
        if part.numel == BUCKETS and not self.tables[table].lru:
            return total
        share = total * part.numel / BUCKETS
        most = math.ceil(share + MARGIN_DEVIATIONS * math.sqrt(share)) + MARGIN_ROWS
        return most if self.tables[table].lru else min(total, most)

    def room(self, table: int, tensor: TensorSpec) -> int:
        """Returns the most rows of a row table on all shards."""
        declared = self.tables[table].lru or self.tables[table].max_rows
        return declared or tensor.shape[0] or ROWS_MAX_DEFAULT

    def with_max_rows(self, tensors: Sequence[TensorSpec], wanted: Mapping[str, int]) -> Self:
        """Returns the content with other bounds of rows.

        Args:
            wanted: The new `max_rows`, by the name of a row table.

        Raises:
            ConfigError: A row table has no such bound.
        """
        names = [tensor.name for tensor in tensors]
        tables = list(self.tables)
        for name, max_rows in wanted.items():
            number = names.index(name)
            if tables[number].lru:
                raise ConfigError(
                    f"row table {name!r} keeps its newest {tables[number].lru} rows (lru), and is "
                    "never full: max_rows is for tables without lru"
                )
            if max_rows < 1:
                raise ConfigError(f"max_rows of {name!r} is {max_rows}, must be 1 or more")
            tables[number] = replace(tables[number], max_rows=max_rows)
            require_table(tensors[number], tables[number])
        return replace(self, tables=tuple(tables))

    def waiting_max(self, table: int, tensor: TensorSpec, part: SliceSpec) -> int:
        """Returns the most ids of a row table in a slice that wait for their rows."""
        if self.tables[table].min_count <= 1:
            return 0
        buckets = range(part.start, part.stop)
        return int(shares_of(self.room(table, tensor), buckets, WAITING_MIN).sum())

    @property
    def request_nbytes_max(self) -> int:
        """A pull names the rows that it asks for."""
        return PAYLOAD_NBYTES_MAX

    def owned(self, part: SliceSpec, layout: Layout) -> list[Owned]:
        """Returns the ids of each row table that a slice owns."""
        return [
            Owned(
                name=tensor.name,
                num_rows=tensor.shape[0],
                seed=table.seed,
                start=part.start,
                stop=part.stop,
            )
            for tensor, table in zip(layout.tensors, self.tables, strict=True)
        ]

    def read_request(self, data: ByteArray, part: SliceSpec, layout: Layout) -> RowRequest:
        """Returns the rows that a pull asks for.

        Raises:
            DecodeError: The payload has another length, or an id is not one of the slice.
        """
        return decode_pull(data, self.owned(part, layout))

    def push_nbytes_max(self, part: SliceSpec, optimizer: Stepping, compressor: Compressor) -> int:
        """Returns the bytes of the longest payload of any frame."""
        return PAYLOAD_NBYTES_MAX

    def weights_nbytes(self, parts: Sequence[SliceSpec], layout: Layout) -> int:
        """Returns the bytes of the weights of as many rows as there may be."""
        return sum(
            FLOAT_NBYTES * tensor.shape[1] * self.rows_max(number, tensor, part)
            for part in parts
            for number, tensor in enumerate(layout.tensors)
        )

    def memory_nbytes(
        self, parts: Sequence[SliceSpec], layout: Layout, optimizer: Stepping, num_arrays: int
    ) -> int:
        """Returns the bytes of as many rows as there may be, with state and index."""
        assert isinstance(optimizer, RowOptimizer)
        return sum(
            (stride_of(optimizer, tensor.shape[1]) + INDEX_NBYTES)
            * self.rows_max(number, tensor, part)
            + (stride_of(COUNTER, 1) + INDEX_NBYTES) * self.waiting_max(number, tensor, part)
            for part in parts
            for number, tensor in enumerate(layout.tensors)
        )

    def _require(self, tensors: Sequence[TensorSpec], num_shards: int) -> None:
        if not 1 <= num_shards * self.parts <= BUCKETS or not 1 <= self.parts <= PARTS_MAX:
            raise ConfigError(
                f"{self.parts} row slices on each of {num_shards} shards, must be 1..{PARTS_MAX} "
                f"on a shard and at most {BUCKETS} in all"
            )
        if not 1 <= len(tensors) <= TABLES_MAX or len(tensors) != len(self.tables):
            raise ConfigError(f"{len(tensors)} tensors for {len(self.tables)} row tables")
        names = [tensor.name for tensor in tensors]
        for tensor, table in zip(tensors, self.tables, strict=True):
            if names.count(tensor.name) > 1 or not tensor.name.isprintable() or not tensor.name:
                raise ConfigError(f"row table {tensor.name!a} needs a printable name of its own")
            require_table(tensor, table)


def stride_of(optimizer: RowOptimizer, dim: int) -> int:
    """Returns the bytes of one row in a slab: its header, weights and state, in whole words."""
    return -(-(HEADER_NBYTES + FLOAT_NBYTES * optimizer.width(dim)) // 8) * 8


def _table_of(entry: object) -> RowTable:
    if not isinstance(entry, dict):
        raise ConfigError("a row table is declared by an object")
    known = {field.name: field for field in fields(RowTable)}
    for key, value in entry.items():
        if key not in known:
            raise ConfigError(f"a row table has no argument {str(key)[:40]!r}")
        if value is None and known[key].default is None:
            continue
        wanted = int if known[key].default is None else type(known[key].default)
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise ConfigError(f"{key} of a row table must be of type {wanted.__name__}")
    return RowTable(**entry)


def require_table(tensor: TensorSpec, table: RowTable) -> None:
    """Raises ConfigError for a shape or an argument that no shard can serve."""
    what = f"row table {tensor.name!r}"
    if (
        len(tensor.shape) != DIMENSIONS
        or tensor.shape[0] < 0
        or not 1 <= tensor.shape[1] <= DIM_MAX
    ):
        raise ConfigError(f"{what} has shape {list(tensor.shape)}, must be (rows, 1..{DIM_MAX})")
    if tensor.dtype != "float32" or tensor.compress:
        raise ConfigError(f"{what} must be float32 and not compressed")
    if not -(1 << 63) <= table.seed < 1 << 64:
        raise ConfigError(f"seed of {what} is {table.seed}, must have 64 bits")
    if not 0 <= table.max_rows < ROWS_MAX or not tensor.shape[0] < ROWS_MAX:
        raise ConfigError(f"{what} has {max(table.max_rows, tensor.shape[0])} rows, too many")
    if not 0.0 <= table.max_norm < math.inf:
        raise ConfigError(f"max_norm of {what} is {table.max_norm}, must be 0 or more")
    if not (0 <= table.min_count <= COUNT_MAX and 0 <= table.ttl <= TTL_MAX):
        raise ConfigError(
            f"{what} has min_count {table.min_count} and ttl {table.ttl}, must be "
            f"0..{COUNT_MAX} and 0..{TTL_MAX}"
        )
    if not 0 <= table.lru < ROWS_MAX or (table.lru and table.max_rows):
        raise ConfigError(
            f"{what} has lru {table.lru} and max_rows {table.max_rows}; give one of them, below "
            f"{ROWS_MAX}"
        )
    if 0 < table.lru < LRU_MIN:
        raise ConfigError(
            f"{what} has lru {table.lru}, must be at least {LRU_MIN}: each of {BUCKETS} buckets "
            "keeps its newest rows; give so few rows max_rows"
        )
    if not -(1 << 63) <= (table.padding_idx or 0) < 1 << 63:
        raise ConfigError(f"padding_idx of {what} is {table.padding_idx}, must be an int64")
    parse_init(table.init)
