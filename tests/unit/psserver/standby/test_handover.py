"""Every order of steps, lost answers and kills of a move: one process serves, and nothing is lost.

The machines are those of psserver/standby; their drivers here are their durable marks and one
variable for the content of the journals. Mutants show that the checks can fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from pscore.errors import RemoteProtocolError
from psserver.standby.handover import Giver, Giving, Taker, Taking

MOVE = "m"
KILLS_MAX = 3
UPDATES_MAX = 4
MUTANTS = (
    "serves after it gave", "begins without all", "followed before all", "forgets the mark",
    "answers before the other has it",
)  # fmt: skip


@dataclass(frozen=True)
class World:
    """Both processes: their memory, and the marks that a kill leaves."""

    giver: Giver = Giver.SERVING
    taker: Taker = Taker.EMPTY
    given: bool = False  # The giver's mark.
    prepared: bool = False  # The taker's marks.
    taken: bool = False
    here: int = 1  # Updates in the giver's journal.
    there: int = 0  # In the taker's.
    is_followed: bool = False  # Answers wait until the taker has their changes.
    acknowledged: int = 1
    kills: int = 0


def serving(world: World, mutant: str) -> tuple[bool, bool]:
    giver = Giving(world.giver).serves
    if mutant == "serves after it gave":
        giver = giver or world.giver is Giver.GIVEN
    return giver, world.taker is Taker.SERVING


def following(world: World, mutant: str) -> Iterator[World]:
    """Yields the worlds after one more event."""
    here, there = serving(world, mutant)
    if world.here < UPDATES_MAX and here:
        yield replace(world, here=world.here + 1)
    if world.acknowledged < world.here and here:
        has_it = world.there == world.here or mutant == "answers before the other has it"
        if has_it or not world.is_followed:
            yield replace(world, acknowledged=world.acknowledged + 1)
    if world.acknowledged < UPDATES_MAX and there:
        newest = world.there + 1
        yield replace(world, there=newest, acknowledged=max(world.acknowledged, newest))
    yield from moved_on(world, mutant)
    if mutant == "begins without all" and world.taker is Taker.TAKING:
        yield replace(world, taker=Taker.SERVING, taken=True)
    if world.giver in (Giver.COPYING, Giver.FOLLOWED, Giver.FROZEN):
        giving = Giving(world.giver)
        giving.give_up()
        yield replace(world, giver=giving.phase, is_followed=False)
    if world.kills < KILLS_MAX:
        again = Giving.resumed(is_given=world.given).phase
        yield replace(world, giver=again, is_followed=False, kills=world.kills + 1)
        resumed = Taking.resumed(MOVE if world.prepared else "", MOVE if world.taken else "")
        yield replace(world, taker=resumed.phase, kills=world.kills + 1)


def moved_on(world: World, mutant: str) -> Iterator[World]:
    """Yields the worlds after the giver's next step."""
    giving, taking = Giving(world.giver), Taking(world.taker, MOVE)
    if world.giver is Giver.SERVING and world.taker is not Taker.SERVING:
        giving.start()
        taking.offer(MOVE, has_jobs=False)
        yield replace(world, giver=giving.phase, taker=taking.phase, prepared=False, there=0)
    if world.giver in (Giver.COPYING, Giver.FOLLOWED) and world.taker is Taker.TAKING:
        yield replace(world, there=world.here)
    has_all = world.there == world.here or mutant == "followed before all"
    if world.giver is Giver.COPYING and has_all:
        giving.copied()
        yield replace(world, giver=giving.phase, is_followed=True)
    if world.giver is Giver.FOLLOWED:
        giving.freeze()
        yield replace(world, giver=giving.phase)
    if world.giver is Giver.FROZEN and world.taker is Taker.TAKING:
        yield from frozen(world, giving, taking, mutant)
    if world.giver is Giver.GIVEN:
        yield from begun(world, giving, taking)


def frozen(world: World, giving: Giving, taking: Taking, mutant: str) -> Iterator[World]:
    """Yields the worlds after the last pieces, and after the gift."""
    if world.there != world.here:
        yield replace(world, there=world.here)
    if world.there == world.here:
        taking.prepare(MOVE)
        done = replace(world, taker=taking.phase, prepared=True)
        yield done  # The answer is lost, and the giver gives up or is killed.
        giving.give()
        yield replace(done, giver=giving.phase, given=mutant != "forgets the mark")


def begun(world: World, giving: Giving, taking: Taking) -> Iterator[World]:
    """Yields the worlds after `begin`, with and without its answer."""
    try:
        taking.begin(MOVE)
    except RemoteProtocolError:
        return
    done = replace(world, taker=taking.phase, prepared=False, taken=True)
    yield done
    giving.begun()
    yield replace(done, giver=giving.phase)


def problems(mutant: str = "") -> set[str]:
    """Returns what goes wrong in any order of events."""
    found: set[str] = set()
    seen, left = {World()}, [World()]
    while left:
        world = left.pop()
        here, there = serving(world, mutant)
        if here and there:
            found.add("two processes serve")
        if there and world.there < world.acknowledged:
            found.add("an acknowledged update is lost")
        if world.is_followed and world.there < world.acknowledged:
            found.add("an answered update is not on both sides")
        if here and world.here < world.acknowledged:
            found.add("an acknowledged update is lost")
        if found:
            return found
        for other in following(world, mutant):
            if other not in seen:
                seen.add(other)
                left.append(other)
    ends = [world for world in seen if world.giver is Giver.MOVED]
    assert ends
    assert all(world.taker in (Taker.SERVING, Taker.TAKING) or world.kills for world in ends)
    return found


def test_no_order_of_events_makes_two_processes_serve_or_loses_an_update() -> None:
    assert problems() == set()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_noticed(mutant: str) -> None:
    assert problems(mutant)


def test_pieces_of_another_move_and_processes_with_jobs_are_refused() -> None:
    taking = Taking.resumed("", "")
    with pytest.raises(RemoteProtocolError, match="jobs of its own"):
        taking.offer("a", has_jobs=True)
    taking.offer("a", has_jobs=False)
    for wrong in (lambda: taking.require("b"), lambda: taking.begin("a")):
        with pytest.raises(RemoteProtocolError, match="taking"):
            wrong()
    giving = Giving.resumed(is_given=True)
    with pytest.raises(RemoteProtocolError, match="given"):
        giving.start()
