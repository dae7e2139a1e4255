"""`state_dict` and `load_state_dict` of the wrapper: torch's format, with the shards' state in it.

What `torch.optim` would hold stands under the usual keys, so that a plain torch optimizer can load
it and a plain torch optimizer's can be loaded here. Under `paceline` stand the step, the mode and
what error feedback owes, as one flat vector in the model's own order, which is the same for any
number of shards. In a mode whose workers run the wrapped optimizer themselves its state is the
worker's own, and the shards' is under `paceline` too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pscore.errors import ConfigError
from pscore.types import FloatArray, Role
from psworker.training.look import look

if TYPE_CHECKING:
    from psworker.training.optimizer import DistributedOptimizer


def torch_state(wrapper: DistributedOptimizer) -> dict[str, Any]:
    """Returns the state of the wrapper and of the shards' optimizer."""
    flat, counts = _pull_state(wrapper)
    plugin, bucket = wrapper.plugin, wrapper.bucket
    order = _torch_order(wrapper)
    state: dict[int, dict[str, torch.Tensor]] = {}
    for index, steps in enumerate(counts):
        if steps == 0:
            continue
        entry = {name: bucket.state_view(flat[name], index).clone() for name in plugin.state_names}
        if plugin.torch_has_step:
            entry["step"] = torch.tensor(float(steps))
        if entry:
            state[order[index]] = entry
    wrapper.exchange.flush()
    inner = wrapper.inner_state()
    return {
        "state": state if inner is None else inner,
        "param_groups": wrapper.plain_state_dict()["param_groups"],
        "paceline": {
            "step": wrapper.steps,
            "samples_seen": wrapper.samples_seen,
            "mode": str(wrapper.rule),
            "compression": str(wrapper.compressor),
            "counts": torch.tensor(counts),
            "outer": {} if inner is None else state,
            "compressor_state": {
                name: torch.from_numpy(flat)
                for name, flat in wrapper.exchange.compressor_state().items()
            },
        },
    }


def load_torch_state(wrapper: DistributedOptimizer, state_dict: dict[str, Any]) -> None:
    """Restores what `torch_state` returned; all workers call it, rank 0's goes to the shards.

    Raises:
        ConfigError: The state is of another model or optimizer.
    """
    plugin, bucket = wrapper.plugin, wrapper.bucket
    order = _torch_order(wrapper)
    own = state_dict.get("paceline", {})
    step = int(own.get("step", wrapper.steps))
    flat = {name: np.zeros(bucket.layout.numel, dtype=np.float32) for name in plugin.state_names}
    counts = [0] * len(order)
    held = own.get("outer", {}) if wrapper.rule.outer_optimizer else state_dict["state"]
    for index, position in order.items():
        entry = held.get(position)
        if entry is None:
            continue
        counts[index] = int(own["counts"][index]) if "counts" in own else int(entry.get("step", 1))
        for name in plugin.state_names:
            _fill(bucket.state_view(flat[name], index), entry.get(name), wrapper, index, name)
    wrapper.plain_load_state_dict(state_dict)
    wrapper.exchange.flush()
    wrapper.exchange.run(wrapper.replica.settle())
    wrapper.session.barrier("load_state_dict")
    if wrapper.session.rank == 0:
        upload(wrapper, Role.STATE, [flat[name] for name in plugin.state_names], counts, step)
    wrapper.session.barrier("load_state_dict")
    wrapper.exchange.ask_origin()
    wrapper.exchange.run(wrapper.replica.fetch(0, wrapper.exchange))
    wrapper.progress.locate(step, float(own.get("samples_seen", step * wrapper.samples)))
    wrapper.show_weights()
    _load_compressor_state(wrapper, own.get("compressor_state", {}))


def upload(
    wrapper: DistributedOptimizer,
    role: Role,
    state: Sequence[FloatArray] = (),
    counts: Sequence[int] = (),
    step: int = 0,
) -> None:
    """Uploads the weights of the model; with `Role.STATE` the optimizer's state too.

    Args:
        wrapper: Of this worker.
        role: `WEIGHTS` or `STATE`.
        state: Its arrays, flat, `(layout.numel,)` each.
        counts: Optimizer steps of each parameter.
        step: Steps of training that are behind them.
    """
    bucket, exchange = wrapper.bucket, wrapper.exchange
    bucket.gather_weights()
    weights = bucket.weights.cpu().numpy()
    for spec in bucket.layout.slices:
        arrays = [array[spec.start : spec.stop] for array in (weights, *state)]
        steps = [counts[segment.tensor] for segment in spec.segments] if counts else []
        exchange.load(spec.index, role, arrays, steps, step)
    exchange.flush()


def _load_compressor_state(wrapper: DistributedOptimizer, state: dict[str, torch.Tensor]) -> None:
    """Restores what error feedback owes; with other tensors compressed it lies elsewhere."""
    for name, flat in state.items():
        if flat.shape != (wrapper.bucket.layout.numel,):
            raise ConfigError(
                f"{name} of the compressor has shape {list(flat.shape)} in the state, "
                f"{[wrapper.bucket.layout.numel]} here"
            )
    wrapper.exchange.load_compressor_state({name: flat.numpy() for name, flat in state.items()})


def _fill(
    target: torch.Tensor, value: Any, wrapper: DistributedOptimizer, index: int, name: str
) -> None:
    """Copies one state tensor; an absent momentum is zero."""
    if value is None:
        return
    tensor = torch.as_tensor(value)
    if tensor.shape != target.shape:
        raise ConfigError(
            f"{name} of {wrapper.bucket.layout.tensors[index].name!r} has shape "
            f"{list(tensor.shape)} in the state, {list(target.shape)} in the model"
        )
    target.copy_(tensor)


def _torch_order(wrapper: DistributedOptimizer) -> dict[int, int]:
    """Returns, for each parameter of the layout, its number in torch's state dict."""
    number, numbers = 0, {}
    for group in wrapper.param_groups:
        for parameter in group["params"]:
            numbers[id(parameter)] = number
            number += 1
    return {i: numbers[id(parameter)] for i, parameter in enumerate(wrapper.bucket.parameters)}


def _pull_state(wrapper: DistributedOptimizer) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Pulls the optimizer's state; returns flat `(numel,)` tensors, and steps per parameter."""
    layout, names = wrapper.bucket.layout, wrapper.plugin.state_names
    seen = look(wrapper, len(names))
    counts = [0] * len(layout.tensors)
    for spec, steps in zip(layout.slices, seen.counts, strict=True):
        for segment, count in zip(spec.segments, steps, strict=True):
            counts[segment.tensor] = int(count)
    return dict(zip(names, seen.state, strict=True)), counts
