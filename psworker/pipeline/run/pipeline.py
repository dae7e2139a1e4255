"""`psworker.Pipeline`: this worker's replica of a stage, among the workers of all stages."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pscore.compressors.none import NoCompression
from pscore.errors import ConfigError
from pscore.net.addresses import parse_addresses
from pscore.observe.timeline import open_timeline
from pscore.rules import parse_mode
from pscore.rules.base import Rule
from pscore.table_spec import TableSpec
from pscore.timing.auto import parse_fixed_mode
from pscore.types import TensorSpec
from psworker.connection.membership.session import Session
from psworker.job import context
from psworker.job.environment import Environment
from psworker.peers.peers import Peers
from psworker.pipeline.plan.choice import AUTO, Plan, agreed_plan, resolve_plan
from psworker.pipeline.run.chain import Block, chain_of, join_blocks, names_of
from psworker.pipeline.run.checkpoint import StageCheckpoint, Tensors, optimizer_state
from psworker.pipeline.run.driver import Driver, Work
from psworker.pipeline.run.schedule import Place, Stash, TwoVersions, Vertical
from psworker.pipeline.run.stage import Loss
from psworker.pipeline.run.stage_steps import Absences
from psworker.training.optimizer import DistributedOptimizer

STASHES: dict[str, type[Stash]] = {"weights": Stash, "vertical": Vertical}
SCHEDULES = ("1f1b", "2bw")
STOP, CONTINUE = "stop", "continue"  # Values of `on_lost`.
log = logging.getLogger("paceline")


class Pipeline:
    """Trains a model in stages, one forward and one backward in turns, without a flush.

    Every worker makes one with the same model and plan, and calls `step` with the same minibatches;
    it computes those of its replica, and sends activations and gradients to its neighbours.

    Attributes:
        plan: Each stage's last block and replicas.
        place: Stage and replica of this worker in the plan.
        module: The layers of its stage; the parameters hold the newest weights.
        optimizer: Optimizer of its stage, with the learning rate times `Stash.rate`.
        minibatches: Minibatches behind it, those before the checkpoint that it resumed from too.
    """

    _saved: dict[tuple[int, Path], Path]  # The last checkpoint, by number and folder.

    def __init__(
        self,
        model: nn.Module,
        example: torch.Tensor,
        loss: Loss,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        plan: Plan | str | Path = AUTO,
        *,
        bandwidth: str | None = None,
        memory: str | None = None,
        schedule: str = "1f1b",
        stash: str = "weights",
        minibatches: int | None = None,
        mode: str | Rule = "ssgd",
        resume: str | Path | None = None,
        on_lost: str = STOP,
        servers: str | list[str] | None = None,
        job: str | None = None,
        rank: int | None = None,
        num_workers: int | None = None,
    ) -> None:
        """Joins the job, and waits for the workers of all stages.

        Args:
            model: A chain of blocks (psworker/pipeline/run/chain.py), the same on every worker.
            example: An input of it.
            loss: Returns a scalar for the last stage's output and the targets.
            optimizer: Makes the optimizer of some parameters.
            plan: For each stage the name of its last block and its replicas, or a file that
                `psworker plan --save-plan` wrote. `auto`: the file of PACELINE_PIPELINE, else
                rank 0 measures the model with the example, one minibatch, and finds the plan; if
                a pipeline does not pay, one stage on all workers: data parallelism.
            bandwidth: With `auto`: a worker's link, as `1gbit`.
            memory: With `auto`: limit of a worker's memory, as `16g`; none by default.
            schedule: `1f1b`; `2bw`: an update of several minibatches, and two weight versions; or
                one of torch's schedules by its class name, as `Schedule1F1B`: with a flush.
            stash: With `1f1b`: `weights`, the newest version of each stage, or `vertical`, the
                version of the first stage at all stages.
            minibatches: Minibatches of an update, but with `1f1b`; `2bw`: all workers by default.
            mode: Between replicas of a stage: `ssgd`, `asgd`, `ssd` or others (docs/pipelines.md).
            resume: Folder of checkpoints that `save` wrote, also with another plan. The newest
                good one is loaded, if there is one; every worker reads the same.
            on_lost: `stop`: when a worker is lost, the others end with an error. `continue`: they
                go on, a worker that is started again takes its place, and every minibatch counts
                once at each stage; then all stages are on the shards.
            servers: Addresses of the shards; else PACELINE_SERVERS.
            job: Name of the job; else that of the launcher. A stage with replicas is the job
                `job.s0`, `job.s1`, ...
            rank: Rank of this worker; else the launcher's. Those of the first stage come first.
            num_workers: Workers of all stages; else the launcher's.

        Raises:
            ConfigError: Plan and model or workers do not fit, or there is no server address.
            PacelineError: The shards do not answer, or refuse this worker.
        """
        joins = _read_environment(servers, job, rank, num_workers)
        self._timeline = open_timeline(joins.timeline, "worker", joins.rank)
        self._continues, self._rule = on_lost == CONTINUE, _rule_of(mode, schedule, stash, on_lost)
        _require(schedule, stash, minibatches, on_lost, loss)
        plan, limits = resolve_plan(plan, joins.pipeline, bandwidth, memory)
        blocks, checkpoint, session = chain_of(model, example), _read(resume, model), None
        if limits is not None:
            session = self._open(joins)
            plan = agreed_plan(session, blocks, example, limits, optimizer, self._rule)
        self._take_place(plan, model, blocks, joins if session is None else session)
        self._stage_job = {"job": f"{joins.job}.s{self.place.stage}", "servers": _addresses(joins)}
        self._versions = partial(_versions, schedule, stash, minibatches, self._rule)
        self.optimizer = self._make_optimizer(optimizer, checkpoint)
        self._driver = self._make_driver(loss, session or self._open(joins), checkpoint)
        self.minibatches, self._saved = self._driver.first, {}

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
        number = self.minibatches
        self.minibatches += 1
        self._driver.step(number, inputs, targets)
        return self.losses.get(number)

    def save(self, folder: str | Path, *, keep: int = 3) -> Path:
        """Ends the minibatches in flight, and writes the whole model at this minibatch.

        Every worker calls it behind the same minibatch. Rank 0 gets the parts of all stages, and
        writes them into a folder of its own (psworker/pipeline/run/checkpoint.py): its
        `model.safetensors` has the names of the whole model, which loads it. The pipeline then
        begins empty. A second call behind the same minibatch does nothing.

        Args:
            folder: Where rank 0 writes; others do not use it.
            keep: Newest checkpoints that stay there.

        Returns:
            The checkpoint's folder.

        Raises:
            ConfigError: Updates are not whole at this minibatch, or an optimizer's state cannot be
                written; with `on_lost="continue"`, the same minibatch is in another folder.
            PacelineError: Rank 0 could not write it; training may go on.
            TransportError: A worker of another stage is gone.
        """
        self._driver.require_whole(self.minibatches)
        number, path = self.minibatches, Path(folder)
        if (number, path) in self._saved:
            return self._saved[number, path]

        def write(weights: Tensors, state: Tensors) -> None:
            nonlocal path
            path = StageCheckpoint(number, weights, state).write(path, keep)

        self._driver.save(number, write)
        self._saved = {(number, Path(folder)): path}
        return path

    def finish(self) -> None:
        """Ends the minibatches in flight, and leaves the job; `state_dict` is then whole.

        Raises:
            TransportError: A worker of another stage is gone.
        """
        self._driver.finish(self.minibatches)

    @property
    def losses(self) -> dict[int, float]:
        """Losses of the minibatches whose loss this worker has computed, by number."""
        return self._driver.losses

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the parameters and buffers of this stage under the names of the whole model."""
        state = self.module.state_dict()
        return {whole: state[name] for name, whole in self._names.items()}

    # ----- the start

    def _take_place(
        self, plan: Plan, model: nn.Module, blocks: Sequence[Block], me: Environment | Session
    ) -> None:
        """Sets this worker's place in a plan, and the layers of its stage."""
        self.plan = [*plan]
        self.place = _place_of(self.plan, me.rank, me.num_workers)
        _require_enough(self._rule, self.place)
        first, last = _ranges(blocks, self.plan)[self.place.stage]
        self.module = join_blocks(blocks[first : last + 1])
        self._names = names_of(model, self.module)

    def _parts(self) -> tuple[Tensors, Tensors]:
        """Returns weights and optimizer state of this stage, as a checkpoint has them."""
        with contextlib.ExitStack() as stack:
            if isinstance(self.optimizer, DistributedOptimizer):
                stack.enter_context(self.optimizer.global_weights())
            weights = {name: value.detach().clone() for name, value in self.state_dict().items()}
        return weights, optimizer_state(self.optimizer, self._parameter_names())

    def _weigh(self, weight: float) -> None:
        """Multiplies the weight of the next gradient; one replica has no mean."""
        if isinstance(self.optimizer, DistributedOptimizer):
            self.optimizer.samples *= weight

    def _parameter_names(self) -> dict[int, str]:
        return {id(p): self._names[name] for name, p in self.module.named_parameters()}

    def _open(self, joins: Environment) -> Session:
        """Joins the job of all stages."""
        return context.open_session(_addresses(joins), joins, timeline=self._timeline)

    def _make_driver(self, loss: Loss, session: Session, saved: StageCheckpoint | None) -> Driver:
        """Returns what runs this worker's replica; it waits for the workers of all stages."""
        first = 0 if saved is None else saved.minibatches
        own = self.optimizer
        steps = Absences(own) if isinstance(own, DistributedOptimizer) else None
        work = Work(
            module=self.module,
            optimizer=self.optimizer,
            loss=loss,
            versions=self._versions,
            parts=self._parts,
            step_aside=lambda: None if steps is None else steps.step_aside(),
            weigh=self._weigh,
            is_shared=steps is not None,
        )
        if self._continues:
            from psworker.pipeline.run.continuing import ContinuingDriver

            def declare() -> int:
                return _directory(session, self.plan, "continues")

            peers = Peers(session, declare())
            assert steps is not None
            driver: Driver = ContinuingDriver(
                work, self.place, session, peers, first, steps, declare
            )
        else:
            table = _directory(session, self.plan, f"from minibatch {first}")
            peers = Peers(session, table, keeps_links=True)
            driver = Driver(work, self.place, session, peers, first)
        session.heartbeats.stage_reports.append(driver.report)
        context.enter_pipeline(session)
        return driver

    def _make_optimizer(
        self,
        make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        saved: StageCheckpoint | None,
    ) -> torch.optim.Optimizer:
        named = [(self._names[n], p) for n, p in self.module.named_parameters() if p.requires_grad]
        optimizer = make([parameter for _, parameter in named])
        for group in optimizer.param_groups:
            group["lr"] *= self._versions(self.place).rate
        is_new = True
        if self.place.num_replicas > 1 or self._continues:
            joined_context = context.join(
                **self._stage_job,  # type: ignore[arg-type]
                rank=self.place.replica,
                num_workers=self.place.num_replicas,
                local_group=None,
                timeline=self._timeline,
            )
            is_new = not joined_context.session.known.tables
            optimizer = DistributedOptimizer(optimizer, named, mode=self._rule)
        if saved is not None and (is_new or not self._continues):  # Else the shards are further.
            saved.load_optimizer(optimizer, self._parameter_names())
        return optimizer


