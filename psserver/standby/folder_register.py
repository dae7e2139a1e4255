"""A register in a folder that both machines reach: each claim is a file, made once."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

from pscore.errors import ConfigError
from psserver.standby.succession import Claim


class FolderRegister:
    """The claims of one shard in a folder.

    A claim is written under another name and then linked to its own, which fails if that is taken:
    on local file systems and over NFS.
    """

    def __init__(self, folder: Path, shard: str) -> None:
        """Touches nothing yet; raises ConfigError if there is no such folder."""
        if not folder.is_absolute() or not folder.is_dir():
            raise ConfigError(f"{folder} is no folder here: name one that both machines reach")
        self._folder, self._shard = folder, shard

    def newest(self) -> Claim | None:
        """Returns the claim with the largest epoch; None: there is none yet."""
        found = [name for name in os.listdir(self._folder) if name.startswith(f"{self._shard}.")]
        epochs = [int(name.split(".")[1]) for name in found if name.endswith(".claim")]
        if not epochs:
            return None
        return Claim.from_json(json.loads(self._path(max(epochs)).read_text()))

    def create(self, claim: Claim) -> bool:
        """Writes a claim; returns False if there is one of its epoch, which stays."""
        path = self._path(claim.epoch)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            with draft.open("x") as file:
                json.dump(claim.to_json(), file)
                file.flush()
                os.fsync(file.fileno())
            os.link(draft, path)
        except FileExistsError:
            return False
        finally:
            draft.unlink(missing_ok=True)
        return True

    def _path(self, epoch: int) -> Path:
        return self._folder / f"{self._shard}.{epoch}.claim"
