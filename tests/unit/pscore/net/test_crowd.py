"""Which connection goes when there are too many."""

from pscore.net.crowd import SAFE_TICKS, ExchangeStage, OpenExchanges, to_close


def test_the_oldest_of_the_address_with_most_goes() -> None:
    assert to_close([(1, "a"), (2, "b"), (3, "b"), (4, "a"), (5, "b")]) == [2]
    assert to_close([(7, "a")], 3) == [7]
    assert to_close([]) == []


def test_of_equal_addresses_the_oldest_goes() -> None:
    assert to_close([(1, "a"), (2, "b"), (3, "b"), (4, "a")]) == [1]
    assert to_close([(1, "a"), (2, "b"), (3, "b"), (4, "a")], 3) == [1, 2, 3]


def test_one_address_does_not_take_the_places_of_others() -> None:
    held = [(0, "honest")]
    for number in range(1, 100):
        held.append((number, "greedy"))
        if len(held) > 4:
            (gone,) = to_close(held)
            held = [each for each in held if each[0] != gone]
    assert (0, "honest") in held


def test_a_peer_that_speaks_keeps_its_place_before_any_number_of_silent_ones() -> None:
    places = OpenExchanges[int](5)
    places.enter(0, "a")
    places.advance(0, ExchangeStage.BEGUN)
    places.enter(1, "b")
    for number in range(2, 1000):
        assert places.choose() == [number - 1]
        places.leave(number - 1)
        places.enter(number, "b")


def test_a_peer_that_speaks_is_safe_for_a_while_and_one_that_is_answered_always() -> None:
    places = OpenExchanges[str](5)
    for name, stage in (
        ("slow", ExchangeStage.BEGUN),
        ("asked", ExchangeStage.ASKED),
        ("takes", ExchangeStage.ANSWERED),
    ):
        places.enter(name, "a")
        places.advance(name, stage)
    for _ in range(SAFE_TICKS):
        assert places.choose() == []
        assert places.tick() == []
    assert places.choose() == ["slow"]
    places.leave("slow")
    assert places.choose() == ["takes"]
    places.leave("takes")
    assert places.choose() == []


def test_the_time_of_the_answer_does_not_count() -> None:
    places = OpenExchanges[str](3)
    for name in ("asks", "silent"):
        places.enter(name, "a")
    assert [places.tick() for _ in range(2)] == [[], []]
    places.advance("asks", ExchangeStage.ASKED)
    assert [places.tick() for _ in range(3)] == [[], ["silent"], ["silent"]]
    places.leave("silent")
    places.advance("asks", ExchangeStage.ANSWERED)
    places.advance("asks", ExchangeStage.BEGUN)  # A handshake that goes on: no way back.
    places.advance("gone", ExchangeStage.ASKED)
    assert [places.tick() for _ in range(4)] == [[], [], [], ["asks"]]
