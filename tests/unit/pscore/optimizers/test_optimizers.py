"""Server optimizers: torch's numbers, one pass, nothing touched that has no gradient."""

import inspect
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pscore.errors import UnsupportedOptimizerError
from pscore.memory.kernels import sum_all
from pscore.optimizers import OPTIMIZERS, Optimizer, from_torch, hyper_rows, mean, sgd, warm_up
from pscore.optimizers.base import DeviceStep, SliceStep
from pscore.rules import make_server_optimizer
from pscore.types import FloatArray, HyperArray, IntArray, SegmentTable

SIZES = (1, 7, 64, 2049, 5000)
GROUPS = (0, 1, 0, 1, 0)
PADDING = 3  # Elements before each segment and after the last.


def layout(sizes: Sequence[int], groups: Sequence[int], padding: int) -> tuple[SegmentTable, int]:
    starts = np.cumsum([padding] + [size + padding for size in sizes])[:-1]
    bounds = np.stack([starts, starts + np.array(sizes)], axis=1)
    table = SegmentTable(bounds=bounds.astype(np.int64), groups=np.array(groups, np.int64))
    return table, int(bounds[-1, 1]) + padding


class Slice:
    """The state of one slice on a shard."""

    def __init__(self, optimizer: Optimizer, sizes: Sequence[int], groups: Sequence[int]) -> None:
        self.optimizer = optimizer
        self.segments, self.numel = layout(sizes, groups, PADDING)
        rng = np.random.default_rng(len(sizes))
        self.weights = rng.standard_normal(self.numel, np.float32)
        self.state = [np.zeros(self.numel, np.float32) for _ in optimizer.state_names]
        self.counts = np.zeros(len(sizes), np.int64)

    def part(self, array: FloatArray, index: Any) -> FloatArray:
        start, stop = self.segments.bounds[index]
        return array[start:stop]

    def step(
        self,
        grad: FloatArray,
        active: IntArray,
        hyper: HyperArray,
        scale: float = 1.0,
        out: FloatArray | None = None,
        **more: Any,
    ) -> None:
        """Makes a step into `out`, which the weights are then; None: into another array."""
        out = np.full(self.numel, np.nan, np.float32) if out is None else out
        given = (self.state, self.segments, self.counts, active, hyper)
        self.optimizer.step(SliceStep(self.weights, out, grad, scale, *given, **more))
        self.weights = out


SGDS: list[dict[str, Any]] = [
    {"weight_decay": 0.01},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.01},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    {"momentum": 0.5, "weight_decay": 0.01, "maximize": True},
]
ADAMS: list[dict[str, Any]] = [
    {"weight_decay": 0.1},
    {"betas": (0.5, 0.9), "eps": 1e-3, "maximize": True},
]
ADAGRADS: list[dict[str, Any]] = [
    {},
    {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5, "eps": 1e-3},
    {"maximize": True},
]
RMSPROPS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9, "weight_decay": 0.01, "alpha": 0.9},
    {"centered": True, "eps": 1e-3},
    {"centered": True, "momentum": 0.5, "eps": 1e-3, "maximize": True},
]
NADAMS: list[dict[str, Any]] = [
    {"weight_decay": 0.1, "momentum_decay": 0.1},
    {"weight_decay": 0.1, "decoupled_weight_decay": True, "betas": (0.5, 0.9), "eps": 1e-3},
]
RADAMS: list[dict[str, Any]] = [
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True, "betas": (0.8, 0.9)},
    {"betas": (0.9, 0.5)},  # Never adaptive.
]
# Since torch 2.7.
DECOUPLED: dict[str, Any] = {"decoupled_weight_decay": True}
if DECOUPLED.keys() - inspect.signature(torch.optim.Adam).parameters.keys():
    DECOUPLED = {}
