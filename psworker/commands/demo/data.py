"""Fashion-MNIST (Xiao et al., arXiv:1708.07747) from its gzipped idx files, without a download."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pscore.errors import ConfigError

NUM_TRAINED = 8_000  # Images of the 10,000 to train on, without a training part.
SIDE = 28  # Pixels.
NUM_CLASSES = 10
MEAN, DEVIATION = 0.2860, 0.3530  # Mean and deviation of the training part's pixels, in 0..1.
NBYTES_MAX = 1 << 28  # The largest real file has 47,040,016 bytes.
SOURCE = "https://github.com/zalandoresearch/fashion-mnist"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Images and their labels."""

    images: torch.Tensor  # (number, 1, SIDE, SIDE) float32, mean about 0, deviation about 1
    labels: torch.Tensor  # (number,) int64


def find_folder(given: Path | None) -> Path:
    """Returns the folder of the images: `given`, or the one in a clone or in an installed wheel.

    Raises:
        ConfigError: There are no images in it; says which files are looked for.
    """
    cloned = Path(__file__).parents[3] / "examples" / "data"
    shipped = cloned if cloned.is_dir() else Path(__file__).parent / "images"
    folder = shipped if given is None else given
    if not (folder / _file("t10k", "images")).is_file():
        where = "this installation has no images" if given is None else f"none at {given}"
        raise ConfigError(
            f"Fashion-MNIST is needed, and {where}: give a folder that holds "
            f"{_file('t10k', 'images')} and {_file('t10k', 'labels')} (and the train files for "
            f"the full set) with --data; they are at {SOURCE}"
        )
    return folder


def load(folder: Path, num_images: int | None = None) -> tuple[Part, Part]:
    """Returns the training and test images.

    With the published training part that is the published split, 60,000 and 10,000; else the test
    part's first 8,000 and last 2,000.

    Args:
        num_images: Train on the first so many only.

    Raises:
        ConfigError: A file is not what it should be.
    """
    held_back = _read(folder, "t10k")
    if (folder / _file("train", "images")).is_file():
        train, test = _read(folder, "train"), held_back
    else:
        train = Part(images=held_back.images[:NUM_TRAINED], labels=held_back.labels[:NUM_TRAINED])
        test = Part(images=held_back.images[NUM_TRAINED:], labels=held_back.labels[NUM_TRAINED:])
    if num_images is not None:
        train = Part(images=train.images[:num_images], labels=train.labels[:num_images])
    return train, test


def _file(part: str, what: str) -> str:
    return f"{part}-{what}-idx{3 if what == 'images' else 1}-ubyte.gz"


def _read(folder: Path, part: str) -> Part:
    pixels = read_idx(folder / _file(part, "images"), 3)
    labels = read_idx(folder / _file(part, "labels"), 1)
    if pixels.shape[1:] != (SIDE, SIDE) or len(pixels) != len(labels):
        raise ConfigError(
            f"{folder}: {part} has images {list(pixels.shape)} for {len(labels)} labels, must be "
            f"[number, {SIDE}, {SIDE}] and one label for each"
        )
    images = (torch.from_numpy(pixels).float().div_(255.0) - MEAN) / DEVIATION
    return Part(images=images.unsqueeze(1), labels=torch.from_numpy(labels).long())


def read_idx(path: Path, num_dimensions: int) -> np.ndarray:
    """Returns the bytes of a gzipped idx file as an array with `num_dimensions`, uint8.

    Raises:
        ConfigError: It cannot be read, or is not such a file.
    """
    try:
        with gzip.open(path) as file:
            content = file.read(NBYTES_MAX)
    except (OSError, EOFError, zlib.error) as problem:
        raise ConfigError(f"{path} cannot be read: {problem}") from problem
    header_nbytes = 4 * (1 + num_dimensions)
    if len(content) >= header_nbytes:
        magic, *shape = struct.unpack(f">{1 + num_dimensions}I", content[:header_nbytes])
        wanted = 0x0800 + num_dimensions  # 8: unsigned bytes.
        if magic == wanted and math.prod(shape) == len(content) - header_nbytes:
            array = np.frombuffer(content, dtype=np.uint8, offset=header_nbytes)
            return array.reshape(shape).copy()
    raise ConfigError(f"{path} is not an idx file of bytes with {num_dimensions} dimensions")