def _read_environment(
    servers: str | list[str] | None, job: str | None, rank: int | None, num_workers: int | None
) -> Environment:
    """Returns the environment, with the arguments that are given in its place."""
    given: dict[str, Any] = {"job": job or None, "rank": rank, "num_workers": num_workers}
    return Environment.read(servers=parse_addresses(servers) or None, **given)


def _addresses(joins: Environment) -> list[str]:
    """Returns the addresses of the shards, or raises a `ConfigError` where there is none."""
    if not joins.servers:
        raise ConfigError("a pipeline needs shards: psserver start, and PACELINE_SERVERS")
    return list(joins.servers)


def _directory(session: Session, plan: Plan, begin: str) -> int:
    """Returns the table whose directory lists the workers; another plan or begin is refused."""
    names = [f"stage {s} to {name} on {number}" for s, (name, number) in enumerate(plan)]
    stages = [TensorSpec(name=name, shape=(1,), dtype="float32") for name in [*names, begin]]
    spec = TableSpec(
        name="pipeline",
        tensors=tuple(stages),
        num_shards=len(session.links),
        rule=parse_mode("asgd"),
        compressor=NoCompression(),
        optimizer="sgd",
        num_groups=1,
    )
    return session.define(spec)[0]


def _place_of(plan: Plan, rank: int, num_workers: int) -> Place:
    """Returns the place of a rank; raises ConfigError if the plan has another number of workers."""
    replicas = [number for _, number in plan]
    if num_workers != sum(replicas) or rank < 0:
        raise ConfigError(
            f"the plan has {sum(replicas)} workers, the job {num_workers}, and the "
            f"rank is {rank}: start as many, with psworker run or torchrun"
        )
    return Place.of_rank(rank, replicas)


