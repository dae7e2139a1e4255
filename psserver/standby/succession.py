"""Decisions about which process has a shard, as claims that a register keeps.

A register keeps one claim for each epoch of a shard, and lets nobody replace it. The process that
wants to change something reads the newest claim and writes the next one; if another process was
first, it reads again. A claim names the process that has the shard, and the standby that may take
it without a word from that one. So

    pair      holder         -> holder, heir     the standby has everything that is answered
    alone     holder, heir   -> holder           the standby is away
    take      holder, heir   -> heir             the holder is away
    give      holder         -> another          the shard moves there (`psserver drain`)

and of `alone` and `take` only one succeeds. While a claim names an heir, the holder answers nothing
that the heir lacks (stream.py), so a holder that is cut off answers nothing until it has written
`alone`. No clock is compared with another one: how long a process waits before it tries decides
only how soon something happens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from pscore.errors import ConfigError

TEXT_LENGTH_MAX = 1000


TEXTS = ("holder", "address", "heir", "heir_address", "reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Which process has a shard, from one epoch on.

    Attributes:
        epoch: 1 for the first claim of a shard.
        holder: Name of the process that has it, which no other one ever has.
        address: Its address.
        heir: Name of the standby that may take it; empty: none may.
        heir_address: Its address.
        reason: Why the claim was written, for people.
    """

    epoch: int
    holder: str
    address: str
    heir: str = ""
    heir_address: str = ""
    reason: str = ""

    def to_json(self) -> dict[str, object]:
        """Returns the claim as a file has it."""
        return asdict(self)

    @staticmethod
    def from_json(values: object) -> Claim:
        """Returns the claim that `to_json` wrote; raises ValueError if it is none."""
        if not isinstance(values, Mapping):
            raise ValueError("a claim is no list")
        epoch = values.get("epoch")
        if type(epoch) is not int or epoch < 1:
            raise ValueError(f"{epoch!r} is no epoch")
        texts = {key: values.get(key) for key in TEXTS}
        if not all(isinstance(it, str) and len(it) <= TEXT_LENGTH_MAX for it in texts.values()):
            raise ValueError("a claim has other values")
        return Claim(epoch=epoch, **{key: str(value) for key, value in texts.items()})


def pair(newest: Claim | None, holder: str, address: str, heir: str, heir_address: str) -> Claim:
    """Returns the claim by which a holder gets a standby that may take its place.

    Raises:
        ConfigError: The shard is another process's.
    """
    if newest is not None and newest.holder != holder:
        raise ConfigError(
            f"the register says that the shard is at {newest.address} since epoch {newest.epoch}: "
            "give it a folder of its own if that is of a former cluster"
        )
    return Claim(
        epoch=_next(newest),
        holder=holder,
        address=address,
        heir=heir,
        heir_address=heir_address,
        reason="a standby has everything",
    )


def alone(newest: Claim | None, holder: str, address: str, reason: str) -> Claim | None:
    """Returns the claim by which a holder goes on without its standby; None: that has the shard.

    The newest claim is returned if it says so already.
    """
    if newest is not None and newest.holder != holder:
        return None
    if newest is not None and not newest.heir:
        return newest
    return Claim(epoch=_next(newest), holder=holder, address=address, reason=reason)


def take(newest: Claim | None, heir: str, reason: str) -> Claim | None:
    """Returns the claim by which a standby gets the shard; None: it may not.

    The newest claim is returned if it says so already.
    """
    if newest is None:
        return None
    if newest.holder == heir:
        return newest
    if newest.heir != heir:
        return None
    address = newest.heir_address
    return Claim(epoch=newest.epoch + 1, holder=heir, address=address, reason=reason)


def give(newest: Claim | None, holder: str, to: str, address: str) -> Claim | None:
    """Returns the claim by which a holder that never serves again names the next one.

    None: no register was ever asked about this shard. The newest claim is returned if it says so
    already, or if the shard has gone further since.
    """
    if newest is None or newest.holder != holder:
        return newest
    return Claim(epoch=newest.epoch + 1, holder=to, address=address, reason="it was moved")


def left_to(newest: Claim | None, other: str) -> Claim | None:
    """Returns the claim of the other place, where a shard's first place has lost its journals.

    Args:
        other: Address of the other place.

    Returns:
        The newest claim; None: the shard is new, and begins here.

    Raises:
        ConfigError: The shard is neither new nor there.
    """
    if newest is not None and newest.address != other:
        raise ConfigError(
            f"the register says that a process at {newest.address} has had the shard since epoch "
            f"{newest.epoch}, and this one has lost its journals: start it again once the standby "
            "has taken over, or name another register if that is of a former cluster"
        )
    return newest


def _next(newest: Claim | None) -> int:
    return 1 if newest is None else newest.epoch + 1
