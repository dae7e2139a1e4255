"""`Embedding` and `EmbeddingBag` beside those of torch: results, gradients, and errors."""

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import psworker
from pscore.errors import ConfigError, GradientError
from pscore.rows.spec import Rows
from psworker.rows.modules import Embedding, EmbeddingBag, EmbeddingTable, dense_parameters

ROWS, DIM = 12, 5
BATCH = torch.tensor([[3, 7, 3], [0, 11, 2], [2, 2, 0], [5, 3, 9]])
FLAT = torch.tensor([3, 7, 3, 0, 11, 2, 2, 2, 0])
OFFSETS = torch.tensor([0, 2, 2, 5])  # The second bag is empty.
FACTORS = torch.tensor([0.5, -1.0, 2.0, 1.0, 3.0, 0.0, 1.5, 1.0, -2.0])


def start(padding: int | None = None) -> torch.Tensor:
    values = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(3))
    if padding is not None:
        values[padding] = 0.0
    return values


def gradient(table: EmbeddingTable) -> np.ndarray:
    """Returns the gradient of the whole table, which only a small one has."""
    whole = np.zeros((ROWS, DIM), np.float32)
    found = table.gradients.read(table.weight, "table")
    if found is not None:
        whole[found.ids.view(np.int64)] = found.values
    return whole


def compare(ours: Any, theirs: Any, *arguments: Any, **named: Any) -> None:
    """Compares results and gradients of a loss that no two elements enter alike."""
    one, other = ours(*arguments, **named), theirs(*arguments, **named)
    torch.testing.assert_close(one, other, rtol=0.0, atol=0.0)
    factors = torch.arange(one.numel()).reshape(one.shape).sin()
    for result in (one, other):
        torch.autograd.backward((result * factors).sum())
    np.testing.assert_allclose(gradient(ours), theirs.weight.grad.numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("padding", [None, 0, -1])
def test_an_embedding_equals_that_of_torch(padding: int | None) -> None:
    values = start(padding)
    ours = Embedding.from_pretrained(values, freeze=False, padding_idx=padding)
    given: Any = torch.nn.Embedding
    theirs = given.from_pretrained(values, freeze=False, padding_idx=padding)
    compare(ours, theirs, BATCH)
    compare(ours, theirs, BATCH[0, 0])  # Used twice in a step, once without a dimension.
    compare(ours, theirs, torch.zeros(0, 3, dtype=torch.int64))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 2])
def test_a_bag_equals_that_of_torch(mode: str, padding: int | None) -> None:
    values = start(padding)
    options: dict[str, Any] = {"mode": mode, "padding_idx": padding, "freeze": False}
    ours = EmbeddingBag.from_pretrained(values, **options)
    theirs = torch.nn.EmbeddingBag.from_pretrained(values, **options)
    compare(ours, theirs, BATCH)
    compare(ours, theirs, FLAT, OFFSETS)
    compare(ours, theirs, BATCH.int(), None)
    ours.include_last_offset = theirs.include_last_offset = True
    compare(ours, theirs, FLAT, torch.cat([OFFSETS, torch.tensor([len(FLAT)])]))


def test_weights_of_samples_have_a_gradient_too() -> None:
    ours = EmbeddingBag.from_pretrained(start(), mode="sum", freeze=False)
    theirs = torch.nn.EmbeddingBag.from_pretrained(start(), mode="sum", freeze=False)
    mine, yours = (FACTORS.clone().requires_grad_() for _ in range(2))
    for bag, factors in ((ours, mine), (theirs, yours)):
        torch.autograd.backward(bag(FLAT, OFFSETS, per_sample_weights=factors).sin().sum())
    torch.testing.assert_close(mine.grad, yours.grad)
    assert theirs.weight.grad is not None
    np.testing.assert_allclose(gradient(ours), theirs.weight.grad.numpy(), rtol=1e-6, atol=1e-6)


def test_a_batch_of_padding_only_has_a_gradient_without_rows() -> None:
    table = Embedding(ROWS, DIM, padding_idx=0, name="t")
    torch.autograd.backward(table(torch.zeros(4, dtype=torch.int64)).sum())
    found = table.gradients.read(table.weight, "t")
    assert found is not None
    assert len(found.ids) == 0


def test_a_second_backward_through_the_same_rows_is_counted_once_more() -> None:
    table = Embedding(ROWS, DIM, name="t")
    loss = table(BATCH).sum()
    torch.autograd.backward(loss, retain_graph=True)
    once = gradient(table).copy()
    torch.autograd.backward(loss)
    np.testing.assert_array_equal(gradient(table), 2 * once)


CLEAR: list[Callable[[torch.nn.Module], None]] = [
    lambda model: model.zero_grad(),
    lambda model: torch.optim.SGD(model.parameters(), lr=0.1).zero_grad(),
    lambda model: setattr(model.weight, "grad", None),
]