CASES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    *((torch.optim.SGD, options) for options in SGDS),
    *((torch.optim.Adam, options) for options in ADAMS),
    *((torch.optim.AdamW, options) for options in ADAMS),
    (torch.optim.Adam, {"weight_decay": 0.1, **DECOUPLED}),
    *((torch.optim.Adam, {"amsgrad": True} | options) for options in ADAMS),
    *((torch.optim.AdamW, {"amsgrad": True} | options) for options in ADAMS),
    (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1, **DECOUPLED}),
    *((torch.optim.Adagrad, options) for options in ADAGRADS),
    *((torch.optim.RMSprop, options) for options in RMSPROPS),
    *((torch.optim.NAdam, options) for options in NADAMS),
    *((torch.optim.RAdam, options) for options in RADAMS),
]


def groups_of(slice_: Slice, lr: float) -> tuple[list[torch.nn.Parameter], list[dict[str, Any]]]:
    """Returns parameters with the slice's weights, and two groups of them with learning rates."""
    count = len(slice_.segments)
    parameters = [
        torch.nn.Parameter(torch.from_numpy(slice_.part(slice_.weights, i).copy()))
        for i in range(count)
    ]
    members: list[list[torch.nn.Parameter]] = [[], []]
    for index, parameter in enumerate(parameters):
        members[int(slice_.segments.groups[index])].append(parameter)
    return parameters, [
        {"params": members[0], "lr": lr},
        {"params": members[1], "lr": lr / 2, "weight_decay": 0.0},
    ]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_fifty_steps_end_where_torch_ends(
    kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    drawn = Slice(sgd.SGD(), SIZES, GROUPS)
    parameters, groups = groups_of(drawn, 0.02)
    theirs: Any = kind(groups, **options)
    optimizer, _ = from_torch(theirs)
    ours = Slice(optimizer, SIZES, GROUPS)
    rng = np.random.default_rng(7)
    for step in range(50):
        grad = rng.standard_normal(ours.numel, np.float32)
        # The second tensor has no gradient at first, and each has none now and then.
        active = (rng.random(len(SIZES)) < 0.8).astype(np.int64)
        active[1] &= step > 2
        for index, parameter in enumerate(parameters):
            mean = torch.from_numpy(ours.part(grad, index) / np.float32(4.0))
            parameter.grad = mean if active[index] else None
        if step == 25:
            for group in theirs.param_groups:
                group["lr"] *= 0.5
                if "betas" in group:  # As OneCycleLR changes them.
                    group["betas"] = (0.7 * group["betas"][0], group["betas"][1])
        ours.step(grad, active, hyper_rows(optimizer, theirs.param_groups), scale=0.25)
        theirs.step()
    for index, parameter in enumerate(parameters):
        wanted = parameter.detach().numpy()
        np.testing.assert_allclose(ours.part(ours.weights, index), wanted, rtol=2e-5, atol=2e-6)
        for name, array in zip(optimizer.state_names, ours.state, strict=True):
            if name in theirs.state[parameter]:
                kept = theirs.state[parameter][name].numpy()  # A number is compared with each.
                np.testing.assert_allclose(ours.part(array, index), kept, rtol=2e-5, atol=2e-6)


def model_step(
    name: str, w: Any, g: Any, state: list[Any], count: int, row: dict[str, float]
) -> Any:
    """One step in float64, written from the papers' formulas; `count` steps came before."""
    d = -g if row["maximize"] else g
    decouples = name in ("nadam", "radam") and row["decoupled_weight_decay"]
    if name in ("adamw", "amsgradw") or decouples:
        w = w - row["lr"] * row["weight_decay"] * w
    else:
        d = d + row["weight_decay"] * w
    if name == "adagrad":
        state[0] = (state[0] if count else row["initial_accumulator_value"]) + d**2
        return w - row["lr"] / (1 + count * row["lr_decay"]) * d / (np.sqrt(state[0]) + row["eps"])
    if name in ("rmsprop", "centered_rmsprop"):
        state[0] = row["alpha"] * state[0] + (1 - row["alpha"]) * d**2
        variance = state[0]
        if name == "centered_rmsprop":
            state[2] = row["alpha"] * state[2] + (1 - row["alpha"]) * d
            variance = np.maximum(variance - state[2] ** 2, 0)
        state[1] = row["momentum"] * state[1] + d / (np.sqrt(variance) + row["eps"])
        return w - row["lr"] * state[1]
    if name == "sgd":
        if row["momentum"] == 0:
            return w - row["lr"] * d
        fresh = d if count == 0 else row["momentum"] * state[0] + (1 - row["dampening"]) * d
        state[0] = fresh
        return w - row["lr"] * (d + row["momentum"] * fresh if row["nesterov"] else fresh)
    return adam_like(name, w, d, state, count + 1, row)


def adam_like(name: str, w: Any, d: Any, state: list[Any], t: int, row: dict[str, float]) -> Any:
    """Step `t`, from 1, of one with two moments; the decay is in `w` or `d`."""
    state[0] = row["beta1"] * state[0] + (1 - row["beta1"]) * d
    state[1] = row["beta2"] * state[1] + (1 - row["beta2"]) * d**2
    if name == "nadam":
        mu, mu_next = (
            row["beta1"] * (1 - 0.5 * 0.96 ** (s * row["momentum_decay"])) for s in (t, t + 1)
        )
        state[2] = (state[2] if t > 1 else 1.0) * mu
        size = np.sqrt(state[1] / (1 - row["beta2"] ** t)) + row["eps"]
        ahead = mu_next * state[0] / (1 - state[2] * mu_next)
        return w - row["lr"] * ((1 - mu) * d / (1 - state[2]) + ahead) / size
    mean = state[0] / (1 - row["beta1"] ** t)
    if name == "radam":
        longest = 2 / (1 - row["beta2"]) - 1
        rho = longest - 2 * t * row["beta2"] ** t / (1 - row["beta2"] ** t)
        if rho <= 5:
            return w - row["lr"] * mean
        r = (rho - 4) * (rho - 2) * longest / ((longest - 4) * (longest - 2) * rho)
        adaptive = np.sqrt(1 - row["beta2"] ** t) / (np.sqrt(state[1]) + row["eps"])
        return w - row["lr"] * mean * np.sqrt(r) * adaptive
    if name in ("amsgrad", "amsgradw"):
        state[2] = np.maximum(state[2], state[1])
    square = state[-1] / (1 - row["beta2"] ** t)
    return w - row["lr"] * mean / (np.sqrt(square) + row["eps"])


@st.composite
def runs(draw: st.DrawFn) -> tuple[str, list[int], dict[str, float], int]:
    name = draw(st.sampled_from([name for name in OPTIMIZERS if OPTIMIZERS[name].torch_classes]))
    sizes = draw(st.lists(st.integers(1, 2100), min_size=1, max_size=6))
    values = {
        "lr": draw(st.floats(1e-3, 0.5)),
        "momentum": draw(st.sampled_from([0.0, 0.5, 0.9])),
        "dampening": draw(st.sampled_from([0.0, 0.25])),
        "weight_decay": draw(st.sampled_from([0.0, 0.1])),
        "nesterov": draw(st.sampled_from([0.0, 1.0])),
        "maximize": draw(st.sampled_from([0.0, 1.0])),
        "beta1": draw(st.sampled_from([0.5, 0.9])),
        "beta2": draw(st.sampled_from([0.5, 0.9, 0.999])),
        "eps": 1e-2,
        "alpha": draw(st.sampled_from([0.5, 0.99])),
        "lr_decay": draw(st.sampled_from([0.0, 0.5])),
        "initial_accumulator_value": draw(st.sampled_from([0.0, 0.5])),
        "momentum_decay": draw(st.sampled_from([0.0, 0.1])),
        "decoupled_weight_decay": draw(st.sampled_from([0.0, 1.0])),
    }
    return name, sizes, values, draw(st.integers(0, 2**32 - 1))


@given(runs())
def test_any_layout_follows_an_independent_model(
    run: tuple[str, list[int], dict[str, float], int],
) -> None:
    name, sizes, values, seed = run
    optimizer = OPTIMIZERS[name]()
    ours = Slice(optimizer, sizes, [0] * len(sizes))
    hyper = np.array([[values[column] for column in optimizer.hyper_names]])
    exact: list[Any] = [ours.part(ours.weights, i).astype(np.float64) for i in range(len(sizes))]
    states: list[list[Any]] = [[0.0 for _ in optimizer.state_names] for _ in sizes]
    counts = [0] * len(sizes)
    rng = np.random.default_rng(seed)
    for _ in range(8):
        grad = rng.standard_normal(ours.numel, np.float32)
        active = rng.integers(0, 2, len(sizes))
        ours.step(grad, active, hyper, scale=0.3)
        for index in np.flatnonzero(active):
            mean = 0.3 * ours.part(grad, index).astype(np.float64)
            exact[index] = model_step(
                name, exact[index], mean, states[index], counts[index], values
            )
            counts[index] += 1
    assert ours.counts.tolist() == counts
    for place in range(len(sizes)):
        np.testing.assert_allclose(
            ours.part(ours.weights, place), exact[place], rtol=1e-5, atol=2e-5
        )


def test_sgd_by_hand() -> None:
    ours = Slice(sgd.SGD(), [1], [0])
    ours.weights[:] = 1.0
    ours.state[0][:] = 9.0  # Left over from before a reset: the first step starts over.
    on = np.ones(1, np.int64)
    # lr 1/2, momentum 1/2, dampening 1/2, weight decay 1/4; gradients summed over two workers.
    hyper = np.array([[0.5, 0.5, 0.5, 0.25, 0.0, 0.0]])
    ours.step(np.full(ours.numel, 1.0, np.float32), on, hyper, scale=0.5)
    # d = 1/2 + 1/4 * 1 = 3/4; the first step does not dampen: v = 3/4; w = 1 - 3/8.
    assert (ours.part(ours.weights, 0)[0], ours.part(ours.state[0], 0)[0]) == (0.625, 0.75)
    ours.step(np.full(ours.numel, 0.5, np.float32), on, hyper, scale=0.5)
    # d = 1/4 + 5/32 = 13/32; v = 3/8 + 13/64 = 37/64; w = 5/8 - 37/128 = 43/128.
    assert (ours.part(ours.weights, 0)[0], ours.part(ours.state[0], 0)[0]) == (43 / 128, 37 / 64)
    hyper[0, 2], hyper[0, 4] = 0.0, 1.0
    ours.step(np.full(ours.numel, 0.0, np.float32), on, hyper, scale=0.5)
    # Nesterov: d = 43/512; v = 37/128 + 43/512 = 191/512; w = 43/128 - (43/512 + 191/1024) / 2.
    assert ours.part(ours.weights, 0)[0] == 43 / 128 - (86 + 191) / 2048


def test_sgd_rounds_after_every_operation() -> None:
    """No fused multiply-add: the same bits on every machine, and in numpy."""
    ours = Slice(sgd.SGD(), [4099], [0])
    start = ours.weights.copy()
    rng = np.random.default_rng(1)
    grad, ours.state[0] = (rng.standard_normal(ours.numel, np.float32) for _ in range(2))
    w, g, v = (ours.part(array, 0) for array in (start, grad, ours.state[0].copy()))
    f = np.float32
    ours.counts[:] = 1
    hyper = np.array([[0.1, 0.9, 0.3, 0.01, 0.0, 0.0]])
    ours.step(grad, np.ones(1, np.int64), hyper, scale=1 / 3)
    d: FloatArray = g * f(1 / 3) + f(0.01) * w
    v[:] = f(0.9) * v + f(1 - 0.3) * d
    np.testing.assert_array_equal(ours.part(ours.state[0], 0), v)
    np.testing.assert_array_equal(ours.part(ours.weights, 0), w - f(0.1) * v)


def test_adam_by_hand() -> None:
    hyper = np.array([[0.25, 0.5, 0.75, 0.0, 0.5, 0.0]])
    grad = np.full(7, 1.0, np.float32)
    for name, d, shrink in (("adam", 1.5, 1.0), ("adamw", 1.0, 0.875)):
        ours = Slice(OPTIMIZERS[name](), [1], [0])
        ours.weights[:] = 1.0
        ours.step(grad, np.ones(1, np.int64), hyper)
        # m = d / 2 over 1 - 1/2, v = d^2 / 4 over 1 - 3/4: the first step is lr whatever d is.
        assert ours.part(ours.weights, 0)[0] == shrink - 0.25
        assert [ours.part(array, 0)[0] for array in ours.state] == [d / 2, d * d / 4]


@pytest.mark.parametrize(("name", "factor"), [("assign", 0.5), ("assign_sum", 1.0)])
def test_an_assignment_takes_the_mean_or_the_sum(name: str, factor: float) -> None:
    ours = Slice(OPTIMIZERS[name](), [2, 2], [0, 0])
    before = ours.weights.copy()
    grad = np.arange(ours.numel, dtype=np.float32)
    ours.step(grad, np.array([0, 1]), np.zeros((1, 1)), scale=0.5)
    np.testing.assert_array_equal(ours.part(ours.weights, 1), factor * ours.part(grad, 1))
    start, stop = ours.segments.bounds[1]
    np.testing.assert_array_equal(ours.weights[:start], before[:start])
    np.testing.assert_array_equal(ours.weights[stop:], before[stop:])
    assert ours.counts.tolist() == [0, 1]


def hyper_for(optimizer: Optimizer) -> HyperArray:
    values = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "nesterov": 1.0, "maximize": 0.0}
    return np.array([[values.get(column, 0.1) for column in optimizer.hyper_names]] * 2)


