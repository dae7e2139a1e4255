"""`DistributedOptimizer` wraps a torch optimizer; the training loop does not change.

`zero_grad`, `backward`, `step` and any `lr_scheduler` work as before. `step` sends this worker's
gradients to the shards, which run the wrapped optimizer on the mean (or as the mode says), and
brings the weights for the next forward pass into the model.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ParamSpec

import torch
from torch.amp.grad_scaler import GradScaler

from pscore.compressors import parse_compressor
from pscore.compressors.base import Compressor
from pscore.errors import ConfigError, GradientError
from pscore.estimate import parse_pull_compressor
from pscore.optimizers.base import Optimizer
from pscore.rules.base import Rule, require_sizes, takes_all
from pscore.rules.decentralised import Decentralised
from pscore.table_names import newest, next_name
from pscore.timing.auto import parse_fixed_mode
from psworker.connection.accounts.left_out import LeftOut
from psworker.job import context
from psworker.job.companions import Companion
from psworker.job.grouping import Choice
from psworker.model.flat import trained
from psworker.model.sharded import require_possible
from psworker.model.tracing import not_traced
from psworker.training.arguments import (
    list_named,
    parse_rows_mode,
    require_clip,
    require_closure,
    require_model,
    require_optimizer,
)
from psworker.training.changes import growth, handover
from psworker.training.changes.auto_mode import ModeWish
from psworker.training.changes.mode_change import change_mode
from psworker.training.changes.recovery import WorkerRecovery
from psworker.training.companions import (
    begin_together,
    find_companions,
    have_gradient,
    require_unscaled,
)
from psworker.training.declaration import Declaration
from psworker.training.figures import WorkerFigures
from psworker.training.gradients import clipping, scaling
from psworker.training.gradients.group import GroupGradients
from psworker.training.gradients.overlap import EarlyGradients
from psworker.training.gradients.sharded import make_gradients
from psworker.training.group_steps import GroupSteps
from psworker.training.hints import Hints
from psworker.training.local_steps.peer_step import require_peers, use_local_steps
from psworker.training.local_steps.worker_steps import choose_optimizer
from psworker.training.progress import require_weight
from psworker.training.state.buffers import Buffers, require_policy
from psworker.training.state.global_weights import global_weights
from psworker.training.state.state_dict import read_state, restore, torch_state
from psworker.training.steps import Steps
from psworker.training.table import TrainingTable
from psworker.transports.interrupts import held

log = logging.getLogger("paceline")
TABLE = "model"
P = ParamSpec("P")
_open: weakref.WeakSet[DistributedOptimizer] = weakref.WeakSet()
_making = threading.Lock()


def _one_at_a_time(make: Callable[P, None]) -> Callable[P, None]:
    """Refuses a second constructor at the same time: the order of tables must be the workers'."""

    @functools.wraps(make)
    def made(*args: P.args, **options: P.kwargs) -> None:
        if not _making.acquire(blocking=False):
            raise ConfigError(
                "another thread is making a DistributedOptimizer: make them one after the other, "
                "in the same order on every worker"
            )
        try:
            make(*args, **options)
        finally:
            _making.release()

    return made


