"""The mean gradient of all workers, in the place of each parameter's own."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from pscore.partition import make_layout
from psworker.model.flat import FlatModel, describe
from psworker.training.local_steps.peer_step import PeerStep


def test_the_mean_is_written_into_gradients_of_any_layout_and_type() -> None:
    parameters = {
        "matrix": torch.nn.Parameter(torch.zeros(2, 3)),
        "scalar": torch.nn.Parameter(torch.tensor(0.0)),
        "transposed": torch.nn.Parameter(torch.zeros(4, 2).t()),
        "half": torch.nn.Parameter(torch.zeros(2).bfloat16()),
        "half scalar": torch.nn.Parameter(torch.tensor(0.0).bfloat16()),
        "without": torch.nn.Parameter(torch.zeros(3)),
        "of others": torch.nn.Parameter(torch.zeros(3)),
    }
    count = len(parameters)
    layout = make_layout(describe(list(parameters.items()), [0] * count), 1)
    flat = FlatModel(list(parameters.values()), layout)
    for name, parameter in parameters.items():
        parameter.grad = None if name == "of others" else torch.full_like(parameter, 9.0)
    weight, has = 4.0, [float(name != "without") for name in parameters]
    total = np.arange(layout.numel + 1 + count, dtype=np.float32)
    total[layout.numel], total[layout.numel + 1 :] = weight, has
    before, kept = total.copy(), parameters["matrix"].grad
    worker = SimpleNamespace(_table=SimpleNamespace(flat=flat, layout=layout), _skips=True)
    PeerStep._scatter(cast(Any, worker), total)
    assert (total == before).all()
    assert not worker._skips
    assert parameters["matrix"].grad is kept
    for index, (name, parameter) in enumerate(parameters.items()):
        if name == "without":
            assert parameter.grad is None
            continue
        start = layout.offsets[index]
        wanted = torch.from_numpy(total[start : start + parameter.numel()] / np.float32(weight))
        assert parameter.grad is not None
        assert torch.equal(parameter.grad.reshape(-1), wanted.to(parameter.dtype))
