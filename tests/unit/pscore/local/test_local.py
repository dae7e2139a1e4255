"""Local updates on slices of several segments, on the CPU and as on another device."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pscore.errors import ConfigError
from pscore.local import LOCAL_UPDATES, LocalSlice, LocalUpdate, make_local_update
from pscore.local.dc import DC, AdaptiveDC
from pscore.local.glu import GLU
from pscore.local.mirror import Mirror
from pscore.local.secant import Secant
from pscore.local.sgd import PlainSGD
from pscore.optimizers import OPTIMIZERS
from pscore.types import SegmentTable

ROWS = {
    "sgd": [[0.1, 0.9, 0.0, 0.01, 0.0, 0.0], [0.05, 0.9, 0.0, 0.0, 0.0, 1.0]],
    "adamw": [[0.1, 0.9, 0.99, 1e-6, 0.01, 0.0], [0.05, 0.9, 0.99, 1e-6, 0.0, 1.0]],
    "assign": [[0.1], [0.05]],
}


class ElsewhereTensor(torch.Tensor):
    """A tensor of the CPU that says that it is on another device."""

    device = SimpleNamespace(type="elsewhere")  # type: ignore[assignment]


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().as_subclass(ElsewhereTensor)


def plain(tensor: torch.Tensor) -> Any:
    return tensor.as_subclass(torch.Tensor).numpy()


def make_part(sizes: list[int], optimizer: str = "sgd") -> LocalSlice:
    """Returns a slice with two elements of padding around each segment, groups 0 and 1 in turn."""
    starts = np.cumsum([2] + [size + 2 for size in sizes])[:-1]
    bounds = np.stack([starts, starts + np.array(sizes)], axis=1)
    rng = np.random.default_rng(5)
    return LocalSlice(
        weights=torch.from_numpy(rng.standard_normal(int(bounds[-1, 1]) + 2, np.float32)),
        segments=SegmentTable(bounds=bounds, groups=np.arange(len(sizes)) % 2),
        optimizer=OPTIMIZERS[optimizer](),
        hyper=np.array(ROWS[optimizer]),
        active=np.ones(len(sizes), np.int64),
        counts=np.zeros(len(sizes), np.int64),
    )


LOCALS: list[LocalUpdate] = [
    PlainSGD(0.5),
    GLU(steps=3),
    GLU(1.5, 0.25, 0.5, divisor=0.7),
    Secant(),
    Secant(1.5, 0.25, 0.5),
    Mirror(),
    DC(0.5, 0.5),
    AdaptiveDC(1.0, 0.7, 0.5),
]


@pytest.mark.parametrize("local", LOCALS, ids=lambda local: local.name)
@pytest.mark.parametrize("optimizer", ROWS)
def test_the_cpu_and_other_devices_agree(local: LocalUpdate, optimizer: str) -> None:
    ours, other = (make_part([5, 64, 1, 300], optimizer) for _ in range(2))
    other.weights = elsewhere(other.weights)
    rng = np.random.default_rng(6)
    for version in (0, 1, 4):
        pulled = torch.from_numpy(rng.standard_normal(len(ours.weights), np.float32))
        for part, weights in ((ours, pulled), (other, elsewhere(pulled))):
            local.rebase(part, weights, [], version)
            part.version = version
        for _ in range(3):
            grad = torch.from_numpy(rng.standard_normal(len(ours.weights), np.float32))
            ours.active = other.active = rng.integers(0, 2, 4)
            local.update(ours, grad)
            local.update(other, elsewhere(grad))
        np.testing.assert_allclose(plain(other.weights), plain(ours.weights), 2e-6, 2e-6)
    assert ours.state.keys() == other.state.keys()
    for name in ours.state:
        first, second = (plain(part.state[name]) for part in (ours, other))
        for start, stop in ours.segments.bounds:
            np.testing.assert_allclose(second[start:stop], first[start:stop], 1e-5, 1e-5)


@pytest.mark.parametrize("local", LOCALS, ids=lambda local: local.name)
@pytest.mark.parametrize("place", [torch.clone, elsewhere])
def test_inactive_segments_and_padding_do_not_move(local: LocalUpdate, place: Any) -> None:
    part = make_part([5, 70, 9])
    before = plain(part.weights).copy()
    part.weights = place(part.weights)
    part.active = np.array([0, 1, 0])
    grad = np.full(before.size, np.nan, np.float32)
    start, stop = part.segments.bounds[1]
    grad[start:stop] = 1.0
    local.update(part, place(torch.from_numpy(grad)))
    after = plain(part.weights)
    moved = np.flatnonzero(after != before)
    np.testing.assert_array_equal(moved, np.arange(start, stop))
    assert np.isfinite(after).all()


@pytest.mark.parametrize("local", LOCALS, ids=lambda local: local.name)
@pytest.mark.parametrize("place", [torch.clone, elsewhere])
def test_a_pull_replaces_all_weights_padding_too(local: LocalUpdate, place: Any) -> None:
    part = make_part([5, 70])
    part.weights = place(part.weights)
    for version in (0, 3):
        pulled = torch.full((len(part.weights),), float(version))
        local.rebase(part, place(pulled), [], version)
        part.version = version
        np.testing.assert_array_equal(plain(part.weights), pulled.numpy())


@pytest.mark.parametrize("local", LOCALS, ids=lambda local: local.name)
def test_arrays_are_allocated_once(local: LocalUpdate) -> None:
    part = make_part([5, 70])
    addresses = set()
    for version in range(4):
        local.rebase(part, torch.ones(len(part.weights)), [], version)
        part.version = version
        local.update(part, torch.ones(len(part.weights)))
        addresses.add(tuple(array.data_ptr() for array in part.state.values()))
    assert len(addresses) == 1


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.floats(0.0, 2.0))
def test_a_plain_step_has_the_bits_of_its_formula(sizes: list[int], lr_scale: float) -> None:
    """In this order of float32 operations: another rule's local step can be compared by bits."""
    part = make_part(sizes)
    before = plain(part.weights).copy()
    grad = np.random.default_rng(8).standard_normal(before.size, np.float32)
    PlainSGD(lr_scale).update(part, torch.from_numpy(grad))
    for (start, stop), group in zip(part.segments.bounds, part.segments.groups, strict=True):
        lr, decay = np.float32(lr_scale * part.hyper[group, 0]), np.float32(part.hyper[group, 3])
        w, g = before[start:stop], grad[start:stop]
        sign = np.float32(-1.0 if group == 1 else 1.0)  # The second group maximizes.
        np.testing.assert_array_equal(
            plain(part.weights)[start:stop], w - lr * (sign * g + decay * w)
        )


