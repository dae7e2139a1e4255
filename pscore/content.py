"""The protocol of a table's content: the kind of numbers in its slices, as it is declared.

The kinds of content are registered in pscore/contents; the shards' stores of each kind in
psserver/stores. No other code branches on a kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self

from pscore.compressors.base import Compressor
from pscore.partition import Layout
from pscore.rules.base import Rule
from pscore.types import ByteArray, SliceSpec, TensorSpec


class Stepping(Protocol):
    """The part of an optimizer that declarations, messages and checkpoints use."""

    name: ClassVar[str]  # Its name on the wire.
    hyper_names: ClassVar[tuple[str, ...]]  # Columns of the hyper-parameters, the first `lr`.
    state_names: ClassVar[tuple[str, ...]]  # Names of its state arrays.
    assigns: ClassVar[bool]  # Whether pushes are values that replace the weights, not gradients.


class Content(ABC):
    """The content of a table's slices; an immutable value."""

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Returns the content that `arguments` describes.

        Raises:
            ConfigError: An argument is unknown, or wrong.
        """

    @abstractmethod
    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `of`, as JSON can hold them."""

    def difference(self, theirs: Content, tensors: Sequence[TensorSpec]) -> str | None:
        """Returns a sentence about the first difference from the job's content, or None."""
        return None if self == theirs else f"content is {self} here and {theirs} in the job"

    @abstractmethod
    def layout(self, tensors: Sequence[TensorSpec], num_shards: int) -> Layout:
        """Returns the slices of a table on each shard.

        Raises:
            ConfigError: The tensors cannot be of such a table.
        """

    @abstractmethod
    def optimizer(self, name: str) -> Stepping:
        """Returns the shards' optimizer of that name; raises ConfigError if there is none."""

    def require_rule(self, rule: Rule) -> None:  # noqa: B027
        """Raises ConfigError for a mode that such a table cannot have."""

    @property
    @abstractmethod
    def request_nbytes_max(self) -> int:
        """Bytes of the longest payload of a pull's request."""

    @abstractmethod
    def read_request(self, data: ByteArray, part: SliceSpec, layout: Layout) -> object:
        """Returns the meaning of the payload of a pull's request.

        Args:
            data: `(nbytes,) uint8`.

        Raises:
            DecodeError: The payload cannot be of this slice.
        """

    @abstractmethod
    def push_nbytes_max(self, part: SliceSpec, optimizer: Stepping, compressor: Compressor) -> int:
        """Returns the bytes of the longest payload of a push of a slice."""

    @abstractmethod
    def weights_nbytes(self, parts: Sequence[SliceSpec], layout: Layout) -> int:
        """Returns the most bytes of weights in some slices of a layout."""

    @abstractmethod
    def memory_nbytes(
        self, parts: Sequence[SliceSpec], layout: Layout, optimizer: Stepping, num_arrays: int
    ) -> int:
        """Returns the most bytes that some slices of a layout need.

        Args:
            num_arrays: Arrays as long as the weights that the mode, the optimizer and the journal
                need of a content that is updated as a whole.
        """
