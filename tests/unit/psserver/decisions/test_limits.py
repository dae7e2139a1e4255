"""The limits of a shard, and its refusals beyond them."""

import pytest

from pscore.compressors.none import NoCompression
from pscore.errors import LimitError
from pscore.net.budget import Budget
from pscore.rules import SSGD
from pscore.table_spec import TableSpec
from pscore.types import TensorSpec
from psserver.decisions.limits import Limits
from psserver.decisions.membership import Member
from psserver.decisions.shard import Shard

MB = 1 << 20


def spec(name: str, numel: int, optimizer: str = "sgd") -> TableSpec:
    return TableSpec(
        name=name,
        tensors=(TensorSpec(name="w", shape=(numel,), dtype="float32"),),
        num_shards=1,
        rule=SSGD(),
        compressor=NoCompression(),
        optimizer=optimizer,
        num_groups=1,
    )


def test_tables_of_all_jobs_share_the_memory_of_a_shard() -> None:
    """SGD with momentum has four arrays: weights twice, momentum, a sum."""
    shard = Shard(0, 1, 10.0, Limits(memory_nbytes=40 * MB))
    jobs = [
        shard.decide_join(
            name, 1, Member(rank=0, incarnation=1, restart=0, host="a", pid=1, heard_s=0.0)
        )[0]
        for name in ("one", "other")
    ]
    table, _ = shard.define(jobs[0], spec("model", 2 * MB))
    assert table.memory_nbytes == 32 * MB
    message = (
        r"table 'model' of job 'other' on shard 0 needs 16777216 bytes .*, 8388608 of 41943040"
    )
    with pytest.raises(LimitError, match=message):
        shard.define(jobs[1], spec("model", MB))
    assert jobs[1].tables == {}
    shard.define(jobs[1], spec("model", MB // 2))
    with pytest.raises(LimitError, match=r", 0 of 41943040 are left"):
        shard.define(jobs[1], spec("next", 16))


def test_journals_take_more_memory() -> None:
    """State and sum are there twice."""
    limits = Limits(memory_nbytes=48 * MB - 1, is_kept=True)
    shard = Shard(0, 1, 10.0, limits)
    member = Member(rank=0, incarnation=1, restart=0, host="a", pid=1, heard_s=0.0)
    job, _ = shard.decide_join("one", 1, member)
    with pytest.raises(LimitError, match=f"needs {48 * MB} bytes"):
        shard.define(job, spec("model", 2 * MB))


def test_a_budget_is_taken_and_given_back() -> None:
    budget = Budget(100)
    budget.take(60, "a push")
    with pytest.raises(LimitError, match=r"an answer wants 41 bytes under way, 40 of 100 are left"):
        budget.take(41, "an answer")
    budget.take(40, "a push")
    budget.give(100)
    assert budget.left == budget.nbytes == 100