def test_the_mean_of_no_gradient_is_nan() -> None:
    ours = Slice(mean.Mean(), [2, 2], [0, 0])
    grad = np.arange(ours.numel, dtype=np.float32)
    ours.step(grad, np.array([0, 1]), np.zeros((1, 1)), scale=0.5)
    np.testing.assert_array_equal(ours.part(ours.weights, 1), ours.part(grad, 1) / 2)
    assert np.isnan(ours.part(ours.weights, 0)).all()
    assert np.isnan(ours.weights).sum() == 2
    assert ours.counts.tolist() == [0, 1]


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"mean"}))
def test_inactive_segments_and_padding_are_copied_and_keep_their_state(name: str) -> None:
    ours = Slice(OPTIMIZERS[name](), SIZES, GROUPS)
    before = ours.weights
    for array in ours.state:
        array[:] = 2.0
    grad = np.full(ours.numel, np.nan, np.float32)
    ours.step(grad, np.zeros(len(SIZES), np.int64), hyper_for(ours.optimizer))
    np.testing.assert_array_equal(ours.weights, before)
    assert all((array == 2.0).all() for array in ours.state)
    assert not ours.counts.any()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_in_place_has_the_same_bits(name: str) -> None:
    ours, other = (Slice(OPTIMIZERS[name](), SIZES, GROUPS) for _ in range(2))
    rng = np.random.default_rng(3)
    hyper = hyper_for(ours.optimizer)
    for _ in range(3):
        grad = rng.standard_normal(ours.numel, np.float32)
        active = np.array([1, 1, 0, 1, 1])
        given_grad, before = grad.copy(), ours.weights.copy()
        old = ours.weights
        ours.step(grad, active, hyper, scale=0.5)
        np.testing.assert_array_equal(old, before)
        other.step(grad, active, hyper, 0.5, other.weights)
        np.testing.assert_array_equal(grad, given_grad)
    np.testing.assert_array_equal(ours.weights, other.weights)
    np.testing.assert_array_equal(ours.state, other.state)


