"""Builds of one protocol understand each other: nothing that an older one knows has changed."""

from tests.golden.protocol.protocol import changed, recorded, words


def test_nothing_that_an_older_build_of_this_protocol_knows_has_changed() -> None:
    assert not changed(recorded(), words()), "raise wire.PROTOCOL, and record the words again"


def test_all_words_are_recorded() -> None:
    assert recorded() == words(), "run `python -m tests.golden.protocol.protocol`"


def test_a_default_that_an_older_shard_refuses_is_a_change() -> None:
    """Slices of 16 MiB were one, under protocol 5."""
    old = {"protocol": "5", "content ssgd shared memory": "flat {}"}
    new = {"protocol": "5", "content ssgd shared memory": 'flat {"long": true}'}
    assert changed(old, new)
    assert not changed(old, new | {"protocol": "6"})
    assert not changed(old, old | {"JoinRequest.more": "15 13"})
