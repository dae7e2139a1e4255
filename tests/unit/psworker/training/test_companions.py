"""Tables beside a model's own: found by the rooms that have registered, none by name."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pscore.errors import ConfigError
from pscore.rules import ASGD, SSGD, DiLoCo
from pscore.rules.base import Rule
from pscore.types import Origin
from psworker.job.companions import Companion, Declare
from psworker.training import companions
from psworker.training.table import Agree


class Place:
    """A place in a job, as far as companions use it."""

    session = None

    def __init__(self) -> None:
        self.closers: list[Any] = []

    def at_close(self, closer: Any) -> None:
        self.closers.append(closer)


class Steps:
    """A companion that notes what it was told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **options: self.told.append((name, *given, *options.values()))


def join(place: Place, optimizers: object) -> list[Companion]:
    declare = companions.find_companions(
        cast(Any, optimizers), [], SSGD(), cast(Any, place), "model", lambda call: call()
    )
    return declare()


def test_each_room_gets_the_optimizers_and_each_companion_ends_with_the_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Any] = []
    found = [Steps(), Steps()]

    def of_room(number: int, optimizers: Any) -> Declare:
        given.append(optimizers)
        return lambda: [cast(Companion, found[number])]

    rooms = [lambda first, *_, number=number: of_room(number, first) for number in range(2)]
    monkeypatch.setattr(companions, "FINDERS", rooms)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    place = Place()
    joined = join(place, optimizer)
    for close in place.closers:
        close()
    assert given == [[optimizer]] * 2
    assert joined == found
    assert [one.told for one in found] == [[("end",)]] * 2


def test_an_optimizer_of_tables_that_no_room_has_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(companions, "FINDERS", [])
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ConfigError, match="this model has none"):
        join(Place(), optimizer)
    assert join(Place(), None) == []


class Asked:
    """A companion at a step of its own, which notes with which one it begins."""

    def __init__(self, step: int, order: list[Any], by_step: bool) -> None:
        self.step, self.order, self.by_step = step, order, by_step

    def ask(self) -> int:
        self.order.append("asked")
        return self.step

    def begin_at(self, step: int | None) -> Callable[[], None]:
        self.order.append(step)
        return lambda: self.order.append("answered")


def begin(rule: Rule, expected: int, steps: list[int], *, by_step: bool = True) -> list[Any]:
    """Begins with a table whose slices expect a push; returns what happened, in order."""
    order: list[Any] = []
    exchange = SimpleNamespace(origin=Origin(clock=30, step=100))
    table = cast(Any, SimpleNamespace(rule=rule, exchange=exchange))

    def begin_table(agree: Agree) -> None:
        order.append("pulled")
        order.append(agree(expected))

    found = [Asked(step, order, by_step) for step in steps]
    companions.begin_together(table, cast(Any, found), begin_table)
    return order


def test_a_model_and_its_companions_begin_with_the_newest_step_of_any() -> None:
    """All are asked before any is told: the others wait for this worker from an answer on."""
    assert begin(SSGD(), 32, [101, 104]) == [
        *("asked", "asked", "pulled"),
        *(104, 104, 34),
        *("answered", "answered"),
    ]
    assert begin(SSGD(), 39, [101]) == ["asked", "pulled", 109, 39, "answered"]
    assert begin(SSGD(), 32, []) == ["pulled", 32]


def test_asynchronous_companions_begin_with_the_step_of_the_model() -> None:
    expected = ["asked", "pulled", 104, 34, "answered"]
    assert begin(ASGD(), 32, [104], by_step=False) == expected
    assert begin(ASGD(), 34, [101], by_step=False) == expected
    assert begin(SSGD(), 34, [101], by_step=False) == expected
    assert begin(SSGD(), 34, [109], by_step=False) == expected


def test_companions_begin_by_themselves_beside_rounds_and_backup_workers() -> None:
    for rule in (DiLoCo(), SSGD(backup=1)):
        assert begin(rule, 32, [104]) == ["pulled", 32, "asked", None, "answered"]