class DistributedOptimizer(WorkerFigures, torch.optim.Optimizer):
    """A torch optimizer whose steps are made by parameter-server shards.

    It joins the job when it is made, and brings rank 0's weights into the model.

    Args:
        optimizer: One that the shards run (docs/training.md lists them); its groups'
            hyper-parameters travel with each push.
        named_parameters: `model.named_parameters()`, in the same order on every worker.
        mode: An update rule: `"ssgd"`, `"ssd(steps=5)"`, or `psworker.SSD(steps=5)`. `"auto"`: the
            job measures, in `ssgd` first, and takes the modes that advice names (docs/choosing.md).
        compression: The compressor of pushes: `"none"`, `"fp16"`, or a `Compressor`.
        pull_compression: The compressor of the pulls that training uses.
        servers: Addresses of the shards in their order; else PACELINE_SERVERS; else shards
            are started on this machine and end with the job.
        job: Name of the job; else PACELINE_JOB; else torchrun's run id.
        timeout_s: Seconds without an answer that are an error; else PACELINE_TIMEOUT_S or 30.
        model: The module, if its buffers (BatchNorm's) are to be shared, or it is sharded (FSDP2).
        buffers: Values of the float buffers of `model` inside `global_weights`: `rank0` (those
            of rank 0), `mean` (of all workers), or `local` (each worker its own).
        overlap: Whether gradients leave during backward. Then the script must not change them
            between backward and `step` (no clipping, loss scaling, accumulation): an error.
        gradient_as_bucket_view: With `overlap`: a large `.grad` becomes a view of the vector
            that is sent, which saves its memory; the next backward overwrites it (as in DDP).
        samples: Weight of this worker's gradient in the mean; its batch size if workers'
            batches differ: without it a smaller batch counts as much as a larger one. May be
            changed before each step (`optimizer.samples = len(batch)`).
        compress_min_nbytes: Smaller parameters, and all of one dimension (biases, norm layers),
            are not compressed; in bytes of float32.
        local_group: The processes that are one worker (docs/hosts.md): a ProcessGroup of torch,
            "host", None for each its own, or "auto": "host" under torchrun with torch.distributed.
        compress_exclude: Names or patterns (`"head.*"`) of more parameters to leave out.
        optimizer_on: `shards`; `worker`: in `ssgd` the shards return the mean gradient, and each
            worker's own optimizer steps; in rounds each worker keeps the outer state too, for a
            shard that loses it; `auto`: the shards, if they know the optimizer.
        rows: The optimizer of row tables (docs/rows.md), or several: of `[table.weight, ...]`.
        rows_mode: Their mode, if it is another: `"asgd"` beside `"ssgd"`.
        publish_every: Updates from one version of the weights for readers to the next; seconds in
            an asynchronous mode (docs/publish.md). That of rank 0 counts. None: there are none.

    Raises:
        UnsupportedOptimizerError: The shards do not implement the optimizer or an argument.
        ConfigError: An argument is wrong.
        RemoteProtocolError: The shards refuse this worker; the message says why.
        ServerUnavailableError: No shard answers.
    """

    _end = ""  # Why training has ended.
    _global: contextlib.ExitStack | None = None  # Ends `global_weights`; None outside of it.
    _step_supports_amp_scaling = True  # `GradScaler.step` calls `step` for an overflow too.

    @_one_at_a_time
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        mode: str | Rule = "ssgd",
        compression: str | Compressor = "none",
        pull_compression: str | Compressor = "none",
        servers: str | list[str] | None = None,
        job: str | None = None,
        timeout_s: float | None = None,
        model: torch.nn.Module | None = None,
        buffers: str = "rank0",
        overlap: bool = False,
        gradient_as_bucket_view: bool = False,
        samples: float = 1.0,
        compress_min_nbytes: int = 1 << 16,
        compress_exclude: Sequence[str] = (),
        local_group: Choice = "auto",
        optimizer_on: str = "auto",
        rows: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        rows_mode: str | Rule | None = None,
        publish_every: int | None = None,
    ) -> None:
        """Joins the job, and brings rank 0's weights into the model."""
        require_optimizer(optimizer, named_parameters, DistributedOptimizer)
        samples = require_weight(samples)
        beside = parse_rows_mode(rows, rows_mode)
        self._wish, self._is_on_worker = ModeWish(mode, rows), optimizer_on == "worker"
        rule = self._wish.first
        self._declaration = Declaration(
            named=list_named(named_parameters),
            compressor=parse_compressor(compression),
            pull_compressor=parse_pull_compressor(pull_compression),
            min_nbytes=compress_min_nbytes,
            exclude=compress_exclude,
            publish_every=publish_every,
        )
        is_raw = self._declaration.pull_compressor.is_raw
        plugin = choose_optimizer(optimizer, rule, optimizer_on, is_raw=is_raw)
        names, parameters, _ = trained(optimizer, self._declaration.named)
        require_model(model, parameters)
        require_policy(model, buffers)
        early = EarlyGradients(overlap, names, has_views=gradient_as_bucket_view)
        require_possible(names, parameters, model, overlap=early.is_wanted)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._context = context.join(
            servers=servers, job=job, timeout_s=timeout_s, local_group=local_group
        )
        session = self._context.session
        first = self._context.next_name(TABLE)
        name = newest(first, session.known.tables)
        if (chosen := self._wish.join(session, name)) != rule:
            rule, plugin = chosen, choose_optimizer(optimizer, chosen, optimizer_on, is_raw=is_raw)
        named, run = self._declaration.named, self._run_in_forward
        self._beside = find_companions(rows, named, beside or rule, self._context, first, run)
        with growth.explain_growth(name):
            table = self._declare(name, parameters, rule, plugin, samples, early.has_views, model)
        self._take(optimizer, parameters)
        self._left_out, self._hints = LeftOut(), Hints(model)
        self._buffers = Buffers(model, buffers, session)
        self._warn_of_buffers(rule)
        self._companions: list[Companion] = []  # Declared by `_start`.
        self._drive(table, early)
        self._recovery.start(self._start)
        self._gradients.watch(self._recovery.hook)
        self._context.take_name(TABLE)
        self._context.at_close(self.close)
        _open.add(self)
        self._choose_mode()

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; a library may replace `step`, by a function that takes a scaler."""
        super().__setattr__(name, scaling.takes_scaler(value) if name == "step" else value)

    # ----- the training loop

    @not_traced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients as `torch.optim.Optimizer.zero_grad` does; counts a step's start."""
        self._left_out.zeroed()
        super().zero_grad(set_to_none)
        for companion in self._companions:
            companion.zero_grad()
        if self._gradients.overlap.is_wanted and not self._gradients.overlap.has_begun:
            self._grow_if_thawed()  # At `step` gradients of this step have left.

    @not_traced
    def step(
        self, closure: Callable[[], Any] | None = None, *, grad_scaler: GradScaler | None = None
    ) -> Any:
        """Ends one step: sends the remaining gradients, and brings in the weights for the next.

        Without any gradient it adds nothing to the step, which counts, and logs a warning once.

        Args:
            closure: Computes the loss and its gradients, and returns it.
            grad_scaler: Given by `GradScaler.step`. If it has found Inf or NaN the step is left
                out; in a mode whose updates take every worker's gradient, by all workers.

        Raises:
            GradientError: A gradient holds NaN or Inf, or was changed after it had left.
            ConfigError: A parameter has moved, training has ended, or this is inside
                `global_weights`.
            PacelineError: A shard refused something, or does not answer.
        """
        self._require_open("step")
        self._require_own_weights("step")
        loss = None
        if closure is not None:
            require_closure(closure)
            with torch.enable_grad():
                loss = closure()
        scaling.refuse_attributes(self)
        require_unscaled(self._companions, grad_scaler)
        self._hints.check(is_beside=have_gradient(self._companions))
        with self._in_one_thread():
            self._grow_if_thawed()
            self._steps.run(grad_scaler)
            self._choose_mode()
        return loss

    @not_traced
    def skip_step(self) -> None:
        """Ends one step without this worker's gradient: for a batch that cannot be used.

        In a mode that collects gradients by step the other workers wait for each worker, and its
        progress is counted in steps. So a script that leaves a batch out calls this instead of
        `step`: the step's mean is that of the others, and the weights come in as usual. In a mode
        with rounds it is a step without a move. In an asynchronous mode it does nothing.

        Raises:
            GradientError: A part of the gradient has left during backward.
            PacelineError: A shard refused something, or does not answer.
        """
        self._require_open("skip_step")
        self._require_own_weights("skip_step")
        with self._in_one_thread():
            self._grow_if_thawed()
            self._steps.run(None, skips=True)
            self._choose_mode()

    @contextlib.contextmanager
    def global_weights(self) -> Iterator[None]:
        """Context manager: loads the global weights for evaluation or a checkpoint.

        Inside, the model holds the shards' exact weights, also where pulls are compressed: in the
        synchronous and delayed modes those after this worker's last step, else the newest. It also
        holds the shared buffers. On exit the former values come back bit for bit. After `close`
        the model holds the global weights anyway, and its own buffers.
        """
        if self._end or self._global is not None:
            yield
            return
        with contextlib.ExitStack() as stack:
            stack.enter_context(global_weights(self._table, self._recovery, self._buffers))
            self._global = stack
            try:
                yield
            finally:
                self._global = None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager: backward only adds to each `.grad`, as in `no_sync` of DDP.

        With `overlap=True` no gradient leaves inside; the last backward of a step must be outside.
        Without it gradients leave at `step`, and the context changes nothing.
        """
        former, gradients = self._gradients.accumulates, self._gradients
        gradients.accumulates = True
        try:
            yield
        finally:
            gradients.accumulates = former

    def set_mode(self, mode: str | Rule) -> None:
        """Changes the mode of the running job, between two steps; every worker calls it.

        Every gradient so far counts, and all workers continue from the same weights, with the
        shards' optimizer state and versions. A `warmup` counts from the start of training. A worker
        that is started again later names the new mode, or that before: then it takes the new one.

        Args:
            mode: As for the constructor: `"ssd(steps=8)"`.

        Raises:
            ConfigError: It does not fit this job, or this is not between two steps, or inside
                `global_weights`.
            JobMismatchError: Another worker has named another mode.
        """
        self._require_own_weights("set_mode")
        former, recovery = self._table, self._recovery
        with recovery.guard():
            if self._end or self._gradients.have_left:
                raise ConfigError("call set_mode() after step(), and before training has ended")
        rule = parse_fixed_mode(mode)
        require_peers(former, rule)
        self._declaration.require_publishable(rule, former.optimizer)
        self._warn_of_buffers(rule)
        if not handover.moves_optimizer(former.rule, rule):
            recovery.run_between_steps(lambda: change_mode(former, rule))
            return
        # Others run the optimizer in the next mode, which takes another table.
        is_raw = former.exchange.spec.pull_compressor.is_raw
        plugin = choose_optimizer(self._inner, rule, "auto", is_raw=is_raw)
        handover.require_possible(former, rule, plugin)
        require_sizes(rule, former.session.num_workers, 0)
        kept = self._leave_table()
        with growth.following(former):
            kept = handover.hand_over(
                former, recovery, kept, self._inner, self.param_groups, rule, plugin
            )
            former.local_step.close()
            self._replace_table(kept, rule, plugin)

    def _choose_mode(self) -> None:
        """Changes to the mode that the job has chosen, if its mode was left open."""
        if self._wish.is_open:
            overlaps = self._gradients.overlap.is_wanted
            rule = self._recovery.run_between_steps(
                lambda: self._wish.ask(self._table, self._inner, overlaps=overlaps)
            )
            if rule is not None:
                self.set_mode(rule)

    def close(self) -> None:
        """Ends training: the model keeps the global weights.

        The other workers wait for this worker's gradients until it leaves the job: with
        `psworker.shutdown`, which calls this, or at the end of the script.
        """
        if not self._end:
            if self._global is not None:
                self._global.close()  # The worker's own weights have the moves of an open round.
            self._retire("close() or psworker.shutdown()")
            self._recovery.run_between_steps(self._end_training)
            self._hints.sum_up()
            self._table.local_step.close()

    # ----- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, as torch does; every worker calls it, between the same two steps.

        Its parameters must be in `named_parameters` of the constructor. Parameters of other groups
        that were frozen and have been unfrozen are trained from then on too; without new groups
        `step` finds these by itself. The shards' memory holds the former table beside the new one
        until the job ends (psworker/training/changes/growth.py).

        Raises:
            ConfigError: A parameter has no name, workers of this job come and go, or this is inside
                `global_weights`.
            GradientError: Gradients of this step have left during backward.
            PacelineError: A shard refused something, or does not answer.
        """
        super().add_param_group(param_group)
        if hasattr(self, "_table"):  # The constructor of torch calls this too.
            try:
                self._grow()
            except (ConfigError, GradientError):
                self.param_groups.pop()
                raise

    def _take(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        """Ends training with former wrappers of the parameters, and wraps the optimizer.

        That gets these groups, and steps of it that are not this wrapper's are refused.

        Its step hooks run here where it makes no step itself, on this worker's gradient.
        """
        _replace_others(parameters)
        self._inner, self._stepping = optimizer, threading.Lock()
        optimizer.param_groups = self.param_groups
        mine = weakref.ref(self)

        def refuse(*_: object) -> None:
            wrapper = mine()
            if wrapper is not None and wrapper in _open and not wrapper._stepping.locked():
                raise ConfigError(
                    "step() of the wrapped optimizer would change this worker's model alone: call "
                    "step() of the DistributedOptimizer"
                )

        def run_before(wrapper: DistributedOptimizer, args: Any, options: dict[str, Any]) -> None:
            hooks = [one for one in optimizer._optimizer_step_pre_hooks.values() if one != refuse]
            if hooks and not wrapper._runs_inner:
                if scaler := options.get(scaling.ARGUMENT):
                    scaling.unscale(wrapper, scaler)
                for hook in hooks:
                    hook(optimizer, args, options)

        def run_after(wrapper: DistributedOptimizer, args: Any, options: dict[str, Any]) -> None:
            for hook in [*optimizer._optimizer_step_post_hooks.values()]:
                if not wrapper._runs_inner:
                    hook(optimizer, args, options)

        optimizer.register_step_pre_hook(refuse)
        self.register_step_pre_hook(run_before)
        self.register_step_post_hook(run_after)

    # ----- states

    def __getstate__(self) -> dict[str, Any]:
        """Refuses to be copied or pickled: torch's copy has groups only, and could not step.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "a DistributedOptimizer cannot be copied or pickled, its state is on the shards: save "
            "optimizer.state_dict(), inside global_weights()"
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the shards' optimizer state in torch's format, and this worker's own.

        The usual keys hold what `torch.optim` keeps there, so that a plain optimizer can load it;
        `paceline` holds the step, the mode and the residuals of error feedback. Inside
        `global_weights` in the middle of a round, the step is that of the round's beginning, to
        which the global weights belong (docs/training.md lists the modes that continue exactly).

        Raises:
            ConfigError: The model is sharded (FSDP2); the message names another way.
            PacelineError: A shard refused something, or does not answer.
        """
        inner = self._inner.state_dict()["state"] if self._runs_inner else None
        return torch_state(
            self._table,
            self._recovery,
            self.param_groups,
            super().state_dict(),
            inner,
            at_round=self._global is not None,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the shards' optimizer state and the model's weights on all workers.

        Every worker calls it, after it has loaded the model's weights; those of rank 0 (or the
        lowest rank left) go to the shards. A worker that was started again, and calls it before its
        first step while the others train on, takes the job's weights instead, and logs that.

        Args:
            state_dict: From `state_dict` of a wrapper, or of a plain torch optimizer.

        Raises:
            ConfigError: The state is of another model or optimizer, or this is inside
                `global_weights`.
            PacelineError: A shard refused something, or does not answer.
        """
        self._require_own_weights("load_state_dict")
        with self._recovery.guard():
            try:
                loaded = read_state(self._table, self.param_groups, state_dict)
                plain = {"state": {}, "param_groups": state_dict["param_groups"]}
                super().load_state_dict(plain)
            except ConfigError:
                raise
            except (AttributeError, LookupError, TypeError, ValueError) as problem:
                raise ConfigError(f"the state does not fit: {problem}") from problem
            if self._runs_inner:
                self._inner.load_state_dict({**plain, "state": state_dict["state"]})
            self._inner.param_groups = self.param_groups
            if not restore(self._table, loaded, self._companions):
                self._recovery.begin_anew("the others have passed load_state_dict()")
                text = "worker %d continues from step %d of the job, not from the state of step %d"
                log.warning(text, self._context.session.rank, self.steps, loaded.step)

    @property
    def _runs_inner(self) -> bool:
        """Whether this worker runs the wrapped optimizer."""
        return bool(self._table.rule.outer_optimizer) or self._table.means is not None

    # ----- tables

    def _declare(
        self,
        name: str,
        parameters: Sequence[torch.nn.Parameter],
        rule: Rule,
        plugin: Optimizer,
        samples: float,
        has_views: bool,
        model: torch.nn.Module | None = None,
    ) -> TrainingTable:
        """Returns a table of the parameters that are trained; arguments are `TrainingTable`'s."""
        session, declaration = self._context.session, self._declaration
        declaration.require_publishable(rule, plugin)
        spec = declaration.spec(name, self, rule, plugin, session)
        return TrainingTable(
            session,
            spec,
            parameters,
            plugin,
            has_views,
            model,
            samples=samples,
            publish_every=declaration.publish_every,
            holds_rounds=self._is_on_worker,
        )

    def _drive(self, table: TrainingTable, early: EarlyGradients) -> None:
        """Makes the gradients, the recovery and the steps of a table."""
        self._table = table
        use_local_steps(table, self._inner)
        gradients = make_gradients(table, early, lambda: table.set_hyper(self.param_groups))
        self._gradients = gradients
        buffers, left_out, companions = self._buffers, self._left_out, self._companions
        self._recovery = WorkerRecovery(table, gradients, buffers, left_out, companions)
        make_steps = GroupSteps if isinstance(gradients, GroupGradients) else Steps
        self._steps = make_steps(
            self, self._inner, table, gradients, buffers, self._recovery, left_out, companions
        )
        self._hints.follow(table, gradients)
        self._declaration = replace(self._declaration, kept=tuple(table.flat.parameters))
        trained_ids = {id(parameter) for parameter in self._declaration.kept}
        given = [parameter for group in self.param_groups for parameter in group["params"]]
        self._frozen = [parameter for parameter in given if id(parameter) not in trained_ids]
        session = table.session
        if takes_all(table.rule) and not session.min_workers and session.group.is_leader:
            session.heartbeats.left_out[table.exchange.table] = self._left_out

    def _grow_if_thawed(self) -> None:
        if growth.is_thawed(self._frozen):
            self._grow()

    def _grow(self) -> None:
        """Continues with another table, of all parameters that are to be trained now."""
        self._require_open("add_param_group")
        self._require_own_weights("add_param_group")
        table = self._table
        growth.require_possible(table, self._gradients)
        plugin, session = table.optimizer, table.session
        self._declaration.spec(table.name, self, self.rule, plugin, session).layout()
        table.require_hyper(self.param_groups)
        kept = self._leave_table()
        with growth.following(table):
            self._replace_table(kept, self.rule, plugin)

    def _leave_table(self) -> growth.Kept:
        """Ends training with the present table, and with this wrapper unless the next one starts.

        A step with the former table would be this worker's alone.
        """
        kept = growth.leave(self._table, self._recovery)
        self._end = "a change of parameters or mode that failed"
        return kept

    def _replace_table(self, kept: growth.Kept, rule: Rule, plugin: Optimizer) -> None:
        """Continues with the table that follows the present one, which all workers have left.

        Args:
            kept: The state that the next table takes over.
        """
        former, gradients = self._table, self._gradients
        declared = self._declaration
        names, parameters, _ = trained(self, declared.named, declared.kept)
        has_views = gradients.overlap.has_views
        early = EarlyGradients(gradients.overlap.is_wanted, names, has_views=has_views)
        gradients.unwatch()
        former.session.heartbeats.left_out.pop(former.exchange.table, None)
        name = next_name(former.name)
        table = self._declare(name, parameters, rule, plugin, self.samples, has_views)
        self._inner.param_groups = self.param_groups
        self._drive(table, early)
        with self._recovery.guard():
            growth.take_over(former, table, kept, self.param_groups)
        self._gradients.watch(self._recovery.hook)
        self._end = ""

    def _warn_of_buffers(self, rule: Rule) -> None:
        """Logs, on one process, why evaluation may be wrong in a mode, because of buffers."""
        caution = self._buffers.caution(rule)
        if caution and self._context.session.process_rank == 0:
            log.warning("%s", caution)

    @contextlib.contextmanager
    def _in_one_thread(self) -> Iterator[None]:
        """Refuses a step while another thread makes one, for which it would wait."""
        if not self._stepping.acquire(blocking=False):
            raise ConfigError(
                "another thread is inside step() or skip_step() of this optimizer: make steps in "
                "one thread, or keep a lock around them"
            )
        try:
            holds = self._table.group.is_alone and not isinstance(self.rule, Decentralised)
            with held() if holds else contextlib.nullcontext():
                yield
        finally:
            self._stepping.release()

    def _require_open(self, name: str) -> None:
        if self._end:
            raise ConfigError(f"training has ended: {name}() called after {self._end}")
        self._table.session.require_own()

    def _require_own_weights(self, name: str) -> None:
        if self._global is not None:
            raise ConfigError(
                f"{name}() inside global_weights(): the model would go back to its former weights "
                "at the end; end the context first"
            )

    def _start(self) -> None:
        """Starts training: the first weights are uploaded, and pulled."""
        table, companions = self._table, self._companions
        companions[:] = companions or self._beside()
        for companion in companions:
            companion.start()
        begin_together(table, companions, lambda agree: table.start(self.param_groups, agree))

    def _run_in_forward(self, action: Callable[[], Any]) -> Any:
        """Runs an action of a companion, as `WorkerRecovery.run_in_forward` does."""
        return self._recovery.run_in_forward(action)

    def _end_training(self) -> None:
        """Ends exchanges and rounds, and brings the global weights into the model."""
        for companion in self._companions:
            companion.flush()
        self._table.local_step.part()
        self._table.end_round()
        self._table.fetch(None)
        self._table.flat.scatter_weights()

    def _retire(self, why: str) -> None:
        """Ends training with this wrapper: its hooks are removed."""
        self._end = why
        self._gradients.unwatch()
        self._hints.end()
        _open.discard(self)


@not_traced
def clip_grad_norm_(optimizer: DistributedOptimizer, max_norm: float) -> torch.Tensor:
    """Scales this worker's gradients so that the norm of the workers' mean is at most `max_norm`.

    Every worker calls it at every step, between backward and `step` (with a `GradScaler`, after
    `unscale_`). If the gradient of some worker is not finite, nothing is changed.

    Args:
        optimizer: The wrapper.
        max_norm: The largest 2-norm of the mean gradient.

    Returns:
        The norm of the mean gradient before, the same on all workers; Inf if it is not finite.

    Raises:
        ConfigError: An argument is wrong, training has ended, or the mode's updates do not take
            every worker's gradient of one step.
        GradientError: Gradients have left during backward.
        PacelineError: This worker is no longer part of the job, or a shard does not answer.
    """
    require_clip(optimizer, max_norm, DistributedOptimizer)
    optimizer._require_open("clip_grad_norm_")
    optimizer._grow_if_thawed()
    table, gradients = optimizer._table, optimizer._gradients
    return clipping.clip(table, gradients, optimizer._recovery, max_norm)


def _replace_others(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Ends training with former wrappers of the same parameters (a notebook cell run again).

    Their hooks would push gradients too, and the model no longer uses their weights.
    """
    ours = {id(parameter) for parameter in parameters}
    for former in list(_open):
        if not ours.isdisjoint(map(id, former._table.flat.parameters)):
            former._context.not_at_close(former.close)
            former._table.local_step.close()
            former._retire("another DistributedOptimizer was made with its parameters")
            log.info("a DistributedOptimizer was replaced by another with its parameters")
