"""A shard whose standby has taken over is followed there, and not restored."""

from __future__ import annotations

import pytest

from pscore.pb.ps.v1 import control_pb2 as pb
from psserver.mending.successors import Answer, Successors
from tests.unit.psserver.mending.test_losses import shard


def with_standby(instance: int) -> pb.StatusReply:
    answer = shard(instance, a=7)
    answer.next_address = "c:1"
    return answer


@pytest.mark.parametrize("answer", [None, shard(9)], ids=["silent", "empty"])
def test_a_standby_that_serves_has_the_shard(answer: Answer) -> None:
    served, asked, addresses = shard(2, a=8), list[str](), ["a:1", "b:1"]

    def ask(address: str) -> Answer:
        asked.append(address)
        return served

    successors = Successors(ask)
    first = [shard(1, a=7), with_standby(2)]
    assert successors.look(addresses, first) == first
    assert successors.look(addresses, [first[0], answer]) == [first[0], served]
    assert (asked, addresses) == (["c:1"], ["a:1", "c:1"])
    assert successors.look(addresses, [first[0], None]) == [first[0], None]
    assert asked == ["c:1"]  # Nobody has named another one.


def test_an_empty_shard_counts_as_silent_while_its_standby_may_have_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    there: list[Answer] = [None]
    successors, empty = Successors(lambda _: there[0]), shard(9)
    successors.look(["b:1"], [with_standby(2)])
    assert [successors.look(["b:1"], [empty]) for _ in range(2)] == [[None]] * 2
    there[0] = pb.StatusReply(shard=pb.DescribeReply(instance=3, stands_by=True))
    assert successors.look(["b:1"], [empty]) == [None]
    written = "".join(capsys.readouterr())
    assert written.count("came back empty") == 2
    assert "psserver promote c:1" in written
    there[0] = shard(3)  # It is empty too.
    assert successors.look(["b:1"], [empty]) == [empty]
