"""A shard whose standby has taken over is followed there, and not restored."""

from __future__ import annotations

from pathlib import Path

import pytest

from pscore.pb.ps.v1 import control_pb2 as pb
from psserver.mending.successors import Answer, Successors
from tests.unit.psserver.mending.test_losses import shard


def with_standby(instance: int) -> pb.StatusReply:
    answer = shard(instance, a=7)
    answer.next_address = "c:1"
    return answer


class Cluster:
    """Two shards; `there` is the answer of the second one's standby."""

    def __init__(self, path: Path) -> None:
        self.there: Answer = None
        self.asked: list[str] = []
        self._path = path
        self.start()

    def start(self) -> None:
        """Starts the process that follows the shards, which reads its file."""
        self.addresses = ["a:1", "b:1"]
        self.successors = Successors(self._ask, self.addresses, self._path)

    def look(self, second: Answer) -> Answer:
        """Returns what counts as the answer of the second shard."""
        first = shard(1, a=7)
        found = self.successors.look([first, second])
        assert found[0] == first
        return found[1]

    def _ask(self, address: str) -> Answer:
        self.asked.append(address)
        return self.there


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "checkpoints" / ".successors")


@pytest.mark.parametrize("answer", [None, shard(9)], ids=["silent", "empty"])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_standby_that_serves_has_the_shard(
    is_restarted: bool, answer: Answer, cluster: Cluster
) -> None:
    assert cluster.look(with_standby(2)) == with_standby(2)
    assert cluster.successors.next == ["", "c:1"]
    if is_restarted:
        cluster.start()
    cluster.there = shard(2, a=8)
    assert cluster.look(answer) == cluster.there
    assert (cluster.asked, cluster.addresses) == (["c:1"], ["a:1", "c:1"])
    assert cluster.look(None) is None
    assert cluster.asked == ["c:1"]  # Nobody has named another one.
    assert cluster.successors.next == ["", ""]


def test_the_next_process_finds_a_shard_that_has_moved_before(cluster: Cluster) -> None:
    cluster.look(with_standby(2))
    cluster.there = shard(2, a=8)
    cluster.look(None)
    cluster.start()
    assert cluster.look(shard(9)) == cluster.there
    assert cluster.addresses == ["a:1", "c:1"]


def test_a_file_of_a_cluster_that_is_no_more_holds_nothing_up(cluster: Cluster) -> None:
    cluster.look(with_standby(2))
    cluster.start()
    assert cluster.look(shard(9)) == shard(9)
    assert cluster.look(shard(9)) == shard(9)
    assert cluster.asked == ["c:1"]


def test_a_damaged_file_is_as_none(cluster: Cluster, tmp_path: Path) -> None:
    cluster.look(with_standby(2))
    (tmp_path / "checkpoints" / ".successors").write_text("{}")
    cluster.start()
    assert cluster.look(shard(9)) == shard(9)
    assert not cluster.asked


def test_an_empty_shard_counts_as_silent_while_its_standby_may_have_all(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = shard(9)
    cluster.look(with_standby(2))
    assert [cluster.look(empty) for _ in range(2)] == [None] * 2
    cluster.there = pb.StatusReply(shard=pb.DescribeReply(instance=3, stands_by=True))
    assert cluster.look(empty) is None
    written = "".join(capsys.readouterr())
    assert written.count("came back empty") == 2
    assert "psserver promote c:1" in written
    cluster.there = shard(3)  # It is empty too.
    assert cluster.look(empty) == empty


def test_a_shard_that_a_person_has_restored_counts_again(cluster: Cluster) -> None:
    cluster.look(with_standby(2))
    assert cluster.look(shard(9, a=-1, b=0)) is None
    assert cluster.look(shard(9, a=3)) == shard(9, a=3)
    cluster.there = shard(2, a=8)
    assert cluster.look(shard(9, a=4)) == shard(9, a=4)
