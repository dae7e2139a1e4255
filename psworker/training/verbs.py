"""The classic verbs on named tensors (`push`, `pull`, `push_pull`), and membership of the job.

Each name is a table of its own on the shards. A push contributes this worker's tensor to the
name's current round; the round is complete when every worker has pushed, and then its value is the
mean. A pull returns the value of the last round that this worker has pushed to, or, before its
first push, the newest.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from pscore.compressors.none import NoCompression
from pscore.errors import ConfigError
from pscore.optimizers.assign import Assign
from pscore.rules.ssgd import SSGD
from pscore.table_spec import TableSpec
from pscore.types import Push, Role, TensorSpec
from psworker.connection.exchange import Exchange
from psworker.connection.session import Session
from psworker.job import context
from psworker.job.grouping import Choice
from psworker.replica.ports import PullBuffer


class NamedTensor:
    """One named tensor on the shards.

    Attributes:
        round: Number of this worker's next round.
        has_pushed: Whether this worker has taken part in a round.
    """

    def __init__(self, name: str, like: torch.Tensor, *, alone: bool = False) -> None:
        """Declares the tensor; its first value is zero.

        Args:
            name: Its name.
            like: A tensor of its shape.
            alone: Whether one process of each group takes part by itself.
        """
        spec = TensorSpec(name=name, shape=tuple(like.shape) or (1,), dtype="float32")
        session = context.current().session
        self.shape = like.shape
        self.exchange = Exchange(
            session,
            TableSpec(
                name=f"tensor.{name}",
                tensors=(spec,),
                num_shards=len(session.links),
                rule=SSGD(),
                compressor=NoCompression(),
                optimizer=Assign.name,
                num_groups=1,
            ),
        )
        self.layout = self.exchange.layout
        self.rank = session.rank
        self.group = None if alone else session.group
        self.round, self.has_pushed = 0, False
        self._incarnation = session.incarnation
        self._pushes = session.is_leader or alone
        if self._pushes:
            zeros = np.zeros(self.layout.numel, dtype=np.float32)
            for part in self.layout.slices:
                self.exchange.load(part.index, Role.WEIGHTS, [zeros[part.start : part.stop]], [])
            self.exchange.flush()
        if self.group is not None:
            self.group.barrier()
        pull_buffers = self._fetch(torch.zeros(self.layout.numel))
        # A worker that joins later, or comes back, begins with the newest round of all slices
        # (`Replica.begin`).
        self.round = max(
            max(pull_buffer.clock, pull_buffer.version) for pull_buffer in pull_buffers
        )
        if self.group is not None:
            self.round = int(max(given for (given,) in self.group.gather([self.round])))
        is_uneven = any(
            (one.clock, one.version) != (self.round, self.round) for one in pull_buffers
        )
        if self._pushes and is_uneven:
            self._fetch(torch.zeros(self.layout.numel), begins=True)

    def belongs_to(self, session: Session) -> bool:
        """Whether the rounds are those of a worker's present membership in its job."""
        mine = self.exchange.session
        return mine is session and session.incarnation == self._incarnation

    def push(self, tensor: torch.Tensor, weight: float = 1.0) -> None:
        """Contributes to the current round; the processes of a group do it together."""
        flat = torch.zeros(self.layout.numel)
        flat[: tensor.numel()] = tensor.detach().float().reshape(-1).cpu()
        if self.group is not None:
            total = self.group.sum([weight])[0]
            flat, weight = self.group.sum_on_host(flat * weight) / (total or 1.0), total
        for part in self.layout.slices if self._pushes else ():
            push = Push(
                worker=self.rank,
                step=self.round,
                base_version=0,
                samples=weight,
                hyper=np.zeros((1, len(Assign.hyper_names))),
            )
            self.exchange.push(part.index, push, flat[part.start : part.stop], compress=False)
        self.round, self.has_pushed = self.round + 1, True

    def pull(self) -> torch.Tensor:
        """Returns the value of this worker's last round, float32, in the tensor's shape."""
        flat = torch.zeros(self.layout.numel)
        self._fetch(flat)
        return flat[: self.shape.numel()].view(self.shape)

    def _fetch(self, flat: torch.Tensor, *, begins: bool = False) -> list[PullBuffer]:
        pull_buffers = []
        for part in self.layout.slices:
            pull_buffer = PullBuffer(weights=flat[part.start : part.stop], state=[], begins=begins)
            self.exchange.pull(part.index, self.round, self.round, pull_buffer, with_state=False)
            pull_buffers.append(pull_buffer)
        self.exchange.run(part.index for part in self.layout.slices)
        return pull_buffers


_named: dict[str, NamedTensor] = {}