@pytest.mark.parametrize("clear", CLEAR)
def test_zero_grad_of_the_model_clears_the_gradient_of_the_rows(
    clear: Callable[[torch.nn.Module], None],
) -> None:
    table = Embedding(ROWS, DIM, name="t")
    torch.autograd.backward(table(BATCH).sum())
    clear(table)
    assert table.gradients.read(table.weight, "t") is None
    torch.autograd.backward(table(BATCH[0]).sum())
    found = table.gradients.read(table.weight, "t")
    assert found is not None
    assert found.ids.tolist() == [3, 7]
    assert found.counts.tolist() == [2, 1]


def test_a_change_of_gradients_that_cannot_reach_the_rows_is_an_error() -> None:
    table = Embedding(ROWS, DIM, name="users")
    torch.autograd.backward(table(BATCH).sum())
    torch.nn.utils.clip_grad_norm_(table.parameters(), 1.0)
    with pytest.raises(GradientError, match=r"'users' was changed in place .*dense_parameters"):
        table.gradients.read(table.weight, "users")


def test_a_gradient_that_is_not_finite_names_the_table_and_the_id() -> None:
    table = Embedding(None, DIM, name="users")
    torch.autograd.backward((table(torch.tensor([4, -9])) * torch.tensor([[1.0], [1e39]])).sum())
    with pytest.raises(GradientError, match=r"'users' holds NaN or Inf at id -9"):
        table.gradients.read(table.weight, "users")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Of Dynamo in itself.
