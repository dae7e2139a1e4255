"""The parts of a sharded model reach the processes that push them, and come back."""

import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pscore.partition import make_layout
from pscore.types import TensorSpec
from psworker.group import routes as routing
from psworker.group.routes import Routes

SHAPES = {"a": (7, 5), "b": (3,), "c": (90, 100), "whole": (11,)}


@dataclass
class FakeGroup:
    """A process of a group."""

    rank: int
    size: int


def run(size: int, call: Any) -> None:
    """Calls a function in a thread for each process; an exchange copies between all of them."""
    offers: dict[int, tuple[torch.Tensor, list[int]]] = {}
    meet = threading.Barrier(size)

    class Group(FakeGroup):
        def exchange(self, taken: torch.Tensor, given: torch.Tensor, *counts: list[int]) -> Any:
            offers[self.rank] = given, counts[1]
            meet.wait(200)
            parts = [
                torch.split_with_sizes(given, sent)[self.rank]
                for given, sent in (offers[rank] for rank in range(size))
            ]
            assert [part.numel() for part in parts] == counts[0]
            taken.copy_(torch.cat(parts))
            meet.wait(200)

            class Done:
                def wait(self) -> None:
                    pass

            return Done()

    problems: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            call(cast(Any, Group(rank, size)))
        except BaseException as problem:  # noqa: BLE001 - of another thread
            problems.append(problem)
            meet.abort()

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


def rows(size: int, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Returns the ranges that `torch.chunk` of the first dimension gives; empty ones are 0, 0."""
    row = 1
    for length in shape[1:]:
        row *= length
    step = -(-shape[0] // size)
    cuts = [(min(rank * step, shape[0]), min((rank + 1) * step, shape[0])) for rank in range(size)]
    return [(first * row, last * row) if last > first else (0, 0) for first, last in cuts]


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("round_numel", [1, 1 << 24])
def test_collect_and_spread_are_inverse(
    size: int, round_numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "ROUND_NUMEL", round_numel)
    tensors = [
        TensorSpec(name=name, shape=shape, dtype="float32") for name, shape in SHAPES.items()
    ]
    layout = make_layout(tensors, 2)
    full = [torch.randn(spec.numel) for spec in tensors]
    spans = [
        [
            (0, spec.numel) if spec.name == "whole" else rows(size, spec.shape)[rank]
            for spec in tensors
        ]
        for rank in range(size)
    ]
    flat = torch.zeros(layout.numel)
    for offset, values in zip(layout.offsets, full, strict=True):
        flat[offset : offset + values.numel()] = values
    owned: list[int] = []

    def work(group: Any) -> None:
        routes = Routes(layout, spans, group)
        parts = [
            values[start:stop].clone()
            for values, (start, stop) in zip(full, routes.spans, strict=True)
        ]
        memory = torch.zeros(routes.memory.numel)
        routes.collect(parts, memory)
        for index in routes.own:
            spec, here = layout.slices[index], routes.memory.slices[index]
            assert torch.equal(memory[here.start : here.stop], flat[spec.start : spec.stop])
        back = [torch.full_like(part, torch.nan) for part in parts]
        routes.spread(memory, back)
        for part, again in zip(parts, back, strict=True):
            assert torch.equal(part, again)
        owned.extend(routes.own)

    run(size, work)
    assert sorted(owned) == list(range(len(layout.slices)))


def test_a_slice_is_pushed_by_the_process_that_holds_it() -> None:
    layout = make_layout([TensorSpec(name="large", shape=(4096, 1024), dtype="float32")], 1)
    spans = [[part] for part in rows(2, (4096, 1024))]
    routes = Routes(layout, spans, cast(Any, FakeGroup(0, 2)))
    half = len(layout.slices) // 2
    assert routes.own == list(range(half))
    assert routes.here == routes.own
    assert routes.memory.numel == sum(layout.slices[index].numel for index in routes.own)


def test_a_process_without_a_piece_takes_part_on_the_models_device() -> None:
    """A backend of GPUs refuses tensors of the CPU. The device `meta` stands for a GPU here."""
    device = torch.device("meta")
    shape = (50257, 768)  # The embedding of GPT-2: each round has parts of some processes only.
    layout = make_layout([TensorSpec(name="embedding", shape=shape, dtype="float32")], 1)
    spans = [[part] for part in rows(4, shape)]
    given: list[torch.Tensor] = []

    @dataclass
    class Group(FakeGroup):
        def exchange(self, taken: torch.Tensor, source: torch.Tensor, *counts: object) -> Any:
            given.extend((taken, source))
            return SimpleNamespace(wait=lambda: None)

    for rank in range(4):
        routes = Routes(layout, spans, cast(Any, Group(rank, 4)))
        memory = torch.zeros(routes.memory.numel, device=device)
        (first, last) = spans[rank][0]
        parts = [torch.zeros(last - first, device=device)]
        routes.collect(parts, memory)
        routes.spread(memory, parts)
    assert given
    assert all(tensor.device.type == "meta" for tensor in given)
