"""`psworker.Pipeline`: this worker's replica of a stage, among the workers of all stages."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pscore.compressors.none import NoCompression
from pscore.errors import ConfigError, TransportError
from pscore.rules import SSGD, parse_mode
from pscore.table_spec import TableSpec
from pscore.types import TensorSpec
from psworker.gossip.base import Meet, Waits, Want
from psworker.job import context
from psworker.job.environment import Environment, parse_servers
from psworker.peers.peers import Peers
from psworker.pipeline import wire
from psworker.pipeline.chain import Block, chain_of, joined, names_of
from psworker.pipeline.schedule import Place, Stash, TwoVersions, Vertical
from psworker.pipeline.stage import Loss, Receive, StageReplica, Update
from psworker.pipeline.stage import Waits as StageWaits
from psworker.training.optimizer import DistributedOptimizer

Plan = Sequence[tuple[str, int]]
STASHES: dict[str, type[Stash]] = {"weights": Stash, "vertical": Vertical}
SCHEDULES = ("1f1b", "2bw")
MEET_S = 0.05  # From one question for workers that have yet to come to the next.


class Pipeline:
    """Trains a model in stages, one forward and one backward in turns, without a flush.

    Every worker makes one with the same model and plan, and calls `step` with the same minibatches;
    it computes those of its replica, and sends activations and gradients to its neighbours.

    Attributes:
        place: Stage and replica of this worker.
        module: The layers of its stage; the parameters hold the newest weights.
        optimizer: Optimizer of its stage, with the learning rate times replicas of the stage over
            replicas of
            the first one: stages with more replicas make fewer updates.
        losses: Losses of the minibatches whose loss this worker has computed, by number.
    """

    def __init__(
        self,
        model: nn.Module,
        example: torch.Tensor,
        loss: Loss,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        plan: Plan,
        *,
        schedule: str = "1f1b",
        stash: str = "weights",
        minibatches: int | None = None,
        mode: str = "ssgd",
        servers: str | list[str] | None = None,
        job: str | None = None,
        rank: int | None = None,
        num_workers: int | None = None,
    ) -> None:
        """Joins the job, and waits for the workers of all stages.

        Args:
            model: A chain of blocks (psworker/pipeline/chain.py), the same on every worker.
            example: An input of it.
            loss: Returns a scalar for the last stage's output and the targets.
            optimizer: Makes the optimizer of some parameters.
            plan: For each stage the name of its last block and its replicas; `psworker plan
                MODEL --pipeline` finds them.
            schedule: `1f1b`, or `2bw`: an update of several minibatches, and two weight versions.
            stash: With `1f1b`: `weights`, the newest version of each stage, or `vertical`, the
                version of the first stage at all stages.
            minibatches: With `2bw`: minibatches of an update; all workers by default.
            mode: Between replicas of a stage: `ssgd`, without backup workers.
            servers: Addresses of the shards; else PACELINE_SERVERS.
            job: Name of the job; else that of the launcher. A stage with replicas is the job
                `job.s0`, `job.s1`, ...
            rank: Rank of this worker; else the launcher's. Those of the first stage come first.
            num_workers: Workers of all stages; else the launcher's.

        Raises:
            ConfigError: Plan and model or workers do not fit, or there is no server address.
            PacelineError: The shards do not answer, or refuse this worker.
        """
        environment = Environment.read()
        rank = environment.rank if rank is None else rank
        replicas = [number for _, number in plan]
        _require(plan, mode, schedule, stash, minibatches)
        num_workers = num_workers or environment.num_workers
        if num_workers != sum(replicas) or rank < 0:
            raise ConfigError(
                f"the plan has {sum(replicas)} workers, the job {num_workers}, and the "
                f"rank is {rank}: start as many, with psworker run or torchrun"
            )
        self.place = Place.of_rank(rank, replicas)
        blocks = chain_of(model, example)
        first, last = _ranges(blocks, plan)[self.place.stage]
        self.module = joined(blocks[first : last + 1])
        self._names = names_of(model, self.module)
        job, addresses = job or environment.job, parse_servers(servers) or environment.servers
        if not addresses:
            raise ConfigError("a pipeline needs shards: psserver start, and PACELINE_SERVERS")
        self._stage_job = {"job": f"{job}.s{self.place.stage}", "servers": list(addresses)}
        self.optimizer = self._make_optimizer(optimizer, mode)
        versions = _versions(self.place, schedule, stash, minibatches)
        self._stage = StageReplica(self.module, versions, loss, self._send)
        self.losses = self._stage.losses
        self._number = 0
        joins = replace(environment, job=job, rank=rank, num_workers=num_workers)
        self._session = context.open_session(addresses, joins)
        self._peers = Peers(self._session, self._declare(plan))
        self._peers.run(self._gather())

    def step(self, inputs: Any, targets: Any) -> float | None:
        """Trains on a minibatch; every worker calls it with the same ones, in the same order.

        Args:
            inputs: Inputs of the first stage, which alone reads it.
            targets: Targets of the last stage, which alone reads it.

        Returns:
            The loss, on the worker that has computed it.

        Raises:
            TransportError: A worker of another stage is gone.
        """
        number = self._number
        self._number += 1
        self._drive(self._stage.step(number, inputs, targets))
        return self.losses.get(number)

    def finish(self) -> None:
        """Ends the minibatches in flight, and leaves the job; `state_dict` is then whole.

        Raises:
            TransportError: A worker of another stage is gone.
        """
        self._drive(self._stage.finish())
        if self.place.num_replicas > 1:
            context.shutdown()  # The others' last round waits no longer for this replica.
        self._session.barrier("pipeline")
        self._peers.close()
        self._session.leave()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the parameters and buffers of this stage under the names of the whole model."""
        found = self.module.state_dict()
        return {whole: found[name] for name, whole in self._names.items()}

    # ----- the start

    def _make_optimizer(
        self, make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], mode: str
    ) -> torch.optim.Optimizer:
        named = [(self._names[n], p) for n, p in self.module.named_parameters() if p.requires_grad]
        made = make([parameter for _, parameter in named])
        for group in made.param_groups:
            group["lr"] *= self.place.num_replicas / self.place.replicas[0]
        if self.place.num_replicas == 1:
            return made
        context.join(
            **self._stage_job,  # type: ignore[arg-type]
            rank=self.place.replica,
            num_workers=self.place.num_replicas,
            local_group=None,
        )
        return DistributedOptimizer(made, named, mode=mode)

    def _declare(self, plan: Plan) -> int:
        """Returns the table whose directory lists the workers; another plan is refused."""
        stages = [
            TensorSpec(name=f"stage {stage} to {name} on {number}", shape=(1,), dtype="float32")
            for stage, (name, number) in enumerate(plan)
        ]
        spec = TableSpec(
            name="pipeline",
            tensors=tuple(stages),
            num_shards=len(self._session.links),
            rule=parse_mode("asgd"),
            compressor=NoCompression(),
            optimizer="sgd",
            num_groups=1,
        )
        return self._session.define(spec)[0]

    def _gather(self) -> Waits:
        """Waits until the workers of all stages are there."""
        yield Meet(-1)
        while len(self._peers.members()) < sum(self.place.replicas):
            time.sleep(MEET_S)
            yield Meet(-1)

    # ----- the run

    def _send(self, to: int, kind: int, minibatch: int, values: torch.Tensor) -> None:
        wire.send(self._peers, to, kind, minibatch, values)

    def _drive(self, script: StageWaits) -> None:
        """Runs what the stage has to do; on an error it leaves the job, so the others learn it."""
        is_done = False
        try:
            self._peers.run(self._waits(script))
            is_done = True
        finally:
            if not is_done:
                self._peers.close()
                self._session.leave("its pipeline failed", failed=True)

    def _waits(self, script: StageWaits) -> Waits:
        """Answers what the stage waits for, from its neighbours and its optimizer."""
        answer: torch.Tensor | None = None
        with contextlib.suppress(StopIteration):
            while True:
                wait = script.send(answer)
                answer = None
                if isinstance(wait, Update):
                    self.optimizer.step()
                else:
                    answer = yield from self._receive(wait)

    def _receive(self, wait: Receive) -> Generator[Want | Meet, Any, torch.Tensor]:
        found = yield from wire.receive(wait.source, wait.kind, wait.minibatch)
        if found is None:
            yield Meet(self._number, waits=False)
            place = Place.of_rank(wait.source, self.place.replicas)
            raise TransportError(
                f"the workers of the pipeline have changed while minibatch {wait.minibatch} was "
                f"awaited from replica {place.replica} of stage {place.stage}; start all again"
            )
        return found


