"""Standard error that drops lines when the disk is full, so that no process ends."""

from __future__ import annotations

from typing import Any, TextIO


class Patient:
    """A stream for log lines that drops what cannot be written, and says later how many."""

    def __init__(self, stream: TextIO) -> None:
        """Writes to the file of `stream`, without a buffer in memory."""
        buffer = getattr(stream, "buffer", None)
        self._raw: Any = getattr(buffer, "raw", None)
        self._stream = stream
        self._num_lost = 0

    def write(self, text: str) -> None:
        """Writes a text; says first how many could not be written before it."""
        lost, self._num_lost = self._num_lost, 0
        if lost:
            text = f"\n({lost} lines before this could not be written)\n{text}"
        try:
            if self._raw is None:
                self._stream.write(text)
                self._stream.flush()
            else:
                self._write_all(text.encode(errors="backslashreplace"))
        except (OSError, ValueError):  # Full, or closed.
            self._num_lost = lost + 1

    def flush(self) -> None:
        """Does nothing: each text has left."""

    def _write_all(self, data: bytes) -> None:
        while data:
            data = data[self._raw.write(data) or 0 :]