@pytest.mark.parametrize("shares", [[1.0, 1.0], [3.0], [2.0, 0.5, 1.0], [1.0, 4.0, 1.0, 0.1]])
@pytest.mark.parametrize("name", OPTIMIZERS.own)
def test_a_step_that_adds_its_gradients_has_the_bits_of_their_sum(
    name: str, shares: list[float]
) -> None:
    ours, other = (Slice(OPTIMIZERS[name](), SIZES, GROUPS) for _ in range(2))
    assert ours.optimizer.adds
    rng = np.random.default_rng(7)
    hyper = hyper_for(ours.optimizer)
    active = np.array([1, 1, 0, 1, 1])
    for _ in range(2):
        grads = [rng.standard_normal(ours.numel, np.float32) for _ in shares]
        given = [grad.copy() for grad in grads]
        total = np.empty(ours.numel, np.float32)
        sum_all(grads, shares, total)
        ours.step(total, active, hyper, scale=0.5)
        rest = grads[1:]
        other.step(grads[0], active, hyper, 0.5, other.weights, others=rest, shares=shares)
        np.testing.assert_array_equal(grads, given)
    np.testing.assert_array_equal(ours.weights, other.weights)
    np.testing.assert_array_equal(ours.state, other.state)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_into_other_state_has_the_same_bits_and_keeps_the_former(name: str) -> None:
    """With a journal: the state of the step before must outlive the step."""
    ours, other = (Slice(OPTIMIZERS[name](), SIZES, GROUPS) for _ in range(2))
    rng = np.random.default_rng(5)
    hyper = hyper_for(ours.optimizer)
    for _ in range(3):
        grad = rng.standard_normal(ours.numel, np.float32)
        active = np.array([1, 0, 1, 1, 0])
        kept = [array.copy() for array in other.state]
        ours.step(grad, active, hyper, scale=0.5)
        state = [np.full_like(array, np.nan) for array in other.state]
        other.step(grad, active, hyper, 0.5, state_out=state)
        np.testing.assert_array_equal(other.state, kept)
        other.state = state
    np.testing.assert_array_equal(ours.weights, other.weights)
    np.testing.assert_array_equal(ours.state, other.state)


