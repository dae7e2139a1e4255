"""A worker in time: the real replica, with slices of one element and payloads from a table."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import torch

from pscore.compressors.base import Compressor
from pscore.net.wire import FLOAT_NBYTES
from pscore.optimizers.base import Optimizer
from pscore.partition import Layout
from pscore.rules.base import Plan, Rule
from pscore.timing.closed import UPDATE_ARRAYS
from pscore.timing.deployment import FORWARD_SHARE, Deployment
from pscore.timing.plans import push_nbytes
from pscore.types import Pull, Push, Role
from psserver.decisions.orders import Acknowledge, Answer
from pssim.network import Loop
from pssim.timing.links import HostLinks, Servers
from pssim.timing.shards import TimedRequest, TimedShard
from psworker.replica.ports import PullBuffer
from psworker.replica.replica import Replica

Condition: TypeAlias = Callable[[], bool]
TimedProgram: TypeAlias = Generator[Condition | float, None, None]


class TimedWorker:
    """One worker: its steps, as `DistributedOptimizer` makes them, and its pushes and pulls.

    It is the `PushPull` of its replica.

    Attributes:
        codec: Compresses its pushes.
        receiver: Receives its answers.
        ended_s: The end of each of its steps, in virtual seconds.
        waited_s: Seconds that its steps waited after computing, added up.
        is_over: Whether it has made all its steps.
    """

    def __init__(
        self,
        rank: int,
        deployment: Deployment,
        layout: Layout,
        rule: Rule,
        compressor: Compressor,
        optimizer: Optimizer,
        shards: Sequence[TimedShard],
        links: HostLinks,
        loop: Loop,
        *,
        num_steps: int,
        seed: int = 0,
        cores: Servers | None = None,
    ) -> None:
        """Waits for `start`; `cores` are those on which its threads run, with others."""
        self.rank = rank
        self.codec, self.receiver = Servers(loop, 1, cores), Servers(loop, 1, cores)
        self._script = Servers(loop, 1, cores)
        self.ended_s: list[float] = []
        self.waited_s = 0.0
        self.is_over = False
        self._deployment = deployment
        self._host = deployment.worker_hosts[rank]
        self._compressor = compressor
        self._num_state = len(optimizer.state_names)
        self._shards, self._links, self._loop = shards, links, loop
        self._grads = [torch.zeros(1) for _ in layout.slices]
        weights = torch.zeros(len(layout.slices))
        self.replica = Replica(
            layout, rule, optimizer, 1, weights, rank, num_workers=deployment.num_workers
        )
        self._unacknowledged: set[int] = set()
        self._buffers: dict[int, PullBuffer] = {}  # Buffers of the pulls under way.
        self._draws = np.random.default_rng([seed, rank])
        self._ready = self._ready_shares()
        self._program: Iterator[Condition | float] = self._train(num_steps)
        self._waits_for: Condition = lambda: False

    def start(self) -> None:
        """Starts its program."""
        self._waits_for = lambda: True
        self._advance()

    def kill(self) -> None:
        """Ends its process: it sends nothing more, and nobody hears its answers."""
        self._program = iter(())
        self._waits_for = lambda: False

    # ----- its program

    def _train(self, num_steps: int) -> TimedProgram:
        yield from self._await_pulls(self.replica.begin(self))
        self.replica.shorten()
        while self.replica.step < num_steps:
            began_s, compute_s = self._loop.now_s, self._draw_s()
            yield from self._compute(began_s, compute_s)
            yield from self._end_step()
            self.waited_s += self._loop.now_s - began_s - compute_s
            self.ended_s.append(self._loop.now_s)
        self.is_over = True

    def _compute(self, began_s: float, compute_s: float) -> TimedProgram:
        """Computes a step; slices leave when they are ready, if they may."""
        plan = self.replica.plan()
        self._pushed: list[int] = []
        if self._deployment.overlap and plan.push is Role.GRADIENT:
            ready: list[int] = []
            for index, share in enumerate(self._ready):
                yield max(0.0, began_s + share * compute_s - self._loop.now_s)
                ready.append(index)
                yield from self._await_push(index)  # Its memory is needed.
                for waiting in [each for each in ready if self._has_landed(each)]:
                    ready.remove(waiting)
                    yield from self._push(waiting, in_backward=True)
        yield max(0.0, began_s + compute_s - self._loop.now_s)

    def _end_step(self) -> TimedProgram:
        """Sends what is left, and ends the step."""
        replica, plan = self.replica, self.replica.plan()
        if plan.push is Role.GRADIENT:
            for index in self._pushed:
                yield from self._end_slice(index, plan)
            left = [index for index in replica.front_first() if index not in set(self._pushed)]
            while left:
                yield partial(self._any_landed, left)
                index = next(each for each in left if self._has_landed(each))
                left.remove(index)
                yield from self._await_push(index)
                yield from self._push(index)
                yield from self._end_slice(index, plan)
        else:
            for index in list(self._unacknowledged):
                yield from self._await_push(index)
        yield from self._await_pulls(replica.finish(self._grads, self))

    def _push(self, index: int, *, in_backward: bool = False) -> TimedProgram:
        yield from self._await_pulls(self.replica.land(index))
        self.replica.push(index, self._grads[index], -1, 1.0, self, in_backward=in_backward)
        self._pushed.append(index)

    def _end_slice(self, index: int, plan: Plan) -> TimedProgram:
        self.replica.end_slice(index, self._grads[index], self)
        if plan.local and not plan.block:
            nbytes = FLOAT_NBYTES * self._deployment.slices[index].numel
            updated: list[bool] = []
            self._script.work(
                nbytes * UPDATE_ARRAYS / self._deployment.rates.local,
                partial(self._end_work, updated),
            )
            yield lambda: bool(updated)

    def _end_work(self, done: list[bool]) -> None:
        done.append(True)
        self._advance()

    def _await_pulls(self, waits: Iterable[int]) -> TimedProgram:
        for index in waits:
            yield partial(self._has_landed, index)

    def _await_push(self, index: int) -> TimedProgram:
        yield lambda: index not in self._unacknowledged

    def _has_landed(self, index: int) -> bool:
        return index not in self._buffers

    def _any_landed(self, indices: Sequence[int]) -> bool:
        return any(self._has_landed(index) for index in indices)

    def _advance(self) -> None:
        """Runs the program until it has to wait."""
        while self._waits_for():
            wanted = next(self._program, None)
            if wanted is None:
                self._waits_for = lambda: False
            elif isinstance(wanted, float):
                self._waits_for = lambda: False
                self._loop.after(wanted, self.start)
            else:
                self._waits_for = wanted

    def _draw_s(self) -> float:
        """Returns the computing seconds of a step."""
        deployment = self._deployment
        mean_s = deployment.compute_s * deployment.slow.get(self.rank, 1.0)
        return mean_s * max(0.1, 1 + deployment.deviation * self._draws.standard_normal())

    def _ready_shares(self) -> list[float]:
        """Returns, for each slice, the share of computing after which its gradient is there."""
        done, shares = 0, []
        for each in self._deployment.slices:
            done += each.numel
            backward = done / self._deployment.numel
            shares.append(FORWARD_SHARE + (1 - FORWARD_SHARE) * backward)
        return shares

    # ----- PushPull

    def push(
        self, index: int, push: Push, grad: torch.Tensor, *, compress: bool, flush: bool = False
    ) -> None:
        """Sends the push of a slice, when it is compressed."""
        each, rates = self._deployment.slices[index], self._deployment.rates
        plan = Plan(push=push.role, compress=compress, flush=flush)
        nbytes = push_nbytes(each.numel, self._compressor, plan, compress=each.compress)
        is_packed = nbytes < each.nbytes
        self._unacknowledged.add(index)
        request = TimedRequest(
            payload_nbytes=nbytes,
            packed=is_packed,
            answer=partial(self._answer, index, self._acknowledged, 0),
        )
        seconds = rates.message_s + (each.nbytes / rates.encode if is_packed else 0.0)
        shard = self._deployment.slices[index].shard
        arrive = partial(self._shards[shard].push, index, push, request)
        leave = partial(self._send, shard, ("push", self.rank, shard), nbytes, arrive)
        seconds += nbytes / rates.worker + self._tls_s(shard, nbytes)
        self.codec.work(seconds / self._deployment.group, leave)

    def pull(
        self, index: int, clock: int, min_version: int, buffer: PullBuffer, *, with_state: bool
    ) -> None:
        """Sends the pull of a slice."""
        pull = Pull(
            worker=self.rank,
            clock=clock,
            min_version=min_version,
            with_state=with_state,
            begins=buffer.begins,
            is_look=buffer.is_look,
        )
        each = self._deployment.slices[index]
        nbytes = FLOAT_NBYTES * each.numel * (1 + (self._num_state if with_state else 0))
        self._buffers[index] = buffer
        request = TimedRequest(
            answer=partial(self._answer, index, self._landed, nbytes),
            answer_nbytes=lambda action: nbytes,
        )
        arrive = partial(self._shards[each.shard].pull, index, pull, request)
        self._send(each.shard, ("ask", self.rank, each.shard), 0, arrive)

    def maps_weights(self, index: int) -> bool:
        """Returns False: answers travel."""
        return False

    # ----- messages

    def _send(
        self, shard: int, connection: tuple[str, int, int], nbytes: int, arrive: Callable[[], None]
    ) -> None:
        target = self._deployment.shard_hosts[shard]
        self._links.send(self._host, target, connection, nbytes, arrive)

    def _answer(
        self,
        index: int,
        take: Callable[[int, Acknowledge | Answer], None],
        nbytes: int,
        action: Acknowledge | Answer,
    ) -> None:
        """Brings the answer of a shard to this worker, which receives it."""
        shard = self._deployment.slices[index].shard
        source = self._deployment.shard_hosts[shard]
        connection = ("answer" if nbytes else "acknowledge", self.rank, shard)
        receive = partial(self._receive, shard, nbytes, partial(take, index, action))
        self._links.send(source, self._host, connection, nbytes, receive)

    def _receive(self, shard: int, nbytes: int, take: Callable[[], None]) -> None:
        if not nbytes:
            take()
            return
        rates = self._deployment.rates
        seconds = rates.message_s + nbytes / rates.worker + self._tls_s(shard, nbytes)
        self.receiver.work(seconds / self._deployment.group, take)

    def _acknowledged(self, index: int, action: Acknowledge | Answer) -> None:
        self._unacknowledged.discard(index)
        self._advance()

    def _landed(self, index: int, action: Acknowledge | Answer) -> None:
        assert isinstance(action, Answer)
        buffer = self._buffers.pop(index)
        buffer.version, buffer.clock = action.version, action.clock
        buffer.counts = np.zeros(1, np.int64) if action.with_state else None
        self._advance()

    def _tls_s(self, shard: int, nbytes: int) -> float:
        is_far = self._deployment.shard_hosts[shard] != self._host
        return nbytes / self._deployment.rates.tls if self._deployment.tls and is_far else 0.0
