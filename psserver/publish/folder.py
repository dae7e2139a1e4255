"""Published weights as folders: versions in the layout of Hugging Face, for other programs.

    TO/v1-000000000120/model.safetensors    one version, complete from the moment it has this name
                       publication.json     its identity, step, and the SHA-256 of each file
                       config.json, ...     files of the model, as they were given
    TO/latest                               a link to the newest one

Engines that load a model from a folder (`from_pretrained`, vLLM, SGLang's
`update_weights_from_disk`) take one of them, or `latest`. Large models are divided into several
files with an index, as `save_pretrained` does.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pscore.errors import ConfigError
from pscore.json_text import to_json
from pscore.subscription.assembly import WeightsVersion
from pscore.subscription.weights import PublishedWeights
from psserver.durability import records
from psserver.durability.journal_dir import LOCK, Lock, lock_folder

LATEST, ABOUT, INDEX = "latest", "publication.json", "model.safetensors.index.json"
WRITING = ".writing-"
NAME = re.compile(r"v(\d+)-(\d+)")
# Types of safetensors, by those of numpy; `uint16` are the bits of bfloat16.
TYPES = {"uint16": "BF16", "float16": "F16", "float32": "F32"}
ALIGN_NBYTES = 8

Array = npt.NDArray[Any]


class VersionsFolder:
    """A folder with the newest versions of a job's weights."""

    def __init__(
        self, to: Path, *, job: str, keep: int, nbytes_max: int, model: Path | None = None
    ) -> None:
        """Ends the work of a process that was killed: deletes what is half-written.

        Args:
            to: The folder, which the first version makes if it is not there.
            model: Folder whose other files (configuration, tokenizer) each version gets too.

        Raises:
            ConfigError: `model` is not a folder, `latest` is there and no link, or the folder has
                versions of another job.
            OSError: The folder cannot be written, or another process writes into it.
        """
        if model is not None and not model.is_dir():
            raise ConfigError(f"{model} is no folder: give the one with config.json of the model")
        self._to, self._job, self._keep, self._nbytes_max = to, job, keep, nbytes_max
        self._model = model
        self._lock: Lock | None = None
        there = next(path for path in (to, *to.parents) if path.exists() or path.is_symlink())
        tempfile.TemporaryFile(dir=there).close()
        self._require_link()
        self._require_own()
        if to.is_dir():
            self._claim()
        for path in to.glob(f"{WRITING}*"):
            path.unlink() if path.is_symlink() else shutil.rmtree(path)
        if (newest := self.newest()) is not None:
            self._point_to(self._path(newest))

    def newest(self) -> WeightsVersion | None:
        """Returns the newest version that is there; None: there is none."""
        return max(self._versions(), default=None)

    def write(self, weights: PublishedWeights) -> Path:
        """Writes a version; it has its name when all of it is on the disk.

        Returns:
            The folder of the version.

        Raises:
            ConfigError: An array has a type that other programs would not read, or `latest` is no
                link.
            OSError: There is no room for it, or another process writes into the folder; former
                versions are as they were.
        """
        self._require_link()
        path = self._path(weights.version)
        self._to.mkdir(parents=True, exist_ok=True)
        self._claim()
        if not (path / ABOUT).exists():  # Else all but the link was done when an error came.
            self._write_to(path, weights)
        self._point_to(path)
        for version in sorted(self._versions())[: -self._keep]:
            # Half deleted it must not look like a version.
            shutil.rmtree(self._path(version).rename(self._draft()))
        return path

    def _write_to(self, path: Path, weights: PublishedWeights) -> None:
        """Writes a version."""
        writing = self._draft()
        writing.mkdir()
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, writing, ignore_errors=True)  # Unless it has its name.
            self._copy_model(writing)
            arrays = {name: np.asarray(array) for name, array in weights.arrays.items()}
            files = _write_tensors(writing, arrays, self._nbytes_max)
            about = {
                "job": self._job,
                "lineage": weights.version.lineage,
                "number": weights.version.number,
                "step": weights.step,
                "exact": weights.exact,
                "sha256": {name: records.sha256_of(writing / name) for name in files},
            }
            (writing / ABOUT).write_text(to_json(about, indent=1) + "\n", encoding="utf-8")
            for written in (*writing.iterdir(), writing):
                records.sync(written)
            writing.rename(path)

    def _draft(self) -> Path:
        return self._to / f"{WRITING}{secrets.token_hex(4)}"

    def _path(self, version: WeightsVersion) -> Path:
        return self._to / f"v{version.lineage}-{version.number:012d}"

    def _versions(self) -> Iterator[WeightsVersion]:
        for path in self._to.glob("v*"):
            if (found := NAME.fullmatch(path.name)) and (path / ABOUT).is_file():
                yield WeightsVersion(lineage=int(found[1]), number=int(found[2]))

    def _claim(self) -> None:
        """Keeps other processes out, which would delete what this one is writing.

        Raises:
            BlockingIOError: Another one uses the folder.
        """
        if self._lock is None or not (self._to / LOCK).exists():  # The folder may be a new one.
            busy = f"another psserver publish writes into {self._to}"
            self._lock = lock_folder(self._to / LOCK, busy)

    def _require_own(self) -> None:
        """Refuses a folder of another job: numbers of two jobs have no order."""
        newest = self.newest()
        if newest is not None:
            about = json.loads((self._path(newest) / ABOUT).read_text(encoding="utf-8"))
            if about["job"] != self._job:
                raise ConfigError(
                    f"{self._to} has versions of job {about['job']!r}: give another --to"
                )

    def _copy_model(self, to: Path) -> None:
        """Copies the model's files, without its weights."""
        if self._model is not None:
            for path in self._model.iterdir():
                if path.is_file() and ".safetensors" not in path.name and path.suffix != ".bin":
                    shutil.copy2(path, to)

    def _require_link(self) -> None:
        """Refuses a `latest` that this program has not made: it could not be replaced."""
        latest = self._to / LATEST
        if latest.exists() and not latest.is_symlink():
            raise ConfigError(f"{latest} is no link to a version: give another --to, or move it")

    def _point_to(self, path: Path) -> None:
        link = self._draft()
        link.symlink_to(path.name)
        link.replace(self._to / LATEST)
        records.sync(self._to)


def _write_tensors(folder: Path, arrays: Mapping[str, Array], nbytes_max: int) -> list[str]:
    """Writes tensors into as many files as are needed; returns the files' names."""
    parts: list[dict[str, Array]] = [{}]
    room = nbytes_max
    for name, array in arrays.items():
        if parts[-1] and array.nbytes > room:
            parts.append({})
            room = nbytes_max
        parts[-1][name] = array
        room -= array.nbytes
    names = ["model.safetensors"]
    if len(parts) > 1:
        names = [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
    for name, part in zip(names, parts, strict=True):
        _write_file(folder / name, part)
    if len(parts) > 1:
        files = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        total = sum(array.nbytes for array in arrays.values())
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        return [*names, INDEX]
    return names


def _write_file(path: Path, arrays: Mapping[str, Array]) -> None:
    """Writes tensors in the format of safetensors, whose writer for numpy has no bfloat16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        if (dtype := TYPES.get(array.dtype.name)) is None:
            raise ConfigError(f"{name!r} is {array.dtype}: --map has to return {', '.join(TYPES)}")
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGN_NBYTES)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).data)
