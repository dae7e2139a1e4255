"""Arguments of `DistributedOptimizer` that are mistaken for others: one clear sentence each."""

from collections.abc import Callable

import pytest
import torch

import psworker

FORM = r"DistributedOptimizer\(optimizer, model\.named_parameters\(\)\)"
wrap: Callable[..., object] = psworker.DistributedOptimizer  # It takes wrong types here.
MODEL = torch.nn.Linear(2, 1)


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD(MODEL.parameters(), lr=0.1)


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "mode": (
        lambda: wrap(sgd(), MODEL.named_parameters(), mode=5),
        "mode is 5, must be text such as name or",
    ),
    "class": (
        lambda: wrap(
            sgd(),
            MODEL.named_parameters(),
            compression=psworker.TopK,
        ),
        "compression is <class .*, must be text such as name or",
    ),
    "parameters": (
        lambda: wrap(sgd(), MODEL.parameters()),
        rf"parameters without names; .* not model\.parameters\(\): {FORM}",
    ),
    "model": (
        lambda: wrap(sgd(), MODEL),
        f"second argument is a model; pass its named parameters: {FORM}",
    ),
    "names": (
        lambda: wrap(sgd(), dict(MODEL.named_parameters())),
        "the second argument has a str in it, must be pairs of name and parameter",
    ),
    "swapped": (
        lambda: wrap(MODEL.named_parameters(), sgd()),
        f"the arguments are swapped: the optimizer comes first, {FORM}",
    ),
    "first": (
        lambda: wrap(MODEL, MODEL.named_parameters()),
        f"the first argument is a Linear, must be an optimizer of torch.optim: {FORM}",
    ),
}


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_mistaken_argument_is_one_sentence(call: Callable[[], object], message: str) -> None:
    with pytest.raises(psworker.ConfigError, match=message):
        call()