def init(
    servers: str | list[str] | None = None,
    *,
    job: str | None = None,
    rank: int | None = None,
    num_workers: int | None = None,
    min_workers: int | None = None,
    max_workers: int | None = None,
    timeout_s: float | None = None,
    tls_ca: str | None = None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    token_file: str | None = None,
    local_group: Choice = "auto",
) -> None:
    """Joins a job; arguments that are not given come from the environment (`environment.py`).

    Args:
        servers: Addresses of the shards in their order.
        job: Name of the job.
        rank: Rank of this worker.
        num_workers: Number of workers of the job.
        min_workers: Minimum of an elastic job; 1 by default.
        max_workers: Maximum, instead of `num_workers`: makes the job elastic.
        timeout_s: Seconds without an answer that are an error.
        tls_ca: Path of the CA that signed the shards' certificates: connect with TLS.
        tls_cert: Path of our own certificate, for shards that require one.
        tls_key: Path of its private key.
        token_file: Path of a file with this job's token (pscore/net/credentials.py).
        local_group: The processes that are one worker, as for `DistributedOptimizer`.

    Raises:
        PacelineError: The shards do not answer, or refuse this worker.
    """
    context.join(
        servers=servers,
        job=job,
        rank=rank,
        num_workers=num_workers,
        min_workers=min_workers,
        max_workers=max_workers,
        timeout_s=timeout_s,
        tls_ca=tls_ca,
        tls_cert=tls_cert,
        tls_key=tls_key,
        token_file=token_file,
        local_group=local_group,
    )


def shutdown() -> None:
    """Leaves the job in order. Models keep the global weights."""
    context.shutdown()


def rank() -> int:
    """Returns the 0-based rank of this process among those of all workers: divides the data."""
    return context.current().session.process_rank


def size() -> int:
    """Returns the number of processes of all workers; the maximum of an elastic job."""
    return context.current().session.num_processes


def live_ranks() -> list[int]:
    """Returns the ranks of the processes that take part in the job now, in order.

    It asks the first shard. In an elastic job workers may join and leave at any time, so two
    workers may get different answers.
    """
    session = context.current().session
    size = 1 if session.group is None else session.group.size
    return [size * worker + local for worker in session.live() for local in range(size)]


def barrier(name: str = "barrier") -> None:
    """Waits until all workers that are still in the job have reached this barrier."""
    context.current().session.barrier(name)


def push(tensor: torch.Tensor, name: str) -> None:
    """Contributes a tensor to the current round of `name`; does not wait for other workers."""
    named(name, tensor).push(tensor)


def pull(name: str, out: torch.Tensor) -> torch.Tensor:
    """Waits for the value of `name` and copies it into `out`."""
    with torch.no_grad():
        return out.copy_(named(name, out).pull())


def push_pull(tensor: torch.Tensor, name: str, *, average: bool = True) -> torch.Tensor:
    """Returns the mean (or the sum) of all workers' tensors, in this one's type and device."""
    mine = named(name, tensor)
    mine.push(tensor)
    value = mine.pull()
    if not average:
        value = value * size()
    return value.to(device=tensor.device, dtype=tensor.dtype)


def broadcast_parameters(
    parameters: Iterable[tuple[str, torch.Tensor]], root_rank: int = 0
) -> None:
    """Copies one worker's tensors to all others, in place.

    `DistributedOptimizer` does this for its own parameters; use it for the others (frozen
    parameters, buffers).
    """
    if not 0 <= root_rank < size():
        raise ConfigError(f"root_rank is {root_rank}, must be in 0..{size() - 1}")
    for name, tensor in parameters:
        mine = named(f"broadcast.{name}", tensor)
        mine.push(tensor, weight=1.0 if rank() == root_rank else 0.0)
        with torch.no_grad():
            tensor.copy_(mine.pull())


def named(name: str, like: torch.Tensor, *, alone: bool = False) -> NamedTensor:
    """Returns the tensor `name` of this process's job, and declares it the first time.

    Args:
        name: Its name.
        like: A tensor of its shape.
        alone: Whether one process of each group takes part by itself.

    Raises:
        ConfigError: It was declared with another shape.
    """
    mine = declared(name)
    if mine is None:
        mine = _named[name] = NamedTensor(name, like, alone=alone)
    if mine.shape != like.shape:
        raise ConfigError(
            f"tensor {name!r} has shape {list(like.shape)}, it was made with {list(mine.shape)}"
        )
    return mine


def declared(name: str) -> NamedTensor | None:
    """Returns the tensor `name`; None if it has to be declared, also after a return to the job."""
    mine = _named.get(name)
    return mine if mine is not None and mine.belongs_to(context.current().session) else None
