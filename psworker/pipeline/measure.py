"""The measured profile of a model: seconds of forward and backward, and bytes, of each block."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from pscore.net.wire import FLOAT_NBYTES
from psworker.pipeline.chain import Block
from psworker.pipeline.profile import Layer, Profile

RUNS_MIN, RUNS_MAX = 3, 30
BUDGET_S = 10.0  # After it a last run ends.


def measure(
    model: str, blocks: Sequence[Block], example: torch.Tensor, budget_s: float = BUDGET_S
) -> Profile:
    """Returns the medians over some runs, on the device of the example.

    Args:
        model: Its name in the profile.
        blocks: Its blocks, in order, with parameters on that device.
        example: One minibatch.
        budget_s: Seconds after which no further run begins, but for three.
    """
    outputs, held = _bytes(blocks, example)
    _run(blocks, example)  # The first one allocates, and chooses algorithms.
    runs: list[list[tuple[float, float]]] = []
    start_s = time.perf_counter()
    while len(runs) < RUNS_MIN or (
        len(runs) < RUNS_MAX and time.perf_counter() - start_s < budget_s
    ):
        runs.append(_run(blocks, example))
    layers = [
        Layer(
            name=block.name,
            forward_s=statistics.median(run[number][0] for run in runs),
            backward_s=statistics.median(run[number][1] for run in runs),
            output_nbytes=outputs[number],
            held_nbytes=held[number],
            parameter_nbytes=FLOAT_NBYTES * sum(p.numel() for p in _trained(block.module)),
        )
        for number, block in enumerate(blocks)
    ]
    return Profile(
        model=model, layers=tuple(layers), samples=len(example), device=example.device.type
    )


def _bytes(blocks: Sequence[Block], example: torch.Tensor) -> tuple[list[int], list[int]]:
    """Returns the bytes of each block's output, and those that it keeps for backward.

    A tensor that several blocks keep counts at the first of them.
    """
    parameters = {p.untyped_storage().data_ptr() for b in blocks for p in b.module.parameters()}
    seen: dict[int, torch.Tensor] = {}
    kept = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters and storage.data_ptr() not in seen:
            seen[storage.data_ptr()] = tensor.detach()  # Alive, so that no other takes its place.
            kept += storage.nbytes()
        return tensor

    outputs, held, flowing = [], [], example
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for block in blocks:
            kept = 0
            flowing = block.module(flowing)
            outputs.append(flowing.numel() * flowing.element_size())
            held.append(kept)
    return outputs, held


def _run(blocks: Sequence[Block], example: torch.Tensor) -> list[tuple[float, float]]:
    """Returns the seconds of forward and backward of each block, in one run."""
    found = []
    flowing = example
    for number, block in enumerate(blocks):
        leaf = flowing.detach()
        if number and leaf.is_floating_point():
            leaf.requires_grad_()
        # Not the leaf itself: a block may change its input in place.
        entry = leaf.clone()
        forward_s, flowing = _timed(example.device, block.module, entry)
        wanted = [item for item in (leaf, *_trained(block.module)) if item.requires_grad]
        backward_s = 0.0
        if wanted and flowing.requires_grad:
            grad = torch.ones_like(flowing)
            backward_s, _ = _timed(
                example.device, torch.autograd.grad, flowing, wanted, grad, allow_unused=True
            )
        found.append((forward_s, backward_s))
    return found


def _timed(
    device: torch.device, work: Callable[..., Any], *args: Any, **options: Any
) -> tuple[float, Any]:
    """Returns the seconds of a call, until the device has done it, and its result."""
    _wait(device)
    start_s = time.perf_counter()
    result = work(*args, **options)
    _wait(device)
    return time.perf_counter() - start_s, result


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