def _rule_of(mode: str | Rule, schedule: str, stash: str, on_lost: str) -> Rule:
    """Returns the mode between the replicas of a stage."""
    rule = parse_fixed_mode(mode)
    if rule.outer_optimizer or rule.gossip:
        raise ConfigError(
            f"mode between replicas is {mode!r}, in which workers make steps by themselves; take "
            "ssgd, asgd or another mode in which shards make each step"
        )
    others = {
        "schedule": (schedule, "1f1b"),
        "stash": (stash, "weights"),
        "on_lost": (on_lost, STOP),
    }
    for name, (given, needed) in others.items():
        if given != needed and not rule.workers_may_step:
            raise ConfigError(
                f"{name}={given!r} with mode={mode!r}: the mode between replicas must be ssgd "
                "without backup, in which every minibatch is in an update that all replicas make"
            )
    return rule


def _require_enough(rule: Rule, place: Place) -> None:
    """Raises a `ConfigError` if a mode needs more replicas of a stage than there are."""
    for stage, number in enumerate(place.replicas):
        if number > 1:
            try:
                rule.require_workers(number)
            except ConfigError as problem:
                raise ConfigError(f"stage {stage}: {problem}") from None


def _require(schedule: str, stash: str, minibatches: int | None, on_lost: str, loss: Loss) -> None:
    """Raises a `ConfigError` if an argument has a wrong value, or does not fit the others."""
    if on_lost not in (STOP, CONTINUE):
        raise ConfigError(f"on_lost is {on_lost!r}, must be {STOP} or {CONTINUE}")
    if on_lost == CONTINUE and schedule != "1f1b":
        raise ConfigError(
            f"on_lost={CONTINUE!r} with schedule={schedule!r}: an update of several minibatches "
            "would be lost with its worker; take schedule='1f1b', or on_lost='stop' and resume="
        )
    if schedule not in SCHEDULES:
        from psworker.pipeline.run.flush import schedule_named, torch_schedules

        if schedule_named(schedule) is None:
            known = ", ".join([*SCHEDULES, *torch_schedules()])
            raise ConfigError(f"schedule is {schedule!r}, must be one of {known}")
    if stash not in STASHES:
        raise ConfigError(f"stash is {stash!r}, must be one of {', '.join(STASHES)}")
    if minibatches is not None and schedule == "1f1b":
        raise ConfigError("minibatches has no effect with schedule='1f1b': each one is an update")
    if stash != "weights" and schedule != "1f1b":
        raise ConfigError(f"stash={stash!r} has no effect but with schedule='1f1b'")
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        raise ConfigError(
            f"the loss ({type(loss).__name__}) has parameters to train: make it the model's last "
            "layers, or set requires_grad to False"
        )


