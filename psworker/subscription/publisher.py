"""Publishes weights of any trainer for readers.

    psworker.init(servers, job="night", rank=0, num_workers=1)
    publisher = psworker.Publisher(model.named_parameters())
    for step in range(steps):
        train(model)  # DDP, FSDP, anything
        if step % 10 == 0:
            publisher.publish(step)

One process publishes; of several that are one worker (`psworker.init` after
`torch.distributed.init_process_group`), which all make the calls, the first one does. The shards
are a store of versions then: the value of the table is what was pushed last, and each push makes a
version.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from pscore.compressors.none import NoCompression
from pscore.errors import ConfigError
from pscore.optimizers.assign_sum import AssignSum
from pscore.rules.ssgd import SSGD
from pscore.subscription.reader import TABLE
from pscore.subscription.weights import STEP, STEP_DIGITS, step_digits
from pscore.table_spec import TableSpec
from pscore.types import FloatArray, Push, Role, TensorSpec
from psworker.connection.exchange.exchange import Exchange
from psworker.connection.exchange.publishing import begin_publication
from psworker.job import context
from psworker.replica.ports import PullBuffer

# The newest of this process, by job and table.
_publishers: weakref.WeakValueDictionary[tuple[str, str], Publisher] = weakref.WeakValueDictionary()


class Publisher:
    """Named arrays as published versions."""

    def __init__(
        self,
        named_arrays: Mapping[str, Any] | Iterable[tuple[str, Any]],
        *,
        table: str = TABLE,
        step: int = 0,
    ) -> None:
        """Declares the arrays, and publishes them as they are.

        Args:
            named_arrays: Numpy arrays or tensors by name; `publish` reads them again. Each shard of
                a `DTensor` (FSDP) is gathered, so every process of its mesh makes the call.
            table: Name under which they are read.
            step: Steps of training behind them.

        Raises:
            ConfigError: `psworker.init` was not called, the job has several workers, there is no
                array, or one has no name, no elements or no real numbers.
            JobMismatchError: The job has published other arrays under this name.
        """
        try:
            self._arrays: dict[Any, Any] = dict(named_arrays)
        except (TypeError, ValueError) as problem:
            raise ConfigError(
                f"a {type(named_arrays).__name__} has no named arrays: give a mapping, or pairs "
                "of name and array, as model.named_parameters()"
            ) from problem
        if not self._arrays:
            raise ConfigError("there is no array to publish: an iterator gives its arrays once")
        if not all(isinstance(name, str) and name for name in self._arrays):
            raise ConfigError(f"names of arrays are {list(self._arrays)[:4]}, must be texts")
        session = context.current().session
        if session.num_workers != 1:
            raise ConfigError(
                f"a Publisher is the only worker of its job, and this one has "
                f"{session.num_workers}: call psworker.init(rank=0, num_workers=1) on one process"
            )
        first = self._on_host()
        tensors = [
            TensorSpec(name=name, shape=array.shape, dtype="float32")
            for name, array in first.items()
        ]
        tensors.append(TensorSpec(name=STEP, shape=(STEP_DIGITS,), dtype="float32"))
        spec = TableSpec(
            name=table,
            tensors=tuple(tensors),
            num_shards=len(session.links),
            rule=SSGD(),
            compressor=NoCompression(),
            optimizer=AssignSum.name,
            num_groups=1,
        )
        agreed = session.define(spec)
        self._exchange = Exchange(session, spec, share=True, agreed=agreed)
        assert self._exchange.grads is not None
        self._values = self._exchange.grads  # Shards of this host read it where it lies.
        self._session = session
        self._key = (session.job, table)
        _publishers[self._key] = self
        begin_publication(session, self._exchange.table, 1)
        # Some slices may have a version of a former process that others lack: all begin anew.
        role = Role.WEIGHTS if agreed.is_new else Role.STATE
        session.group.led(lambda: self._begin(first, step, role))

    def _begin(self, arrays: Mapping[str, FloatArray], step: int, role: Role) -> None:
        self._write(arrays, step)
        for part in self._exchange.layout.slices:
            values = self._values[part.start : part.stop]
            self._exchange.load(part.index, role, [values], [], step)
        self._exchange.flush()
        self._round, is_even = self._newest(0)
        if not is_even:
            self._newest(self._round)

    def publish(self, step: int) -> None:
        """Publishes the arrays as they are now; returns when all shards have them.

        Args:
            step: Steps of training behind them, which readers see.

        Raises:
            ConfigError: An array has another shape than before, or no real numbers; `step` is not
                a whole number; or this process has made another Publisher of the table since.
            PacelineError: A shard does not answer, or refuses this worker.
        """
        if _publishers.get(self._key) is not self:
            raise ConfigError(
                f"this process has made another Publisher of table {self._key[1]!r} since: publish "
                "with that one, or give each a table= of its own"
            )
        arrays = self._on_host()
        self._session.group.led(lambda: self._send(arrays, step))

    def _send(self, arrays: Mapping[str, FloatArray], step: int) -> None:
        self._write(arrays, step)
        self._push()

    def _on_host(self) -> dict[str, FloatArray]:
        return {name: _host(name, array) for name, array in self._arrays.items()}

    def _write(self, arrays: Mapping[str, FloatArray], step: int) -> None:
        layout = self._exchange.layout
        values = [*arrays.values(), step_digits(step)]
        for spec, value in zip(layout.tensors, values, strict=True):
            if value.shape != spec.shape:
                raise ConfigError(f"{spec.name!r} is {value.shape} now, and was {spec.shape}")
        for begin_at, spec, value in zip(layout.offsets, layout.tensors, values, strict=True):
            self._values[begin_at : begin_at + spec.numel] = value.reshape(-1)

    def _push(self) -> None:
        values = torch.from_numpy(self._values)
        for part in self._exchange.layout.slices:
            push = Push(
                worker=self._session.rank,
                step=self._round,
                base_version=0,
                hyper=np.zeros((1, len(AssignSum.hyper_names))),
            )
            self._exchange.push(part.index, push, values[part.start : part.stop], compress=False)
        self._exchange.flush()
        self._round += 1

    def _newest(self, begins_at: int) -> tuple[int, bool]:
        """Begins with an update; returns the newest of all slices, and whether they have all."""
        buffers = []
        for part in self._exchange.layout.slices:
            buffer = PullBuffer(
                weights=torch.zeros(part.numel, dtype=torch.float32, device="cpu"),
                state=[],
                begins=True,
            )
            self._exchange.pull(part.index, begins_at, begins_at, buffer, with_state=False)
            buffers.append(buffer)
        self._exchange.run(part.index for part in self._exchange.layout.slices)
        places = [place for buffer in buffers for place in (buffer.clock, buffer.version)]
        return max(places), min(places) == max(places)


def _host(name: str, array: Any) -> FloatArray:
    """Returns an array or tensor as float32 on the host."""
    try:
        if not isinstance(array, torch.Tensor):
            found = np.asarray(array)
            if found.dtype.kind in "OUScmM":  # Objects, texts, complex numbers, times.
                raise TypeError(f"it is of {found.dtype}")
            return found.astype(np.float32, copy=False)
        whole = array.detach()
        if whole.is_complex():
            raise TypeError("it is complex, and torch.view_as_real(array) has its parts")
        if hasattr(whole, "full_tensor"):
            whole = whole.full_tensor()
        return whole.to(device="cpu", dtype=torch.float32).numpy()
    except (TypeError, ValueError, NotImplementedError) as problem:
        raise ConfigError(f"{name!r} cannot be published: {problem}") from problem
