"""Every order of steps, lost answers and kills of a move: one process serves, and nothing is lost.

The machines are those of psserver/standby; their drivers here are their durable marks and one
variable for the content of the journals. Mutants show that the checks can fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from pscore.errors import RemoteProtocolError
from psserver.standby.handover import Giver, Giving, Taker, Taking, is_free

MOVE = "m"
KILLS_MAX = 3
UPDATES_MAX = 4
NUMBERS_MAX = 1
MUTANTS = (
    "serves after it gave", "begins without all", "followed before all", "forgets the mark",
    "answers before the other has it", "promotes what lacks something", "does not ask the standby",
    "goes on beside its standby", "keeps its number",
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
    has_standby: bool = False  # The giver's mark.
    is_off: bool = False  # The giver's machine, and a person knows it.
    number: int = 0  # By which workers know the shard.
    number_there: int = 0  # By which the taker would serve.


def serving(world: World, mutant: str) -> tuple[bool, bool]:
    """Returns which of the two answer workers."""
    giver = Giving(world.giver).serves and not world.is_off
    if world.is_followed:  # Each answer waits until the other has the change.
        giver = giver and world.taker in (Taker.TAKING, Taker.FOLLOWING)
    if mutant == "serves after it gave":
        giver = giver or world.giver is Giver.GIVEN
    return giver, world.taker is Taker.SERVING and world.number == world.number_there


def following(world: World, mutant: str) -> Iterator[World]:
    """Yields the worlds after one more event."""
    if world.is_off:
        yield from there_alone(world, mutant)
        yield from parted(world, mutant)
        return
    here, _ = serving(world, mutant)
    if world.here < UPDATES_MAX and here:
        yield replace(world, here=world.here + 1)
    if world.acknowledged < world.here and here:
        has_it = world.there == world.here or mutant == "answers before the other has it"
        if has_it or not world.is_followed:
            yield replace(world, acknowledged=world.acknowledged + 1)
    yield from there_alone(world, mutant)
    yield from moved_on(world, mutant)
    if mutant == "begins without all" and world.taker is Taker.TAKING:
        yield replace(world, taker=Taker.SERVING, taken=True)
    yield from parted(world, mutant)
    if world.kills < KILLS_MAX:
        asks = world.has_standby and mutant != "does not ask the standby"
        again = Giving.resumed(is_given=world.given, has_standby=asks).phase
        killed = replace(world, giver=again, is_followed=False, kills=world.kills + 1)
        yield killed
        yield replace(killed, is_off=True)
        resumed = Taking.resumed(MOVE if world.prepared else "", MOVE if world.taken else "")
        yield replace(world, taker=resumed.phase, kills=world.kills + 1)


def there_alone(world: World, mutant: str) -> Iterator[World]:
    """Yields the world after an update that the taker counts and answers."""
    if world.acknowledged < UPDATES_MAX and serving(world, mutant)[1]:
        newest = world.there + 1
        yield replace(world, there=newest, acknowledged=max(world.acknowledged, newest))


def parted(world: World, mutant: str) -> Iterator[World]:
    """Yields the worlds in which the giver goes on alone, or the taker is promoted."""
    giving, taking = Giving(world.giver), Taking(world.taker, MOVE)
    if world.is_off:
        yield replace(world, is_off=False)
        lacks = mutant == "promotes what lacks something" and world.taker is Taker.TAKING
        if world.taker is Taker.FOLLOWING or lacks:
            taking.phase = Taker.FOLLOWING
            taking.prepare(MOVE)
            yield replace(world, taker=taking.phase, prepared=True)
            taking.begin(MOVE)
            yield replace(world, taker=taking.phase, taken=True)
        return
    if world.giver not in (Giver.COPYING, Giver.FOLLOWED, Giver.FROZEN, Giver.ASKING):
        return
    alone = replace(world, giver=Giver.SERVING, is_followed=False, has_standby=False)
    if not world.has_standby:
        giving.give_up()
        yield replace(alone, giver=giving.phase)
        return
    if not taking.release() or mutant == "goes on beside its standby":
        giving.give_up()
        yield replace(alone, giver=giving.phase, taker=taking.phase)
        # It cannot be asked: only if no person has promoted it is the giver to go on.
        number = world.number + (mutant != "keeps its number")
        if number <= NUMBERS_MAX:
            yield replace(alone, giver=giving.phase, number=number)
    else:
        giving.lose()
        yield replace(world, giver=giving.phase, given=True, is_followed=False)


def moved_on(world: World, mutant: str) -> Iterator[World]:
    """Yields the worlds after the giver's next step."""
    giving, taking = Giving(world.giver), Taking(world.taker, MOVE)
    if world.giver is Giver.SERVING and world.taker is not Taker.SERVING:
        giving.start()
        taking.offer(MOVE, has_jobs=False)
        offered = replace(world, giver=giving.phase, taker=taking.phase, prepared=False, there=0)
        yield replace(offered, number_there=world.number)
    takes = world.taker in (Taker.TAKING, Taker.FOLLOWING)
    if world.giver in (Giver.COPYING, Giver.FOLLOWED) and takes:
        yield replace(world, there=world.here)
    has_all = world.there == world.here or mutant == "followed before all"
    if world.giver is Giver.COPYING and has_all:
        giving.copied()
        yield replace(world, giver=giving.phase, is_followed=True)
    if world.giver is Giver.FOLLOWED:
        if world.has_standby and world.taker is Taker.TAKING:
            taking.follow(MOVE)
            yield replace(world, taker=taking.phase)
        yield replace(world, has_standby=True)
        giving.freeze()
        yield replace(world, giver=giving.phase)
    if world.giver is Giver.FROZEN and takes:
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
        is_marked = mutant != "forgets the mark"
        yield replace(done, giver=giving.phase, given=is_marked, has_standby=False)


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


@pytest.mark.parametrize("taker", Taker)
@pytest.mark.parametrize("giver", [Giver.SERVING, Giver.GIVEN, Giver.MOVED])
def test_a_place_without_the_shard_stands_by_unless_the_shard_is_on_its_way(
    giver: Giver, taker: Taker
) -> None:
    """The process that sends a copy may be killed, and know nothing of it: it is asked again."""
    comes = taker in (Taker.FOLLOWING, Taker.PREPARED)
    is_moved, is_new = giver is Giver.MOVED, giver is Giver.SERVING and taker is not Taker.SERVING
    state = Giving(giver), Taking(taker)
    assert is_free(*state, begins_here=True, has_jobs=False) is (is_moved and not comes)
    assert is_free(*state, begins_here=False, has_jobs=True) is (is_moved and not comes)
    wanted = (is_moved or is_new) and not comes
    assert is_free(*state, begins_here=False, has_jobs=False) is wanted
    state[1].is_ending = True
    assert not is_free(*state, begins_here=False, has_jobs=False)
