"""The protocol of a decentralised mode's worker: a state machine without threads and network.

It sends through a `Post`. Where it has to wait it yields what it waits for, and its driver resumes
it with that: `psworker/peers` over sockets, the simulator in one thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from pscore.errors import RemoteProtocolError
from pscore.rules.decentralised import Decentralised
from pscore.types import FloatArray

PART_NUMEL = 1 << 20  # Longest array in one message: 4 MiB.


class Tag(NamedTuple):
    """Use of an array; a sender sends each once."""

    kind: int
    round: int
    part: int
    epoch: int = 0  # 0: it holds under any.


class Want(NamedTuple):
    """Waits for an array; resumed with it, or with None when the members have changed."""

    source: int  # Rank.
    tag: Tag
    waits: bool = True  # Else it is resumed with None if the array is not here yet.


class Meet(NamedTuple):
    """Waits until all members have stopped; resumed with the meetings since the last one."""

    position: int  # Steps or rounds behind this worker; -1: it has just come.
    waits: bool = True  # Else it only learns the members.
    parts: bool = False  # This worker exchanges nothing any more.
    stays: bool = False  # But others that are behind it may need its last result.
    needs_least: bool = False  # It waits while the job has fewer workers than its least.
    needs_all: int = 0  # It waits until that many workers, ranks 0 and up, have met at least once.
    again: bool = False  # An exchange among the members has failed, though none may be gone.

    @property
    def is_first(self) -> bool:
        """Whether the first meeting with this worker counts, even if members have changed since.

        The others have its place from there, and would take it for one that has come later.
        """
        return self.position < 0 and self.waits and not self.needs_all


class Gathering(NamedTuple):
    """The members of an epoch, and their positions when all had stopped."""

    epoch: int
    positions: dict[int, int]  # By rank, in the order of the ranks.
    leaving: frozenset[int] = frozenset()  # Ranks that exchange nothing behind their positions.


class LateExchange(NamedTuple):
    """Waits until an exchange that this worker has begun is over, or the members change."""

    partner: int  # Rank.
    is_over: Callable[[], bool]


class TorchSum(NamedTuple):
    """Waits for a sum over all members by torch.distributed.

    It is resumed with the sum, `(numel,) float32`, the same bits on every member; with the reason
    of a failure; or with None when the members have changed.
    """

    backend: str  # `gloo` or `nccl`.
    epoch: int
    members: tuple[int, ...]  # Ranks, in order.
    port: int  # Of the first member's store.
    round: int
    values: FloatArray


T = TypeVar("T")
Wait = Want | Meet | LateExchange | TorchSum
Steps = Generator[Wait, Any, T]
Waits = Steps[None]


class Post(Protocol):
    """Sends arrays to other workers; no method waits."""

    @property
    def has_moved(self) -> bool:
        """Whether the members have changed since the last meeting that was returned."""

    @property
    def is_short(self) -> bool:
        """Whether the job had fewer workers than its least when this worker last asked."""

    def members(self) -> list[int]:
        """Returns the ranks of the members, in order, as far as this worker knows them."""

    def open_store(self) -> int:
        """Opens this worker's store for torch.distributed, once; returns its port."""

    def is_far(self, to: int) -> bool:
        """Returns whether a message to another worker takes long, however short it is."""

    def give(self, to: int, tag: Tag, values: FloatArray) -> None:
        """Sends an array; it must not change any more."""

    def offer(self, to: int, number: int, part: int, values: FloatArray) -> None:
        """Sends a snapshot of one part, for an exchange; it must not change any more."""


@dataclass(slots=True)
class Model:
    """A worker's model, as a state machine uses it."""

    weights: torch.Tensor  # `(numel,) float32`, the weights that training reads.
    first_step: int  # Steps of training behind it.
    # Makes a step of the wrapped optimizer on them; does nothing in a step left out.
    update: Callable[[], None]
    # Returns this step's gradient times its weight, and further numbers to sum, `(m,)`.
    gather: Callable[[], FloatArray]
    # Puts the sum over all workers in the gradients' place; does not change it.
    scatter: Callable[[FloatArray], None]
    # Returns the weights and the state of the wrapped optimizer, `(k,)`.
    pack: Callable[[], FloatArray]
    unpack: Callable[[FloatArray], None]  # Takes over the result of another worker's `pack`.
    lock: AbstractContextManager[Any]  # Held while the model is mixed; another thread may do so.


