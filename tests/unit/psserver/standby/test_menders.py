"""A shard gets a standby once the processes that restore lost jobs know it."""

from psserver.standby.menders import LEASE_S, Menders


def test_all_menders_must_know_the_standby() -> None:
    menders = Menders()
    assert menders.know("c:1", 0.0)  # There is none.
    menders.note("a", "", 0.0)
    menders.note("b", "", 1.0)
    assert not menders.know("c:1", 1.0)
    menders.note("a", "c:1", 2.0)
    assert not menders.know("c:1", 2.0)
    menders.note("b", "c:1", 3.0)
    assert menders.know("c:1", 3.0)
    assert not menders.know("d:1", 3.0)


def test_a_mender_that_asks_no_more_is_not_awaited() -> None:
    menders = Menders()
    menders.note("a", "", 0.0)
    assert not menders.know("c:1", LEASE_S - 1)
    assert menders.know("c:1", LEASE_S)