def _read(folder: str | Path | None, model: nn.Module) -> StageCheckpoint | None:
    """Loads the newest good checkpoint into a model, if there is one, and returns it."""
    if folder is None:
        return None
    checkpoint, problems = StageCheckpoint.newest(Path(folder))
    for problem in problems:
        log.warning("a checkpoint is left out: %s", problem)
    if checkpoint is None and problems:
        raise ConfigError(f"no checkpoint in {folder} can be read: {problems[0]}")
    if checkpoint is not None:
        checkpoint.load_weights(model)
    return checkpoint


def _versions(
    schedule: str, stash: str, minibatches: int | None, rule: Rule, place: Place
) -> Stash:
    if schedule == "2bw":
        return TwoVersions(place, minibatches or sum(place.replicas))
    if schedule == "1f1b":
        return STASHES[stash](place, rule)
    from psworker.pipeline.run.flush import (  # Torch's need a second to import.
        Flush,
        schedule_named,
    )

    kind = schedule_named(schedule)
    assert kind is not None
    return Flush(place, kind, minibatches)


def _ranges(blocks: Sequence[Block], plan: Plan) -> list[tuple[int, int]]:
    """Returns the first and the last block of each stage."""
    names = [block.name for block in blocks]
    ranges: list[tuple[int, int]] = []
    for name, _ in plan:
        if name not in names:
            raise ConfigError(f"the plan cuts after {name!r}; the blocks are {', '.join(names)}")
        first = ranges[-1][1] + 1 if ranges else 0
        ranges.append((first, names.index(name)))
    if any(first > last for first, last in ranges) or ranges[-1][1] + 1 != len(names):
        raise ConfigError(
            f"the plan cuts after {', '.join(name for name, _ in plan)}: they must be in order, "
            f"and the last one is {names[-1]}"
        )
    _require_parameters(blocks, ranges)
    return ranges


def _require_parameters(blocks: Sequence[Block], ranges: Sequence[tuple[int, int]]) -> None:
    """Raises a `ConfigError` if a stage has nothing to train."""
    for stage, (first, last) in enumerate(ranges):
        module = join_blocks(blocks[first : last + 1])
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ConfigError(
                f"stage {stage} ({blocks[first].name} to {blocks[last].name}) has no parameters to "
                "train: join it with the stage before or behind it"
            )
