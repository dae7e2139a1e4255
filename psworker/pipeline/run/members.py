"""The workers of a pipeline that may be lost and come back, as one of them knows them."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from pscore.errors import PacelineError
from pscore.pb.ps.v1 import control_pb2
from psworker.connection.membership.session import Session
from psworker.gossip.base import Gathering, Meet, Steps, Want
from psworker.peers.peers import Peers
from psworker.pipeline.run import wire
from psworker.pipeline.run.schedule import Place

log = logging.getLogger("paceline")
DIGIT = 2**20  # A number is sent as two of them, each exact in float32.
ENDED = "ended"  # The state of a job whose workers have finished, in the shards' status.
LOOK_S = 0.25  # From one look for a worker of a lost stage to the next.


class MembersChangedError(Exception):
    """The workers have changed while this one waited for one of them."""


class Members:
    """The workers that take part, in an epoch: each change of them begins another one.

    A member has an index among them in the order of the ranks, so those of a stage are neighbours.

    Attributes:
        ranks: Ranks of the members, in order; empty once some stage has none any more.
        rank: Rank of this worker.
        first: Minibatches that all slices had counted when the epoch began.
        saves: Minibatches behind the checkpoint that this worker saves; None: it saves none.
        savers: Indices of the members that save a checkpoint of the first `first` minibatches.
        saved: Minibatches behind the last checkpoint that a member has written, or tried to; -1:
            none.
    """

    def __init__(
        self,
        session: Session,
        peers: Peers,
        planned: Sequence[int],
        loaded: int,
        declare: Callable[[], int],
    ) -> None:
        """Begins without having met anyone.

        Args:
            planned: Replicas of each stage when all are there.
            loaded: Minibatches behind the weights with which the job began.
            declare: Declares the directory of the workers; returns its table.
        """
        self._session, self._peers, self._declare = session, peers, declare
        self._planned = tuple(planned)
        self._loaded = self.first = loaded
        self.rank = session.rank
        self.ranks: list[int] = []
        self.saves: int | None = None
        self.savers: list[int] = []
        self.saved = -1
        self._gathering = Gathering(0, {})  # The last meeting.
        self._num_agreed = 0  # Agreements in this epoch.

    @property
    def has_moved(self) -> bool:
        """Whether the members have changed since the last meeting."""
        return self._peers.has_moved

    @property
    def index(self) -> int:
        """Index of this worker among the members; the first of them decides for all."""
        return self.ranks.index(self.rank)

    def meet(self, total: int | None) -> Place:
        """Waits until all workers have stopped; sets the members, and the first minibatch.

        It waits while a stage has no worker, unless the training has ended and none saves, or the
        others have finished it while this worker was away.

        Args:
            total: Minibatches of the whole training, if it ends; else None.

        Returns:
            Stage and replica of this worker among those that are there.

        Raises:
            PacelineError: This worker is no longer part of the job, or a shard does not answer.
        """
        while True:
            self._ask(Meet(self._position))
            positions = self._gathering.positions
            ranks = sorted(positions)
            stages = [Place.of_rank(rank, self._planned).stage for rank in ranks]
            replicas = tuple(stages.count(stage) for stage in range(len(self._planned)))
            if 0 in replicas:
                saves = any(positions.values())  # A checkpoint needs a part of each stage.
                if not self._is_over(None if saves else total, replicas.index(0)):
                    continue
                ranks = []  # All is counted, and the workers of a stage have left.
            self._session.waits = ""
            self.ranks, self._num_agreed = ranks, 0
            with contextlib.suppress(MembersChangedError):
                self.first = self.agree(self.counted)  # Nothing is in flight now.
                # One that comes back may have been away while the others saved.
                self.saved = self._gather(max, self.saved + 1) - 1
                break
        is_new = self.saved < self.first  # Else some slices may hold more than that by now.
        self.savers = [
            i for i, rank in enumerate(ranks) if is_new and positions[rank] == self.first + 1
        ]
        own = Place.of_rank(self.rank, self._planned).stage
        before = sum(stage < own for stage in stages)
        return Place(own, sorted(positions).index(self.rank) - before, replicas)

    def rejoin(self, problem: PacelineError) -> None:
        """Joins the job again, after this worker was declared lost; it has then met nobody.

        Args:
            problem: The error by which it has learnt that.

        Raises:
            PacelineError: Another process has its rank, or a shard does not answer.
        """
        log.warning("worker %d rejoins its pipeline: %s", self.rank, problem)
        self._session.rejoin()
        self._peers.restart(self._declare())

    def begin_epoch(self) -> None:
        """Begins another epoch, though no worker may be gone."""
        self._ask(Meet(self._position, waits=False, again=True))

    def counted(self) -> int:
        """Returns the first minibatch that some slice of some stage has not counted.

        Raises:
            PacelineError: A shard does not answer.
        """
        counts = [
            [table.minibatches for job in jobs for table in job.tables if table.num_slices]
            for jobs in self._ask_stages()
        ]
        return max(self._loaded, min(min(row, default=0) for row in counts))

    def agree(self, decide: Callable[[], int], leader: int = 0) -> int:
        """Waits until all members have called it; returns what one of them decides then.

        Args:
            decide: Called on the member at index `leader`; returns a number from 0 to 2**44.

        Raises:
            MembersChangedError: They have changed meanwhile.
        """
        return self._gather(lambda _: decide(), 0, leader)

    def _gather(self, decide: Callable[[list[int]], int], own: int, leader: int = 0) -> int:
        """Returns what one member decides when it has the numbers of all; else as `agree`.

        Args:
            decide: Called on that member with the numbers, in no order.
            own: This worker's number, 0 to 2**44.
            leader: Index of that member.
        """
        self._num_agreed += 1
        if not self.ranks:
            return decide([own])
        number = self._num_agreed

        def script() -> Steps[int]:
            if self.index != leader:
                self.send(leader, wire.DONE, number, _digits(own))
                return _number((yield from self.receive(leader, wire.END, number)))
            others = [index for index in range(len(self.ranks)) if index != leader]
            numbers = [own]
            for other in others:
                numbers.append(_number((yield from self.receive(other, wire.DONE, number))))
            decided = decide(numbers)
            for other in others:
                self.send(other, wire.END, number, _digits(decided))
            return decided

        return self._peers.run(script())

    # ----- messages

    def send(self, to: int, kind: int, number: int, values: torch.Tensor) -> None:
        """Sends a tensor to a member, by its index."""
        wire.send(self._peers, self.ranks[to], kind, number, values, self._gathering.epoch)

    def receive(
        self, source: int, kind: int, number: int
    ) -> Generator[Want | Meet, Any, torch.Tensor]:
        """Returns a tensor of a member, by its index, when it is here.

        Raises:
            MembersChangedError: The members have changed meanwhile.
        """
        epoch = self._gathering.epoch
        values = yield from wire.receive(self.ranks[source], kind, number, epoch)
        if values is None:
            raise MembersChangedError
        return values

    def _ask_stages(self) -> list[list[control_pb2.JobStatus]]:
        """Returns the job of each stage, as each shard knows it."""
        jobs = [
            job
            for link in self._session.links
            for job in link.call(link.control.Status, control_pb2.StatusRequest()).jobs
        ]
        names = [f"{self._session.job}.s{stage}" for stage in range(len(self._planned))]
        return [[job for job in jobs if job.job == name] for name in names]

    def _has_finished(self, stage: int) -> bool:
        """Returns whether the workers of a stage have finished, and not been lost."""
        is_over = all(job.state == ENDED for job in self._ask_stages()[stage])
        return is_over and self.counted() > self._loaded  # Else they were lost before any update.

    @property
    def _position(self) -> int:
        """The number that this worker tells the others when they meet."""
        return 0 if self.saves is None else self.saves + 1

    def _ask(self, meet: Meet) -> None:
        """Asks the directory of the members; keeps the last meeting that it tells of."""

        def script() -> Steps[list[Gathering]]:
            found: list[Gathering] = yield meet
            return found

        if found := self._peers.run(script()):
            self._gathering = found[-1]

    def _is_over(self, total: int | None, stage: int) -> bool:
        """Waits until the members change, because a stage has none, or the training has ended.

        Args:
            total: Minibatches of the whole training, if it ends; else None.

        Returns:
            Whether all minibatches are counted, so that its workers have left.
        """
        first = sum(self._planned[:stage])
        ranks = " or ".join(str(first + replica) for replica in range(self._planned[stage]))
        text = f"a worker of stage {stage}, of which none is left: start rank {ranks} again"
        while not self.has_moved:
            if self._has_finished(stage) or (total is not None and self.counted() >= total):
                return True
            if self._session.waits != text:
                log.warning("worker %d waits for %s", self.rank, text)
                self._session.waits = text
            self._session.check()
            time.sleep(LOOK_S)
        return False


def _digits(number: int) -> torch.Tensor:
    """Returns a number as two digits, each exact in float32."""
    return torch.tensor(
        [float(digit) for digit in divmod(number, DIGIT)], dtype=torch.float32, device="cpu"
    )


def _number(digits: torch.Tensor) -> int:
    """Returns the number of two digits."""
    high, low = digits.tolist()
    return int(high) * DIGIT + int(low)
