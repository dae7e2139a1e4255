"""The measured profile of a model: seconds of forward and backward, and bytes, of each block."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from pscore.net.wire import FLOAT_NBYTES
from psworker.pipeline.plan.profile import Layer, Profile
from psworker.pipeline.run.chain import Block
from psworker.pipeline.run.entry import require_tensor
from psworker.pipeline.run.kept import KeptTensors

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
RUNS_MIN, RUNS_MAX = 3, 30
BUDGET_S = 10.0  # After it a last run ends.


def with_momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.0, momentum=0.9)


def measure(
    model: str,
    blocks: Sequence[Block],
    example: torch.Tensor,
    budget_s: float = BUDGET_S,
    optimizer: MakeOptimizer = with_momentum,
) -> Profile:
    """Returns the medians over some runs, on the device of the example.

    Args:
        model: Its name in the profile.
        blocks: Its blocks, in order, with parameters on that device.
        budget_s: Seconds after which no further run begins, but for three.
        optimizer: Makes the optimizer of some parameters, whose step is measured too.
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
            update_s=update_s(_trained(block.module), optimizer),
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
    outputs, held, flowing = [], [], example
    with KeptTensors(p for block in blocks for p in block.module.parameters()) as kept:
        for block in blocks:
            before = kept.nbytes
            flowing = block.module(flowing)
            require_tensor(flowing, f"block {block.name!r}")
            outputs.append(flowing.numel() * flowing.element_size())
            held.append(kept.nbytes - before)
    return outputs, held


def update_s(parameters: Sequence[nn.Parameter], make: MakeOptimizer) -> float:
    """Returns the seconds of an optimizer's step, the median of some, on copies of parameters."""
    if not parameters:
        return 0.0
    copies = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    for copied in copies:
        copied.grad = torch.zeros_like(copied)
    optimizer, device = make(copies), copies[0].device
    optimizer.step()  # The first one makes the state.
    return statistics.median(_timed(device, optimizer.step)[0] for _ in range(RUNS_MIN))


def _run(blocks: Sequence[Block], example: torch.Tensor) -> list[tuple[float, float]]:
    """Returns the seconds of forward and backward of each block, in one run."""
    outputs = []
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
        outputs.append((forward_s, backward_s))
    return outputs


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
