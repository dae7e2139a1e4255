"""Tasks of the simulated cluster: LeNet on Fashion-MNIST, ResNet-20 on CIFAR-10."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional

from psworker.commands.demo import data

BATCH = 32  # Images of one worker in one step.
CIFAR_MEAN, CIFAR_DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
PADDING = 4  # Pixels that an image may be moved by.


class LeNet(nn.Sequential):
    """The demo's LeNet-5. ReLU stands behind the pooling: the same function, for less work."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 6, 5, padding=2),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(6, 16, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(400, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, data.NUM_CLASSES),
        )


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.stride, self.more = stride, width - width_in

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds the two ways; the short one is padded with zero channels (option A)."""
        y = functional.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        around = x[:, :, :: self.stride, :: self.stride]
        if self.more:
            around = functional.pad(around, (0, 0, 0, 0, 0, self.more))
        return functional.relu(y + around)


class ResNet20(nn.Sequential):
    """ResNet-20 for 32 x 32 images (He et al., arXiv:1512.03385, section 4.2): 269,722 weights."""

    def __init__(self) -> None:
        blocks: list[nn.Module] = []
        width_in = 16
        for width in (16, 32, 64):
            for index in range(3):
                blocks.append(Block(width_in, width, 2 if width > 16 and index == 0 else 1))
                width_in = width
        super().__init__(
            nn.Conv2d(3, 16, 3, 1, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            *blocks,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 10),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model, images, and each worker's share of them at each step."""

    name: str
    model: type[nn.Module]
    train: data.Part
    test: data.Part
    seed: int
    num_workers: int
    augments: bool = False
    batch: int = BATCH

    @property
    def steps_per_epoch(self) -> int:
        """Steps of each worker in one pass over the images."""
        return len(self.train.labels) // (self.batch * self.num_workers)

    def make_model(self) -> nn.Module:
        """Returns the model with the weights of this seed."""
        torch.manual_seed(self.seed)
        return self.model()

    def gradient(self, model: nn.Module, rank: int, step: int) -> float:
        """Runs forward and backward on one worker's share of a joint batch."""
        images, labels = self.minibatch(rank, step)
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.item())

    def minibatch(self, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns images and labels."""
        epoch, number = divmod(step, self.steps_per_epoch)
        order = _order(self.seed, epoch, len(self.train.labels))
        start = (number * self.num_workers + rank) * self.batch
        picked = order[start : start + self.batch]
        images, labels = self.train.images[picked], self.train.labels[picked]
        if self.augments:
            images = moved(images, np.random.default_rng([self.seed, rank, step]))
        return images, labels

    @torch.no_grad()
    def evaluate(self, model: nn.Module, num_images: int | None = None) -> tuple[float, float]:
        """Returns accuracy and loss on the test images, or on the first so many."""
        model.eval()
        right = loss = 0.0
        images, labels = self.test.images[:num_images], self.test.labels[:num_images]
        for part, wanted in zip(images.split(500), labels.split(500), strict=True):
            output = model(part)
            right += (output.argmax(dim=1) == wanted).sum().item()
            loss += functional.cross_entropy(output, wanted, reduction="sum").item()
        model.train()
        return right / len(labels), loss / len(labels)


_ORDERS: dict[tuple[int, int, int], torch.Tensor] = {}


def _order(seed: int, epoch: int, number: int) -> torch.Tensor:
    """Returns the order of the images in one epoch; drawn once."""
    key = (seed, epoch, number)
    if key not in _ORDERS:
        generator = torch.Generator().manual_seed(1000 * seed + epoch)
        _ORDERS[key] = torch.randperm(number, generator=generator)
    return _ORDERS[key]


def moved(images: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """Returns the images, each moved by up to 4 pixels and perhaps mirrored."""
    number, _, height, width = images.shape
    padded = functional.pad(images, (PADDING,) * 4)
    tops, lefts = rng.integers(0, 2 * PADDING + 1, (2, number)).tolist()
    parts = [
        padded[index, :, top : top + height, left : left + width]
        for index, (top, left) in enumerate(zip(tops, lefts, strict=True))
    ]
    result = torch.stack(parts)
    mirrored = torch.from_numpy(rng.random(number) < 0.5)
    result[mirrored] = result[mirrored].flip(-1)
    return result


def fashion(folder: Path | None, seed: int, num_workers: int = 4) -> Task:
    """Returns LeNet on Fashion-MNIST; without a folder, on the images of the repository."""
    train, test = data.load(data.find_folder(folder))
    return Task(
        name="LeNet, Fashion-MNIST",
        model=LeNet,
        train=train,
        test=test,
        seed=seed,
        num_workers=num_workers,
    )


def cifar(path: Path, seed: int, num_workers: int = 4, num_test: int | None = None) -> Task:
    """Returns ResNet-20 on CIFAR-10 from an npz of JPEG files (lossy, so compare only within)."""
    with np.load(path) as arrays:
        train, test = _decoded(arrays, "train"), _decoded(arrays, "test", num_test)
    return Task(
        name="ResNet-20, CIFAR-10",
        model=ResNet20,
        train=train,
        test=test,
        seed=seed,
        num_workers=num_workers,
        augments=True,
    )


def _decoded(arrays: np.lib.npyio.NpzFile, part: str, number: int | None = None) -> data.Part:
    content, ends = arrays[f"{part}_jpeg"].tobytes(), arrays[f"{part}_offsets"]
    labels = arrays[f"{part}_labels"][:number]
    pixels = np.stack(
        [
            np.asarray(Image.open(io.BytesIO(content[ends[i] : ends[i + 1]])))
            for i in range(len(labels))
        ]
    )
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div_(255.0)
    mean = torch.tensor(CIFAR_MEAN).view(3, 1, 1)
    images = images.sub_(mean).div_(torch.tensor(CIFAR_DEVIATION).view(3, 1, 1))
    return data.Part(images=images.contiguous(), labels=torch.from_numpy(labels).long())
