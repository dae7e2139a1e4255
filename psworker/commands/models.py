"""Models known by name, and those of a user's own factory.

Parameters of the convolutional networks have torchvision's names and order, with its defaults.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from pscore.errors import ConfigError
from psworker.commands.demo.train import LeNet

CLASSES = 1000  # Classes of ImageNet.
VOCABULARY = 50257
CONTEXT = 1024


class Bottleneck(nn.Module):
    """A residual block: 1 x 1, 3 x 3 with the stride, 1 x 1, and a shortcut."""

    def __init__(self, planes: int, width: int, stride: int) -> None:
        """Makes the block from `planes` to `4 * width` channels."""
        super().__init__()
        self.conv1 = nn.Conv2d(planes, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or planes != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(planes, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns `(n, 4 * width, h / stride, w / stride)` for `(n, planes, h, w)`."""
        found = self.relu(self.bn1(self.conv1(inputs)))
        found = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(found)))))
        shortcut = inputs if self.downsample is None else self.downsample(inputs)
        result: torch.Tensor = self.relu(found + shortcut)
        return result


def _residual_layer(planes: int, width: int, num_blocks: int, stride: int) -> nn.Sequential:
    blocks = [Bottleneck(planes, width, stride)]
    blocks += [Bottleneck(4 * width, width, 1) for _ in range(num_blocks - 1)]
    return nn.Sequential(*blocks)


class ResNet50(nn.Module):
    """ResNet-50: 161 tensors, 25,557,032 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = _residual_layer(64, 64, 3, 1)
        self.layer2 = _residual_layer(256, 128, 4, 2)
        self.layer3 = _residual_layer(512, 256, 6, 2)
        self.layer4 = _residual_layer(1024, 512, 3, 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2048, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns `(n, 1000)` for `(n, 3, h, w)`."""
        found = self.maxpool(self.relu(self.bn1(self.conv1(inputs))))
        found = self.layer4(self.layer3(self.layer2(self.layer1(found))))
        result: torch.Tensor = self.fc(self.avgpool(found).flatten(1))
        return result


