"""The classic verbs on named tensors (`push`, `pull`, `push_pull`), and membership of the job.

Each name is a table of its own on the shards. A push contributes this worker's tensor to the
name's current round; the round is complete when every worker has pushed, and then its value is the
sum of the tensors that were pushed, or their mean. A pull returns the value of the last round that
this worker has pushed to, or, before its first push, the newest. Values are exact in every dtype
(lanes.py); float32 and smaller floats are added in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, overload

import numpy as np
import torch

from pscore.compressors.none import NoCompression
from pscore.errors import ConfigError
from pscore.optimizers.assign_sum import AssignSum
from pscore.rules.ssgd import SSGD
from pscore.table_names import TENSOR
from pscore.table_spec import TableSpec
from pscore.types import Push, Role, TensorSpec
from psworker.connection.exchange.exchange import Exchange
from psworker.connection.membership.session import Session
from psworker.group.worker_group import WorkerGroup
from psworker.job import context
from psworker.job.environment import Environment
from psworker.job.grouping import Choice
from psworker.replica.ports import PullBuffer
from psworker.training.lanes import Lanes

WEIGHT = "sum of weights"  # Name of the element behind a tensor.


class NamedTensor:
    """One named tensor on the shards.

    Attributes:
        lanes: The way in which the tensor travels.
        round: Number of this worker's next round.
        has_pushed: Whether this worker has taken part in a round.
    """

    def __init__(
        self, name: str, like: torch.Tensor, *, alone: bool = False, one_row: bool = False
    ) -> None:
        """Declares the tensor; its first value is zero.

        Args:
            like: A tensor of its shape and dtype.
            alone: Whether one process of each group takes part by itself.
            one_row: Whether only one worker of a round pushes anything but zeros.

        Raises:
            ConfigError: The tensor is sparse or quantized, or has no elements.
        """
        session = context.current().session
        self.name = name
        self.lanes = Lanes.of(like, 1 if one_row else session.num_workers)
        wide = "" if self.lanes.wide == torch.float32 else f" as {self.lanes.wide}"
        self.exchange = Exchange(
            session,
            TableSpec(
                name=f"{TENSOR}{name}",
                tensors=(
                    TensorSpec(name=f"{name}{wide}", shape=self.lanes.sent_shape, dtype="float32"),
                    TensorSpec(name=WEIGHT, shape=(1,), dtype="float32"),
                ),
                num_shards=len(session.links),
                rule=SSGD(),
                compressor=NoCompression(),
                optimizer=AssignSum.name,
                num_groups=1,
            ),
        )
        self.layout = self.exchange.layout
        self.rank = session.rank
        self.group = WorkerGroup() if alone else session.group
        self.round, self.has_pushed = 0, False
        self._incarnation = session.incarnation
        self._pushes = self.group.is_leader
        if self._pushes:
            zeros = np.zeros(self.layout.numel, dtype=np.float32)
            for part in self.layout.slices:
                self.exchange.load(part.index, Role.WEIGHTS, [zeros[part.start : part.stop]], [])
            self.exchange.flush()
        self.group.barrier()
        pull_buffers = self._fetch(
            torch.zeros(self.layout.numel, dtype=torch.float32, device="cpu")
        )
        # A worker that joins later, or comes back, begins with the newest round of all slices
        # (`Replica.begin`).
        newest = max(max(pull_buffer.clock, pull_buffer.version) for pull_buffer in pull_buffers)
        self.round = int(self.group.largest(newest))
        is_uneven = any(
            (one.clock, one.version) != (self.round, self.round) for one in pull_buffers
        )
        if self._pushes and is_uneven:
            self._fetch(
                torch.zeros(self.layout.numel, dtype=torch.float32, device="cpu"), begins=True
            )

    def belongs_to(self, session: Session) -> bool:
        """Whether the rounds are those of a worker's present membership in its job."""
        mine = self.exchange.session
        return mine is session and session.incarnation == self._incarnation

    def push(self, tensor: torch.Tensor, weight: float = 1.0) -> None:
        """Contributes to the current round; the processes of a group do it together.

        Args:
            tensor: A tensor of the declared shape and dtype.
            weight: Its weight in the mean; 1 or 0 unless it travels as float32. With weight 0
                nothing of it is sent, so NaN and Inf change nothing.
        """
        values = self.lanes.widen(tensor)
        if weight != 1.0:
            values = values * weight if weight else self.lanes.none()
        weight = self.group.sum([weight])[0]
        values = self.group.sum_on_host(values)
        flat = torch.zeros(self.layout.numel, dtype=torch.float32, device="cpu")
        numbers, weights = self._parts(flat)
        self.lanes.write(values, self.rank % self.lanes.rows, numbers)
        weights.fill_(weight)
        for part in self.layout.slices if self._pushes else ():
            push = Push(
                worker=self.rank,
                step=self.round,
                base_version=0,
                hyper=np.zeros((1, len(AssignSum.hyper_names))),
            )
            self.exchange.push(part.index, push, flat[part.start : part.stop], compress=False)
        self.round, self.has_pushed = self.round + 1, True

    def pull(self) -> torch.Tensor:
        """Returns the mean of this worker's last round, float32, in the tensor's shape."""
        total, weight = self.pull_sum()
        return self.lanes.narrow(total / (weight or 1.0), torch.float32, self.name)

    def pull_sum(self) -> tuple[torch.Tensor, float]:
        """Returns the sums of the tensors and of the weights pushed in this worker's last round.

        Returns:
            Flat, in the dtype in which the tensors are added up (`Lanes.narrow`).

        Raises:
            ConfigError: The sum is beyond int64.
        """
        flat = torch.zeros(self.layout.numel, dtype=torch.float32, device="cpu")
        self._fetch(flat)
        numbers, weights = self._parts(flat)
        return self.lanes.read(numbers, self.name), float(weights.item())

    def _parts(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the tensor's elements in a flat vector, and the element behind them."""
        tensor, weight = self.layout.offsets
        return flat[tensor : tensor + self.lanes.numel], flat[weight : weight + 1]

    def _fetch(self, flat: torch.Tensor, *, begins: bool = False) -> list[PullBuffer]:
        pull_buffers = []
        for part in self.layout.slices:
            pull_buffer = PullBuffer(weights=flat[part.start : part.stop], state=[], begins=begins)
            self.exchange.pull(part.index, self.round, self.round, pull_buffer, with_state=False)
            pull_buffers.append(pull_buffer)
        session = self.exchange.session
        with session.heartbeats.resting() as rest, session.passed.asked() as passed:

            def meanwhile() -> None:
                rest()
                for pushes in list(session.pushes):
                    if pushes is not self.exchange:  # Its wait is this one.
                        pushes.answers.meet()
                if self.group.is_leader:
                    passed.excuse_at(f"{TENSOR}{self.name}")

            self.exchange.answers.meanwhile = meanwhile
            self.exchange.run(part.index for part in self.layout.slices)
        self.exchange.answers.meanwhile = None
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
    """Returns the 0-based rank of this process among those of all workers: divides the data.

    In a pipeline it counts the workers of all stages.
    """
    return context.place().process_rank


def local_rank() -> int:
    """Returns the 0-based number of this process on its host, as its launcher set it: picks a GPU.

    It may be called before the process joins a job. It is 0 where the launcher has set no rank
    (LOCAL_RANK, SLURM_LOCALID or PACELINE_LOCAL_RANK).
    """
    return Environment.read().local_rank


def size() -> int:
    """Returns the number of processes of all workers; the maximum of an elastic job."""
    return context.place().num_processes


def live_ranks() -> list[int]:
    """Returns the ranks of the processes that take part in the job now, in order.

    It asks the first shard. In an elastic job workers may join and leave at any time, so two
    workers may get different answers.
    """
    session = context.place()
    size = session.group.size
    return [size * worker + local for worker in session.live() for local in range(size)]


def barrier(name: str = "barrier") -> None:
    """Waits until all workers that are still in the job have reached this barrier.

    Their pushes before it are on the shards then, so a pull behind it sees them. A worker that came
    late (it was started again, or joined an elastic job) does not wait where the others have passed
    and wait for it elsewhere, and logs that. They do not wait for one that begins behind it.

    Raises:
        ConfigError: The name is no text.
        PacelineError: This worker is no longer part of the job, or a shard does not answer.
    """
    if not isinstance(name, str):
        raise ConfigError(f"psworker.barrier() takes a name; it was given {name!r}")
    session = context.place()
    for pushes in list(session.pushes):
        pushes.flush()
    session.meet_or_pass(name)


def push(tensor: torch.Tensor, name: str) -> None:
    """Contributes a tensor to the current round of `name`; does not wait for other workers.

    Args:
        tensor: A tensor of any dtype, with the same shape and dtype on every worker.

    Raises:
        ConfigError: The name has tensors of another shape or dtype, or the arguments are swapped.
        PacelineError: This worker is no longer part of the job, or a shard does not answer.
    """
    _require("push", tensor, name)
    _of_dtype(name, tensor).push(tensor)


@overload
def pull(out: torch.Tensor, name: str, *, average: bool = True) -> torch.Tensor: ...


@overload
def pull(out: str, name: torch.Tensor, *, average: bool = True) -> torch.Tensor: ...


def pull(
    out: torch.Tensor | str, name: str | torch.Tensor, *, average: bool = True
) -> torch.Tensor:
    """Waits for the value of `name` and copies it into `out`.

    Args:
        out: A tensor of the shape and dtype of those that are pushed. It may also come second, as
            in former versions: `pull(name, out)`.
        average: Whether the value is the mean; else the sum of the tensors that were pushed.

    Returns:
        `out`.

    Raises:
        ConfigError: The name has tensors of another shape or dtype, or tensors of this dtype have
            no mean or sum.
        PacelineError: This worker is no longer part of the job, or a shard does not answer.
    """
    if isinstance(out, str):
        out, name = name, out
    _require("pull", out, name)
    assert isinstance(out, torch.Tensor)
    assert isinstance(name, str)
    _require_value(out.dtype, name, average=average)
    with torch.no_grad():
        return out.copy_(_value(_of_dtype(name, out), out, average=average))


def push_pull(tensor: torch.Tensor, name: str, *, average: bool = True) -> torch.Tensor:
    """Returns the mean (or the sum) of all workers' tensors, in this one's dtype, on its device.

    Only tensors that were pushed are in it: where workers have left the job, those of the others. A
    worker that came late gets what the others got where they have passed it and wait elsewhere.

    Args:
        tensor: A tensor with the same shape and dtype on every worker. Floats up to float32 are
            added in float32; integers, float64 and complex128 are added exactly in 64 bits.
        average: Whether to return the mean; integers have none, as in torch.

    Raises:
        ConfigError: The name has tensors of another shape or dtype, tensors of this dtype have no
            mean or sum, the sum is beyond the dtype, or the arguments are swapped.
        PacelineError: This worker is no longer part of the job, or a shard does not answer.
    """
    _require("push_pull", tensor, name)
    _require_value(tensor.dtype, name, average=average)
    mine = _of_dtype(name, tensor)
    if not _push(mine, tensor) and not mine.round:
        return tensor.clone()
    return _value(mine, tensor, average=average).to(tensor.device)


def broadcast_parameters(
    parameters: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor], root_rank: int = 0
) -> None:
    """Copies one worker's tensors to all others, in place, exactly in every dtype.

    `DistributedOptimizer` does this for its own parameters; use it for the others (frozen
    parameters, buffers). A worker that came late gets the last ones that were copied.

    Args:
        parameters: Pairs of name and tensor, as `model.named_buffers()`, or a state dict.
        root_rank: Rank of the process whose tensors are copied.

    Raises:
        ConfigError: There is no such rank, it has left the job, or something else was given.
        PacelineError: This worker is no longer part of the job, or a shard does not answer.
    """
    session = context.current().session
    given: object = root_rank
    if not (isinstance(given, int) and 0 <= given < session.num_processes):
        raise ConfigError(f"root_rank is {root_rank!r}, must be in 0..{session.num_processes - 1}")
    is_root = session.process_rank == root_rank
    for name, tensor in _pairs(parameters):
        if not tensor.numel():
            continue
        mine = named(f"broadcast.{name}", tensor, one_row=True)
        has_passed = not _push(mine, tensor, weight=float(is_root))
        if has_passed and not mine.round:
            continue
        total, num_roots = mine.pull_sum()
        if num_roots != 1.0:
            raise ConfigError(f"rank {root_rank} has left the job: nobody has values of {name!r}")
        if has_passed or not is_root:
            with torch.no_grad():
                tensor.copy_(mine.lanes.narrow(total, tensor.dtype, name))


