"""Arguments of `DistributedOptimizer` that are mistaken for others: one clear sentence each."""

from collections.abc import Callable

import pytest
import torch

import psworker

FORM = r"DistributedOptimizer\(optimizer, model\.named_parameters\(\)\)"
wrap: Callable[..., object] = psworker.DistributedOptimizer  # It takes wrong types here.
clip: Callable[..., object] = psworker.clip_grad_norm_
meet: Callable[..., object] = psworker.barrier
init: Callable[..., object] = psworker.init
MODEL = torch.nn.Linear(2, 1)
SHARED = torch.zeros(8)
with torch.inference_mode():
    INFERRED = torch.nn.Parameter(torch.zeros(2))


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD(MODEL.parameters(), lr=0.1)


def of(*parameters: torch.nn.Parameter) -> tuple[torch.optim.SGD, object]:
    named = [(str(number), parameter) for number, parameter in enumerate(parameters)]
    return torch.optim.SGD(parameters, lr=0.1), named


def in_inference() -> None:
    with torch.inference_mode():
        wrap(sgd(), MODEL.named_parameters())


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "mode": (
        lambda: wrap(sgd(), MODEL.named_parameters(), mode=5),
        "mode is 5, must be text such as name or",
    ),
    "class": (
        lambda: wrap(sgd(), MODEL.named_parameters(), compression=psworker.TopK),
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
    "expanded": (
        lambda: wrap(*of(torch.nn.Parameter(torch.ones(1, 2).expand(3, 2)))),
        r"'0' is expanded, so several elements have one place in memory; make it of tensor.clone",
    ),
    "shared memory": (
        lambda: wrap(*of(torch.nn.Parameter(SHARED[:4]), torch.nn.Parameter(SHARED[3:]))),
        "'0' and '1' share memory; use one torch.nn.Parameter in both places",
    ),
    "inference": (in_inference, r"made inside torch\.inference_mode\(\), whose tensors cannot"),
    "inferred": (
        lambda: wrap(*of(INFERRED)),
        r"parameter '0' was made inside torch\.inference_mode\(\): make the model outside",
    ),
    "names": (
        lambda: wrap(sgd(), dict(MODEL.named_parameters())),
        "the second argument has a str in it, must be pairs of name and parameter",
    ),
    "swapped": (
        lambda: wrap(MODEL.named_parameters(), sgd()),
        f"the arguments are swapped: the optimizer comes first, {FORM}",
    ),
    "servers": (
        lambda: wrap(sgd(), MODEL.named_parameters(), servers=[7070]),
        r"servers is \[7070\], must be text as host:port",
    ),
    "job": (lambda: wrap(sgd(), MODEL.named_parameters(), job=5), "job is 5, must be text"),
    "timeout": (
        lambda: wrap(sgd(), MODEL.named_parameters(), timeout_s="long"),
        "timeout_s is 'long', must be a number of seconds",
    ),
    "samples": (
        lambda: wrap(sgd(), MODEL.named_parameters(), samples="all"),
        "samples is 'all', must be in 0",
    ),
    "no model": (
        lambda: wrap(sgd(), MODEL.named_parameters(), model=MODEL.parameters()),
        r"model is a generator, must be the torch\.nn\.Module",
    ),
    "other model": (
        lambda: wrap(sgd(), MODEL.named_parameters(), model=torch.nn.Linear(1, 1)),
        "model= has none of the parameters that are trained",
    ),
    "smallest": (
        lambda: wrap(sgd(), MODEL.named_parameters(), compress_min_nbytes="64k"),
        "compress_min_nbytes is '64k', must be an integer in 0",
    ),
    "excluded text": (
        lambda: wrap(sgd(), MODEL.named_parameters(), compress_exclude="weight"),
        "compress_exclude is 'weight', must be a list of names",
    ),
    "excluded nothing": (
        lambda: wrap(sgd(), MODEL.named_parameters(), compress_exclude=["head.*"]),
        r"compress_exclude has 'head\.\*', which names no parameter",
    ),
    "twice": (
        lambda: wrap(sgd(), MODEL.named_parameters(), mode="ssd(steps=5, steps=6)"),
        "steps is given twice",
    ),
    "mode of rows": (
        lambda: wrap(sgd(), MODEL.named_parameters(), rows_mode="asgd"),
        "rows_mode= is the mode of row tables: it needs rows=",
    ),
    "clip parameters": (
        lambda: clip(MODEL.parameters(), 1.0),
        r"a generator, must be the DistributedOptimizer, not parameters: psworker\.clip_grad_norm_",
    ),
    "clip wrapped": (
        lambda: clip(sgd(), 1.0),
        "the first argument is a SGD, must be the DistributedOptimizer",
    ),
    "barrier": (lambda: meet(5), r"barrier\(\) takes a name; it was given 5"),
    "rank": (lambda: psworker.init(rank=-1), "rank is -1, must be 0 or more"),
    "rank text": (lambda: init(rank="0"), "rank is '0', must be a whole number"),
    "fewest": (
        lambda: psworker.init(min_workers=0, max_workers=2),
        "min_workers is 0, must be 1 or more",
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