def _require(plan: Plan, mode: str, schedule: str, stash: str, minibatches: int | None) -> None:
    """Refuses arguments that do not fit.

    Raises:
        ConfigError: They do not.
    """
    if not plan or min(number for _, number in plan) < 1:
        raise ConfigError(f"plan is {list(plan)}, must name each stage's last block and replicas")
    rule = parse_mode(mode)
    if not isinstance(rule, SSGD):
        raise ConfigError(f"mode between replicas is {mode!r}, must be ssgd")
    if rule.backup:
        raise ConfigError(
            f"mode between replicas is {mode!r}, must be ssgd without backup: each minibatch is on "
            "one replica, and one that is left out would be lost"
        )
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule is {schedule!r}, must be one of {', '.join(SCHEDULES)}")
    if stash not in STASHES:
        raise ConfigError(f"stash is {stash!r}, must be one of {', '.join(STASHES)}")
    if minibatches is not None and schedule != "2bw":
        raise ConfigError("minibatches has no effect but with schedule='2bw'")


def _versions(place: Place, schedule: str, stash: str, minibatches: int | None) -> Stash:
    if schedule == "2bw":
        return TwoVersions(place, minibatches or sum(place.replicas))
    return STASHES[stash](place)


def _ranges(blocks: Sequence[Block], plan: Plan) -> list[tuple[int, int]]:
    """Returns the first and the last block of each stage.

    Raises:
        ConfigError: A name is none, or they are not in order up to the last block, or a stage has
            no parameters.
    """
    names = [block.name for block in blocks]
    found: list[tuple[int, int]] = []
    for name, _ in plan:
        if name not in names:
            raise ConfigError(f"the plan cuts after {name!r}; the blocks are {', '.join(names)}")
        first = found[-1][1] + 1 if found else 0
        found.append((first, names.index(name)))
    if any(first > last for first, last in found) or found[-1][1] + 1 != len(names):
        raise ConfigError(
            f"the plan cuts after {', '.join(name for name, _ in plan)}: they must be in order, "
            f"and the last one is {names[-1]}"
        )
    _require_parameters(blocks, found)
    return found


def _require_parameters(blocks: Sequence[Block], ranges: Sequence[tuple[int, int]]) -> None:
    """Refuses a stage that has nothing to train.

    Raises:
        ConfigError: There is one.
    """
    for stage, (first, last) in enumerate(ranges):
        module = joined(blocks[first : last + 1])
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ConfigError(
                f"stage {stage} ({blocks[first].name} to {blocks[last].name}) has no parameters to "
                "train: join it with the stage before or behind it"
            )
