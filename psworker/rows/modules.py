"""`Embedding` and `EmbeddingBag`, whose rows lie on the shards.

A step pulls the rows that its batch needs, and pushes their gradients; no process holds a whole
table. `weight` is a parameter without elements: it carries the table's place in a torch optimizer
and its groups.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Iterator
from numbers import Real
from operator import index
from typing import Any, Self

import numpy as np
import torch
from torch.nn import functional

from pscore.errors import ConfigError
from pscore.rows.init import NORM_EPS, initial_rows
from pscore.rows.spec import RowTable, require_table
from pscore.types import FloatArray, TensorSpec
from psworker.model.tracing import not_traced
from psworker.rows.cache import RowCache
from psworker.rows.gradients import RowGradients
from psworker.rows.lookups import IdArray, Lookup, RowSource, find, look_up

_tables: weakref.WeakSet[EmbeddingTable] = weakref.WeakSet()
ID_DTYPES = (torch.int64, torch.int32)
log = logging.getLogger("paceline")


class InitialRows:
    """Rows that were never updated, before a table is on the shards: they depend on the id only."""

    def __init__(self, table: EmbeddingTable) -> None:
        self._table = table

    def read(self, ids: IdArray, out: FloatArray, *, is_look: bool) -> None:
        """Copies the first values of the rows of `ids` into `out`, `(u, dim) float32`."""
        table = self._table
        if table.pretrained is not None:
            np.take(table.pretrained, ids.view(np.int64), axis=0, out=out)
        else:
            dim, max_norm = table.embedding_dim, table.max_norm or 0.0
            out[:] = initial_rows(table.init, table.seed_number, ids, dim, max_norm)


class EmbeddingTable(torch.nn.Module):
    """A table of rows on the shards: the part that `Embedding` and `EmbeddingBag` share.

    Attributes:
        num_embeddings: Number of rows; None: any int64 is an id, and a row begins to exist with its
            first gradient.
        embedding_dim: Elements of a row.
        padding_idx: The id whose row is zero and has no gradient; None: there is none.
        max_norm: Largest 2-norm of a row; None: there is no limit.
        name: The table's name in the job; empty: that of the module in the model.
        init: The values of rows before their first update: `normal(std)`, `uniform(a)` in -a..a, or
            `zeros`.
        seed: Seeds these values: a row's depend on it and the row's id only. None: the name does.
        max_rows: Largest number of rows that have been updated; 0: `num_embeddings`, or 2**20.
        min_count: Pushes with a gradient of an id, after which it has a row of its own; 0 or 1: the
            first makes it.
        ttl: Updates after which a row that none of them has changed is its first value again; 0: no
            row goes.
        lru: Largest number of rows that have been updated, 16,384 or more, above which the oldest
            go, in each bucket of ids those above its share; 0: none go.
        cache: Rows that this worker uses again without a pull; None: it pulls every row.
        pretrained: `(num_embeddings, embedding_dim) float32`, until the first step; or None.
        source: The place from which rows come; None: they have never been updated.
        gradients: The gradient of the rows in the step under way.
    """

    weight: torch.nn.Parameter
    _is_told = False  # Whether a warning was logged that its rows are not trained.

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = True,
        *,
        name: str = "",
        init: str = "normal(1)",
        seed: int | None = None,
        max_rows: int = 0,
        min_count: int = 0,
        ttl: int = 0,
        lru: int = 0,
        cache: RowCache | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Makes a table; it is declared to the shards with the optimizer.

        Args:
            padding_idx: As the attribute; counts from the end if it is negative.
            norm_type: As in torch; only 2.
            scale_grad_by_freq: As in torch; only False.
            sparse: Ignored: a step sends the rows that it touches.
            lru: As the attribute; instead of `max_rows`.
            device: Device of the results.
            dtype: Type of the results; rows travel as float32.

        Raises:
            ConfigError: An argument is out of its range, or cannot be as in torch.
        """
        super().__init__()
        _require_sizes(num_embeddings, embedding_dim, padding_idx, seed)
        if scale_grad_by_freq:
            raise ConfigError(
                "scale_grad_by_freq divides by the frequency of an id in one worker's batch, so "
                "the result would depend on the number of workers; pass False, and divide the loss"
            )
        _require_norm(max_norm, norm_type)
        _require_kinds({"name": (name, str), "init": (init, str), "cache": (cache, RowCache)})
        self.num_embeddings = None if num_embeddings is None else index(num_embeddings)
        self.embedding_dim, self.cache = index(embedding_dim), cache
        self.padding_idx = _padding(padding_idx, self.num_embeddings)
        self.max_norm = None if max_norm is None else float(max_norm)
        self.name, self.init, self.seed = name, init, None if seed is None else index(seed)
        self.max_rows, self.min_count, self.ttl, self.lru = max_rows, min_count, ttl, lru
        self.pretrained: FloatArray | None = None
        self.declaration(self.seed_number)  # Refuses a wrong argument.
        empty = torch.empty(0, embedding_dim, device=device, dtype=dtype)
        self.weight = torch.nn.Parameter(empty)
        self.gradients = RowGradients()
        self.source: RowSource | None = None
        _tables.add(self)

    def declaration(self, seed: int) -> RowTable:
        """Returns the declaration of the table at the shards, but for its name and shape.

        Raises:
            ConfigError: An argument cannot be.
        """
        numbers = {key: getattr(self, key) for key in ("max_rows", "min_count", "ttl", "lru")}
        for key, value in numbers.items():
            if type(value) is not int:
                raise ConfigError(f"{key} is {value!r}, must be an int")
        table = RowTable(
            seed=seed,
            init=self.init,
            max_norm=self.max_norm or 0.0,
            padding_idx=self.padding_idx,
            **numbers,
        )
        shape = (self.num_embeddings or 0, self.embedding_dim)
        name = self.name or "without a name"
        require_table(TensorSpec(name=name, shape=shape, dtype="float32"), table)
        return table

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a copy, which looks its rows up where the original does."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _tables.add(self)

    def extra_repr(self) -> str:
        """Returns the arguments that describe the table, for `print(model)`."""
        ids = "any id" if self.num_embeddings is None else self.num_embeddings
        parts = [f"{ids}, {self.embedding_dim}"]
        given = {"name": self.name, "padding_idx": self.padding_idx, "max_norm": self.max_norm}
        parts += [f"{key}={value!r}" for key, value in given.items() if value not in ("", None)]
        return ", ".join([*parts, f"init={self.init!r}"])

    @not_traced
    def find(self, batch: torch.Tensor) -> Lookup:
        """Returns the rows of a batch of ids, as a leaf that collects their gradient.

        Args:
            batch: Ids, int64 or int32, of any shape.

        Raises:
            TypeError: The ids have another dtype.
            IndexError: An id is not one of a row.
            PacelineError: A shard refused something, or does not answer.
        """
        ids = self.check(batch)
        trains = torch.is_grad_enabled() and self.weight.requires_grad
        source = self.source or InitialRows(self)
        made = find(ids, self.embedding_dim, self.padding_idx, source, is_look=not trains)
        device = self.weight.device
        found = made._replace(rows=made.rows.to(device), places=made.places.to(device))
        if trains:
            watch: Any = found.rows.requires_grad_().register_post_accumulate_grad_hook
            watch(lambda _: self._collect(found))
        return found

    def _collect(self, found: Lookup) -> None:
        """Keeps the gradient of a lookup, which backward has made."""
        grad, found.rows.grad = found.rows.grad, None  # A second backward adds its own.
        assert grad is not None
        self.gradients.add(self.weight, found, grad)

    def warn_if_outside(self) -> None:
        """Warns once if a step is made, the rows have a gradient, and they are part of no job."""
        if self.source is None and self.weight.grad is not None and not self._is_told:
            self._is_told = True
            log.warning(
                "%s has a gradient, but DistributedOptimizer was made without it, so its rows do "
                "not change; make the table before, and pass its weight to the optimizer of rows=",
                self._title,
            )

    def check(self, batch: torch.Tensor) -> torch.Tensor:
        """Returns ids as int64 on the CPU, if there are rows of all of them.

        Raises:
            TypeError: The ids have another dtype than int64 and int32.
            IndexError: An id is not one of a row.
        """
        dtype = getattr(batch, "dtype", None)
        if dtype not in ID_DTYPES:
            given = dtype if isinstance(dtype, torch.dtype) else type(batch).__name__
            why = ": a float is exact only up to 2**24" if "float" in str(given) else ""
            raise TypeError(
                f"the ids for {self._title} are {given}, must be a tensor of torch.int64 (or "
                f"int32){why}"
            )
        ids = batch.detach().to("cpu", torch.int64)
        if self.num_embeddings is not None and ids.numel():
            low, high = (int(end) for end in torch.aminmax(ids))
            if low < 0 or high >= self.num_embeddings:
                wrong = f"id {low} is negative" if low < 0 else f"id {high} is out of range"
                raise IndexError(
                    f"{wrong}: {self._title} has ids 0..{self.num_embeddings - 1}; "
                    "num_embeddings=None takes any int64"
                )
        return ids

    @property
    def seed_number(self) -> int:
        """The seed, 64 bits: tables of other names begin with other values."""
        if self.seed is not None:
            return self.seed
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:7], "little")

    @property
    def _title(self) -> str:
        return f"row table {self.name!r}" if self.name else type(self).__name__

    @classmethod
    def _make_pretrained(
        cls, given: torch.Tensor | torch.nn.Module, freeze: bool | None, **options: Any
    ) -> Self:
        """Returns a table with the rows of a tensor or of a module of torch."""
        values = given if isinstance(given, torch.Tensor) else getattr(given, "weight", None)
        for name in ("norm_type", "scale_grad_by_freq"):
            if hasattr(given, name):
                options[name] = getattr(given, name)
        if not (isinstance(values, torch.Tensor) and values.dim() == 2):  # noqa: PLR2004
            raise ConfigError("from_pretrained() takes a matrix, or an Embedding of torch.nn")
        if not len(values):
            raise ConfigError(
                "from_pretrained() got a matrix without rows; those of a row table are on the "
                "shards: pass load_embedding() of a file that psserver export --table wrote"
            )
        table = cls(len(values), values.shape[1], **options)
        rows = values.detach().to("cpu", torch.float32).numpy().copy()
        wrong = np.flatnonzero(~np.isfinite(rows).all(axis=1))
        if len(wrong):
            raise ConfigError(f"row {wrong[0]} given to from_pretrained() holds NaN or Inf")
        if table.max_norm is not None:
            _bound(rows, table.max_norm)
        if table.padding_idx is not None and rows[table.padding_idx].any():
            raise ConfigError(
                f"the row of padding_idx={table.padding_idx} is not zero; set it to zero, or leave "
                "padding_idx out: padding is zero in every row table"
            )
        table.pretrained = rows
        is_tensor = isinstance(given, torch.Tensor)
        is_frozen = (is_tensor or not values.requires_grad) if freeze is None else freeze
        table.weight.requires_grad_(not is_frozen)
        return table


