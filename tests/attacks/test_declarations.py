"""Hostile declarations: shapes, plug-ins and jobs that a shard refuses before it plans for them."""

import json
import time
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest

from pscore.compressors.none import NoCompression
from pscore.errors import ConfigError, PacelineError
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.rules import SSGD
from pscore.table_spec import TableSpec
from pscore.types import TensorSpec
from psserver.decisions.membership import Member
from psserver.decisions.shard import NAME_LENGTH_MAX, Shard
from tests.unit.psserver.front import JOB, Context, Front, Refused, play, played, stores_of

U32, U64 = (1 << 32) - 1, (1 << 64) - 1
COST_NBYTES_MAX = 32 << 20  # Of a refused declaration; the longest here has 65537 tensors.
SECONDS_MAX = 5.0  # Far above what any refusal takes, far below a plan for the declared table.


def tensor(*shape: int, name: str = "w", dtype: str = "float32", group: int = 0) -> pb.Tensor:
    return pb.Tensor(name=name, shape=shape, dtype=dtype, group=group)


async def refused(front: Front, **fields: Any) -> str:
    """Declares a table that must be refused, in little time and memory; returns the message."""
    started_s = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(Refused) as caught:
            await front.define(**fields)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < COST_NBYTES_MAX
    assert time.process_time() - started_s < SECONDS_MAX
    assert front.job.tables == {}
    assert len(str(caught.value)) < 1 << 12
    return str(caught.value)


async def still_serves(front: Front) -> None:
    """The same job can still be declared, and trains."""
    reply = await front.define()
    assert reply.created
    assert len(stores_of(front.running)) == 1


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [tensor(0)],
        [tensor(4, 0)],
        [tensor(U64)],
        [tensor(U64, U64)],
        [tensor(*[U64] * 60)],
        [tensor(*[1] * 65)],
        [tensor(*[2] * 100_000)],
        [tensor(1 << 37)],
        [tensor(1 << 18, 1 << 19)],
        [tensor(1 << 35, name=f"w{index}") for index in range(3)],
        [tensor(1 << 20, name=f"w{index}") for index in range((1 << 16) + 1)],
        [tensor(4, dtype="float64")],
        [tensor(4, dtype="")],
        [tensor(4, dtype="object")],
        [tensor(4, dtype="__import__('os')")],
        [tensor(4), tensor(4)],
        [tensor(4, group=1)],
        [tensor(4, group=U32)],
    ],
    ids=lambda tensors: f"{len(tensors)} of {len(tensors[0].shape) if tensors else 0} dimensions",
)
@played
async def test_tensors_that_no_shard_serves_are_refused(
    front: Front, tensors: list[pb.Tensor]
) -> None:
    await front.join(0)
    assert "ConfigError" in await refused(front, tensors=tensors)
    await still_serves(front)


