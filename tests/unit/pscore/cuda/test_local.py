"""The CUDA local updates move the weights as the CPU's do, bit for bit: run here as C++."""

from typing import Any

import numpy as np
import pytest
import torch

from pscore.cuda.encoders import Launch
from pscore.cuda.local import DeviceKernels
from pscore.local import LocalSlice
from pscore.local.base import ElementwiseUpdate
from pscore.local.dc import DC, AdaptiveDC
from pscore.local.glu import GLU
from pscore.local.mirror import Mirror
from pscore.local.secant import Secant
from pscore.local.sgd import PlainSGD
from pscore.optimizers import OPTIMIZERS
from pscore.optimizers.base import DeviceStep, SliceStep
from pscore.types import SegmentTable
from tests.unit.pscore.cuda.shim import build, launcher

NUMEL = 3000
COLUMNS = {"weight_decay": 0.01, "momentum": 0.9, "lr": 0.05}


@pytest.fixture(scope="module")
def launch() -> Launch:
    return launcher(build())


@pytest.fixture
def started() -> list[str]:
    """The names of the kernels that were started."""
    return []


@pytest.fixture
def kernels(launch: Launch, started: list[str]) -> DeviceKernels:
    def counted(name: str, num_blocks: int, arguments: tuple[Any, ...]) -> None:
        started.append(name)
        launch(name, num_blocks, arguments)

    return DeviceKernels(counted)


def normal(seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(NUMEL).astype(np.float32))


def parts(
    nesterov: float = 0.0, momentum: float = 0.9, optimizer_name: str = "sgd"
) -> list[LocalSlice]:
    """Returns two equal slices of three segments, one without a gradient, two groups."""
    made = []
    for _ in range(2):
        optimizer = OPTIMIZERS[optimizer_name]()
        names = optimizer.hyper_names
        hyper = np.zeros((2, len(names)))
        for group, (decay, maximize) in enumerate(((0.01, 0.0), (0.0, 1.0))):
            values = {"lr": 0.05, "momentum": momentum, "dampening": 0.1, "nesterov": nesterov}
            values |= {"weight_decay": decay, "maximize": maximize}
            values |= {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
            hyper[group] = [values[name] for name in names]
        bounds = np.array([(0, 1000), (1008, 2200), (2208, NUMEL)], dtype=np.int64)
        table = SegmentTable(bounds=bounds, groups=np.array([0, 1, 0], dtype=np.int64))
        made.append(
            LocalSlice(
                weights=normal(0),
                segments=table,
                optimizer=optimizer,
                hyper=hyper,
                active=np.array([1, 1, 0], dtype=np.int64),
                counts=np.zeros(3, dtype=np.int64),
            )
        )
    return made


def assert_same(first: Any, second: Any) -> None:
    assert np.array_equal(first.numpy().view(np.uint32), second.numpy().view(np.uint32))


def assert_same_slices(first: LocalSlice, second: LocalSlice) -> None:
    """Asserts equal bits of the weights, and of the arrays of the local update in each segment."""
    assert_same(first.weights, second.weights)
    for name, array in first.state.items():
        for start, stop in first.segments.bounds.tolist():
            assert_same(array[start:stop], second.state[name][start:stop])


UPDATES = {
    "sgd": PlainSGD(lr_scale=0.7),
    "glu": GLU(alpha=2.0, beta=0.5, lr_scale=0.9, steps=3),
    "glu with a divisor": GLU(lr_scale=0.9, local_warmup=2, divisor=0.3),
    "secant": Secant(alpha=2.0, beta=0.5, lr_scale=0.9),
    "dc": DC(0.9),
    "dc_adaptive": AdaptiveDC(0.9, decay=0.5),
}


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES.keys())
def test_steps_and_pulls_are_the_cpus(
    kernels: DeviceKernels, started: list[str], update: ElementwiseUpdate
) -> None:
    host, other = parts()
    other.kernels = kernels
    for step in range(4):
        for part in (host, other):
            if step != 1:
                update.rebase(part, normal(5 + step), [], 4 * step)
                part.version = 4 * step
            update.update(part, normal(step + 1))
            part.num_made += 1
        assert_same_slices(host, other)
    assert started.count(update.device_kernel) == 4


@pytest.mark.parametrize(("nesterov", "momentum"), [(0.0, 0.9), (1.0, 0.9), (0.0, 0.0)])
def test_a_mirrored_sgd_step_is_the_cpus(
    kernels: DeviceKernels, nesterov: float, momentum: float
) -> None:
    host, other = parts(nesterov, momentum)
    buffers = [torch.zeros(NUMEL), torch.zeros(NUMEL)]
    for step in range(3):
        weights, grad = host.weights.numpy(), normal(step + 1)
        host.optimizer.step(
            SliceStep(
                weights,
                weights,
                grad.numpy(),
                1.0,
                [buffers[0].numpy()],
                host.segments,
                host.counts,
                host.active,
                host.hyper,
            )
        )
        rest = (other.segments, other.counts, other.active, other.hyper)
        kernels.sgd_step(DeviceStep(other.weights, grad, [buffers[1]], *rest))
        assert_same(host.weights, other.weights)
        assert_same(buffers[0], buffers[1])
    assert host.counts.tolist() == other.counts.tolist() == [3, 3, 0]


@pytest.mark.parametrize("name", ["adam", "adamw", "amsgrad", "amsgradw"])
def test_a_mirrored_adam_step_is_the_cpus(
    kernels: DeviceKernels, started: list[str], name: str
) -> None:
    host, other = parts(optimizer_name=name)
    other.kernels = kernels
    update = Mirror("kept")
    for step in range(12):
        for part in (host, other):
            part.active[2] = step % 3 == 0
            update.update(part, normal(step + 1))
        assert_same(host.weights, other.weights)
        for key, value in host.state.items():
            assert_same(value, other.state[key])
        assert host.counts.tolist() == other.counts.tolist()
    assert started == ["adam"] * 12  # One for the slice.


def test_a_slice_is_one_kernel_whose_table_is_copied_when_it_changes(
    kernels: DeviceKernels, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    real = torch.frombuffer

    def frombuffer(data: bytearray, **how: Any) -> torch.Tensor:
        copied.append(len(data))
        return real(data, **how)

    monkeypatch.setattr(torch, "frombuffer", frombuffer)
    host, other = parts()
    other.kernels = kernels
    for step in range(6):
        for part in (host, other):
            if step == 4:
                part.hyper = 0.5 * part.hyper
            PlainSGD(lr_scale=0.7).update(part, normal(step + 1))
        assert_same(host.weights, other.weights)
    assert started == ["local_sgd"] * 6
    assert copied == [2 * 48, 2 * 48]
    other.active[:] = 0
    PlainSGD().update(other, normal(1))
    assert len(started) == 6  # Nothing has a gradient.
