"""Interface of an archive: a table's numbers as the slices have them, and by tensor in files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pscore.partition import Layout
from pscore.table_spec import TableSpec
from pscore.types import ByteArray, SliceSpec

Tensors = Mapping[str, np.ndarray]
Part = tuple[SliceSpec, str, np.ndarray]  # A slice, the name of an array on its shard, the array.


class Room(ABC):
    """Memory for the arrays of all slices of a table, which come one after the other."""

    @abstractmethod
    def target(self, part: SliceSpec, array: str, nbytes: int) -> ByteArray:
        """Returns memory for an array of a slice, `(nbytes,) uint8`."""

    @abstractmethod
    def arrays(self) -> Mapping[str, Tensors]:
        """Returns the numbers by array and tensor, as files have them."""

    @property
    def changes(self) -> Mapping[str, Tensors] | None:
        """The changes since the earlier copy, after `arrays`; None: they are not known."""
        return None


class Archive(ABC):
    """The numbers of the tables of one content."""

    name: ClassVar[str]  # Name of the content.

    @abstractmethod
    def weights_only(self, arrays: Sequence[str]) -> list[str]:
        """Returns those arrays of a slice without which there are no weights."""

    @abstractmethod
    def room(self, spec: TableSpec, layout: Layout, base: Mapping[str, Tensors]) -> Room:
        """Returns memory for a table.

        Args:
            base: The arrays of an earlier copy, to which slices may give the changes only.
        """

    def joined(
        self, base: Mapping[str, Tensors], changes: Sequence[Mapping[str, Tensors]]
    ) -> Mapping[str, Tensors]:
        """Returns the numbers of a copy, and of the changes that followed it."""
        if changes:
            raise ValueError(f"a table of {self.name!r} has no changes")
        return base

    @abstractmethod
    def parts(
        self, spec: TableSpec, layout: Layout, arrays: Mapping[str, Tensors], own: Sequence[int]
    ) -> Iterator[Part]:
        """Returns the arrays of slices, from those of files.

        Args:
            layout: The slices, on any number of shards.
            arrays: By array and tensor, as `Room.arrays` returned them.
            own: The slices that are wanted.
        """

    @abstractmethod
    def about(
        self, spec: TableSpec, layout: Layout, arrays: Mapping[str, Tensors]
    ) -> dict[str, Any]:
        """Returns the announcement of these arrays to the shards, as JSON can hold it."""

    @abstractmethod
    def staged(
        self, spec: TableSpec, parts: Sequence[SliceSpec], about: Mapping[str, Any]
    ) -> dict[int, dict[str, tuple[str, int]]]:
        """Returns dtype and elements of each announced array, by slice and name.

        Raises:
            RemoteProtocolError: It is not one of such a table.
        """

    @abstractmethod
    def exported(
        self, spec: TableSpec, arrays: Mapping[str, Tensors], tensor: str, since: Path | None = None
    ) -> tuple[Tensors, dict[str, str]]:
        """Returns the weights of one tensor as a file of their own has them, and its metadata.

        Args:
            arrays: By array and tensor, as `Room.arrays` returned them.
            since: An earlier file of all of it: only the changes since are wanted.

        Raises:
            ConfigError: There are no changes of such a tensor, or the file is of another one.
        """

    @abstractmethod
    def require_file(self, file: Path, array: str, spec: TableSpec) -> None:
        """Raises ValueError for a file that does not hold an array of a table."""
