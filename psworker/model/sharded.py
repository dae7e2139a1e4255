"""A model of which each process of a group holds a part, as flat memory.

The flat vectors hold the slices that this process pushes and pulls, and nothing else, so that the
memory of a process is its share of the model. `gather_weights`, `gather_sharded` and
`scatter_weights` move the parts between the processes (psworker/group/routes.py); all of them call
these. FSDP2 may keep a copy of whole weights after a forward pass, which is freed when they change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from pscore.errors import ConfigError
from pscore.partition import Layout
from pscore.types import FloatArray
from psworker.group.local_group import LocalGroup
from psworker.group.routes import Routes
from psworker.group.worker_group import WorkerGroup
from psworker.model import dtensors
from psworker.model.device import is_on_device
from psworker.model.finite import is_finite, not_finite
from psworker.model.flat import FlatModel
from psworker.model.grad_views import dense


class ShardedModel(FlatModel):
    """The part of a sharded model's flat gradients and weights that this process pushes.

    `grads` and `weights` are `(routes.memory.numel,) float32`, and `layout` is `routes.memory`.
    """

    is_sharded = True

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], routes: Routes, module: torch.nn.Module
    ) -> None:
        """Copies the weights; all processes of the group call it.

        Args:
            parameters: The parameters, in the order of the layout's tensors.
        """
        from torch.distributed.fsdp import FSDPModule

        self.routes = routes
        self._fsdp = [one for one in module.modules() if isinstance(one, FSDPModule)]
        super().__init__(parameters, routes.memory)

    def _adopt_weights(self) -> None:
        """Leaves the parameters in the memory that FSDP2 has given them."""

    @property
    def has_casts(self) -> bool:
        """Whether a parameter's numbers differ from the shards' float32."""
        return any(parameter.dtype != torch.float32 for parameter in self.parameters)

    @property
    def here(self) -> Sequence[int]:
        """The slices of which this process holds a part."""
        return self.routes.here

    def plain(self) -> list[int]:
        """Returns the parameters that every process holds whole, each with its own gradient."""
        return [i for i, one in enumerate(self.parameters) if not dtensors.is_dtensor(one)]

    def gather_weights(self) -> None:
        """Copies the processes' parts of the parameters into the flat weights."""
        with torch.no_grad():
            self.routes.collect([dtensors.rows(one) for one in self.parameters], self.weights)

    def gather_sharded(self) -> None:
        """Copies the processes' parts of the gradients into the flat ones; zeros where none is."""
        parts = []
        with torch.no_grad():
            for parameter, (start, stop) in zip(self.parameters, self.routes.spans, strict=True):
                grad = parameter.grad
                parts.append(
                    torch.zeros(stop - start, device=self.device, dtype=torch.float32)
                    if grad is None
                    else dtensors.rows(dense(grad))
                )
            self.routes.collect(parts, self.grads)

    def scatter_weights(self) -> None:
        """Copies the flat weights into the processes' parts of the parameters."""
        with torch.no_grad():
            parts = [
                torch.empty(stop - start, device=self.device, dtype=torch.float32)
                for start, stop in self.routes.spans
            ]
            self.routes.spread(self.weights, parts)
            self._put(parts)

    def placed(self, weights: torch.Tensor) -> torch.Tensor:
        """Returns this process's parts of whole weights, one after the other, on its device.

        Args:
            weights: `(numel,) float32` of the table's layout, on the host.
        """
        offsets = self.layout.offsets
        parts = [
            weights[offset + start : offset + stop]
            for offset, (start, stop) in zip(offsets, self.routes.spans, strict=True)
        ]
        return torch.cat(parts).to(self.device)

    def swap_weights(self, other: torch.Tensor) -> None:
        """Swaps this process's parts of the weights with `other`, of `placed`."""
        with torch.no_grad():
            sizes = [stop - start for start, stop in self.routes.spans]
            kept = torch.cat([dtensors.rows(one) for one in self.parameters])
            self._put(torch.split_with_sizes(other, sizes))
            other.copy_(kept)

    def check_grads(self, step: int) -> None:
        """Raises GradientError for NaN or Inf in this process's gradients, if not on a GPU."""
        if is_on_device(self.grads):
            return
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                grad = dtensors.local(dense(parameter.grad))
                if not is_finite(grad):
                    raise not_finite(self.layout.tensors[index].name, grad, step)

    def check_weights(self) -> None:
        """Checks nothing: the parameters are not views of the flat weights."""

    def _put(self, parts: Iterable[torch.Tensor]) -> None:
        """Writes this process's parts of the weights, and frees the whole weights of FSDP2."""
        for parameter, values in zip(self.parameters, parts, strict=True):
            dtensors.put_rows(parameter, values)
        for module in self._fsdp:
            module.reshard()