def test_a_plain_step_by_hand() -> None:
    part = make_part([1])
    part.weights.fill_(1.0)
    part.hyper = np.array([[0.5, 0.9, 0.0, 0.25, 0.0, 0.0]])
    PlainSGD(lr_scale=0.5).update(part, torch.full((5,), 0.75))
    # 1 - 1/4 * (3/4 + 1/4 * 1); the momentum is the shard's and has no part in it.
    assert part.weights.tolist() == [1.0, 1.0, 0.75, 1.0, 1.0]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 9))
def test_the_secant_follows_its_formula_in_any_layout(sizes: list[int], num_updates: int) -> None:
    part = make_part(sizes)
    numel = len(part.weights)
    rng = np.random.default_rng(9)
    old, new, grad = (rng.standard_normal(numel, np.float32) for _ in range(3))
    local = Secant(alpha=1.25, beta=0.75, lr_scale=0.5)
    for version, pulled in ((2, old), (2 + num_updates, new)):
        local.rebase(part, torch.from_numpy(pulled.copy()), [], version)
        part.version = version
    local.update(part, torch.from_numpy(grad))
    for (start, stop), group in zip(part.segments.bounds, part.segments.groups, strict=True):
        lr, decay = part.hyper[group, 0], part.hyper[group, 3]
        w, w_old, g = (array[start:stop].astype(np.float64) for array in (new, old, grad))
        sync = ((1 - lr * decay) ** num_updates * w_old - w) / (num_updates * lr)
        own = -g if group == 1 else g
        wanted = w - 0.5 * lr * (1.25 * own + 0.75 * sync + decay * w)
        np.testing.assert_allclose(plain(part.weights)[start:stop], wanted, rtol=1e-5, atol=1e-6)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 9))
def test_glu_follows_its_formula_in_any_layout(sizes: list[int], steps: int) -> None:
    part = make_part(sizes)
    rng = np.random.default_rng(9)
    local = GLU(alpha=1.25, beta=0.75, lr_scale=0.5, steps=steps)
    before = plain(part.weights).astype(np.float64)
    for pull in (False, False, True):
        if pull:
            pulled = torch.from_numpy(rng.standard_normal(len(part.weights), np.float32))
            local.rebase(part, pulled, [], part.version + 1)
        weights = plain(part.weights).astype(np.float64)
        grad = rng.standard_normal(len(weights), np.float32)
        local.update(part, torch.from_numpy(grad))
        for (start, stop), group in zip(part.segments.bounds, part.segments.groups, strict=True):
            lr, decay = 0.5 * part.hyper[group, 0], part.hyper[group, 3]
            w, p, g = (array[start:stop] for array in (weights, before, grad))
            sync = ((1 - lr * decay) * p - w) / (steps * lr)
            own = -g if group == 1 else g
            wanted = w - lr * (1.25 * own + 0.75 * sync + decay * w)
            np.testing.assert_allclose(plain(part.weights)[start:stop], wanted, 1e-4, 1e-5)
        before = weights


@pytest.mark.parametrize(
    ("name", "arguments", "named"),
    [
        ("sgd", {"lr_scale": -1.0}, "sgd.lr_scale is -1.0"),
        ("glu", {"alpha": float("nan")}, "glu.alpha is nan"),
        ("glu", {"beta": -0.5}, "glu.beta is -0.5"),
        ("glu", {"lr_scale": 2e6}, "glu.lr_scale is 2000000.0"),
        ("glu", {"divisor": -1.0}, "glu.divisor is -1.0"),
        ("secant", {"beta": -0.5}, "secant.beta is -0.5"),
        ("mirror", {"mirror": "both"}, "mirror.mirror is 'both', must be one of exact, kept"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(name: str, arguments: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_local_update(name, arguments)


@pytest.mark.parametrize("name", LOCAL_UPDATES)
def test_every_local_update_takes_its_own_of_all_arguments(name: str) -> None:
    every = {"lr_scale": 0.5, "alpha": 1.0, "beta": 0.25, "mirror": "kept", "steps": 5}
    local = make_local_update(name, every)
    assert local.name == name
    assert not local.pulls_state
    taken = vars(local).keys() & every.keys()
    assert {key: getattr(local, key) for key in taken} == {key: every[key] for key in taken}
    assert taken or name == "none"
