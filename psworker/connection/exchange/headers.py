"""The headers of one table's requests, of which few numbers change from one step to the next.

A header with all its fields takes ten times as long to make as to copy. So the first one of each
slice is kept, and copied for later requests until a field changes that seldom does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from pscore.pb.ps.v1 import data_pb2

H = TypeVar("H", data_pb2.PushHeader, data_pb2.PullHeader)


class PreparedHeaders(Generic[H]):
    """Headers of one kind, one for each slice."""

    def __init__(self, kind: type[H]) -> None:
        """Starts without any; `kind` makes an empty header."""
        self._kind: type[H] = kind
        self._kept: dict[int, tuple[object, H]] = {}  # By slice, each behind the fields in it.

    def copy(self, index: int, about: object, make: Callable[[], H]) -> H:
        """Returns a header of a slice, which the caller may change.

        Args:
            about: All that the header is made of; the kept one serves while this is equal.
            make: Makes the header; called if there is none, or one about something else.
        """
        known, kept = self._kept.get(index, (None, None))
        if kept is None or known != about:
            kept = make()
            self._kept[index] = about, kept
        header: H = self._kind()
        header.CopyFrom(kept)
        return header