DEVICE_CASES = [
    ("sgd", (0.1, 0.0, 0.0, 0.1, 0.0, 0.0)),
    ("sgd", (0.1, 0.9, 0.25, 0.1, 0.0, 1.0)),
    ("sgd", (0.1, 0.9, 0.0, 0.0, 1.0, 0.0)),
    ("adam", (0.1, 0.9, 0.99, 1e-6, 0.1, 1.0)),
    ("adamw", (0.1, 0.9, 0.99, 1e-6, 0.1, 0.0)),
    ("amsgrad", (0.1, 0.9, 0.9, 1e-3, 0.1, 1.0)),
    ("amsgradw", (0.1, 0.9, 0.9, 1e-3, 0.1, 0.0)),
    ("adagrad", (0.1, 0.1, 0.1, 0.5, 1e-3, 1.0)),
    ("rmsprop", (0.1, 0.9, 1e-2, 0.1, 0.0, 0.0)),
    ("rmsprop", (0.1, 0.9, 1e-2, 0.1, 0.9, 1.0)),
    ("centered_rmsprop", (0.1, 0.9, 1e-2, 0.1, 0.9, 0.0)),
    ("nadam", (0.1, 0.9, 0.99, 1e-3, 0.1, 0.1, 0.0, 1.0)),
    ("nadam", (0.1, 0.9, 0.99, 1e-3, 0.1, 0.1, 1.0, 0.0)),
    ("radam", (0.1, 0.9, 0.9, 1e-3, 0.1, 0.0, 1.0)),
    ("radam", (0.1, 0.9, 0.6, 1e-3, 0.1, 1.0, 0.0)),
    ("assign", (0.0,)),
    ("assign_sum", (0.0,)),
]