def named(
    name: str, like: torch.Tensor, *, alone: bool = False, one_row: bool = False
) -> NamedTensor:
    """Returns the tensor `name` of this process's job, and declares it the first time.

    Args:
        like: A tensor of its shape and dtype.
        alone: Whether one process of each group takes part by itself.
        one_row: Whether only one worker of a round pushes anything but zeros.

    Raises:
        ConfigError: It was declared with another shape.
    """
    mine = declared(name)
    if mine is None:
        mine = _named[name] = NamedTensor(name, like, alone=alone, one_row=one_row)
    if mine.lanes.shape != like.shape:
        raise ConfigError(
            f"tensor {name!r} has shape {list(like.shape)}, it was made with "
            f"{list(mine.lanes.shape)}"
        )
    return mine


def declared(name: str) -> NamedTensor | None:
    """Returns the tensor `name`; None if it has to be declared, also after a return to the job."""
    mine = _named.get(name)
    return mine if mine is not None and mine.belongs_to(context.current().session) else None


# ----- inside


def _of_dtype(name: str, like: torch.Tensor) -> NamedTensor:
    """Returns the tensor `name`; refuses one that was declared for another dtype."""
    mine = named(name, like)
    if mine.lanes != Lanes.of(like, mine.lanes.rows):
        raise ConfigError(
            f"tensor {name!r} is {like.dtype} here, and its tensors are added as {mine.lanes.wide}"
            f"{' pairs' if mine.lanes.is_complex else ''}: use one dtype for a name"
        )
    return mine


