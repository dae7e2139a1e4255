"""Numbers of tables in checkpoints, by the content of the table (pscore/contents)."""

from __future__ import annotations

from psserver.archives.base import Archive
from psserver.archives.flat import FlatArchive
from psserver.archives.rows import RowArchive

ARCHIVES: dict[str, Archive] = {one.name: one for one in (FlatArchive(), RowArchive())}

__all__ = ["ARCHIVES", "Archive", "archive_of"]


def archive_of(content: str) -> Archive:
    """Returns the archive of a table with that content."""
    return ARCHIVES[content]