@pytest.mark.parametrize(("name", "row"), DEVICE_CASES)
def test_a_step_on_tensors_agrees(name: str, row: tuple[float, ...]) -> None:
    ours = Slice(OPTIMIZERS[name](), SIZES, GROUPS)
    weights = torch.from_numpy(ours.weights.copy())
    state = [torch.from_numpy(array.copy()) for array in ours.state]
    counts = ours.counts.copy()
    hyper = np.array([row, row])
    hyper[1, 0] /= 2
    rng = np.random.default_rng(4)
    for _ in range(9):
        grad = rng.standard_normal(ours.numel, np.float32)
        active = rng.integers(0, 2, len(SIZES))
        ours.step(grad, active, hyper)
        given_grad = torch.from_numpy(grad.copy())
        ours.optimizer.step_device(
            DeviceStep(weights, given_grad, state, ours.segments, counts, active, hyper)
        )
        np.testing.assert_array_equal(given_grad.numpy(), grad)
    np.testing.assert_array_equal(counts, ours.counts)
    np.testing.assert_allclose(weights.numpy(), ours.weights, rtol=2e-6, atol=2e-6)
    for array, wanted in zip(state, ours.state, strict=True):
        np.testing.assert_allclose(array.numpy(), wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_kernels_are_compiled_for_one_kind_of_arguments(name: str) -> None:
    """Mapped weights cannot be written, and a mean of one has scale 1: neither compiles again."""
    ours = Slice(OPTIMIZERS[name](), SIZES, GROUPS)
    warm_up(ours.optimizer)
    grad = np.zeros(ours.numel, np.float32)
    grad.flags.writeable = False
    ours.step(grad, np.ones(len(SIZES), np.int64), hyper_for(ours.optimizer), scale=1)
    ours.weights.flags.writeable = False
    ours.step(grad, np.ones(len(SIZES), np.int64), hyper_for(ours.optimizer))
    assert all(len(kernel.signatures) <= 1 for kernel in all_kernels())


def all_kernels() -> list[Any]:
    """Returns the kernels that the optimizers call from Python."""
    modules = {sys.modules[optimizer.__module__] for optimizer in OPTIMIZERS.values()}
    return [
        value for module in modules for name, value in vars(module).items() if name[:5] == "_step"
    ]


COMPILED = """
from pscore.optimizers import OPTIMIZERS, warm_up
from tests.unit.pscore.optimizers.test_optimizers import all_kernels

for optimizer in OPTIMIZERS.values():
    warm_up(optimizer())
print(sum(bool(kernel.stats.cache_hits) for kernel in all_kernels()))
print([kernel for kernel in all_kernels() if kernel.stats.cache_misses])
"""


@pytest.mark.slow
def test_a_process_compiles_nothing_that_one_before_it_has_compiled() -> None:
    """The driver's arguments are kernels; passed as addresses they would not be kept on disk."""
    for optimizer in OPTIMIZERS.values():
        warm_up(optimizer())
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True)
    assert (done.stdout.splitlines(), done.stderr) == ([str(len(all_kernels())), "[]"], "")