class Embedding(EmbeddingTable):
    """`torch.nn.Embedding` with its rows on the shards: a step moves only the rows it looks up."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the rows of the ids in `input`, in its shape and one dimension more.

        Args:
            input: Ids, int64 or int32, of any shape.

        Raises:
            TypeError: The ids have another dtype.
            IndexError: An id is not one of a row.
            PacelineError: A shard refused something, or does not answer.
        """
        return self._look_up(input).to(self.weight.dtype)

    @not_traced
    def _look_up(self, batch: torch.Tensor) -> torch.Tensor:
        return look_up(self.find(batch))

    @classmethod
    def from_pretrained(
        cls,
        embeddings: torch.Tensor | torch.nn.Embedding,
        freeze: bool | None = None,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        *,
        name: str = "",
    ) -> Self:
        """Returns a table that begins with given rows: those of rank 0.

        Args:
            embeddings: `(num_embeddings, embedding_dim)`, or a module with such a weight.
            freeze: Whether the rows are only looked up; None: as in the module; for a tensor True,
                as in torch.
            padding_idx: The id whose row is zero; None: that of the module.
            max_norm: Largest 2-norm of a row; None: that of the module.
            name: The table's name in the job; empty: that of the module in the model.

        Raises:
            ConfigError: The rows are no matrix, one is not finite, or that of `padding_idx` is not
                zero.
        """
        if isinstance(embeddings, torch.nn.Embedding):
            padding_idx = embeddings.padding_idx if padding_idx is None else padding_idx
            max_norm = embeddings.max_norm if max_norm is None else max_norm
        options = {"padding_idx": padding_idx, "max_norm": max_norm, "name": name}
        return cls._make_pretrained(embeddings, freeze, **options)


