"""Which connection goes when there are too many."""

from pscore.net.crowd import to_close


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
