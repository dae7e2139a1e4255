"""`DistributedOptimizer` wraps a torch optimizer; the training loop does not change.

`zero_grad`, `backward`, `step` and any `lr_scheduler` work as before. `step` sends this worker's
gradients to the shards, which run the wrapped optimizer on the mean (or as the mode says), and
brings the weights for the next forward pass into the model.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from pscore.compressors import parse_compressor
from pscore.compressors.base import Compressor
from pscore.errors import ConfigError
from pscore.estimate import parse_pull_compressor
from pscore.optimizers import OPTIMIZERS
from pscore.rules import make_server_optimizer, parse_mode
from pscore.rules.base import Rule
from pscore.table_spec import TableSpec
from psworker.compression.error_feedback import choose
from psworker.connection.left_out import LeftOut
from psworker.connection.missed import Missed
from psworker.connection.traffic import Traffic
from psworker.job import context
from psworker.job.grouping import Choice
from psworker.model.flat import describe, trained
from psworker.training import clipping, scaling
from psworker.training.buffers import Buffers
from psworker.training.global_weights import global_weights
from psworker.training.gradients import Gradients
from psworker.training.group_gradients import group_gradients
from psworker.training.group_steps import GroupSteps
from psworker.training.mode_change import change_mode
from psworker.training.overlap import Overlap
from psworker.training.progress import require_weight
from psworker.training.recovery import Recovery
from psworker.training.state_dict import read_state, restore, torch_state
from psworker.training.steps import Steps
from psworker.training.table import TrainingTable

log = logging.getLogger("paceline")
TABLE = "model"
_open: weakref.WeakSet[DistributedOptimizer] = weakref.WeakSet()


class DistributedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose steps are made by parameter-server shards.

    It joins the job when it is made, and brings rank 0's weights into the model.

    Args:
        optimizer: SGD, Adam or AdamW; its groups' hyper-parameters travel with each push.
        named_parameters: `model.named_parameters()`, in the same order on every worker.
        mode: An update rule: `"ssgd"`, `"ssd(steps=5)"`, or `psworker.SSD(steps=5)`.
        compression: The compressor of pushes: `"none"`, `"fp16"`, or a `Compressor`.
        pull_compression: The compressor of the pulls that training uses.
        servers: Addresses of the shards in their order; else PACELINE_SERVERS; else shards
            are started on this machine and end with the job.
        job: Name of the job; else PACELINE_JOB; else torchrun's run id.
        timeout_s: Seconds without an answer that are an error; else PACELINE_TIMEOUT_S or 30.
        model: The module, if its buffers (BatchNorm's running statistics) are to be shared.
        buffers: Values of the float buffers of `model` inside `global_weights`: `rank0` (those
            of rank 0), `mean` (of all workers), or `local` (each worker its own).
        overlap: Whether gradients leave during backward. Then the script must not change them
            between backward and `step` (no clipping, loss scaling, accumulation): an error.
        gradient_as_bucket_view: With `overlap`: a large `.grad` becomes a view of the vector
            that is sent, which saves its memory; the next backward overwrites it (as in DDP).
        samples: Weight of this worker's gradient in the mean; its batch size if workers'
            batches differ. May be changed before each step (`optimizer.samples = 17`).
        compress_min_nbytes: Smaller parameters, and all of one dimension (biases, norm layers),
            are not compressed; in bytes of float32.
        local_group: The processes that are one worker: they average their gradients first, and each
            pushes and pulls a part (docs/hosts.md). A ProcessGroup of `torch.distributed`; "host":
            those of this host; None: each process is a worker; "auto": those of this host under
            torchrun, if `torch.distributed` is initialised.
        compress_exclude: Names or patterns (`"head.*"`) of more parameters to leave out.

    Raises:
        UnsupportedOptimizerError: The shards do not implement the optimizer or an argument.
        ConfigError: An argument is wrong.
        RemoteProtocolError: The shards refuse this worker; the message says why.
        ServerUnavailableError: No shard answers.
    """

    _step_supports_amp_scaling = True  # `GradScaler.step` calls `step` for an overflow too.

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
    ) -> None:
        """Joins the job, and brings rank 0's weights into the model."""
        samples = require_weight(samples)
        rule = parse_mode(mode)
        compressors = parse_compressor(compression), parse_pull_compressor(pull_compression)
        outer = rule.outer_optimizer
        plugin = OPTIMIZERS[outer]() if outer else make_server_optimizer(optimizer)
        names, parameters, groups = trained(optimizer, named_parameters)
        early = Overlap(overlap, names, has_views=gradient_as_bucket_view)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._inner = optimizer
        self._context = context.join(
            servers=servers, job=job, timeout_s=timeout_s, local_group=local_group
        )
        session = self._context.session
        _replace_others(parameters)
        described = describe(list(zip(names, parameters, strict=True)), groups)
        sizes = {"min_nbytes": compress_min_nbytes, "exclude": compress_exclude}
        spec = TableSpec(
            name=self._context.table_name(TABLE),
            tensors=tuple(choose(described, *compressors, **sizes)),  # type: ignore[arg-type]
            num_shards=len(session.links),
            rule=rule,
            compressor=compressors[0],
            optimizer=plugin.name,
            num_groups=len(self.param_groups),
            pull_compressor=compressors[1],
        )
        self._table = TrainingTable(
            session, spec, parameters, plugin, samples=samples, has_grad_views=early.has_views
        )
        shared = group_gradients(self._table, early, self._set_hyper)
        self._gradients = shared or Gradients(self._table, early, self._set_hyper)
        self._end = ""  # Why training has ended.
        self._left_out = left_out = LeftOut()
        if rule.takes_all and not session.min_workers and session.is_leader:
            session.left_out[self._table.exchange.table] = left_out
        self._buffers = Buffers(model, buffers, session)
        self._recovery = Recovery(self._table, self._gradients, self._buffers, left_out)
        held = self._table, self._gradients, self._buffers, self._recovery, left_out
        parts = (self, optimizer, _frozen(self.param_groups, parameters), *held)
        self._steps = Steps(*parts) if shared is None else GroupSteps(shared, *parts)
        self._table.start(self.param_groups)
        self._gradients.watch(self._recovery.hook)
        self._context.at_close(self.close)
        _open.add(self)

    # ----- the training loop

    @property
    def samples(self) -> float:
        """Weight of this worker's gradient in the mean."""
        return self._table.progress.samples

    @samples.setter
    def samples(self, samples: float) -> None:
        if samples != self.samples:
            self._gradients.overlap.changed(f"samples ({self.samples:g}, now {samples:g})")
            self._table.progress.samples = require_weight(samples)

    @property
    def steps(self) -> int:
        """Steps of the job's training behind this worker: seeds its next data (docs/elastic.md)."""
        return self._table.replica.step

    @property
    def samples_seen(self) -> float:
        """Sum of `samples` over these steps: this worker's position in its data."""
        return self._table.progress.seen

    @property
    def clock(self) -> int:
        """Pushes of this worker that the shards have counted: steps, or rounds; 0 in a new job."""
        return self._table.replica.next_push

    @property
    def rule(self) -> Rule:
        """The mode."""
        return self._table.rule

    @property
    def missed(self) -> Missed:
        """Steps of this worker that did not count, or not in every slice."""
        return self._table.exchange.missed

    @property
    def traffic(self) -> Traffic:
        """Bytes sent and received, and pushes that came too late."""
        return self._table.exchange.traffic

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients as `torch.optim.Optimizer.zero_grad` does; counts a step's start."""
        self._left_out.zeroed()
        super().zero_grad(set_to_none)

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        grad_scaler: GradScaler | None = None,
    ) -> Any:
        """Ends one step: sends the remaining gradients, and brings in the weights for the next.

        Args:
            closure: Computes the loss and its gradients, and returns it.
            grad_scaler: Given by `GradScaler.step`. If it has found Inf or NaN the step is left
                out; in a mode whose updates take every worker's gradient, by all workers.

        Raises:
            GradientError: A gradient holds NaN or Inf, or was changed after it had left.
            ConfigError: A parameter has moved, or was frozen when the wrapper was made; or
                training has ended.
            PacelineError: A shard refused something, or does not answer.
        """
        self._require_open("step")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scaling.refuse_attributes(self)
        self._steps.run(grad_scaler)
        return loss

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
        self._steps.run(None, skips=True)

    @contextlib.contextmanager
    def global_weights(self) -> Iterator[None]:
        """Context manager: loads the global weights for evaluation or a checkpoint.

        Inside, the model holds the shards' exact weights, also where pulls are compressed: in the
        synchronous and delayed modes those after this worker's last step, else the newest. It also
        holds the shared buffers. On exit the former values come back bit for bit. After `close`
        the model holds the global weights anyway, and its own buffers.
        """
        if self._end:
            yield
            return
        with global_weights(self._table, self._recovery, self._buffers):
            yield

    def set_mode(self, mode: str | Rule) -> None:
        """Changes the mode of the running job, between two steps; every worker calls it.

        Every gradient so far counts, and all workers continue from the same weights, with the
        shards' optimizer state and versions. A `warmup` counts from the start of training. A worker
        that is started again later names the new mode.

        Args:
            mode: As for the constructor: `"ssd(steps=8)"`.

        Raises:
            ConfigError: It does not fit this job, or this is not between two steps.
            JobMismatchError: Another worker has named another mode.
        """
        with self._recovery.guard():
            if self._end or self._gradients.have_left:
                raise ConfigError("call set_mode() after step(), and before training has ended")
            change_mode(self._table, parse_mode(mode))

    def close(self) -> None:
        """Ends training: the model keeps the global weights.

        The other workers wait for this worker's gradients until it leaves the job: with
        `psworker.shutdown`, which calls this, or at the end of the script.
        """
        if not self._end:
            self._retire("close() or psworker.shutdown()")
            with self._recovery.guard():
                self._table.end_round()
                self._table.fetch(None)
                self._table.flat.scatter_weights()

    # ----- state

    def state_dict(self) -> dict[str, Any]:
        """Returns the shards' optimizer state in torch's format, and this worker's own.

        The usual keys hold what `torch.optim` keeps there, so that a plain optimizer can load it;
        `paceline` holds the step, the mode and the residuals of error feedback.
        """
        inner = self._inner.state_dict()["state"] if self.rule.outer_optimizer else None
        plain = super().state_dict()
        return torch_state(self._table, self._recovery, self.param_groups, plain, inner)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the shards' optimizer state and the model's weights on all workers.

        Every worker calls it, after it has loaded the model's weights; rank 0's go to the shards.

        Raises:
            ConfigError: The state is of another model or optimizer.
        """
        with self._recovery.guard():
            loaded = read_state(self._table, self.param_groups, state_dict)
            plain = {"state": {}, "param_groups": state_dict["param_groups"]}
            super().load_state_dict(plain)
            if self.rule.outer_optimizer:  # Then this worker runs the wrapped optimizer.
                self._inner.load_state_dict({**plain, "state": state_dict["state"]})
            self._inner.param_groups = self.param_groups
            restore(self._table, loaded)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group while the wrapper is made; later the layout is fixed.

        Raises:
            ConfigError: The wrapper is ready.
        """
        if hasattr(self, "_table"):
            raise ConfigError("parameter groups cannot be added after DistributedOptimizer is made")
        super().add_param_group(param_group)

    # ----- inside

    def _set_hyper(self) -> bool:
        """Sets the hyper-parameters of the next push; returns whether they have changed."""
        return self._table.set_hyper(self.param_groups)

    def _require_open(self, name: str) -> None:
        if self._end:
            raise ConfigError(f"training has ended: {name}() after {self._end}")
        self._table.session.require_own()

    def _retire(self, why: str) -> None:
        """Ends training with this wrapper: its hooks are removed."""
        self._end = why
        self._gradients.unwatch()
        _open.discard(self)


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
        ConfigError: The mode's updates do not take every worker's gradient of one step.
        GradientError: Gradients have left during backward.
        PacelineError: This worker is no longer part of the job, or a shard does not answer.
    """
    table, gradients = optimizer._table, optimizer._gradients
    return clipping.clip(table, gradients, optimizer._recovery, max_norm)


def _frozen(
    groups: Sequence[dict[str, Any]], parameters: Sequence[torch.nn.Parameter]
) -> list[torch.nn.Parameter]:
    """Returns the parameters of the groups that are not trained."""
    ours = {id(parameter) for parameter in parameters}
    given = [parameter for group in groups for parameter in group["params"]]
    return [parameter for parameter in given if id(parameter) not in ours]


def _replace_others(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Ends training with former wrappers of the same parameters (a notebook cell run again).

    Their hooks would push gradients too, and the model no longer uses their weights.
    """
    ours = {id(parameter) for parameter in parameters}
    for former in list(_open):
        if not ours.isdisjoint(map(id, former._table.flat.parameters)):
            former._context.not_at_close(former.close)
            former._retire("another DistributedOptimizer was made with its parameters")
            log.info("a DistributedOptimizer was replaced by another with its parameters")