class EmbeddingBag(EmbeddingTable):
    """`torch.nn.EmbeddingBag` with its rows on the shards: a sum, mean or maximum for each bag.

    Attributes:
        mode: `sum`, `mean` or `max`.
        include_last_offset: Whether `offsets` has one entry more than there are bags.
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = True,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        **options: Any,
    ) -> None:
        """Makes a table; it is declared to the shards with the optimizer.

        Args:
            norm_type: As in torch; only 2.
            scale_grad_by_freq: As in torch; only False.
            sparse: Ignored: a step sends the rows that it touches.
            padding_idx: As in `EmbeddingTable`; its ids count in no mean and no maximum.
            options: The other arguments of `EmbeddingTable`.

        Raises:
            ConfigError: An argument is out of its range, or cannot be as in torch.
        """
        if mode not in ("sum", "mean", "max"):
            raise ConfigError(f"mode is {mode!r}, must be 'sum', 'mean' or 'max'")
        places = padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        super().__init__(num_embeddings, embedding_dim, *places, **options)
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns one row a bag, `(bags, embedding_dim)`, as torch does; zeros for an empty bag.

        Args:
            input: Ids: `(bags, length)`, or of one dimension with `offsets`.
            offsets: The first position of each bag.
            per_sample_weights: Factors of the rows, in the shape of `input`; only with `sum`.

        Raises:
            TypeError: The ids have another dtype than int64 and int32.
            IndexError: An id is not one of a row.
            PacelineError: A shard refused something, or does not answer.
        """
        found = self.find(input)
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.to(found.rows.dtype)
        made = functional.embedding_bag(
            found.places,
            found.rows,
            None if offsets is None else offsets.to(found.places),
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=found.padding,
        )
        return made.to(self.weight.dtype)

    @classmethod
    def from_pretrained(
        cls,
        embeddings: torch.Tensor | torch.nn.EmbeddingBag,
        freeze: bool | None = None,
        max_norm: float | None = None,
        mode: str | None = None,
        include_last_offset: bool | None = None,
        padding_idx: int | None = None,
        *,
        name: str = "",
    ) -> Self:
        """Returns a table that begins with given rows: those of rank 0.

        Args:
            embeddings: `(num_embeddings, embedding_dim)`, or a module with such a weight.
            mode: As the attribute; None: that of the module; for a tensor `mean`, as in torch.
            include_last_offset: As the attribute; None: as in the module.

        Raises:
            ConfigError: The rows are no matrix, one is not finite, or that of `padding_idx` is not
                zero.
        """
        if isinstance(embeddings, torch.nn.EmbeddingBag):
            mode = mode or embeddings.mode
            padding_idx = embeddings.padding_idx if padding_idx is None else padding_idx
            max_norm = embeddings.max_norm if max_norm is None else max_norm
            if include_last_offset is None:
                include_last_offset = embeddings.include_last_offset
        return cls._make_pretrained(
            embeddings,
            freeze,
            max_norm=max_norm,
            mode=mode or "mean",
            include_last_offset=bool(include_last_offset),
            padding_idx=padding_idx,
            name=name,
        )