class Convolutional(nn.Module):
    """AlexNet and VGG: `features`, `avgpool` to a square, and `classifier`."""

    def __init__(self, features: Sequence[nn.Module], side: int, head: Sequence[nn.Module]) -> None:
        """Joins the layers of both parts; `side` is that of the square."""
        super().__init__()
        self.features = nn.Sequential(*features)
        self.avgpool = nn.AdaptiveAvgPool2d(side)
        self.classifier = nn.Sequential(*head)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns `(n, 1000)` for `(n, 3, h, w)`."""
        result: torch.Tensor = self.classifier(self.avgpool(self.features(inputs)).flatten(1))
        return result


def alexnet() -> Convolutional:
    """Returns AlexNet: 16 tensors, 61,100,840 elements."""
    features: list[nn.Module] = []
    for planes, width, kernel, stride, padding, pools in (
        (3, 64, 11, 4, 2, True),
        (64, 192, 5, 1, 2, True),
        (192, 384, 3, 1, 1, False),
        (384, 256, 3, 1, 1, False),
        (256, 256, 3, 1, 1, True),
    ):
        features += [nn.Conv2d(planes, width, kernel, stride, padding), nn.ReLU(inplace=True)]
        features += [nn.MaxPool2d(3, 2)] if pools else []
    head = [nn.Dropout(), nn.Linear(256 * 36, 4096), nn.ReLU(inplace=True)]
    head += [nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Linear(4096, CLASSES)]
    return Convolutional(features, 6, head)


def vgg16() -> Convolutional:
    """Returns VGG-16: 32 tensors, 138,357,544 elements."""
    features: list[nn.Module] = []
    planes = 3
    for width, number in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(number):
            features += [nn.Conv2d(planes, width, 3, padding=1), nn.ReLU(inplace=True)]
            planes = width
        features.append(nn.MaxPool2d(2))
    head = [nn.Linear(512 * 49, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    head += [nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, CLASSES)]
    return Convolutional(features, 7, head)


class PlacedTokens(nn.Module):
    """The sum of a token's and a position's embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, width)
        self.wpe = nn.Embedding(CONTEXT, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns `(n, t, width)` for `(n, t)` int64."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        result: torch.Tensor = self.wte(tokens) + self.wpe(places)
        return result


class Attention(nn.Module):
    """Causal attention of several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns `(n, t, width)` for `(n, t, width)`."""
        parts = self.c_attn(inputs).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: torch.Tensor = self.c_proj(found.transpose(1, 2).flatten(2))
        return result


class Residual(nn.Module):
    """A layer behind a norm, added to its input."""

    def __init__(self, width: int, layer: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layer = layer

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns `(n, t, width)` for `(n, t, width)`."""
        result: torch.Tensor = inputs + self.layer(self.norm(inputs))
        return result


def gpt2(
    width: int = 768, layers: int = 12, heads: int = 12, *, is_tied: bool = True
) -> nn.Sequential:
    """Returns a GPT-2, by default the small one: 124,439,808 elements.

    Args:
        width: Elements of a token's vector.
        heads: Heads of a block's attention.
        is_tied: Whether the head uses the table of the embedding, as in GPT-2. Stages of a pipeline
            cannot share a tensor: there the head has its own, of 38.6 M elements more.
    """
    blocks: list[nn.Module] = []
    for _ in range(layers):
        wide = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )
        blocks += [Residual(width, Attention(width, heads)), Residual(width, wide)]
    embedding, head = PlacedTokens(width), nn.Linear(width, VOCABULARY, bias=False)
    if is_tied:
        head.weight = embedding.wte.weight
    return nn.Sequential(embedding, *blocks, nn.LayerNorm(width), head)


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model known by name, and the shape of one sample."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    vocabulary: int = 0  # Vocabulary of integer inputs; 0: they are float32.
    # The same for a pipeline, whose stages share no tensor; None: `make` returns such a model.
    make_for_stages: Callable[[], nn.Module] | None = None


IMAGE = (3, 224, 224)
GPT2 = {"gpt2-medium": (1024, 24, 16), "gpt2-large": (1280, 36, 20), "gpt2-xl": (1600, 48, 25)}
MODELS = {
    "alexnet": KnownModel(alexnet, IMAGE),
    "gpt2": KnownModel(gpt2, (CONTEXT,), VOCABULARY, partial(gpt2, is_tied=False)),
    **{
        name: KnownModel(
            partial(gpt2, *sizes), (CONTEXT,), VOCABULARY, partial(gpt2, *sizes, is_tied=False)
        )
        for name, sizes in GPT2.items()
    },
    "lenet": KnownModel(LeNet, (1, 28, 28)),
    "resnet50": KnownModel(ResNet50, IMAGE),
    "vgg16": KnownModel(vgg16, IMAGE),
}


def make_model(model: str, device: str = "cpu", *, for_stages: bool = False) -> nn.Module:
    """Returns a model known by name, or the result of `module:factory`.

    Args:
        model: One of `MODELS`, or `module:factory`.
        device: Device of its parameters, if it is known by name; `meta`: without memory.
        for_stages: Whether it is to be cut into stages, if it is known by name.

    Raises:
        ConfigError: There is no such model, or the factory does not return one.
    """
    if model in MODELS:
        known = MODELS[model]
        make = (known.make_for_stages if for_stages else None) or known.make
        with torch.device(device):
            return make()
    module_name, colon, factory_name = model.partition(":")
    if not colon:
        names = ", ".join(sorted(MODELS))
        raise ConfigError(f"model is {model!r}, must be one of {names}, or module:factory")
    with _users_code(model):
        return _make(model, module_name, factory_name)


@contextlib.contextmanager
def _users_code(model: str) -> Iterator[None]:
    """Turns an exception of the user's module or factory into one sentence."""
    sys.path.insert(0, os.getcwd())  # As `python -m` does.
    try:
        yield
    except ConfigError:
        raise
    except Exception as problem:
        cause = f"{type(problem).__name__}: {problem}"
        raise ConfigError(f"model {model!r} cannot be made without arguments: {cause}") from problem
    finally:
        sys.path.pop(0)


def _make(model: str, module_name: str, factory_name: str) -> nn.Module:
    factory = getattr(importlib.import_module(module_name), factory_name, None)
    if not callable(factory):
        raise ConfigError(f"module {module_name!r} has no function or class {factory_name!r}")
    module = factory()
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{model!r} returns {module!r:.80}, must return a torch module")
    for parameter in module.parameters():
        _ = parameter.shape  # A lazy parameter raises: it has none yet.
    return module