def _push(mine: NamedTensor, tensor: torch.Tensor, weight: float = 1.0) -> bool:
    """Pushes to a tensor whose value is wanted; returns whether it has.

    It does not if this worker has come late, and others have passed that: they wait for this one
    elsewhere, and would never push to the round in which it would be. The value is that of the last
    round then, or, if the job has begun anew since, nobody has one but this worker.
    """
    session = mine.exchange.session
    if session.passed.came_late and not mine.has_pushed:
        table = f"{TENSOR}{mine.name}"
        places, _ = session.meet_or_pass(table)
        if places and table not in places:
            return False
    mine.push(tensor, weight)
    return True


def _value(mine: NamedTensor, like: torch.Tensor, *, average: bool) -> torch.Tensor:
    """Returns the mean or the sum of a tensor's round, on the host."""
    total, weight = mine.pull_sum()
    if average and weight:
        total = total / weight
    return mine.lanes.narrow(total, like.dtype, mine.name)


def _require(verb: str, tensor: object, name: object) -> None:
    """Raises a `ConfigError` unless a verb was given a tensor and a name, in this order."""
    if not (isinstance(tensor, torch.Tensor) and isinstance(name, str)):
        raise ConfigError(
            f"psworker.{verb}() takes a tensor and its name, in this order; it was given a "
            f"{type(tensor).__name__} and a {type(name).__name__}"
        )


