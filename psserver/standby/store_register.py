"""A register in a store of objects that fsspec reaches, and that makes an object once."""

from __future__ import annotations

import importlib
import json
import secrets
from typing import Any

from pscore.errors import ConfigError
from psserver.standby.succession import Claim

KINDS = ("s3", "gs", "memory")  # Stores in which an object appears at once, or not at all.


class StoreRegister:
    """The claims of one shard in a store: `s3://bucket/night`, `gs://`.

    An object is made on the condition that there is none of its name (`If-None-Match: *`). A store
    that ignores this would let two processes have the shard, so it is tried, and refused.
    """

    def __init__(self, url: str, shard: str) -> None:
        """Connects, and makes an object twice.

        Raises:
            ConfigError: The store is of another kind, fsspec or its package for it is not
                installed, or the store does not answer, or makes an object twice.
        """
        if url.partition("://")[0] not in KINDS:
            raise ConfigError(
                f"{url} cannot be a register: it must be a folder, "
                "etcd://, kubernetes://, s3:// or gs://"
            )
        try:
            core: Any = importlib.import_module("fsspec.core")
            self._store, root = core.url_to_fs(url)
        except (ImportError, ValueError) as problem:
            raise ConfigError(
                f"{url} cannot be reached: {problem}; install fsspec and its package for this kind "
                "of store (s3fs for s3://, gcsfs for gs://) on both machines"
            ) from problem
        self._root, self._shard = root.rstrip("/"), shard
        probe = f"{self._root}/{shard}.{secrets.token_hex(8)}.probe"
        try:
            is_new = self._make(probe, b"1"), self._make(probe, b"2")
            self._store.rm_file(probe)
        except (OSError, TypeError, NotImplementedError, ValueError) as problem:
            raise ConfigError(f"{url} cannot be a register: {problem!r}") from problem
        if is_new != (True, False):
            raise ConfigError(f"{url} cannot be a register: it does not keep what is there")

    def newest(self) -> Claim | None:
        """Returns the claim with the largest epoch; None: there is none yet."""
        self._store.invalidate_cache()
        try:
            found = [str(path).rpartition("/")[2] for path in self._store.ls(self._root, False)]
        except FileNotFoundError:
            return None
        mine = [name for name in found if name.startswith(f"{self._shard}.")]
        epochs = [int(name.split(".")[1]) for name in mine if name.endswith(".claim")]
        return self._read(max(epochs)) if epochs else None

    def create(self, claim: Claim) -> bool:
        """Writes a claim; returns False if there is one of its epoch, which stays."""
        return self._make(self._path(claim.epoch), json.dumps(claim.to_json()).encode())

    def _make(self, path: str, data: bytes) -> bool:
        try:
            self._store.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        return True

    def _read(self, epoch: int) -> Claim:
        return Claim.from_json(json.loads(self._store.cat_file(self._path(epoch))))

    def _path(self, epoch: int) -> str:
        return f"{self._root}/{self._shard}.{epoch}.claim"
