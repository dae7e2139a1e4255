"""Arrays that other workers have sent and this one has yet to take; used from any thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection

from pscore.errors import TransportError
from pscore.types import FloatArray
from psworker.gossip.base import Tag

TAKEN_MAX = 1 << 14  # Arrays taken before that are known when they come again.
UNLISTED_NBYTES_MAX = 64 << 20  # Of all arrays whose senders the directory has yet to list.
ENTRY_NBYTES = 256  # Of such an array beside its numbers.
Key = tuple[int, Tag]  # Incarnation of the sender, and use of the array.


class Mailbox:
    """Keeps each array until it is taken, once."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrays: dict[Key, FloatArray] = {}
        self._taken: deque[Key] = deque(maxlen=TAKEN_MAX)
        self._is_taken: set[Key] = set()
        self._unlisted_nbytes = 0

    def require_room(self) -> None:
        """Refuses an array of a sender that the directory has yet to list, if many wait.

        A newcomer may send before this worker has asked the directory again. It connects anew
        after the error, and sends the array again.

        Raises:
            TransportError: Such arrays fill their place.
        """
        if self._unlisted_nbytes >= UNLISTED_NBYTES_MAX:
            raise TransportError("arrays of workers that the directory does not list fill memory")

    def put(self, sender: int, tag: Tag, values: FloatArray, *, is_listed: bool = True) -> None:
        """Stores an array; one that was taken before, or is here, changes nothing.

        Args:
            sender: Incarnation of the sender.
            is_listed: Whether the directory has listed the sender; else `keep` may drop it.
        """
        key = sender, tag
        with self._changed:
            if key not in self._is_taken and key not in self._arrays:
                self._arrays[key] = values
                if not is_listed:
                    self._unlisted_nbytes += values.nbytes + ENTRY_NBYTES
                self._changed.notify_all()

    def take(self, sender: int, tag: Tag, timeout_s: float) -> FloatArray | None:
        """Returns an array when it is here; None if it does not come in time."""
        key = sender, tag
        with self._changed:
            self._changed.wait_for(lambda: key in self._arrays, timeout_s)
            values = self._arrays.pop(key, None)
            if values is not None:
                if len(self._taken) == TAKEN_MAX:
                    self._is_taken.discard(self._taken[0])
                self._taken.append(key)
                self._is_taken.add(key)
            return values

    def wait(self, timeout_s: float) -> None:
        """Waits until something comes, or `notify` is called."""
        with self._changed:
            self._changed.wait(timeout_s)

    def notify(self) -> None:
        """Wakes the thread that waits."""
        with self._changed:
            self._changed.notify_all()

    def keep(self, senders: Collection[int], epoch: int) -> None:
        """Drops arrays of workers that are gone or not listed, and of epochs that are over."""
        with self._changed:
            self._unlisted_nbytes = 0
            self._arrays = {
                (sender, tag): values
                for (sender, tag), values in self._arrays.items()
                if sender in senders and (tag.epoch == 0 or tag.epoch >= epoch)
            }

    def __len__(self) -> int:
        return len(self._arrays)
