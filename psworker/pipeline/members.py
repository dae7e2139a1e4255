"""The workers of a pipeline that may be lost and come back, as one of them knows them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from pscore.pb.ps.v1 import control_pb2
from psworker.connection.session import Session
from psworker.gossip.base import Gathering, Meet, Waits, Want
from psworker.peers.peers import Peers
from psworker.pipeline import wire
from psworker.pipeline.schedule import Place

log = logging.getLogger("paceline")
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
    """

    def __init__(self, session: Session, peers: Peers, planned: Sequence[int], loaded: int) -> None:
        """Begins without having met anyone.

        Args:
            session: This worker's part in the job of all stages.
            peers: Its connections to the workers of that job.
            planned: Replicas of each stage when all are there.
            loaded: Minibatches behind the weights with which the job began.
        """
        self._session, self._peers = session, peers
        self._planned = tuple(planned)
        self._loaded = self.first = loaded
        self.rank = session.rank
        self.ranks: list[int] = []
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

        It waits while a stage has no worker, unless the training has ended.

        Args:
            total: Minibatches of the whole training, if it ends; else None.

        Returns:
            Stage and replica of this worker among those that are there.

        Raises:
            PacelineError: This worker is no longer part of the job, or a shard does not answer.
        """
        while True:
            self._ask(Meet(self.counted()))
            positions = self._gathering.positions
            ranks = sorted(positions)
            stages = [Place.of_rank(rank, self._planned).stage for rank in ranks]
            replicas = tuple(stages.count(stage) for stage in range(len(self._planned)))
            if 0 not in replicas or self._is_over(total, replicas.index(0)):
                break
        self._session.waits = ""
        self.first, self.ranks, self._num_agreed = min(positions.values()), ranks, 0
        if 0 in replicas:  # All is counted, and the workers of a stage have left.
            self.first, self.ranks = self.counted(), []
        own = Place.of_rank(self.rank, self._planned).stage
        before = sum(stage < own for stage in stages)
        return Place(own, ranks.index(self.rank) - before, replicas)

    def begin_epoch(self) -> None:
        """Begins another epoch, though no worker may be gone."""
        self._ask(Meet(self.counted(), waits=False, again=True))

    def counted(self) -> int:
        """Returns the first minibatch that some slice of some stage has not counted.

        Raises:
            PacelineError: A shard does not answer.
        """
        counts: list[list[int]] = [[] for _ in self._planned]
        stages = {f"{self._session.job}.s{stage}": stage for stage in range(len(counts))}
        for link in self._session.links:
            for job in link.call(link.control.Status, control_pb2.StatusRequest()).jobs:
                if job.job in stages:
                    tables = [table for table in job.tables if table.num_slices]
                    counts[stages[job.job]] += [table.minibatches for table in tables]
        return max(self._loaded, min(min(found, default=0) for found in counts))

    def agree(self, decide: Callable[[], int]) -> int:
        """Waits until all members have called it; returns what the first of them decides then.

        Args:
            decide: Called on the first member; returns a number of `first` or more.

        Raises:
            MembersChangedError: They have changed meanwhile.
        """
        self._num_agreed += 1
        if not self.ranks:
            return decide()
        number, none = self._num_agreed, torch.zeros(1)
        found: list[int] = []

        def script() -> Waits:
            if self.index:
                self.send(0, wire.DONE, number, none)
                found.append(self.first + int((yield from self.receive(0, wire.END, number))))
                return
            for other in range(1, len(self.ranks)):
                yield from self.receive(other, wire.DONE, number)
            found.append(decide())
            answer = torch.tensor([float(found[0] - self.first)])
            for other in range(1, len(self.ranks)):
                self.send(other, wire.END, number, answer)

        self._peers.run(script())
        return found[0]

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
        found = yield from wire.receive(self.ranks[source], kind, number, epoch)
        if found is None:
            raise MembersChangedError
        return found

    # ----- inside

    def _ask(self, meet: Meet) -> None:
        """Asks the directory of the members; keeps the last meeting that it tells of."""

        def script() -> Waits:
            if found := (yield meet):
                self._gathering = found[-1]

        self._peers.run(script())

    def _is_over(self, total: int | None, stage: int) -> bool:
        """Waits until the members change, because a stage has none, or the training has ended.

        Args:
            total: Minibatches of the whole training, if it ends; else None.
            stage: The stage.

        Returns:
            Whether all minibatches are counted, so that its workers have left.
        """
        first = sum(self._planned[:stage])
        ranks = " or ".join(str(first + replica) for replica in range(self._planned[stage]))
        text = f"a worker of stage {stage}, of which none is left: start rank {ranks} again"
        while not self.has_moved:
            if total is not None and self.counted() >= total:
                return True
            if self._session.waits != text:
                log.warning("worker %d waits for %s", self.rank, text)
                self._session.waits = text
            self._session.check()
            time.sleep(LOOK_S)
        return False
