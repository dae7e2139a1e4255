"""The way of a sharded model's parts between the processes that hold them and those that push.

FSDP2 and tensor parallelism leave a part of each tensor in each process of a group. The shards know
whole tensors, cut into slices. So each slice has one process that pushes and pulls it: the one that
holds most of it, as far as all get about equally much. Where that process does not hold the whole
slice, the others send it their parts of the gradient before the push, and it sends them their
parts of the weights after the pull, by all-to-all exchanges in the group. Of a tensor much larger
than a slice almost nothing moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from pscore.partition import Layout
from psworker.group.local_group import LocalGroup

ROUND_NUMEL = 1 << 24  # Elements in one all-to-all exchange: bounds its memory to 64 MiB.
UNEVEN = 1.1  # A process pushes at most this many times its even share, and one slice more.
Spans = Sequence[tuple[int, int]]  # By tensor: first and last element that a process holds.


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a slice that one process holds and one process pushes."""

    slice: int
    tensor: int
    holder: int
    owner: int
    is_source: bool  # Several may hold it; one of them sends its gradient.
    local: int  # Start in the holder's part of the tensor, in elements.
    inner: int  # Start in the slice.
    numel: int


class Routes:
    """The pieces of all slices.

    Attributes:
        spans: The part of each tensor that this process holds.
        owners: Local rank of the process that pushes and pulls each slice.
        own: The slices of this process.
        here: The slices of which this process holds a part.
        memory: The layout with the slices of this process one after the other, and no room for
            the others.
    """

    def __init__(self, layout: Layout, spans: Sequence[Spans], group: LocalGroup) -> None:
        """Finds the owners.

        Args:
            spans: For each process, by local rank, the part of each tensor that it holds.
        """
        self._group = group
        self.spans = spans[group.rank]
        parts = [_held(layout, index, spans) for index in range(len(layout.slices))]
        self.owners = _owners(layout, parts, group.size)
        self.own = [index for index, rank in enumerate(self.owners) if rank == group.rank]
        self.memory = _compact(layout, self.own)
        pieces = [
            piece
            for index, held in enumerate(parts)
            for piece in _pieces(index, held, self.owners[index])
        ]
        self.here = sorted({piece.slice for piece in pieces if piece.holder == group.rank})
        self._rounds = list(_rounds(layout, pieces))

    def collect(self, parts: Sequence[torch.Tensor], memory: torch.Tensor) -> None:
        """Brings the parts that the processes hold into the slices that this process pushes.

        Args:
            parts: This process's part of each tensor, flat, float32.
            memory: `(memory.numel,) float32`, written.
        """
        rank = self._group.rank
        for pieces in self._rounds:
            chosen = [piece for piece in pieces if piece.is_source]
            sent = [piece for piece in chosen if piece.holder == rank]
            come = [piece for piece in chosen if piece.owner == rank]
            self._move(
                chosen,
                [(piece.owner, _part(parts[piece.tensor], piece)) for piece in sent],
                [(piece.holder, self._room(memory, piece)) for piece in come],
                memory,
            )

    def spread(self, memory: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Brings the slices that this process pulls to the processes that hold parts of them.

        Args:
            memory: `(memory.numel,) float32`.
            parts: This process's part of each tensor, flat, float32; written.
        """
        rank = self._group.rank
        for pieces in self._rounds:
            sent = [piece for piece in pieces if piece.owner == rank]
            come = [piece for piece in pieces if piece.holder == rank]
            self._move(
                pieces,
                [(piece.holder, self._room(memory, piece)) for piece in sent],
                [(piece.owner, _part(parts[piece.tensor], piece)) for piece in come],
                memory,
            )

    def _move(
        self,
        pieces: Sequence[Piece],
        sent: Sequence[tuple[int, torch.Tensor]],
        come: Sequence[tuple[int, torch.Tensor]],
        memory: torch.Tensor,
    ) -> None:
        """Copies tensors from each process to each; both sides have them in one order.

        Args:
            pieces: All that move, between any two processes.
            sent: Tensors that leave, each with its receiver.
            come: Memory for tensors that arrive, each with its sender.
            memory: A tensor on their device: a process without any takes part with empty ones.
        """
        rank, size = self._group.rank, self._group.size
        kept = [tensor for receiver, tensor in sent if receiver == rank]
        own = [tensor for sender, tensor in come if sender == rank]
        for target, source in zip(own, kept, strict=True):
            target.copy_(source)
        if all(piece.holder == piece.owner for piece in pieces):
            return
        others = [other for other in range(size) if other != rank]
        given = [tensor for other in others for receiver, tensor in sent if receiver == other]
        taken = [tensor for other in others for sender, tensor in come if sender == other]
        counts_given, counts_taken = [0] * size, [0] * size
        for receiver, tensor in sent:
            counts_given[receiver] += tensor.numel() if receiver != rank else 0
        for sender, tensor in come:
            counts_taken[sender] += tensor.numel() if sender != rank else 0
        source = torch.cat(given) if given else memory.new_empty(0)
        target = source.new_empty(sum(counts_taken))
        self._group.exchange(target, source, counts_taken, counts_given).wait()
        parts = torch.split_with_sizes(target, [one.numel() for one in taken])
        for tensor, values in zip(taken, parts, strict=True):
            tensor.copy_(values)

    def _room(self, memory: torch.Tensor, piece: Piece) -> torch.Tensor:
        start = self.memory.slices[piece.slice].start + piece.inner
        return memory[start : start + piece.numel]


def _part(part: torch.Tensor, piece: Piece) -> torch.Tensor:
    return part[piece.local : piece.local + piece.numel]


@dataclass(frozen=True, slots=True)
class _Held:
    """A part of a slice that a process holds."""

    tensor: int
    holder: int
    local: int
    inner: int
    numel: int
    is_first: bool  # No process of a lower rank holds it.


def _held(layout: Layout, index: int, spans: Sequence[Spans]) -> list[_Held]:
    """Returns the parts of a slice that the processes hold, in the order of slice and rank."""
    parts = []
    for segment in layout.slices[index].segments:
        start = segment.tensor_start
        stop = start + segment.stop - segment.start
        known: set[tuple[int, int]] = set()
        for rank, held in enumerate(spans):
            first, last = held[segment.tensor]
            low, high = max(start, first), min(stop, last)
            if low < high:
                inner = segment.start + low - start
                is_first = (low, high) not in known
                known.add((low, high))
                parts.append(_Held(segment.tensor, rank, low - first, inner, high - low, is_first))
    return parts


def _pieces(index: int, held: Sequence[_Held], owner: int) -> Iterator[Piece]:
    """Returns the pieces of a slice; of equal ones the owner's is the source, else the first."""
    own = {(part.inner, part.numel) for part in held if part.holder == owner}
    for part in held:
        has_own = (part.inner, part.numel) in own
        is_source = part.holder == owner if has_own else part.is_first
        yield Piece(
            index, part.tensor, part.holder, owner, is_source, part.local, part.inner, part.numel
        )


def _owners(layout: Layout, parts: Sequence[Sequence[_Held]], size: int) -> list[int]:
    """Returns the process that pushes each slice: the one with most of it that has room for it."""
    longest = max(spec.numel for spec in layout.slices)
    limit = UNEVEN * sum(spec.numel for spec in layout.slices) / size + longest
    loads, owners = [0] * size, []
    for spec, held in zip(layout.slices, parts, strict=True):
        numels = [0] * size
        for part in held:
            numels[part.holder] += part.numel
        ranks = [rank for rank in range(size) if loads[rank] + spec.numel <= limit]
        owner = min(ranks, key=lambda rank: (-numels[rank], loads[rank], rank))
        loads[owner] += spec.numel
        owners.append(owner)
    return owners


def _compact(layout: Layout, own: Sequence[int]) -> Layout:
    """Returns a layout with room for some slices alone."""
    slices, stop = list(layout.slices), 0
    for spec in layout.slices:
        start = stop
        stop += spec.numel if spec.index in own else 0
        slices[spec.index] = replace(spec, start=start, stop=stop)
    return replace(layout, slices=tuple(slices), numel=stop)


def _rounds(layout: Layout, pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Returns the pieces in parts of about `ROUND_NUMEL` elements of whole slices."""
    found: list[Piece] = []
    first = 0
    for piece in pieces:
        spec = layout.slices[piece.slice]
        if found and piece.slice != found[-1].slice and spec.stop - first > ROUND_NUMEL:
            yield found
            found, first = [], spec.start
        found.append(piece)
    if found:
        yield found
