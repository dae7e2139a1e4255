"""Second places of checkpoints: a folder, or a store of files that fsspec can reach.

A copy is a checkpoint like the first one, under the same name. In a folder it appears at once,
complete; in a store its manifest is written last, and a folder without one is no checkpoint.
"""

from __future__ import annotations

import importlib
import shutil
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from pscore.errors import ConfigError
from psserver.remote.checkpoint_files import MANIFEST, adopt, delete


class SecondPlace(Protocol):
    """A place with checkpoints, each under its name."""

    def names(self) -> list[str]:
        """Returns the names of the checkpoints there; none if nothing was ever written."""

    def manifest(self, name: str) -> bytes:
        """Returns the manifest of a checkpoint."""

    def send(self, source: Path) -> None:
        """Copies the checkpoint in folder `source` to the place, under the folder's name."""

    def fetch(self, name: str, target: Path) -> None:
        """Copies a checkpoint into the new folder `target`."""

    def delete(self, name: str) -> None:
        """Deletes a checkpoint."""


class FolderPlace:
    """A folder, of another host as a rule."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self) -> list[str]:
        """Returns the names of the checkpoints in the folder; raises OSError if it is a file."""
        if self._folder.exists() and not self._folder.is_dir():
            raise NotADirectoryError(f"{self._folder} is not a directory")
        return [path.parent.name for path in self._folder.glob(f"[!.]*/{MANIFEST}")]

    def manifest(self, name: str) -> bytes:
        """Returns the manifest of a checkpoint; raises OSError if it cannot be read."""
        return (self._folder / name / MANIFEST).read_bytes()

    def send(self, source: Path) -> None:
        """Copies a checkpoint into the folder, and compares the copy with its hashes.

        Raises:
            OSError, ValueError: It cannot be written, or the copy is not whole.
        """
        adopt(self._folder, source.name, partial(_copy_tree, source))

    def fetch(self, name: str, target: Path) -> None:
        """Copies a checkpoint out of the folder.

        Raises:
            OSError: It cannot be read, or there is no room.
        """
        _copy_tree(self._folder / name, target)

    def delete(self, name: str) -> None:
        """Deletes a checkpoint."""
        delete(self._folder, self._folder / name)


class StorePlace:
    """A store that fsspec reaches by a URL: `s3://bucket/night`, `gs://`, `sftp://`."""

    def __init__(self, url: str) -> None:
        """Connects, as far as the store's client does that here.

        Raises:
            ConfigError: fsspec, or its package for this kind of store, is not installed.
        """
        try:
            core: Any = importlib.import_module("fsspec.core")
            self._store, self._root = core.url_to_fs(url)
        except (ImportError, ValueError) as problem:
            raise ConfigError(
                f"{url} cannot be reached: {problem}; install fsspec and its package for this kind "
                "of store (s3fs for s3://, gcsfs for gs://) where shard 0 runs"
            ) from problem

    def names(self) -> list[str]:
        """Returns the names of the checkpoints in the store whose manifest is there.

        Raises:
            OSError: The store does not answer.
        """
        self._store.invalidate_cache()
        try:
            found = self._store.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        names = [str(path).rstrip("/").rpartition("/")[2] for path in found]
        return [name for name in names if self._store.exists(self._path(name, MANIFEST))]

    def manifest(self, name: str) -> bytes:
        """Returns the manifest of a checkpoint; raises OSError if it cannot be read."""
        return bytes(self._store.cat_file(self._path(name, MANIFEST)))

    def send(self, source: Path) -> None:
        """Copies a checkpoint into the store, its manifest last.

        Raises:
            OSError: The store does not answer, or refuses.
        """
        self._store.makedirs(self._path(source.name), exist_ok=True)
        for path in sorted(source.iterdir(), key=lambda path: path.name == MANIFEST):
            self._store.put_file(str(path), self._path(source.name, path.name))

    def fetch(self, name: str, target: Path) -> None:
        """Copies a checkpoint out of the store.

        Raises:
            OSError: It cannot be read, or there is no room.
        """
        target.mkdir()
        for path in self._store.ls(self._path(name), detail=False):
            file = str(path).rpartition("/")[2]
            self._store.get_file(self._path(name, file), str(target / file))

    def delete(self, name: str) -> None:
        """Deletes a checkpoint, its manifest first, so that a half deleted one does not look whole.

        Raises:
            OSError: The store does not answer, or refuses.
        """
        self._store.rm_file(self._path(name, MANIFEST))
        self._store.rm(self._path(name), recursive=True)

    def _path(self, *names: str) -> str:
        return "/".join((self._root.rstrip("/"), *names))


def place_of(text: str) -> SecondPlace:
    """Returns the place that a setting names: a URL, or else a folder.

    Raises:
        ConfigError: It is a URL of a kind of store that cannot be reached from here.
    """
    return StorePlace(text) if "://" in text else FolderPlace(Path(text))


def _copy_tree(source: Path, target: Path) -> None:
    shutil.copytree(source, target, copy_function=shutil.copyfile)
