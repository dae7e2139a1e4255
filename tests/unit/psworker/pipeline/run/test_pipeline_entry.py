"""The ends of a stage: the activation with which it begins, and its result."""

import pytest
import torch
from torch import nn

from pscore.errors import ConfigError
from psworker.pipeline.plan.measure import measure
from psworker.pipeline.run.chain import Block
from psworker.pipeline.run.entry import make_entry


@pytest.mark.parametrize("is_view", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_the_gradient_of_an_activation_is_that_of_its_leaf(is_view: bool, in_place: bool) -> None:
    layers = nn.Sequential(nn.ReLU(inplace=in_place), nn.Linear(3, 2))
    whole = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    plain = whole.clone().requires_grad_()
    expected = torch.autograd.grad(layers(plain * 1.0).sum(), [plain, *layers.parameters()])
    values = whole.flatten().clone().reshape(4, 3) if is_view else whole.clone()
    leaf, entry = make_entry(values)
    found = torch.autograd.grad(layers(entry).sum(), [leaf, *layers.parameters()])
    for own, other in zip(found, expected, strict=True):
        assert torch.equal(own, other)
    assert leaf.untyped_storage().nbytes() == leaf.element_size()


def test_a_block_that_returns_a_tuple_is_refused_by_its_name() -> None:
    blocks = [Block("first", nn.Linear(3, 3)), Block("memory", nn.LSTM(3, 3))]
    with pytest.raises(ConfigError, match="block 'memory' returns a tuple, must return one tensor"):
        measure("a model", blocks, torch.zeros(2, 5, 3))
