"""The table that a training script trains: its model on the shards, and this worker's copy.

`DistributedOptimizer`, changes of the mode, `state_dict` and recovery are all made of the moves of
this class.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from pscore.cuda.local import kernels_for
from pscore.errors import JobMismatchError
from pscore.local.base import optimizer_state
from pscore.observe.timeline import recorded
from pscore.optimizers import hyper_rows
from pscore.optimizers.base import Optimizer
from pscore.rules import parse_mode
from pscore.rules.base import Rule, rounds_wait
from pscore.table_names import next_name
from pscore.table_spec import TableSpec
from pscore.types import FloatArray, IntArray, Role
from psworker.connection.exchange.exchange import Exchange
from psworker.connection.exchange.publishing import begin_publication
from psworker.connection.membership.session import Session
from psworker.group.worker_group import WorkerGroup
from psworker.model.sharded import find_routes, make_flat
from psworker.replica.late import continue_at, push_late
from psworker.replica.ports import PullBuffer
from psworker.replica.replica import Replica
from psworker.replica.slice_ends import OF_ROUNDS
from psworker.training.local_steps.local_step import LocalStep
from psworker.training.local_steps.worker_steps import MeanGradients
from psworker.training.parts import Parts, own_slices, refuse_in_group
from psworker.training.progress import TrainingProgress

log = logging.getLogger("paceline")
Agree = Callable[[int], int]  # Returns the first push, given the one that slices expect.


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalState:
    """A copy of the shards' weights and of their optimizer's state."""

    weights: torch.Tensor  # (layout.numel,) float32, on the host.
    state: list[torch.Tensor]  # State arrays of the optimizer, likewise; empty unless requested.
    counts: list[IntArray]  # With state: optimizer steps of each segment, by slice.


class TrainingTable:
    """The parameters of a model as a table on the shards, with this worker's replica of it.

    Attributes:
        name: The table's name at the shards.
        layout: The place of each parameter in the flat vector, and the shard of each slice.
        exchange: Pushes and pulls of the table.
        flat: The model as flat memory.
        replica: The state machine that decides what is sent at each step.
        progress: Samples and steps behind this worker.
        parts: The slices of this process and of the others of its group.
        local_step: The part of a step that this worker makes by itself.
        make_step: Returns the local step of a mode.
        means: The mean gradients, where those are pulled and the workers run the optimizer; None:
            weights are pulled.
        publish_every: Updates from one version for readers to the next; None: there are none.
        is_left: Whether all workers have left it, for the table that follows.
    """

    means: MeanGradients | None = None
    is_left = False

    def __init__(
        self,
        session: Session,
        spec: TableSpec,
        parameters: Sequence[torch.nn.Parameter],
        optimizer: Optimizer,
        has_grad_views: bool = False,
        model: torch.nn.Module | None = None,
        *,
        samples: float = 1.0,
        publish_every: int | None = None,
        holds_rounds: bool = False,
    ) -> None:
        """Declares the parameters at the shards, and moves them into flat memory.

        Args:
            parameters: The parameters that are trained, in the order of `spec.tensors`.
            has_grad_views: Whether large `.grad`s may become views of the flat gradients.
            model: The module, which a sharded model needs.
            samples: Weight of this worker's gradient in the mean.
            publish_every: Updates from one version for readers to the next; None: there are none.
            holds_rounds: Whether it keeps the weights and outer state of each round, for a shard
                that loses them.

        Raises:
            ConfigError: The model is sharded over other processes than this worker's.
            JobMismatchError: The job's table of this name is a different one.
            PacelineError: A shard refused something, or does not answer.
        """
        self.name = spec.name
        self.optimizer = optimizer
        refuse_in_group(spec.rule, optimizer, session.group)
        spec = replace(spec, is_held=holds_rounds and _can_hold(spec, session))
        agreed = session.define(spec, adopts=True)
        spec = replace(spec, content=agreed.content)
        routes = find_routes(parameters, spec.layout(), session.group, model)
        own, memory = own_slices(spec.layout(), session.group, routes)
        self.exchange = Exchange(session, spec, share=True, own=own, memory=memory, agreed=agreed)
        self.layout = self.exchange.layout
        self.flat = make_flat(
            parameters, memory, self.exchange.grads, routes, model, has_views=has_grad_views
        )
        num_groups, weights = spec.num_groups, self.flat.weights
        if not optimizer.holds_weights:
            self.means = MeanGradients(self.flat, session)
            weights = self.means.values
        self.replica = Replica(
            self.flat.layout,
            spec.rule,
            optimizer,
            num_groups,
            weights,
            session.rank,
            own=own,
            num_workers=session.num_workers,
        )
        self.replica.speed = lambda: session.pace.share
        self.exchange.payloads.origin_of = lambda index: self.replica.round.origin(index)
        self.parts = Parts(self.layout, self.flat, self.replica, session)
        kernels = kernels_for(weights)
        for part in self.replica.parts:
            part.kernels = kernels
        self._record_updates()
        self.progress = TrainingProgress(samples, self.replica, self.exchange)
        self.local_step = LocalStep()
        self.make_step: Callable[[Rule], LocalStep] = lambda _: LocalStep()
        self.publish_every = publish_every
        self._holds_rounds = holds_rounds
        self._hold()

    @property
    def session(self) -> Session:
        """This worker's part in the job."""
        return self.exchange.session

    @property
    def group(self) -> WorkerGroup:
        """The processes that are this worker."""
        return self.exchange.session.group

    @property
    def rule(self) -> Rule:
        """The mode."""
        return self.replica.rule

    def _record_updates(self) -> None:
        """Records the time of each local update in the timeline, if there is one."""
        timeline = self.session.timeline
        if timeline is not None:
            self.replica.local.around_update = lambda index, step: recorded(
                timeline, "local update", step=step, slice=index
            )

    def _hold(self) -> None:
        """Keeps what a shard may lose, if this worker can have all of it in the present mode."""
        rounds = self._holds_rounds and _can_hold(self.exchange.spec, self.session)
        self.replica.local.keeps_state = rounds
        is_held = rounds or self.means is not None
        self.exchange.refills.start(self._held if is_held else None)
        is_wanted = self._holds_rounds and self.rule.round_role is Role.DELTA
        if is_wanted and not is_held and self.session.group.is_leader:
            log.warning(
                "optimizer_on='worker', but workers cannot fill a shard that is lost: they can in "
                "rounds that wait for all workers (no overlap, backup or quorum), with float32 "
                "weights, without local groups, in a job that is not elastic"
            )

    def _held(self, index: int) -> tuple[int, list[FloatArray], list[int]]:
        """Returns a slice as the last pull has brought it: version, weights, state and counts."""
        part = self.replica.parts[index]
        if self.means is not None:
            return part.version, [part.weights.numpy(force=True)], []
        origin = self.replica.round.origin(index)
        assert origin is not None
        arrays = [origin, *optimizer_state(part)]
        return part.version, [each.numpy(force=True) for each in arrays], part.counts.tolist()

    def grads(self) -> list[torch.Tensor]:
        """Returns the flat gradient of each slice, `(numel,) float32`."""
        return [self.flat.grads_of(spec.index) for spec in self.layout.slices]

    def set_hyper(self, param_groups: Sequence[dict[str, Any]]) -> bool:
        """Sets the hyper-parameters of the next push; returns whether they have changed."""
        before = self.replica.parts[0].hyper
        rows = hyper_rows(self.optimizer, self._outer(param_groups), len(before))
        for part in self.replica.parts:
            part.hyper = rows
        return not np.array_equal(before, rows)

    def require_hyper(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Raises ConfigError for groups without a hyper-parameter of the shards' optimizer."""
        hyper_rows(self.optimizer, self._outer(param_groups))

    def _outer(self, param_groups: Sequence[dict[str, Any]]) -> list[Mapping[str, Any]]:
        step, num_workers = self.replica.step, self.session.num_workers
        return [self.rule.outer_group(step, group, num_workers) for group in param_groups]

    # ----- moves

    def upload(
        self,
        role: Role,
        state: Sequence[FloatArray] = (),
        counts: Sequence[int] = (),
        step: int = 0,
        *,
        gathers: bool = True,
    ) -> None:
        """Uploads the weights of the model; with `Role.STATE` the optimizer's state too.

        A process of a sharded model uploads its own slices.

        Args:
            role: `WEIGHTS` or `STATE`.
            state: State arrays of the optimizer, flat, `(layout.numel,)` each.
            counts: Optimizer steps of each parameter.
            step: Steps of training behind these weights.
            gathers: Whether the weights are those of the model; else the flat ones as they are.
        """
        if gathers:
            self.flat.gather_weights()
        weights = self.flat.weights.cpu().numpy()
        for spec in [self.flat.layout.slices[index] for index in self.parts.uploaded]:
            arrays = [array[spec.start : spec.stop] for array in (weights, *state)]
            steps = [counts[segment.tensor] for segment in spec.segments] if counts else []
            self.exchange.load(spec.index, role, arrays, steps, step)
        self.exchange.flush()

    def start(
        self,
        param_groups: Sequence[dict[str, Any]],
        agree: Agree = int,
        bring: Callable[[], None] | None = None,
    ) -> None:
        """Starts training, at `param_groups`: the lowest rank uploads its weights, all pull.

        Args:
            agree: As for `begin`.
            bring: Uploads a state that all workers have, and `continue_from` follows; None: the
                model's weights are the first.
        """
        self._warn_of(self.rule)
        if bring is None and self.parts.may_upload:
            self.flat.gather_weights()  # Not later: some slices may have come by then.
        if self.parts.uploads:
            (bring or self._bring_first)()
        self.set_hyper(param_groups)
        self.begin(agree=agree, bring=bring)
        self._await_all(holds=bring is not None)

    def _bring_first(self) -> None:
        self.upload(Role.WEIGHTS, gathers=False)

    def come_back(self, step: int, agree: Agree) -> None:
        """Continues after `rejoin`; where no update was made the job may have begun anew.

        Args:
            step: The step at which this worker was.
            agree: As for `begin`.
        """
        self.replica.round.reset()
        self.begin(step, agree)
        self._await_all()

    def _await_all(self, *, holds: bool = False) -> None:
        """Waits for all to begin: no worker may end before, as the job would be over then.

        Where an update was made, the others have begun unless all of them come late too, to a job
        that was restored: perhaps in a mode without this wait, or on a first shard that has been
        lost since.
        """
        if self.exchange.has_updates and not self.session.passed.at_start:
            return
        if not self.rule.by_step:
            self.session.agree_at(f"begin of {self.name}", 0, 0.0, meets=True, holds=holds)

    def begin(
        self,
        step: int | None = None,
        agree: Agree = int,
        bring: Callable[[], None] | None = None,
    ) -> None:
        """Pulls the global weights and the step to begin with, and shows the weights.

        Args:
            step: The step at which this worker was; None: the replica's.
            agree: Agrees with other tables on the first push.
            bring: As for `start`.

        Raises:
            StateLostError: The weights are in the other workers alone (worker_steps.py).
        """
        if self.parts.may_upload and not self.exchange.has_updates:  # Others may have left.
            self.exchange.answers.upload = bring or self._bring_first
        step = self.replica.step if step is None else step
        self.exchange.run(self.replica.fetch(0, self.exchange))
        self.exchange.answers.upload = None
        self._begin_together(agree)
        self.parts.agree()
        self.progress.locate(step)
        self.parts.gather()
        if self.means is not None and self.replica.next_push > self.exchange.origin.clock:
            raise self.means.refuse(self.replica.step, "comes to")
        self.take_weights()
        self.show_weights()
        if self.publish_every is not None:  # Shards that have lost the job have to be told again.
            begin_publication(self.session, self.exchange.table, self.publish_every)
        self._start_local_step()

    def continue_from(self, step: int, samples_seen: float, barrier: str) -> None:
        """Continues from a state, with its steps, that one worker has uploaded; all wait for it."""
        # Workers that exchange models meet once more before they begin.
        self.session.barrier(barrier, holds=bool(self.rule.gossip))
        self.exchange.ask_origin()
        if self.rule.outer_optimizer:
            self.replica.local.restart()  # Moves of the round that was open are over.
        self.fetch(0)
        if self.replica.clocks.num_fragments > 1:
            self._begin_together()
        self.take_weights()
        self.progress.locate(step, samples_seen)
        self.show_weights()
        self._renew_local_step()
        self._start_local_step()

    def _begin_together(self, agree: Agree = int) -> None:
        first, origin = agree(self.parts.first_push()), self.exchange.origin
        self.exchange.run(self.replica.begin_at(first, self.exchange, origin))

    def _renew_local_step(self) -> None:
        """Replaces the local step by that of the mode; exchanges start over."""
        self.local_step.close()
        self.local_step = self.make_step(self.rule)
        self.local_step.announce()

    def _start_local_step(self) -> None:
        """Starts the local step; where others are ahead, this worker continues at their step."""
        step = self.local_step.start()
        self.flat.note_weights()
        if step is None or not self.rule.by_step:
            return
        while push_late(self.replica, step, self.grads(), self.exchange):
            self.exchange.flush()
        continue_at(self.replica, step, self.progress.samples)

    def finish_step(self, samples: float) -> None:
        """Ends a step in the slices of this process: pulls, and the waits of the mode.

        Args:
            samples: Weight of the step in the mean of a round.
        """
        if self.replica.plan().push in OF_ROUNDS:
            self.exchange.flush()  # The moves overwrite those of the last round.
        self.exchange.run(self.replica.finish(self.grads(), self.exchange, samples))

    def end_round(self) -> None:
        """Pushes the moves of a round that is still open; the gradient memory must be free."""
        self.exchange.flush()
        if self.replica.num_inner:
            self.flat.gather_weights()
        self.replica.end_round(self.grads(), self.exchange)

    def settle(self) -> None:
        """Waits until every push is acknowledged and every pull has been applied."""
        self.exchange.flush()
        self.exchange.run(self.replica.settle())

    def fetch(self, min_version: int | None) -> None:
        """Replaces the flat weights by the shards' own, also where pulls are compressed.

        Args:
            min_version: The oldest version that will do; None: one with this worker's last push.
        """
        self.exchange.run(self.replica.fetch(min_version, self.exchange))
        self.parts.agree()
        self.parts.gather()

    def peek(self, num_state: int | None = None) -> GlobalState:
        """Copies the shards' weights, with this worker's last push in them; changes no training.

        Of a sharded model it copies the slices of which this process holds a part.

        Args:
            num_state: Number of the optimizer's state arrays, copied too; None: weights only.
        """
        flats = [
            torch.zeros(self.layout.numel, dtype=torch.float32, device="cpu")
            for _ in range(1 + (num_state or 0))
        ]
        pull_buffers = {}
        for index in self.flat.here:
            spec = self.layout.slices[index]
            weights, *state = [flat[spec.start : spec.stop] for flat in flats]
            pull_buffers[index] = PullBuffer(weights=weights, state=state, is_look=True)
        self.exchange.flush()
        with_state = num_state is not None
        self.exchange.run(self.replica.peek(pull_buffers, self.exchange, with_state=with_state))
        counts = [one.counts for one in pull_buffers.values() if one.counts is not None]
        return GlobalState(weights=flats[0], state=flats[1:], counts=counts)

    def change_rule(self, rule: Rule) -> None:
        """Continues under another mode, with the global weights, at the same step."""
        self._warn_of(rule)
        refuse_in_group(rule, self.optimizer, self.group)
        self.settle()
        if rule.alike:
            self.local_step.share_state()
        self.group.barrier()
        self.exchange.change(rule, self.replica.step)
        self.replica.change(rule)
        self._hold()
        self._renew_local_step()
        self.begin()

    def _warn_of(self, rule: Rule) -> None:
        """Logs, on one worker, the reason not to use the compressor with a rule."""
        caution = rule.caution(self.exchange.spec.compressor)
        if caution and self.session.process_rank == 0:
            log.warning("%s", caution)

    def rejoin(self) -> None:
        """Joins the job again as a new incarnation, perhaps at another rank; forgets all pushes.

        Raises:
            JobMismatchError: The others continue with the table that follows this one.
            PacelineError: This worker cannot rejoin.
        """
        self.session.rejoin()
        self._follow()
        self.exchange.restart()
        self.replica.restart()
        self.replica.rank = self.session.rank

    def _follow(self) -> None:
        """Changes to the mode that the others have taken without this worker."""
        known = self.session.known.tables
        if self.is_left or next_name(self.name) in known:
            raise gone_on(self.session.job)
        mode = known.get(self.name) or str(self.rule)
        if mode == str(self.rule):
            return
        if self.session.group.is_leader:
            text = "worker %d takes the mode %s, to which the job has changed without it"
            log.warning(text, self.session.rank, mode)
        rule = parse_mode(mode)
        self.exchange.spec = replace(self.exchange.spec, rule=rule)
        self.replica.change(rule)
        self._hold()
        self.local_step.close()
        self.local_step = self.make_step(rule)

    def take_weights(self) -> None:
        """Makes the value that was uploaded and pulled the weights, also where means are pulled."""
        if self.means is not None:
            self.means.take_weights()

    def show_weights(self) -> None:
        """Writes the flat weights into the model; rounds use the model's own values."""
        self.flat.scatter_weights()
        if self.rule.outer_optimizer and self.flat.has_casts:
            before = self.flat.weights.clone()
            self.flat.gather_weights()
            self.replica.round.shift(self.flat.weights - before)
        self.flat.note_weights()


def gone_on(job: str) -> JobMismatchError:
    """Returns the error of a worker that the others have left behind in the former table."""
    return JobMismatchError(
        f"job {job!r} has changed its mode or its model has grown without this worker: start this "
        "worker again, with the mode and all parameters that the job has by now"
    )


def _can_hold(spec: TableSpec, session: Session) -> bool:
    """Returns whether each worker can have all that the shards have of a table, after each round.

    Weights of another dtype differ from those of the shards; several processes have parts of them.
    """
    is_exact = all(tensor.dtype == "float32" for tensor in spec.tensors)
    is_fixed = session.group.is_alone and not session.min_workers
    return rounds_wait(spec.rule) and is_exact and is_fixed and spec.pull_compressor.is_raw
