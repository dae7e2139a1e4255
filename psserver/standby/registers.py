"""Registers: places that keep one claim for each epoch of a shard, and let nobody replace it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from psserver.standby.etcd_register import SCHEMES, EtcdRegister
from psserver.standby.folder_register import FolderRegister
from psserver.standby.kubernetes_register import SCHEME, KubernetesRegister
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


def newest_in(register: Register, known: int) -> Claim | None:
    """Returns the claim with the largest epoch; None: there is none yet.

    Args:
        known: Epoch of a claim that was there before; 0: none was.

    Raises:
        OSError, ValueError: The register does not answer, or shows less than it had, as a folder
            without its mount, or with an old listing, does.
    """
    newest = register.newest()
    epoch = 0 if newest is None else newest.epoch
    if epoch < known:
        raise ValueError(f"it had claim {known}, and shows {epoch or 'none'} now: is it mounted?")
    return newest


def settle(
    register: Register, decide: Callable[[Claim | None], Claim | None], known: int = 0
) -> Claim | None:
    """Writes what is decided about the newest claim; decides again where another was first.

    Args:
        decide: Returns the claim to write, the newest one if it is right, or None.
        known: Epoch of a claim that was there before; 0: none was.

    Returns:
        The claim that counts now; None: there is nothing to write.

    Raises:
        OSError, ValueError: The register does not answer, or lacks that claim; the decision is
            written or not.
    """
    while True:
        newest = newest_in(register, known)
        wanted = decide(newest)
        if wanted is None or wanted == newest or register.create(wanted):
            return wanted


def register_of(text: str, shard: str) -> Register:
    """Returns the register at a place: a URL of etcd, Kubernetes or a store, or else a folder.

    Args:
        shard: Name of the shard, which no other one at this place has.

    Raises:
        ConfigError: It cannot be used from here.
    """
    scheme = text.partition("://")[0]
    if scheme in SCHEMES:
        return EtcdRegister(text, shard)
    if scheme == SCHEME:
        return KubernetesRegister(text, shard)
    return StoreRegister(text, shard) if "://" in text else FolderRegister(Path(text), shard)
