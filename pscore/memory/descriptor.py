"""The file descriptor of an object: closed by hand, or with its owner."""

from __future__ import annotations

import os


class Descriptor:
    """What owns one file descriptor."""

    fd: int = -1  # Of the class: what has no descriptor has nothing to close.

    def __init__(self, fd: int) -> None:
        """Takes an open descriptor over."""
        self.fd = fd

    def close(self) -> None:
        """Closes it; what is mapped stays until its last view is gone."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        """Closes one that nobody has closed."""
        self.close()
