"""`DistributedOptimizer`: wraps a torch optimizer; the training loop does not change.

`zero_grad`, `backward`, `step` and any `lr_scheduler` work as before. `step` sends this worker's
gradients to the shards, which run the wrapped optimizer on the mean (or as the mode says), and
brings the weights for the next forward pass into the model.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.amp.grad_scaler import GradScaler

from pscore.compressors import parse_compressor
from pscore.compressors.base import Compressor
from pscore.cuda.local import kernels_for
from pscore.errors import (
    ConfigError,
    ReplacedError,
    UnknownJobError,
)
from pscore.estimate import parse_pull_compressor
from pscore.optimizers import OPTIMIZERS, hyper_rows
from pscore.partition import make_layout
from pscore.rules import make_server_optimizer, parse_mode
from pscore.rules.base import Rule
from pscore.types import Role, TensorSpec
from psworker.compression.error_feedback import choose
from psworker.connection.exchange import Exchange
from psworker.connection.left_out import LeftOut
from psworker.connection.trace import timed_step
from psworker.job import context
from psworker.model.flat import Bucket, describe, refuse_thawed, trained
from psworker.replica.replica import Replica
from psworker.training import scaling, setback
from psworker.training.buffers import Buffers
from psworker.training.gradients import Gradients
from psworker.training.look import global_weights
from psworker.training.mode_change import change_mode
from psworker.training.overlap import Overlap
from psworker.training.progress import Progress, require_weight
from psworker.training.state_dict import load_torch_state, torch_state, upload

log = logging.getLogger("paceline")
TABLE = "model"
_open: weakref.WeakSet[DistributedOptimizer] = weakref.WeakSet()


class DistributedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose steps are made by parameter-server shards."""

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
    ) -> None:
        """Joins the job, and brings rank 0's weights into the model.

        Args:
            optimizer: SGD, Adam or AdamW; its groups' hyper-parameters travel with each push.
            named_parameters: As `model.named_parameters()` gives them, on every worker alike.
            mode: An update rule: `"ssgd"`, `"ssd(steps=5)"`, or `psworker.SSD(steps=5)`.
            compression: A compressor: `"none"`, `"fp16"`, or a `Compressor`. Of what is pushed.
            pull_compression: Of what is pulled to train on; else weights are pulled as they are.
            servers: Addresses of the shards in their order; else PACELINE_SERVERS; else shards
                are started on this machine and end with the job.
            job: Name of the job; else PACELINE_JOB; else torchrun's run id.
            timeout_s: Seconds without an answer that are an error; else PACELINE_TIMEOUT_S or 30.
            model: The module, if its buffers (BatchNorm's running statistics) are to be shared.
            buffers: What `global_weights` puts into the float buffers of `model`: `rank0` (rank
                0's), `mean` (of all workers), or `local` (each worker its own).
            overlap: Whether gradients leave during backward, where the script changes none between
                backward and `step`: no clipping, loss scaling, accumulation. A change is an error.
            gradient_as_bucket_view: With `overlap`: a large `.grad` becomes a view of the vector
                that is sent, which saves its memory; the next backward overwrites it (as in DDP).
            samples: Weight of this worker's gradient in the mean; its batch size if workers'
                batches differ. May be set anew before each step (`optimizer.samples = 17`).
            compress_min_nbytes: Smaller parameters, and all of one dimension (biases, norm layers),
                are not compressed; in bytes of float32.
            compress_exclude: Names of more that are not, or patterns such as `"head.*"`.

        Raises:
            UnsupportedOptimizerError: The shards do not implement the optimizer or an argument.
            ConfigError: An argument is wrong.
            RemoteProtocolError: The shards refuse this worker; says why.
            ServerUnavailableError: No shard answers.
        """
        self._inner, samples = optimizer, require_weight(samples)
        self.rule = parse_mode(mode)
        self.compressor = parse_compressor(compression)
        self.pull_compressor = parse_pull_compressor(pull_compression)
        outer = self.rule.outer_optimizer
        self.plugin = OPTIMIZERS[outer]() if outer else make_server_optimizer(optimizer)
        names, parameters, groups = trained(optimizer, named_parameters)
        early = Overlap(overlap, names, lends=gradient_as_bucket_view)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._context = context.join(servers=servers, job=job, timeout_s=timeout_s)
        self.session = self._context.session
        chosen = choose(
            describe(list(zip(names, parameters, strict=True)), groups),
            *(self.compressor, self.pull_compressor),
            min_nbytes=compress_min_nbytes,
            exclude=compress_exclude,
        )
        self._make_table(parameters, chosen, early, samples)
        self.buffers = Buffers(model, buffers, self.session)
        self._start()

    def _make_table(
        self,
        parameters: list[torch.nn.Parameter],
        tensors: Sequence[TensorSpec],
        overlap: Overlap,
        samples: float,
    ) -> None:
        """Declares the parameters at the shards, and lays them out here."""
        self._replace_others(parameters)
        layout = make_layout(tensors, len(self.session.links))
        num_groups = len(self.param_groups)
        self._table_name = self._context.table_name(TABLE)
        self.exchange = Exchange(
            self.session,
            self._table_name,
            layout,
            self.rule,
            self.compressor,
            self.plugin,
            num_groups,
            pull_compressor=self.pull_compressor,
            share=True,
        )
        self.missed = self.exchange.missed  # Steps of this worker that did not count whole.
        self.bucket = Bucket(parameters, layout, self.exchange.grads, lends=overlap.lends)
        weights, rank = self.bucket.weights, self.session.rank
        kernels = kernels_for(weights)
        self.replica = Replica(layout, self.rule, self.plugin, num_groups, weights, rank, kernels)
        self.replica.timeline = self.session.timeline
        self.progress = Progress(samples, self.replica, self.exchange)
        self.gradients = Gradients(
            self.bucket, self.exchange, self.replica, overlap, self.progress, self._set_hyper
        )
        ours = {id(parameter) for parameter in parameters}
        given = [parameter for group in self.param_groups for parameter in group["params"]]
        self._frozen = [parameter for parameter in given if id(parameter) not in ours]
        self._end = ""  # Why training has ended.
        self.left_out = LeftOut()
        self.setback: setback.Setback | None = None  # This worker is to join anew.
        if self.rule.takes_all and not self.session.min_workers:
            self.session.left_out[self.exchange.table] = self.left_out

    def _replace_others(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Ends training with former wrappers of the same parameters: a notebook's cell run again.

        Their hooks would push a gradient too, and their weights are not the model's any more.
        """
        ours = {id(parameter) for parameter in parameters}
        for former in list(_open):
            if not ours.isdisjoint(map(id, former.bucket.parameters)):
                former.gradients.unwatch()
                former._context.not_at_close(former.close)
                former._end = "another DistributedOptimizer was made with its parameters"
                _open.discard(former)
                log.info("a DistributedOptimizer was replaced by another with its parameters")

    # ----- the training loop

    @property
    def samples(self) -> float:
        """Weight of this worker's gradient in the mean."""
        return self.progress.samples

    @samples.setter
    def samples(self, samples: float) -> None:
        if samples != self.samples:
            self.gradients.overlap.changed(f"samples ({self.samples:g}, now {samples:g})")
            self.progress.samples = require_weight(samples)

    @property
    def steps(self) -> int:
        """Steps of the job's training behind this worker: seeds its next data (docs/elastic.md)."""
        return self.replica.step

    @property
    def samples_seen(self) -> float:
        """Sum of `samples` over these steps: this worker's place in data that it goes through."""
        return self.progress.seen

    @property
    def clock(self) -> int:
        """Pushes of this worker that the shards have counted: steps, or rounds; 0 in a new job."""
        return self.replica.next_push

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does what `torch.optim.Optimizer.zero_grad` does, and counts the beginning of a step."""
        self.left_out.zeroed()
        super().zero_grad(set_to_none)

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        grad_scaler: GradScaler | None = None,
    ) -> Any:
        """Ends one step: sends what has not left yet, and brings in the weights for the next.

        Args:
            closure: Computes the loss and its gradients, and returns it.
            grad_scaler: Given by `GradScaler.step`. If it has found Inf or NaN the step is left
                out; in a mode whose updates take every worker's gradient, by all workers.

        Raises:
            GradientError: A gradient holds NaN or Inf, or was changed after it had left.
            ConfigError: A parameter has moved, or was frozen when the wrapper was made; or
                training has ended.
            PacelineError: A shard refused something, or nobody answers.
        """
        self._require_open("step")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scaling.refuse_attributes(self)
        self._run(grad_scaler)
        return loss

    def skip_step(self) -> None:
        """Ends one step without this worker's gradient: for a batch that cannot be used.

        In a mode that collects gradients by step the others wait for each worker, and count what
        it has done by its steps. So a script that leaves a batch out calls this in the place of
        `step`: the step's mean is that of the others, and the weights come in as ever. In a mode
        with rounds it is a step without a move. In an asynchronous mode it does nothing.

        Raises:
            GradientError: A part of the gradient has left during backward.
            PacelineError: A shard refused something, or nobody answers.
        """
        self._require_open("skip_step")
        self._run(None, skips=True)

    def _require_open(self, name: str) -> None:
        if self._end:
            raise ConfigError(f"training has ended: {name}() after {self._end}")
        self.session.require_own()

    def _run(self, grad_scaler: GradScaler | None, *, skips: bool = False) -> None:
        """Makes one step, or leaves it out; behind an error that shards may know of, comes back."""
        timeline, number = self.session.timeline, self.replica.step
        begin_ns = 0 if timeline is None else timeline.now_ns()
        with setback.recovers(self):
            if self.setback is None:
                try:
                    self._make_step(grad_scaler, skips=skips)
                except (ReplacedError, UnknownJobError) as problem:
                    self.setback = setback.Setback(problem, number)
            elif grad_scaler is not None:
                scaling.unscale(self, grad_scaler)
            if self.setback is None:
                self.missed.end_step()
                self.progress.locate(number)
                self.gradients.end()
                self.left_out.ended()
            else:
                setback.come_back(self, self.setback)
                self.left_out.given_up()
            self.exchange.payloads.raise_refused()
        if timeline is not None:
            timeline.span("optimizer.step", begin_ns, step=number)

    def _make_step(self, grad_scaler: GradScaler | None, *, skips: bool) -> None:
        """Checks what a step is made of, and makes it, unless all leave it out."""
        before = self.replica.parts[0].hyper
        self._set_hyper()
        if not np.array_equal(before, self.replica.parts[0].hyper):
            self.gradients.overlap.changed("a learning rate or other hyper-parameter")
        self.gradients.check()
        self.bucket.check_weights()
        self.bucket.warn_of_changes()
        refuse_thawed(self._frozen)
        has_overflow = grad_scaler is not None and self._overflows(grad_scaler)
        if not (has_overflow and self.rule.takes_all):  # Then all leave it out.
            self._finish_step(skips=skips or has_overflow)

    def _overflows(self, scaler: GradScaler) -> bool:
        """Unscales the gradients, and returns whether the step is to be left out."""
        if self.gradients.overlap.has_begun:
            scaling.refuse_early()
        return scaling.overflows(self, scaler, self.rule, self.session, self._table_name)

    def _finish_step(self, *, skips: bool) -> None:
        """Sends what has not left, and brings in the weights for the next step."""
        plan = self.replica.plan()
        if skips and not self.rule.by_step:
            return  # Nobody waits for this worker's gradient.
        if plan.push is Role.GRADIENT:
            if skips:
                self.gradients.push_none()
            else:
                self.gradients.push_rest()
        if plan.inner and not skips:
            timed_step(self._inner, self.session.timeline, self.replica.step)
            self.bucket.gather_weights()
        if plan.push is Role.DELTA:
            self.exchange.flush()  # The moves are written where the former ones were.
        grads, samples = self.gradients.flat(), self.samples
        self.exchange.run(self.replica.finish(grads, self.exchange, samples))
        self.show_weights()
        self.buffers.post(0.0 if skips else samples)
        self.gradients.settle()  # From here on the script may write to `.grad`.

    @contextlib.contextmanager
    def global_weights(self) -> Iterator[None]:
        """Brings the global weights into the model for evaluation or a checkpoint.

        Inside, the model holds the shards' weights, as they are there also where pulls are
        compressed: in the synchronous and delayed modes those after this worker's last step, else
        the newest. It also holds the shared buffers. Afterwards training goes on from where it
        was, to the bit. After `close` the model holds the global weights anyway, and its own
        buffers.
        """
        if self._end:
            yield
            return
        with global_weights(self, self.buffers.shared()):
            yield

    @setback.mends
    def set_mode(self, mode: str | Rule) -> None:
        """Changes the mode of the running job, between two steps; every worker calls it.

        Every gradient so far counts, and all go on from the same weights, with the shards'
        optimizer state and versions. A `warmup` counts from the start of training. A worker that
        is started again later names the new mode.

        Args:
            mode: As for the constructor: `"ssd(steps=8)"`.

        Raises:
            ConfigError: It does not fit this job, or this is not between two steps.
            JobMismatchError: Another worker has named another mode.
        """
        if self._end or self.gradients.have_left:
            raise ConfigError("set_mode() is called after step(), and before training has ended")
        change_mode(self, parse_mode(mode), self.gradients.flat())

    def close(self) -> None:
        """Ends training: the model keeps the global weights.

        Others wait for this worker's gradients until it leaves the job: `psworker.shutdown`, which
        calls this, or the end of the script.
        """
        if not self._end:
            self._end = "close() or psworker.shutdown()"
            self.gradients.unwatch()
            _open.discard(self)
            with setback.guard(self):
                self.exchange.flush()
                self.replica.end_round(self.gradients.flat(), self.exchange)
                self.exchange.run(self.replica.fetch(None, self.exchange))
                self.bucket.scatter_weights()

    # ----- state

    def state_dict(self) -> dict[str, Any]:
        """Returns the shards' optimizer state in torch's format, and this worker's own.

        What `torch.optim` would hold is under the usual keys, so that a plain optimizer can load
        it; `paceline` holds the step, the mode and what error feedback owes.
        """
        return torch_state(self)

    @setback.mends
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the shards' optimizer state and the model's weights on all workers.

        Every worker calls it, after it has loaded the model's weights; rank 0's go to the shards.
        """
        load_torch_state(self, state_dict)

    def plain_state_dict(self) -> dict[str, Any]:
        """Returns what `torch.optim.Optimizer.state_dict` does: groups, and no state."""
        return super().state_dict()

    def plain_load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does what `torch.optim.Optimizer.load_state_dict` does, for the wrapped one too.

        The state goes to the wrapped optimizer if this worker runs it, else nowhere.
        """
        plain = {"state": {}, "param_groups": state_dict["param_groups"]}
        super().load_state_dict(plain)
        if self.rule.outer_optimizer:
            self._inner.load_state_dict({**plain, "state": state_dict["state"]})
        self._inner.param_groups = self.param_groups

    def inner_state(self) -> dict[int, Any] | None:
        """Returns the wrapped optimizer's state if this worker runs it, else None."""
        if not self.rule.outer_optimizer:
            return None
        state: dict[int, Any] = self._inner.state_dict()["state"]
        return state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group while the wrapper is made; later the layout is fixed.

        Raises:
            ConfigError: The wrapper is ready.
        """
        if hasattr(self, "exchange"):
            raise ConfigError("parameter groups cannot be added after DistributedOptimizer is made")
        super().add_param_group(param_group)

    # ----- inside

    def _set_hyper(self) -> None:
        step = self.replica.step
        groups = [self.rule.outer_group(step, group) for group in self.param_groups]
        rows = hyper_rows(self.plugin, groups)
        for part in self.replica.parts:
            part.hyper = rows

    def _start(self) -> None:
        """Uploads rank 0's weights, takes them on every worker, and begins to train."""
        if self.session.rank == 0:
            upload(self, Role.WEIGHTS)
        self._set_hyper()
        self.exchange.run(self.replica.begin(self.exchange))
        self.progress.locate()
        self.show_weights()
        if not self.rule.by_step:  # Nobody may end before all have come: the job would be over.
            self.session.barrier("begin")
        self.gradients.watch(partial(setback.hook, self))
        self._context.at_close(self.close)
        _open.add(self)

    def show_weights(self) -> None:
        """Brings the flat weights into the model; a round begins from what the model holds."""
        self.bucket.scatter_weights()
        if self.rule.outer_optimizer and self.bucket.has_casts and self.replica.num_inner == 0:
            self.bucket.gather_weights()
            self.replica.take_reference()
        self.bucket.note_weights()
