"""Registers: places that keep one claim for each epoch of a shard, and let nobody replace it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from psserver.standby.folder_register import FolderRegister
from psserver.standby.store_register import StoreRegister
from psserver.standby.succession import Claim


class Register(Protocol):
    """The claims of one shard; may be used by any thread."""

    def newest(self) -> Claim | None:
        """Returns the claim with the largest epoch; None: there is none yet.

        Raises an `OSError` if it cannot be read, and a `ValueError` if a file holds no claim.
        """

    def create(self, claim: Claim) -> bool:
        """Writes a claim; returns False if there is one of its epoch, which stays.

        Raises an `OSError` if that cannot be known: the claim is there, or not.
        """


def settle(register: Register, decide: Callable[[Claim | None], Claim | None]) -> Claim | None:
    """Writes what is decided about the newest claim; decides again where another was first.

    Args:
        decide: Returns the claim to write, the newest one if it is right, or None.

    Returns:
        The claim that counts now; None: there is nothing to write.

    Raises:
        OSError, ValueError: The register does not answer, and the claim is written or not.
    """
    while True:
        newest = register.newest()
        wanted = decide(newest)
        if wanted is None or wanted == newest or register.create(wanted):
            return wanted


def register_of(text: str, shard: str) -> Register:
    """Returns the register at a place: a URL, or else a folder.

    Args:
        text: The place.
        shard: Name of the shard, which no other one at this place has.

    Raises:
        ConfigError: It cannot be used from here.
    """
    return StoreRegister(text, shard) if "://" in text else FolderRegister(Path(text), shard)
