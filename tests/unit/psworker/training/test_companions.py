"""Tables beside a model's own: found by the rooms that have registered, none by name."""

from typing import Any, cast

import pytest
import torch

from pscore.errors import ConfigError
from pscore.rules import SSGD
from psworker.job.companions import Companion, Declare
from psworker.training import companions


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