@dataclass(slots=True)
class ExchangeStats:
    """A worker's last exchanges, for people."""

    partner: int = -1
    staleness: int = 0
    num_exchanges: int = 0
    refused: set[int] = field(default_factory=set)  # Ranks whose models held NaN or Inf.


class Gossip(ABC):
    """One worker's part in the exchange of models."""

    name: ClassVar[str]  # Its name in `GOSSIPS`.
    # Steps behind this worker, or rounds of all-reduce, counted alike by all that depend on it.
    number: int = 0

    def __init__(self, rule: Decentralised, rank: int, model: Model, post: Post) -> None:
        self.rule = rule
        self.rank = rank
        self.model = model
        self.post = post
        self.stats = ExchangeStats()  # Its last exchanges, for status.

    @classmethod  # noqa: B027
    def require_fit(cls, rule: Decentralised, device: str, *, has_tls: bool) -> None:
        """Refuses a model or a job in which the worker could not exchange.

        Args:
            device: Type of the model's device, as torch names it: `cpu`, `cuda`.
            has_tls: Whether the connections of the job are encrypted.

        Raises:
            ConfigError: It could not.
        """

    @abstractmethod
    def start(self) -> Waits:
        """Meets the other workers; the model has the weights to begin with."""

    @abstractmethod
    def step(self) -> Waits:
        """Makes one step: the wrapped optimizer's, and the exchange."""

    def meet(self) -> Waits:
        """Meets the others between two steps, where this worker waits for something else."""
        yield Meet(self.number, waits=False)

    def part(self) -> Waits:
        """Reports that this worker exchanges nothing any more."""
        yield Meet(self.number, waits=False, parts=True)

    def end(self) -> None:  # noqa: B027
        """Brings the final model into the weights; nothing is exchanged any more."""

    def begin(self) -> None:  # noqa: B027
        """Notes that the model has the weights with which the next step begins."""

    def on_offer(
        self, source: int, incarnation: int, number: int, part: int, values: FloatArray
    ) -> FloatArray | None:
        """Answers another worker's snapshot with this one's; None: it is busy.

        Args:
            source: Its rank.
            incarnation: Its incarnation: another process counts its exchanges anew.
            part: Index of the part of the model.
            values: The snapshot.

        Raises:
            RemoteProtocolError: There is no such part, or the snapshot is not one of it.
        """
        return None

    def on_answer(self, number: int, part: int, values: FloatArray | None) -> None:  # noqa: B027
        """Receives the answer to an offer; None: the other one is busy or gone."""


def require_numel(source: int, values: FloatArray, least: int, most: float) -> None:
    """Refuses an array of another worker that is too short or too long.

    Args:
        least: Fewest numbers that are accepted.
        most: Most of them; infinite: any number.

    Raises:
        RemoteProtocolError: It has fewer or more.
    """
    if not least <= len(values) <= most:
        wanted = f"{least}" if least == most else f"{least} to {most}"
        raise RemoteProtocolError(
            f"worker {source} has sent {len(values)} numbers, {wanted} wanted"
        )


def is_finite(values: FloatArray) -> bool:
    """Returns whether an array, which is not empty, holds neither NaN nor Inf."""
    return bool(np.isfinite(values.min()) and np.isfinite(values.max()))


def parts_of(numel: int) -> list[slice]:
    """Returns the parts of an array that travel in messages of their own."""
    return [slice(i, min(i + PART_NUMEL, numel)) for i in range(0, numel, PART_NUMEL)]


def to_host(values: torch.Tensor) -> FloatArray:
    """Returns a copy of a vector on the host."""
    array: FloatArray = values.detach().to("cpu", copy=True).numpy()
    return array


def on_device_of(like: torch.Tensor, values: FloatArray) -> torch.Tensor:
    """Returns an array that came from another worker on the device of `like`."""
    return torch.from_numpy(values).to(like.device)


def sends(members: Sequence[int], rank: int) -> list[int]:
    """Returns the other members, beginning with the next one, so that not all send to the first."""
    place = members.index(rank)
    return [*members[place + 1 :], *members[:place]]
