"""Owners of a file descriptor: `close` closes it, else the end of its owner does."""

from __future__ import annotations

import os


class Descriptor:
    """The owner of one file descriptor."""

    fd: int = -1  # Descriptor of an object whose `__init__` failed: nothing to close.

    def __init__(self, fd: int) -> None:
        """Owns an open descriptor from now on."""
        self.fd = fd

    def close(self) -> None:
        """Closes it; mapped memory stays until its last view is gone."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        """Closes it if that was not done."""
        self.close()
