"""The numbers of one slice, and how a clock's actions change them. No decisions, no I/O.

The weights are kept twice: an update reads one copy and writes the other, so that the newest
weights can be read while the next are made; a reader that is still sending from a copy has a lease
on it, and then the update takes another. Actions of one slice are carried out one after the
other; different slices in parallel, without the GIL.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pscore.compressors.base import Compressor
from pscore.compressors.none import NoCompression
from pscore.optimizers.base import Optimizer
from pscore.rules.base import Memory, Rule
from pscore.types import ByteArray, FloatArray, IntArray, Role, SegmentTable, SliceSpec
from pscore.wire import floats
from psserver.clock import Add, Load, Update
from psserver.estimate import Estimate

RAW = NoCompression()


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """The bytes of one push, and how to read them."""

    data: ByteArray  # (nbytes,)
    compressor: Compressor
    counts: tuple[int, ...] = ()  # Role STATE: optimizer steps of each segment.


class Buffer:
    """One copy of the weights, and how many readers still send from it."""

    __slots__ = ("array", "leases", "number")

    def __init__(self, array: FloatArray, number: int) -> None:
        """Wraps an array; `number` is 1 or 2 in the table's segment, 0 outside."""
        self.array = array
        self.leases = 0
        self.number = number


class SliceStore:
    """Weights, optimizer state and open sums of one slice; all arrays `(numel,) float32`."""

    def __init__(
        self,
        spec: SliceSpec,
        rule: Rule,
        optimizer: Optimizer,
        buffers: Sequence[FloatArray] | None = None,
        versions: IntArray | None = None,
    ) -> None:
        """Starts with zeros.

        Args:
            spec: The slice.
            rule: The job's mode.
            optimizer: The server's.
            buffers: Two arrays for the weights, in shared memory; else private ones are made.
            versions: `(2,) int64`, where the versions of these buffers are published.
        """
        self.numel = spec.numel
        self.segments = SegmentTable.of(spec)
        self.state = [self._zeros() for _ in optimizer.state_names]
        self.counts: IntArray = np.zeros(len(self.segments), dtype=np.int64)
        self._rule = rule
        self._optimizer = optimizer
        arrays = buffers or (self._zeros(), self._zeros())
        shared = buffers is not None
        self._buffers = [Buffer(array, i + 1 if shared else 0) for i, array in enumerate(arrays)]
        self._newest = self._buffers[0]
        self._versions = versions
        self._leasing = threading.Lock()
        self._bins: dict[int, FloatArray] = {}
        self._free: list[FloatArray] = []
        self._memory: Memory | None = None
        self._estimate: Estimate | None = None

    @property
    def weights(self) -> FloatArray:
        """The newest weights."""
        return self._newest.array

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = [buffer.array for buffer in self._buffers]
        arrays += [*self.state, *self._bins.values(), *self._free]
        if self._memory is not None:
            arrays += [self._memory.scratch, *self._memory.state.values()]
        estimate_nbytes = self._estimate.nbytes if self._estimate is not None else 0
        return sum(array.nbytes for array in arrays) + estimate_nbytes

    def export(self) -> dict[str, np.ndarray]:
        """Returns copies of all that has to outlive the process; open sums are not part of it."""
        arrays: dict[str, np.ndarray] = {
            "weights": self.weights.copy(),
            "counts": self.counts.copy(),
        }
        arrays |= {f"state.{i}": array.copy() for i, array in enumerate(self.state)}
        if self._memory is not None:
            kept = self._memory.state.items()
            arrays |= {f"memory.{name}": array.copy() for name, array in kept}
        return arrays

    def restore(self, arrays: Mapping[str, np.ndarray], version: int) -> None:
        """Takes what `export` returned, before anything else happens to the slice."""
        spare = self._spare()
        np.copyto(spare.array, arrays["weights"])
        self._publish(spare, version)
        self.counts[:] = arrays["counts"]
        for index, array in enumerate(self.state):
            np.copyto(array, arrays[f"state.{index}"])
        prefix = "memory."
        for name in [name for name in arrays if name.startswith(prefix)]:
            self._remember().state[name.removeprefix(prefix)] = arrays[name]

    def change(self, rule: Rule) -> None:
        """Goes on under another rule; what the former one remembered is of no use to it."""
        self._rule, self._memory = rule, None

    def lease(self) -> Buffer:
        """Returns the newest weights' buffer; it stays as it is until `release`."""
        with self._leasing:
            self._newest.leases += 1
            return self._newest

    def release(self, buffer: Buffer) -> None:
        """Ends a lease; may be called from any thread."""
        with self._leasing:
            buffer.leases -= 1

    def check(self, payload: Payload, role: Role) -> None:
        """Refuses a payload that cannot be of this slice, before anything is counted.

        Raises:
            DecodeError: It has another length.
        """
        if role in (Role.WEIGHTS, Role.STATE):
            num_arrays = 1 if role is Role.WEIGHTS else 1 + len(self.state)
            floats(memoryview(payload.data), num_arrays, self.numel)
        elif payload.data.nbytes:
            payload.compressor.check(payload.data, self.numel)

    def load(self, action: Load, payload: Payload) -> None:
        """Takes weights, and with `Role.STATE` the optimizer's state, as they are."""
        num_arrays = 1 if action.role is Role.WEIGHTS else 1 + len(self.state)
        weights, *state = floats(memoryview(payload.data), num_arrays, self.numel)
        spare = self._spare()
        np.copyto(spare.array, weights)
        self._publish(spare, action.version)
        for array, value in zip(self.state, state, strict=False):
            np.copyto(array, value)
        if payload.counts:
            self.counts[:] = payload.counts
        self._estimate = None  # What was loaded may be far away: it is sent whole.

    def add(self, action: Add, payload: Payload) -> None:
        """Adds a gradient to a bin; an empty payload is a gradient of zeros."""
        bin_ = self._bins.get(action.bin)
        if bin_ is None:
            assert action.is_first
            bin_ = self._bins[action.bin] = self._free.pop() if self._free else self._zeros()
        if not payload.data.nbytes:
            if action.is_first:
                bin_.fill(0.0)
        elif self._rule.compensates:
            memory = self._remember()
            payload.compressor.decode_add(payload.data, memory.scratch, 1.0, assign=True)
            self._rule.compensate(memory.scratch, action.worker, memory)
            raw = memory.scratch.view(np.uint8)
            RAW.decode_add(raw, bin_, action.weight, assign=action.is_first)
        else:
            payload.compressor.decode_add(payload.data, bin_, action.weight, assign=action.is_first)

    def update(self, action: Update) -> None:
        """Makes one optimizer step with a bin's mean, and frees the bin."""
        bin_ = self._bins.pop(action.bin)
        self._step(bin_, action)
        self._free.append(bin_)

    def add_and_update(self, add: Add, payload: Payload, update: Update) -> None:
        """Both in one: a raw gradient that is the only one of its update needs no bin."""
        alone = add.is_first and add.weight == 1.0 and isinstance(payload.compressor, NoCompression)
        if alone and payload.data.nbytes and not self._rule.compensates:
            self._step(payload.data.view("<f4"), update)
        else:
            self.add(add, payload)
            self.update(update)

    def read(self, worker: int, *, with_state: bool) -> list[FloatArray]:
        """Returns the newest weights and, if asked, the state: views until the next action."""
        if self._rule.remembers_pulls and not with_state:
            self._rule.on_pull(worker, self._remember())
        return [self.weights, *self.state] if with_state else [self.weights]

    def estimate(self, worker: int, version: int, compressor: Compressor) -> Estimate:
        """Returns what stands for the newest weights where pulls are compressed.

        Args:
            worker: Who pulls.
            version: Of the newest weights.
            compressor: Of what workers pull.
        """
        if self._estimate is None:
            self._estimate = Estimate(compressor, self.weights, version)
        self._estimate.follow(self.weights, version)
        if self._rule.remembers_pulls:
            memory = self._remember()
            memory.weights = self._estimate.values  # What the worker computes its gradient from.
            self._rule.on_pull(worker, memory)
        return self._estimate

    def _step(self, grad: FloatArray, update: Update) -> None:
        active = np.array(
            [update.present >> i & 1 for i in range(len(self.segments))], dtype=np.int64
        )
        spare = self._spare()
        self._optimizer.step(
            self.weights,
            spare.array,
            grad,
            update.scale,
            self.state,
            self.segments,
            self.counts,
            active,
            update.hyper,
        )
        self._publish(spare, update.version)

    def _spare(self) -> Buffer:
        """Returns a buffer that nobody reads; a slow reader costs one more, and stalls nobody."""
        with self._leasing:
            for buffer in self._buffers:
                if buffer is not self._newest and buffer.leases == 0:
                    break
            else:
                buffer = Buffer(self._zeros(), 0)
                self._buffers.append(buffer)
        if self._versions is not None and buffer.number:
            self._versions[buffer.number - 1] = -1
        return buffer

    def _publish(self, buffer: Buffer, version: int) -> None:
        if self._versions is not None and buffer.number:
            self._versions[buffer.number - 1] = version
        self._newest = buffer

    def _remember(self) -> Memory:
        """Returns the rule's memory; `weights` are the newest at each call."""
        if self._memory is None:
            self._memory = Memory(weights=self.weights, scratch=self._zeros())
        self._memory.weights = self.weights
        return self._memory

    def _zeros(self) -> FloatArray:
        return np.zeros(self.numel, dtype=np.float32)
