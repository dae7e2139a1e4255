"""Shards that come back without jobs that they had, as the status of all of them shows it."""

from pscore.pb.ps.v1 import control_pb2 as pb
from psserver.mending.losses import Losses, torn


def shard(instance: int, **jobs: int | None) -> pb.StatusReply:
    """Returns the status of a shard; of each job the oldest version, None if it has no slice."""
    reply = pb.StatusReply(shard=pb.DescribeReply(instance=instance))
    for name, version in jobs.items():
        job = reply.jobs.add(job=name, state="live")
        if version is not None:
            job.tables.add(name="model", num_slices=2, version_min=version)
    return reply


def test_a_job_is_lost_where_a_new_instance_lacks_its_weights() -> None:
    """Workers that rejoin make the job and its table on the empty shard, which has no weights."""
    losses = Losses()
    assert losses.look([shard(1, a=7, b=3), shard(2, a=7, b=3)]) == {}
    assert losses.look([shard(1, a=9, b=5), None]) == {}
    assert losses.look([shard(1, a=9, b=5), shard(5)]) == {"a": [1], "b": [1]}
    assert losses.look([shard(1, a=9, b=5), shard(5, a=-1)]) == {"a": [1], "b": [1]}
    assert losses.look([None, shard(5, a=-1, b=5)]) == {}
    assert losses.look([shard(1, a=9, b=5), shard(5, a=-1, b=5)]) == {"a": [1]}
    assert losses.look([shard(1, a=9, b=5), shard(5, a=9, b=5)]) == {}
    assert not losses.has_any


def test_a_job_whose_weights_are_on_the_workers_is_left_to_them() -> None:
    losses = Losses()
    before, after, other = shard(2, a=7), shard(5, a=-1), shard(1, a=7)
    for status in (before, after, other):
        status.jobs[0].tables[0].optimizer = "mean"
    assert losses.look([other, before]) == losses.look([other, after]) == {}
    assert torn([other, after]) == {}


def test_a_job_that_live_workers_hold_is_left_to_them_until_they_are_gone() -> None:
    losses = Losses()
    before, after, other = shard(2, a=7), shard(5, a=-1), shard(1, a=7)
    for status in (before, after, other):
        status.jobs[0].tables[0].on_workers = True
    assert losses.look([other, before]) == losses.look([other, after]) == {}
    for status in (after, other):
        status.jobs[0].state = "interrupted"
    assert losses.look([other, after]) == {"a": [1]}


def test_the_same_instance_loses_nothing() -> None:
    """Its job was forgotten, or starts over, and rank 0 has yet to upload the weights."""
    losses = Losses()
    losses.look([shard(1, a=7), shard(2, a=7)])
    assert losses.look([shard(1, a=0), shard(2, a=-1)]) == {}
    assert losses.look([shard(1, a=7), shard(2)]) == {}


def test_a_job_that_has_ended_or_was_forgotten_everywhere_is_not_restored() -> None:
    losses = Losses()
    losses.look([shard(1, a=7, b=7), shard(2, a=7, b=7)])
    ended = shard(1, a=7)
    ended.jobs[0].state = "ended"
    assert losses.look([ended, shard(5)]) == {}


def test_a_shard_without_slices_of_a_job_cannot_lose_it() -> None:
    losses = Losses()
    losses.look([shard(1, a=7), shard(2, a=None)])
    assert losses.look([shard(1, a=7), shard(5)]) == {}
    assert losses.look([shard(6), shard(5, a=None)]) == {"a": [0]}


def test_a_job_whose_journal_a_shard_refuses_is_lost() -> None:
    losses, refusing = Losses(), shard(2)
    refusing.lost.add(job="a", reason="its journal is damaged")
    assert losses.look([shard(1, a=7), refusing]) == {"a": [1]}
    assert losses.look([shard(1, a=7), shard(2, a=3)]) == {}


def test_a_job_without_slices_on_the_shard_that_refuses_it_is_restored_once() -> None:
    """Of a small model; a shard that has only some of the tables has not got it back."""
    losses, refusing, other = Losses(), shard(2, b=0), shard(1, a=7)
    refusing.lost.add(job="a", reason="its journal is of another boot")
    other.jobs[0].tables.add(name="gates", num_slices=1, version_min=2)
    assert losses.look([other, refusing]) == {"a": [1]}
    again = shard(2, b=0)
    again.jobs.add(job="a", state="live").tables.add(name="model")
    assert losses.look([other, again]) == {"a": [1]}
    again.jobs[1].tables.add(name="gates")
    assert losses.look([other, again]) == {}
    assert not losses.has_any


def test_a_job_is_torn_if_it_has_updates_on_one_shard_and_no_weights_on_another() -> None:
    assert torn([shard(1, a=7, b=7), shard(2, a=-1, b=3)]) == {"a": [1]}
    assert torn([shard(1, a=0), shard(2, a=-1)]) == {}  # It starts.
    assert torn([shard(1, a=7), shard(2, a=None)]) == {}
    ended = shard(2, a=7)
    ended.jobs[0].state = "ended"
    assert torn([shard(1, a=-1), ended]) == {}


def test_a_change_that_is_seen_late_may_have_another_reason() -> None:
    losses = Losses()
    losses.look([shard(1, a=7, b=7), shard(2, a=7, b=7)])
    assert losses.look([shard(1, a=7, b=7), shard(5, b=7)]) == {"a": [1]}
    assert losses.look([shard(1, a=7, b=7), shard(6)], is_late=True) == {"a": [1]}
    assert losses.look([shard(1, a=7, b=7), shard(6)]) == {"a": [1]}


def test_a_shard_that_workers_reach_elsewhere_has_lost_nothing() -> None:
    """It got a standby while this process was cut off from it, which has taken over."""
    losses, first, empty = Losses(), shard(1, a=7, b=3), shard(5)
    losses.look([shard(1, a=7, b=3), shard(2, a=7, b=3)])
    worker = first.jobs[0].workers.add(state="live", reached=[1, 2])
    assert losses.look([first, empty]) == {"b": [1]}
    assert losses.elsewhere == {1}
    for reached in ([1, 0], [1, 5], [1], []):  # The last two are of another version.
        worker.reached[:] = reached
        assert losses.look([first, empty]) == {"a": [1], "b": [1]}
    worker.reached[:], worker.state = [1, 2], "lost"
    assert losses.look([first, empty]) == {"a": [1], "b": [1]}
    assert not losses.elsewhere