def parameter() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(3))]


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        (torch.optim.SGD, {"lr": 0.1, "foreach": False}, "sgd"),
        (torch.optim.SGD, {"lr": 0.1, "fused": True}, "sgd"),
        (torch.optim.Adam, {"lr": torch.tensor(0.1), "capturable": True}, "adam"),
        (torch.optim.Adam, {"lr": 0.1, **DECOUPLED}, "adamw" if DECOUPLED else "adam"),
        (torch.optim.AdamW, {"lr": 0.1}, "adamw"),
        (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}, "amsgrad"),
        (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}, "amsgradw"),
        (torch.optim.Adagrad, {"lr": 0.1, "foreach": True}, "adagrad"),
        (torch.optim.RMSprop, {"lr": 0.1, "capturable": True}, "rmsprop"),
        (torch.optim.RMSprop, {"lr": 0.1, "centered": True}, "centered_rmsprop"),
        (torch.optim.NAdam, {"lr": 0.1, "decoupled_weight_decay": True}, "nadam"),
        (torch.optim.RAdam, {"lr": torch.tensor(0.1)}, "radam"),
    ],
)
def test_the_counterpart_of_a_torch_optimizer(kind: Any, options: Any, name: str) -> None:
    optimizer, hyper = from_torch(kind(parameter(), **options))
    assert optimizer.name == name
    assert hyper.dtype == np.float64
    assert hyper.shape == (1, len(optimizer.hyper_names))
    assert hyper[0, 0] == pytest.approx(0.1, rel=1e-7)
    assert optimizer.hyper_names[0] == "lr"


