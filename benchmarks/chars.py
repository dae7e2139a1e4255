"""A task of text: a small transformer that predicts the next character."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

PART = Path(__file__).parent.parent / "examples" / "data" / "tiny-shakespeare-part.txt"
HELD_OUT = 0.1  # Of the text, at its end.


class Layer(nn.Module):
    """Causal attention and a network of two linear maps, each behind a norm."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `(rows, length, width)`."""
        rows, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(rows, length, 3, self.num_heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Characters in, logits of the next ones out; the embedding is the output's matrix too."""

    def __init__(self, num_characters: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_characters, 64)
        self.place = nn.Parameter(0.02 * torch.randn(length, 64))
        self.layers = nn.Sequential(Layer(64, 4), Layer(64, 4))
        self.norm = nn.LayerNorm(64)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Returns `(rows, length, num_characters)` from `(rows, length)` numbers of characters."""
        x = self.embedding(characters) + self.place[: characters.shape[1]]
        return functional.linear(self.norm(self.layers(x)), self.embedding.weight)


@dataclass(frozen=True)
class Text:
    """A text whose characters are predicted."""

    path: Path = PART  # The file; characters are bytes.
    length: int = 32  # Characters of a row.
    rows: int = 4  # Rows of one worker in one step.
    # Workers with a part of the text each (unlike data); 1: all draw from all of it.
    num_parts: int = 1
    seed: int = 0  # Seed of the model and of the rows.

    @cached_property
    def _numbers(self) -> tuple[torch.Tensor, int]:
        data = np.frombuffer(self.path.read_bytes(), np.uint8)
        kinds, numbers = np.unique(data, return_inverse=True)
        return torch.from_numpy(numbers.astype(np.int64)), len(kinds)

    @property
    def _split(self) -> int:
        return int(len(self._numbers[0]) * (1.0 - HELD_OUT))

    def make_model(self) -> Transformer:
        """Returns the model, with the same weights at each call."""
        torch.manual_seed(self.seed)
        return Transformer(self._numbers[1], self.length)

    def gradient(self, model: nn.Module, rank: int, step: int) -> float:
        """Computes one worker's gradients of one step into `.grad`; returns the loss."""
        rng = np.random.default_rng([self.seed, rank, step])
        room = (self._split - self.length - 1) // self.num_parts
        first = room * (rank % self.num_parts)
        loss = self._loss(model, first + rng.integers(room, size=self.rows))
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def held_out_loss(self, model: nn.Module, num_rows: int = 256) -> float:
        """Returns the mean loss on the end of the text, in nats a character."""
        room = len(self._numbers[0]) - self._split - self.length - 1
        begins = self._split + np.linspace(0, room, num_rows).astype(np.int64)
        with torch.no_grad():
            return float(self._loss(model, begins))

    def _loss(self, model: nn.Module, begins: np.ndarray) -> torch.Tensor:
        rows = torch.stack([self._numbers[0][b : b + self.length + 1] for b in begins.tolist()])
        logits = model(rows[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