def test_a_model_larger_than_the_memory_of_the_host_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is within the limits of a plan; its cost is compared with the memory left."""
    left = SimpleNamespace(available=1 << 20)
    monkeypatch.setattr("psserver.engine.host_memory.psutil.virtual_memory", lambda: left)

    async def scene(front: Front) -> None:
        await front.join(0)
        with pytest.raises(
            Refused, match=r"LimitError: table 'model' on shard 0 needs \d+ bytes of memory"
        ):
            await front.define(tensors=[tensor(1 << 18)])
        assert front.job.tables == {}
        await still_serves(front)

    play(scene)


@pytest.mark.parametrize("shape", [(-1,), (-4, -4), (4, -1), (-(1 << 62), 2)])
def test_negative_sizes_are_refused(shape: tuple[int, ...]) -> None:
    """They cannot travel, but a checkpoint may hold them."""
    shard = Shard(0, 1, 10.0)
    member = Member(rank=0, incarnation=1, restart=0, host="a", pid=1, heard_s=0.0)
    job, _ = shard.decide_join(JOB, 1, member)
    spec = spec_of(tensors=(TensorSpec(name="w", shape=shape, dtype="float32"),))
    with pytest.raises(ConfigError, match=r"'w' has shape \["):
        shard.define(job, spec)
    assert job.tables == {}


def spec_of(tensors: tuple[TensorSpec, ...]) -> TableSpec:
    return TableSpec(
        name="model",
        tensors=tensors,
        num_shards=1,
        rule=SSGD(),
        compressor=NoCompression(),
        optimizer="sgd",
        num_groups=1,
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"num_shards": 0},
        {"num_shards": 2},
        {"num_shards": U32},
        {"num_groups": 0},
        {"num_groups": 1025},
        {"num_groups": U32},
        {"optimizer": ""},
        {"optimizer": "os.system"},
        {"optimizer": "x" * 100},
    ],
    ids=str,
)
@played
async def test_numbers_and_names_out_of_range_are_refused(
    front: Front, fields: dict[str, Any]
) -> None:
    await front.join(0)
    assert "ConfigError" in await refused(front, **fields)
    await still_serves(front)


HOSTILE_ARGUMENTS = [
    "[]",
    "3",
    "null",
    "not json",
    "{",
    "{'steps': 5}",
    "[" * 100_000,
    '{"a":' * 100_000,
    json.dumps({"steps": 5, "nonesuch": 1}),
    json.dumps({"steps": "5"}),
    json.dumps({"steps": 5.5}),
    json.dumps({"steps": True}),
    json.dumps({"steps": None}),
    json.dumps({"steps": [5]}),
    json.dumps({"steps": 0}),
    json.dumps({"steps": -1}),
    json.dumps({"steps": 1 << 70}),
    '{"steps": ' + "9" * 100_000 + "}",
    json.dumps({"lr_scale": -1.0}),
    '{"lr_scale": NaN}',
    '{"lr_scale": Infinity}',
    json.dumps({"local": "nonesuch"}),
    json.dumps({"local": "__class__"}),
    json.dumps({"__class__": "x"}),
    json.dumps({"__init__": 1, "steps": 5}),
    json.dumps({"name": "ssgd"}),
]


@pytest.mark.parametrize("arguments", HOSTILE_ARGUMENTS, ids=lambda text: text[:30])
@played
async def test_hostile_arguments_of_a_rule_are_refused(front: Front, arguments: str) -> None:
    await front.join(0)
    plugin = pb.Plugin(name="ssd", arguments=arguments)
    assert "ConfigError" in await refused(front, rule=plugin)
    await still_serves(front)


@pytest.mark.parametrize("plugin", ["rule", "compressor"])
@played
async def test_a_whole_number_too_large_for_a_float_is_refused(front: Front, plugin: str) -> None:
    await front.join(0)
    huge = "1" + "0" * 400
    hostile = {
        "rule": pb.Plugin(name="ssd", arguments=f'{{"lr_scale": {huge}}}'),
        "compressor": pb.Plugin(name="2bit", arguments=f'{{"threshold": {huge}}}'),
    }
    assert "ConfigError" in await refused(front, **{plugin: hostile[plugin]})


@pytest.mark.parametrize("name", ["", "nonesuch", "SSGD", "ssgd()", "__init__", "os.system"])
@played
async def test_names_of_plugins_that_are_not_there_are_refused(front: Front, name: str) -> None:
    await front.join(0)
    message = await refused(front, rule=pb.Plugin(name=name))
    assert f"no mode {name!r}; there are" in message
    message = await refused(front, compressor=pb.Plugin(name=name))
    assert f"no compression {name!r}; there are" in message
    await still_serves(front)


@pytest.mark.parametrize("backup", [2, 3, 1 << 40])
@played
async def test_a_mode_that_does_not_fit_the_job_is_refused(front: Front, backup: int) -> None:
    await front.join(0)
    plugin = pb.Plugin(name="ssgd", arguments=json.dumps({"backup": backup}))
    assert "ssgd.backup is" in await refused(front, rule=plugin)
    await still_serves(front)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_workers": 0},
        {"num_workers": 4097},
        {"num_workers": U32},
        {"rank": 2},
        {"rank": (1 << 31) - 1},
        {"job": ""},
        {"job": "x" * (NAME_LENGTH_MAX + 1)},
        {"protocol": 0},
        {"protocol": U32},
    ],
    ids=lambda fields: str(fields)[:30],
)
@played
async def test_a_hostile_join_makes_no_job(front: Front, fields: dict[str, Any]) -> None:
    values: dict[str, Any] = {"job": JOB, "rank": 0, "num_workers": 2, "protocol": 1}
    with pytest.raises(Refused) as caught:
        await front.control.Join(pb.JoinRequest(**values | fields), Context())
    assert caught.value.kind in ("ConfigError", "RankTakenError", "ProtocolVersionError")
    assert front.engine.shard.jobs == {}
    assert len(str(caught.value)) < 1 << 12
    await front.join(0)


@played
async def test_a_stranger_declares_nothing(front: Front) -> None:
    await front.join(0)
    with pytest.raises(Refused, match="no worker has joined at rank 1"):
        await front.define(rank=1)
    assert front.job.tables == {}


@played
async def test_every_refusal_is_one_of_ours(front: Front) -> None:
    """A handler that raises anything else stops the shard, and so all of its jobs."""
    await front.join(0)
    for arguments in HOSTILE_ARGUMENTS:
        for name in ("ssd", "diloco", "dcasgd"):
            request = pb.Plugin(name=name, arguments=arguments)
            with pytest.raises((Refused, PacelineError)):
                await front.define(rule=request)
