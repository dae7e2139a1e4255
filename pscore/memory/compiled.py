"""Loops that were compiled before: an image brings them, since a container begins without any."""

from __future__ import annotations

import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

STOCK = Path(sys.prefix) / "share" / "paceline" / "loops"  # `deploy/Dockerfile` writes it.


def take_compiled(place: Path, stock: Path = STOCK) -> None:
    """Copies compiled loops to where Numba keeps them, unless there is something already.

    Numba looks for code by the processor and its features, the source and its own version, so code
    of another processor is not used: the loop is compiled then. It also wants to write there.

    Args:
        place: Numba's folder, of this user.
        stock: A folder with the same layout, which may be read-only.
    """
    if place.exists() or not stock.exists():
        return
    # Another process of the container may be first.
    with suppress(OSError), tempfile.TemporaryDirectory(dir=place.parent) as folder:
        shutil.copytree(stock, Path(folder) / place.name).rename(place)