def dense_parameters(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yields the parameters of a model that are no placeholders of row tables."""
    rows = {id(table.weight) for table in model.modules() if isinstance(table, EmbeddingTable)}
    return (parameter for parameter in model.parameters() if id(parameter) not in rows)


def warn_of_tables() -> None:
    """Warns of tables whose rows do not change, though training makes steps."""
    for table in list(_tables):
        table.warn_if_outside()


def tables_of(parameters: list[torch.nn.Parameter]) -> dict[int, EmbeddingTable]:
    """Returns the tables whose placeholders are among some parameters, by `id(parameter)`."""
    given = {id(parameter) for parameter in parameters}
    return {id(table.weight): table for table in _tables if id(table.weight) in given}


def _bound(rows: FloatArray, max_norm: float) -> None:
    """Scales rows with a larger norm in place, as torch does when it looks them up."""
    norms = np.linalg.norm(rows.astype(np.float64), axis=1)
    factors = np.where(norms > max_norm, max_norm / (norms + NORM_EPS), 1.0)
    rows *= factors[:, None].astype(np.float32)


def _require_sizes(
    num_embeddings: int | None, embedding_dim: int, padding_idx: int | None, seed: int | None
) -> None:
    """Raises ConfigError for numbers that are no ints, or not those of a table."""
    given = {"num_embeddings": num_embeddings, "padding_idx": padding_idx, "seed": seed}
    numbers = {name: value for name, value in given.items() if value is not None}
    for name, value in {"embedding_dim": embedding_dim, **numbers}.items():
        if not hasattr(value, "__index__"):
            raise ConfigError(f"{name} is {value!r}, must be an int")
    if num_embeddings is not None and num_embeddings < 1:
        raise ConfigError(
            f"num_embeddings is {num_embeddings}, must be 1 or more, or None for any int64 id"
        )
    if embedding_dim < 1:
        raise ConfigError(f"embedding_dim is {embedding_dim}, must be 1 or more")


def _require_norm(max_norm: float | None, norm_type: float) -> None:
    """Raises ConfigError for a bound of rows that shards cannot keep."""
    if max_norm is not None and not (isinstance(max_norm, Real) and max_norm > 0.0):
        raise ConfigError(f"max_norm is {max_norm!r}, must be above 0; None: there is no limit")
    if max_norm is not None and norm_type != 2.0:  # noqa: PLR2004
        raise ConfigError(f"norm_type is {norm_type}, must be 2: the shards keep 2-norms")


def _require_kinds(given: dict[str, tuple[object, type]]) -> None:
    """Raises ConfigError for an argument that is of another type, and not None."""
    for name, (value, kind) in given.items():
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"{name} is {value!r}, must be of type {kind.__name__}")


def _padding(padding_idx: int | None, num_embeddings: int | None) -> int | None:
    """Returns the id of the padding; one that counts from the end is resolved.

    Raises:
        ConfigError: The table has no such row.
    """
    if padding_idx is None:
        return None
    if num_embeddings is None:
        if not -(1 << 63) <= padding_idx < 1 << 63:
            raise ConfigError(f"padding_idx is {padding_idx}, must be an int64")
        return index(padding_idx)
    if not -num_embeddings <= padding_idx < num_embeddings:
        raise ConfigError(f"padding_idx is {padding_idx}, must be within {num_embeddings} rows")
    return index(padding_idx) % num_embeddings
