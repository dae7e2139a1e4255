"""Parameters of which each process holds a part: DTensors of FSDP2 and of tensor parallel plans.

A process's part is taken as rows: a range of the flattened tensor. A tensor that is sharded in
another dimension is redistributed in its mesh, in each direction.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from pscore.errors import ConfigError
from psworker.group.local_group import LocalGroup
from psworker.group.worker_group import WorkerGroup

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is a DTensor, also before its module is imported."""
    return hasattr(tensor, "placements")


def first_dtensor(parameters: Iterable[torch.Tensor]) -> int | None:
    """Returns the place of the first DTensor, or None."""
    return next((index for index, one in enumerate(parameters) if is_dtensor(one)), None)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this process's part of a tensor, without its graph; of a plain one all of it."""
    found: Any = tensor.detach()
    if is_dtensor(tensor):
        found = found.to_local()
    assert isinstance(found, torch.Tensor)
    return found


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this process's rows of a tensor, flat, float32; a view where that is possible.

    All processes of its mesh call it where it is sharded in another dimension than the first.
    """
    found: Any = tensor.detach()
    if is_dtensor(tensor):
        found = found.redistribute(placements=_by_rows(found)).to_local()
    flat: torch.Tensor = found.reshape(-1)
    return flat.float()


def put_rows(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Writes this process's rows into its part of a tensor; called as `rows` is.

    Args:
        values: The rows, flat, float32.
    """
    there = local(tensor)
    if is_dtensor(tensor):
        dtensor: Any = tensor
        placements = _by_rows(dtensor)
        if placements != list(dtensor.placements):
            from torch.distributed.tensor import DTensor

            row = tensor[:1].numel()
            part = values.view(values.numel() // row, *tensor.shape[1:])
            stride = torch.empty(tensor.shape, device="meta").stride()
            mesh = dtensor.device_mesh
            whole = DTensor.from_local(part, mesh, placements, shape=tensor.shape, stride=stride)
            values = local(whole.redistribute(placements=dtensor.placements))
    there.copy_(values.reshape(there.shape))


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the range of the flattened tensor that this process's rows are."""
    if not is_dtensor(tensor):
        return 0, tensor.numel()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    dtensor: Any = tensor
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, dtensor.device_mesh, _by_rows(dtensor)
    )
    row = tensor[:1].numel() if tensor.dim() else 1
    num_rows = shape[0] if shape else 1
    first = int(offset[0]) * row if offset else 0
    return (first, first + int(num_rows) * row) if num_rows else (0, 0)


def require_mesh(name: str, parameter: torch.Tensor, group: WorkerGroup) -> None:
    """Refuses a DTensor whose mesh has other processes than this worker.

    Raises:
        ConfigError: This process is a worker by itself, or the mesh has other processes than the
            group.
    """
    if not is_dtensor(parameter):
        return
    dtensor: Any = parameter
    if not isinstance(group, LocalGroup):
        raise ConfigError(
            f"parameter {name!r} is a DTensor, and its processes must be one worker: pass "
            "local_group=mesh.get_group() to DistributedOptimizer, or start the script with "
            "torchrun and call torch.distributed.init_process_group() (docs/hosts.md)"
        )
    ranks = sorted(dtensor.device_mesh.mesh.flatten().tolist())
    if ranks != sorted(group.ranks):
        raise ConfigError(
            f"parameter {name!r} is sharded over the ranks {ranks}, but this worker's group has "
            f"the ranks {sorted(group.ranks)}, and they must be the same: shard it over this "
            'group alone, without a dimension of replicas, as in fully_shard(model, mesh=mesh["'
            'shard"]), and average between the groups with Paceline'
        )
    if any(placement.is_partial() for placement in dtensor.placements):
        raise ConfigError(f"parameter {name!r} is a sum that its processes have not added up")


def _by_rows(tensor: DTensor) -> list[Placement]:
    """Returns placements with every sharded dimension replaced by the first, unless all are."""
    from torch.distributed.tensor import Shard

    dims = [getattr(placement, "dim", None) for placement in tensor.placements]
    if all(dim in (None, 0) for dim in dims) and not any(
        placement.is_partial() for placement in tensor.placements
    ):
        return list(tensor.placements)
    return [placement if placement.is_replicate() else Shard(0) for placement in tensor.placements]