def test_a_compiled_model_looks_its_rows_up_outside_of_the_graph() -> None:
    """Dynamo takes numpy for torch: it followed the lookup, and failed at uint64."""
    table = Embedding(None, 4, name="a", init="uniform(1)")
    bag = EmbeddingBag(None, 4, name="b", init="uniform(1)")
    model = torch.nn.ModuleDict({"table": table, "bag": bag, "top": torch.nn.Linear(4, 1)})

    def score(ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model["top"](model["table"](ids) + model["bag"](ids[:, None]))
        return result.square().sum()

    ids = torch.tensor([7, -3, 1 << 62, 7])
    found = []
    for function in (score, torch.compile(score, backend="eager")):
        loss: torch.Tensor = function(ids)
        torch.autograd.backward(loss)
        grads = [each.gradients.read(each.weight, each.name) for each in (table, bag)]
        found.append((loss.item(), grads))
        table.zero_grad()
        bag.zero_grad()
    (loss_alone, alone), (loss_compiled, compiled) = found
    assert loss_alone == loss_compiled
    for one, other in zip(alone, compiled, strict=True):
        assert one is not None
        assert other is not None
        for array, wanted in zip(other, one, strict=True):
            np.testing.assert_array_equal(array, wanted)


def test_rows_of_an_unbounded_table_depend_on_seed_and_id_alone() -> None:
    ids = torch.tensor([0, -1, 1 << 62, 5, -(1 << 63)])
    one, other = Embedding(None, DIM, name="a"), EmbeddingBag(None, DIM, name="a")
    rows = one(ids)
    torch.testing.assert_close(rows, other(ids[:, None]), rtol=0.0, atol=0.0)
    torch.testing.assert_close(rows.flip(0), one(ids.flip(0)), rtol=0.0, atol=0.0)
    assert len(np.unique(rows.detach().numpy())) > 4 * DIM
    assert not torch.equal(rows, Embedding(None, DIM, name="b")(ids))  # Another seed.
    assert torch.equal(rows, copy.deepcopy(one)(ids))


def test_first_values_are_chosen_by_name() -> None:
    ids = torch.arange(4000)
    assert not Embedding(None, 4, init="zeros")(ids).any()
    assert Embedding(None, 4, init="uniform(0.25)")(ids).abs().max() <= 0.25
    drawn = Embedding(4000, 4)(ids)
    assert abs(drawn.std().item() - 1.0) < 0.02
    assert Embedding(4000, 4, max_norm=0.5)(ids).norm(dim=1).max() <= 0.5
    with pytest.raises(ConfigError, match=r"init is 'xavier'"):
        Embedding(None, 4, init="xavier")


def test_the_dtype_of_the_module_is_that_of_the_result() -> None:
    table = Embedding(ROWS, DIM, name="t").to(torch.bfloat16)
    made = table(BATCH)
    assert made.dtype == torch.bfloat16
    torch.autograd.backward(made.sum())
    assert gradient(table).dtype == np.float32


def test_wrong_ids_are_refused_in_plain_words() -> None:
    table = Embedding(ROWS, DIM, name="users")
    with pytest.raises(TypeError, match=r"'users' are torch.float32, must be .* 2\*\*24"):
        table(torch.ones(2))
    with pytest.raises(IndexError, match=r"id 12 is out of range: row table 'users' has ids 0..11"):
        table(torch.tensor([3, 12]))
    with pytest.raises(IndexError, match=r"id -1 is negative"):
        table(torch.tensor([-1, 3]))
    given: Any = [3]
    with pytest.raises(TypeError, match=r"are list, must be a tensor of torch\.int64"):
        table(given)


ODD: Any = 1.5
WORD: Any = "large"
ON_SHARDS: Any = Embedding(9, 4)


def test_numbers_of_numpy_are_declared_as_those_of_python() -> None:
    numbers: list[Any] = [np.int64(9), np.int64(4), np.int64(-1), np.float32(0.5)]
    table = Embedding(*numbers, seed=numbers[1])
    declared = Rows((table.declaration(table.seed_number),))
    assert declared.tables[0].padding_idx == 8
    assert Rows.of(json.loads(json.dumps(declared.arguments()))) == declared


def with_wrong_rows(number: float) -> torch.Tensor:
    values = torch.ones(5, 2)
    values[2, 1] = values[4, 0] = number
    return values


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Embedding(0, 4), "num_embeddings is 0"),
        (lambda: Embedding(None, 0), "embedding_dim is 0"),
        (lambda: Embedding(9, 4, padding_idx=9), "padding_idx is 9"),
        (lambda: Embedding(None, 4, name="a", lru=100), "row table 'a' has lru 100, must be at"),
        (lambda: Embedding(None, 4, lru=20_000, max_rows=9), "give one of them"),
        (lambda: Embedding(None, 4, min_count=-1), "has min_count -1"),
        (lambda: Embedding(None, 4, ttl=ODD), "ttl is 1.5, must be an int"),
        (lambda: Embedding(9, 4, scale_grad_by_freq=True), "divides by the frequency"),
        (lambda: Embedding(9, 4, max_norm=1.0, norm_type=1.0), "norm_type is 1.0, must be 2"),
        (lambda: Embedding(9, 4, max_norm=0.0), "max_norm is 0.0, must be above 0"),
        (lambda: Embedding(ODD, 4), "num_embeddings is 1.5, must be an int"),
        (lambda: Embedding(9, 4, max_norm=WORD), "max_norm is 'large', must be above 0"),
        (lambda: Embedding(9, ODD), "embedding_dim is 1.5, must be an int"),
        (lambda: Embedding(9, 4, seed=ODD), "seed is 1.5, must be an int"),
        (lambda: Embedding(9, 4, seed=1 << 70), "must have 64 bits"),
        (lambda: Embedding(9, 4, name=ODD), "name is 1.5, must be of type str"),
        (lambda: Embedding(9, 4, cache=ODD), "cache is 1.5, must be of type RowCache"),
        (lambda: Embedding(9, 4, padding_idx=ODD), "padding_idx is 1.5, must be an int"),
        (lambda: Embedding(None, 4, padding_idx=1 << 63), "must be an int64"),
        (lambda: EmbeddingBag(9, 4, mode="min"), "mode is 'min'"),
        (lambda: Embedding.from_pretrained(torch.zeros(3)), "takes a matrix"),
        (lambda: Embedding.from_pretrained(torch.ones(3, 2), padding_idx=1), "is not zero"),
        (lambda: Embedding.from_pretrained(torch.nn.Linear(2, 3).bias), "takes a matrix"),
        (lambda: Embedding.from_pretrained(ODD), "takes a matrix"),
        (lambda: Embedding.from_pretrained(ON_SHARDS), "without rows; .* load_embedding"),
        (lambda: EmbeddingBag.from_pretrained(ON_SHARDS.weight), "load_embedding"),
        (lambda: Embedding.from_pretrained(with_wrong_rows(torch.inf)), "row 2 given .* NaN or"),
        (lambda: EmbeddingBag.from_pretrained(with_wrong_rows(torch.nan)), "row 2 given"),
    ],
)
def test_an_argument_that_cannot_be_as_in_torch_is_refused(
    make: Callable[[], Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_module_of_torch_gives_its_rows_and_arguments() -> None:
    theirs = torch.nn.EmbeddingBag(ROWS, DIM, mode="max", padding_idx=3, max_norm=None)
    ours = EmbeddingBag.from_pretrained(theirs)
    assert (ours.mode, ours.padding_idx, ours.weight.requires_grad) == ("max", 3, True)
    torch.testing.assert_close(ours(BATCH), theirs(BATCH))
    assert not Embedding.from_pretrained(start()).weight.requires_grad


def test_an_argument_of_a_module_that_cannot_be_kept_is_refused() -> None:
    by_other_norm = torch.nn.Embedding(ROWS, DIM, max_norm=1.0, norm_type=1.0)
    with pytest.raises(ConfigError, match=r"norm_type is 1\.0, must be 2"):
        Embedding.from_pretrained(by_other_norm)
    by_frequency = torch.nn.EmbeddingBag(ROWS, DIM, scale_grad_by_freq=True)
    with pytest.raises(ConfigError, match="divides by the frequency"):
        EmbeddingBag.from_pretrained(by_frequency)


def test_placeholders_are_no_dense_parameters() -> None:
    model = torch.nn.Sequential(psworker.Embedding(None, 4), torch.nn.Linear(4, 2))
    assert [tuple(each.shape) for each in dense_parameters(model)] == [(2, 4), (2,)]
    assert sum(parameter.numel() for parameter in model[0].parameters()) == 0


def test_a_frozen_table_has_no_gradient() -> None:
    table = Embedding(ROWS, DIM, name="t")
    table.weight.requires_grad_(False)
    assert not table(BATCH).requires_grad
    with torch.no_grad():
        assert not Embedding(ROWS, DIM, name="t")(BATCH).requires_grad