def _require_value(dtype: torch.dtype, name: str, *, average: bool) -> None:
    """Raises a `ConfigError` unless tensors of a dtype have a mean, or a sum."""
    if dtype == torch.bool:
        raise ConfigError(
            f"tensor {name!r} is torch.bool, which has neither a mean nor a sum; exchange "
            "tensor.int(), with average=False for the number of workers"
        )
    if average and not (dtype.is_floating_point or dtype.is_complex):
        raise ConfigError(
            f"tensor {name!r} is {dtype}, which has no mean; pass average=False for the exact sum, "
            "or exchange tensor.double()"
        )


def _pairs(
    parameters: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor],
) -> list[tuple[str, torch.Tensor]]:
    """Returns pairs of name and tensor; raises ConfigError for anything else."""
    given: object = parameters.items() if isinstance(parameters, Mapping) else parameters
    pairs: list[Any] = list(given) if isinstance(given, Iterable) else [given]
    kinds = [tuple(map(type, pair)) if isinstance(pair, tuple) else () for pair in pairs]
    if all(
        len(kind) == 2 and kind[0] is str and issubclass(kind[1], torch.Tensor)  # noqa: PLR2004
        for kind in kinds
    ):
        return pairs
    raise ConfigError(
        "broadcast_parameters() takes pairs of name and tensor: model.named_parameters(), "
        "model.named_buffers() or model.state_dict()"
    )