def test_every_argument_comes_into_its_column() -> None:
    options: dict[str, Any] = {"momentum": 0.5, "dampening": 0.25, "weight_decay": 0.125}
    _, hyper = from_torch(torch.optim.SGD(parameter(), lr=2.0, maximize=True, **options))
    assert hyper.tolist() == [[2.0, 0.5, 0.25, 0.125, 0.0, 1.0]]
    _, hyper = from_torch(torch.optim.SGD(parameter(), lr=2.0, momentum=0.5, nesterov=True))
    assert hyper.tolist() == [[2.0, 0.5, 0.0, 0.0, 1.0, 0.0]]
    _, hyper = from_torch(
        torch.optim.Adam(parameter(), 2.0, (0.5, 0.25), 0.125, 0.75, maximize=True)
    )
    assert hyper.tolist() == [[2.0, 0.5, 0.25, 0.125, 0.75, 1.0]]
    _, hyper = from_torch(torch.optim.Adagrad(parameter(), 2.0, 0.5, 0.25, 0.125, 0.75))
    assert hyper.tolist() == [[2.0, 0.5, 0.25, 0.125, 0.75, 0.0]]
    _, hyper = from_torch(torch.optim.RMSprop(parameter(), 2.0, 0.5, 0.25, 0.125, 0.75))
    assert hyper.tolist() == [[2.0, 0.5, 0.25, 0.125, 0.75, 0.0]]
    _, hyper = from_torch(
        torch.optim.NAdam(parameter(), 2.0, (0.5, 0.25), 0.125, 0.75, 0.375, True)
    )
    assert hyper.tolist() == [[2.0, 0.5, 0.25, 0.125, 0.75, 0.375, 1.0, 0.0]]
    _, hyper = from_torch(torch.optim.RAdam(parameter(), 2.0, (0.5, 0.25), 0.125, 0.75, True))
    assert hyper.tolist() == [[2.0, 0.5, 0.25, 0.125, 0.75, 1.0, 0.0]]
    assert hyper_rows("assign", [{}, {"lr": 0.5}]).tolist() == [[0.0], [0.5]]


class OwnSGD(torch.optim.SGD):
    pass


def mixed(kind: type[torch.optim.Optimizer], flag: str) -> torch.optim.Optimizer:
    """Returns an optimizer whose two groups differ in a flag."""
    made: Any = kind(parameter())  # type: ignore[call-arg]
    made.add_param_group({"params": parameter(), flag: True})
    made.param_groups[0][flag] = False
    return made  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        (torch.optim.ASGD(parameter()), "ASGD"),
        (OwnSGD(parameter(), lr=0.1), "OwnSGD"),
        (mixed(torch.optim.AdamW, "amsgrad"), "amsgrad=True in one group"),
        (mixed(torch.optim.RMSprop, "centered"), "centered=True in one group"),
        (torch.optim.NAdam(parameter(), differentiable=True), "differentiable=True"),
        (torch.optim.Adam(parameter(), differentiable=True), "differentiable=True"),
        (torch.optim.SGD(parameter(), lr=0.1, differentiable=True), "differentiable=True"),
        (mixed(torch.optim.Adam, "decoupled_weight_decay"), "decoupled_weight_decay=True in one"),
    ],
)
def test_options_without_a_counterpart_are_refused_by_name(optimizer: Any, named: str) -> None:
    with pytest.raises(UnsupportedOptimizerError, match=named):
        from_torch(optimizer)


def test_a_refused_class_comes_with_the_supported_ones() -> None:
    with pytest.raises(UnsupportedOptimizerError, match=r"Adam, torch\.optim\.AdamW, .*\.SGD$"):
        from_torch(torch.optim.ASGD(parameter()))


@pytest.mark.parametrize(
    "optimizer", [torch.optim.ASGD(parameter()), mixed(torch.optim.Adam, "amsgrad")]
)
def test_a_refusal_names_the_modes_that_run_any_optimizer(optimizer: Any) -> None:
    with pytest.raises(
        UnsupportedOptimizerError, match=r"modes adpsgd, .*local, sgp, slowmo, and ssgd with"
    ):
        make_server_optimizer(optimizer)


def test_an_argument_of_a_later_torch_is_refused_unless_it_has_its_default() -> None:
    optimizer = torch.optim.SGD(parameter(), lr=0.1)
    optimizer.defaults["centred"] = optimizer.param_groups[0]["centred"] = None
    from_torch(optimizer)
    optimizer.param_groups[0]["centred"] = True
    with pytest.raises(UnsupportedOptimizerError, match="centred=True"):
        from_torch(optimizer)


def test_keys_that_schedulers_and_users_keep_in_a_group_are_ignored() -> None:
    optimizer = torch.optim.SGD(parameter(), lr=0.1)
    optimizer.param_groups[0].update(initial_lr=0.5, name="head")
    assert from_torch(optimizer)[0].name == "sgd"


def test_optimizers_load_without_torch() -> None:
    program = "import sys, pscore.optimizers, pscore.local; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("False", "")
