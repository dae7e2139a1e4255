"""`DistributedOptimizer`: wraps a torch optimizer; the training loop does not change.

`zero_grad`, `backward`, `step` and any `lr_scheduler` work as before. `step` sends this worker's
gradients to the shards, which run the wrapped optimizer on the mean (or as the mode says), and
brings the weights for the next forward pass into the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from pscore.compressors import parse_compressor
from pscore.compressors.base import Compressor
from pscore.errors import (
    ConfigError,
    GradientError,
    PacelineError,
    ReplacedError,
    UnknownJobError,
)
from pscore.estimate import parse_pull_compressor
from pscore.optimizers import OPTIMIZERS, from_torch, hyper_rows
from pscore.partition import make_layout
from pscore.rules import parse_mode
from pscore.rules.base import Rule
from pscore.types import Role, TensorSpec
from psworker import context
from psworker.bucket import Bucket, describe, refuse_thawed, trained
from psworker.buffers import Buffers
from psworker.change import change_mode
from psworker.exchange import Exchange
from psworker.feedback import choose
from psworker.overlap import Overlap
from psworker.replica import Replica
from psworker.spans import timed_step
from psworker.state import load_torch_state, torch_state

TABLE = "model"


class DistributedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose steps are made by parameter-server shards."""

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
        overlap: bool | str = "auto",
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
            timeout_s: How long a shard may not answer before that is an error, in seconds; else
                PACELINE_TIMEOUT_S; else 30.
            model: The module, if its buffers (BatchNorm's running statistics) are to be shared.
            buffers: What `global_weights` puts into the float buffers of `model`: `rank0` (rank
                0's), `mean` (of all workers), or `local` (each worker its own).
            overlap: Whether gradients leave during backward, none waiting for others: True, False
                (gradient clipping and accumulation need it), or `auto`: found out in a few steps.
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
        self._inner = optimizer
        self.rule = parse_mode(mode)
        self.compressor = parse_compressor(compression)
        self.pull_compressor = parse_pull_compressor(pull_compression)
        outer = self.rule.outer_optimizer
        self.plugin = OPTIMIZERS[outer]() if outer else from_torch(optimizer)[0]
        self._names, parameters, groups = trained(optimizer, named_parameters)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._samples = samples
        self._context = context.join(servers=servers, job=job, timeout_s=timeout_s)
        self.session = self._context.session
        tensors = describe(list(zip(self._names, parameters, strict=True)), groups)
        compressors = (self.compressor, self.pull_compressor)
        chosen = choose(
            tensors, *compressors, min_nbytes=compress_min_nbytes, exclude=compress_exclude
        )
        self._make_table(parameters, chosen)
        self._overlap = Overlap(overlap, self._names)
        self._watch(parameters)
        self._buffers = Buffers(model, buffers, self.session)
        self._upload()
        self._context.at_close(self.close)

    def _make_table(
        self, parameters: list[torch.nn.Parameter], tensors: Sequence[TensorSpec]
    ) -> None:
        """Declares the parameters at the shards, and lays them out here."""
        layout = make_layout(tensors, len(self.session.links))
        num_groups = len(self.param_groups)
        self.exchange = Exchange(
            self.session,
            self._context.table_name(TABLE),
            layout,
            self.rule,
            self.compressor,
            self.plugin,
            num_groups,
            pull_compressor=self.pull_compressor,
            share=True,
        )
        self.missed = self.exchange.missed  # Steps of this worker that did not count whole.
        self.bucket = Bucket(parameters, layout, self.exchange.grads)
        weights, rank = self.bucket.weights, self.session.rank
        self.replica = Replica(layout, self.rule, self.plugin, num_groups, weights, rank)
        self.replica.timeline = self.session.timeline

    def _watch(self, parameters: list[torch.nn.Parameter]) -> None:
        """Has autograd say when a gradient is made, and knows which slices it completes."""
        slices = self.bucket.layout.slices
        self._index = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._missing = [0] * len(slices)  # Gradients of each slice still to come.
        self._slices_of: list[list[int]] = [[] for _ in parameters]
        for spec in slices:
            for segment in spec.segments:
                self._slices_of[segment.tensor].append(spec.index)
        self._reset_missing()
        self._is_closed = False
        self._frozen = [
            parameter
            for group in self.param_groups
            for parameter in group["params"]
            if id(parameter) not in self._index
        ]
        self._lost: PacelineError | None = None  # The shards go on without this worker.
        self._gathered: set[int] = set()
        self._pushed: set[int] = set()
        hook = self._hook
        self._handles = [
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            for parameter in parameters
        ]

    # ----- the training loop

    @property
    def samples(self) -> float:
        """Weight of this worker's gradient in the mean."""
        return self._samples

    @samples.setter
    def samples(self, samples: float) -> None:
        if samples != self._samples:
            self._overlap.changed(f"samples ({self._samples:g}, now {samples:g})")
            self._samples = samples

    @property
    def clock(self) -> int:
        """Steps that are behind this worker, counted as the shards do.

        A worker that joins a running job begins where the others are: in a mode by step at the
        job's next step, else where the slowest worker is. In a mode with rounds these are counted.
        """
        return self.replica.next_push

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Ends one step: sends what has not left yet, and brings in the weights for the next.

        Raises:
            GradientError: A gradient holds NaN or Inf, or was changed after it had left.
            ConfigError: A parameter has moved, or was frozen when the wrapper was made; or
                training has ended.
            PacelineError: A shard refused something, or nobody answers.
        """
        if self._is_closed:
            raise ConfigError("training has ended: step() after close() or psworker.shutdown()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        timeline = self.session.timeline
        begin_ns = 0 if timeline is None else timeline.now_ns()
        before = self.replica.parts[0].hyper
        self._set_hyper()
        if not np.array_equal(before, self.replica.parts[0].hyper):
            self._overlap.changed("a learning rate or other hyper-parameter")
        self._overlap.finish(self.bucket.parameters)
        self.bucket.check_weights()
        self.bucket.warn_of_changes()
        refuse_thawed(self._frozen)
        number = self.replica.step
        try:
            if self._lost is not None:
                raise self._lost
            self._finish_step()
        except (ReplacedError, UnknownJobError) as problem:
            self._come_back(problem, number)
        self.missed.end_step()
        self._gathered.clear()
        self._pushed.clear()
        self._reset_missing()
        if timeline is not None:
            timeline.span("optimizer.step", begin_ns, step=number)
        return loss

    def _finish_step(self) -> None:
        """Sends what has not left, and brings in the weights for the next step."""
        plan = self.replica.plan()
        if plan.push is Role.GRADIENT:
            self._push_rest()
        if plan.inner:
            timed_step(self._inner, self.session.timeline, self.replica.step)
            self.bucket.gather_weights()
        if plan.push is Role.DELTA:
            self.exchange.flush()  # The moves are written where the former ones were.
        self.exchange.run(self.replica.finish(self._grads(), self.exchange, self.samples))
        self.show_weights()
        self._buffers.post(self.samples)
        for index in self.bucket.lent.end_step():
            self._await_room(index)  # From here on the script may write to `.grad`.

    def _come_back(self, problem: PacelineError, number: int) -> None:
        """Joins anew after having been declared lost; of step `number` counts what has arrived."""
        self.exchange.give_up_step(self.clock, problem)
        self._lost = None
        self.session.rejoin()
        self.exchange.restart()
        self._buffers.restart()
        self.replica.restart()
        self.replica.rank = self.session.rank
        self.exchange.run(self.replica.begin(self.exchange))
        self.show_weights()
        self.replica.step = number + 1

    @contextlib.contextmanager
    def global_weights(self) -> Iterator[None]:
        """Brings the global weights into the model for evaluation or a checkpoint.

        Inside, the model holds the shards' weights: in the synchronous and delayed modes those
        after this worker's last step, else the newest. It also holds the shared buffers.
        Afterwards training goes on from where it was, to the bit. After `close` the model holds
        the global weights anyway, and its own buffers.
        """
        if self._is_closed:
            yield
            return
        self.bucket.warn_of_changes()
        self.exchange.flush()
        kept = None
        differs = self.replica.drifts or self.exchange.compresses_pulls
        if differs or not self.rule.by_step:
            kept = self.bucket.weights.clone()
            self.exchange.run(self.replica.peek(self.bucket.weights, self.exchange))
            self.bucket.scatter_weights()
        with self._buffers.shared():
            try:
                yield
            finally:
                if kept is not None:
                    self.bucket.weights.copy_(kept)
                    self.bucket.scatter_weights()
                    self.bucket.note_weights()

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
        if self._is_closed or self._pushed:
            raise ConfigError("set_mode() is called after step(), and before training has ended")
        change_mode(self, parse_mode(mode), self._grads())

    def close(self) -> None:
        """Ends training: the model keeps the global weights.

        Others wait for this worker's gradients until it leaves the job: `psworker.shutdown`, which
        calls this, or the end of the script.
        """
        if not self._is_closed:
            self._is_closed = True
            for handle in self._handles:
                handle.remove()
            self.exchange.flush()
            self.replica.end_round(self._grads(), self.exchange)
            self.exchange.run(self.replica.fetch(None, self.exchange))
            self.bucket.scatter_weights()

    # ----- state

    def state_dict(self) -> dict[str, Any]:
        """Returns the shards' optimizer state in torch's format, and this worker's own.

        What `torch.optim` would hold is under the usual keys, so that a plain optimizer can load
        it; `paceline` holds the step, the mode and what error feedback owes.
        """
        return torch_state(self)

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

    def _hook(self, parameter: torch.Tensor) -> None:
        """Is called by autograd when the gradient of `parameter` is complete."""
        if self.replica.plan().push is not Role.GRADIENT:
            return
        index = self._index[id(parameter)]
        if not self._overlap.has_begun:
            self._set_hyper()
        self._overlap.made(index, self.bucket.parameters[index])
        if not self._overlap.is_early or self._lost is not None:
            return
        try:
            self._leave_early(index)
        except (ReplacedError, UnknownJobError) as problem:
            self._lost = problem  # `step` comes back; backward goes on undisturbed.

    def _leave_early(self, index: int) -> None:
        """Gathers one gradient during backward, and pushes the slices that it completes."""
        self._gather([index])
        if self.bucket.lent.takes(index) and self._lends(index):
            self.bucket.lent.lend(index)
        self._overlap.moved(index, self.bucket.parameters[index])
        for part in self._slices_of[index]:
            self._missing[part] -= 1
            if self._missing[part] == 0 and self.exchange.has_landed(part):
                self._push(part, in_backward=True)  # Else `step` does, which may wait.

    def _await_room(self, index: int) -> None:
        """Waits until the former gradient of a parameter has left the flat vector."""
        for part in self._slices_of[index]:
            self.exchange.acknowledged(part)

    def _push_rest(self) -> None:
        """Sends the gradients that have not left during backward.

        Where some have, or may, one slice is on its way while the next is looked at; else all are
        looked at first, so that the step can be left out.
        """
        if not self._pushed and not self._overlap.is_wanted:
            self._gather(range(len(self.bucket.parameters)))
        for index in self.replica.front_first():
            if index not in self._pushed:
                self._gather([part.tensor for part in self.bucket.layout.slices[index].segments])
                self._push(index)

    def _grads(self) -> list[torch.Tensor]:
        return [self.bucket.grads_of(index) for index in range(len(self.replica.parts))]

    def _gather(self, indices: Sequence[int]) -> None:
        """Brings gradients into the flat vector, once, after the former ones have left it."""
        lent, made = self.bucket.lent, []
        indices = [index for index in indices if index not in self._gathered]
        for index in indices:
            self._await_room(index)
            if self.bucket.parameters[index].grad is None:
                self.bucket.clear_grad(index)
                continue
            made.append(index)
            if lent.has(index) and not self._lends(index):
                lent.part(index)
        try:
            self.bucket.gather_grads(made, self.replica.step)
        except GradientError:
            if not self._pushed:  # So the step can be left out.
                self._gathered.clear()
                self._reset_missing()
                self._overlap.forget()
            raise
        self._gathered.update(indices)

    def _lends(self, index: int) -> bool:
        """Whether a gradient is acknowledged by the end of the step, or soon after it has left."""
        plan = self.replica.plan()
        waits = plan.block and plan.pull
        return waits or self.exchange.maps_grads(self._slices_of[index])

    def _push(self, index: int, *, in_backward: bool = False) -> None:
        """Sends one slice, after a pull of it that is still under way."""
        self.exchange.run(self.replica.land(index))
        part = self.replica.parts[index]
        present = 0
        for position, segment in enumerate(self.bucket.layout.slices[index].segments):
            has_grad = self.bucket.parameters[segment.tensor].grad is not None
            part.active[position] = has_grad
            present |= has_grad << position
        grad, samples = self.bucket.grads_of(index), self.samples
        self.replica.push(index, grad, present, samples, self.exchange, in_backward=in_backward)
        self._pushed.add(index)

    def _set_hyper(self) -> None:
        step = self.replica.step
        groups = [self.rule.outer_group(step, group) for group in self.param_groups]
        rows = hyper_rows(self.plugin, groups)
        for part in self.replica.parts:
            part.hyper = rows

    def _reset_missing(self) -> None:
        for spec in self.bucket.layout.slices:
            self._missing[spec.index] = len(spec.segments)

    def _upload(self) -> None:
        """Rank 0 uploads its weights; everybody takes them."""
        if self.session.rank == 0:
            self.load(Role.WEIGHTS, [])
        self._set_hyper()
        self.exchange.run(self.replica.begin(self.exchange))
        self.show_weights()
        if not self.rule.by_step:  # Nobody may end before all have come: the job would be over.
            self.session.barrier("begin")

    def show_weights(self) -> None:
        """Brings the flat weights into the model; a round begins from what the model holds."""
        self.bucket.scatter_weights()
        if self.rule.outer_optimizer and self.bucket.has_casts and self.replica.num_inner == 0:
            self.bucket.gather_weights()
            self.replica.take_reference()
        self.bucket.note_weights()

    def load(self, role: Role, state: list[np.ndarray], counts: Sequence[int] = ()) -> None:
        """Uploads the model's weights, with flat state arrays `(numel,)` for `Role.STATE`."""
        self.bucket.gather_weights()
        weights = self.bucket.weights.cpu().numpy()
        for spec in self.bucket.layout.slices:
            arrays = [array[spec.start : spec.stop] for array in (weights, *state)]
            steps = [counts[segment.tensor] for segment in spec.segments] if counts else []
            self.exchange.load(spec.index, role, arrays, steps)
        self.exchange.flush()