def find_routes(
    parameters: Sequence[torch.nn.Parameter],
    layout: Layout,
    group: WorkerGroup,
    module: torch.nn.Module | None,
) -> Routes | None:
    """Returns the parts of a sharded model, or None: no parameter is a DTensor.

    Raises:
        ConfigError: The parameters are not sharded over the processes of this worker.
    """
    if dtensors.first_dtensor(parameters) is None:
        return None
    names = [spec.name for spec in layout.tensors]
    for name, parameter in zip(names, parameters, strict=True):
        dtensors.require_mesh(name, parameter, group)
    assert isinstance(group, LocalGroup)
    assert module is not None
    numbers = [float(number) for one in parameters for number in dtensors.span(one)]
    spans = [
        [(int(first), int(last)) for first, last in zip(row[::2], row[1::2], strict=True)]
        for row in group.gather(numbers)
    ]
    for index, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
        held = sorted({row[index] for row in spans if row[index][0] < row[index][1]})
        ends = [0, *(last for _, last in held)]
        if [first for first, _ in held] != ends[:-1] or ends[-1] != parameter.numel():
            shares = getattr(parameter, "placements", ())
            raise ConfigError(
                f"parameter {name!r} is sharded as {shares}, whose parts are not rows of it, one "
                "after the other"
            )
    return Routes(layout, spans, group)


def make_flat(
    parameters: Sequence[torch.nn.Parameter],
    memory: Layout,
    grads: FloatArray | None,
    routes: Routes | None,
    module: torch.nn.Module | None,
    *,
    has_views: bool,
) -> FlatModel:
    """Returns the model as flat memory, with its weights.

    Args:
        parameters: The parameters, in the order of the layout's tensors.
        routes: The parts of a sharded model; None: this process has the whole model.
        module: The model, if it is sharded.
    """
    if routes is None:
        return FlatModel(parameters, memory, grads, has_views=has_views)
    assert module is not None
    return ShardedModel(parameters, routes, module)


def refuse_sharded(flat: FlatModel, what: str, instead: str) -> None:
    """Raises ConfigError for an operation on whole tensors where the model is sharded."""
    if flat.is_sharded:
        raise ConfigError(f"{what} is not possible where processes hold parts: {instead}")


def require_possible(
    names: Sequence[str],
    parameters: Sequence[torch.nn.Parameter],
    module: torch.nn.Module | None,
    *,
    overlap: bool,
) -> None:
    """Refuses arguments that do not fit a sharded model.

    Raises:
        ConfigError: `module` is missing, or `overlap` is wanted.
    """
    index = dtensors.first_dtensor(parameters)
    if index is None:
        return
    if module is None:
        raise ConfigError(
            f"parameter {names[index]!r} is a DTensor, and whole weights that FSDP2 keeps have to "
            "be freed when they change: pass model=model to DistributedOptimizer"
        )
    if overlap:
        raise ConfigError(
            f"parameter {names[index]!r} is a DTensor, whose gradient is pushed at step(), after "
            "the processes of its mesh have averaged it: pass overlap=False to "
            "DistributedOptimizer"
        )
