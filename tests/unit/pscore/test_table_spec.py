"""The declaration of a table travels unchanged, as a message and as a record."""

import json
from dataclasses import replace

import pytest

from pscore.compressors import parse_compressor
from pscore.compressors.none import NoCompression
from pscore.contents import LONG
from pscore.errors import ConfigError
from pscore.json_text import COUNT_MAX
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.rows.spec import Rows, RowTable
from pscore.rules import SSGD, parse_mode
from pscore.table_spec import TableSpec
from pscore.types import Origin, TensorSpec

SPEC = TableSpec(
    name="model",
    tensors=(
        TensorSpec(name="weight", shape=(4, 3), dtype="bfloat16", group=1, compress=True),
        TensorSpec(name="bias", shape=(), dtype="float32"),
    ),
    num_shards=2,
    rule=parse_mode("ssd(steps=7)"),
    compressor=parse_compressor("2bit(threshold=0.25)"),
    optimizer="adam",
    num_groups=2,
    pull_compressor=parse_compressor("fp16"),
)


def test_a_message_holds_all_that_is_declared() -> None:
    data = SPEC.to_proto().SerializeToString()
    assert TableSpec.from_proto(pb.Table.FromString(data)) == SPEC


def test_the_fingerprint_in_a_message_is_that_of_the_layout() -> None:
    assert SPEC.to_proto().fingerprint == SPEC.layout().fingerprint


def test_a_record_holds_the_origin_too() -> None:
    spec = TableSpec.from_json(json.loads(json.dumps(SPEC.to_json())))
    assert spec == SPEC
    longer = replace(SPEC, content=LONG)
    assert TableSpec.from_json(json.loads(json.dumps(longer.to_json()))) == longer
    record = SPEC.to_json() | {"origin": [3, COUNT_MAX]}
    assert TableSpec.from_json(record).origin == Origin(3, COUNT_MAX)


def test_the_fields_that_older_messages_and_records_lack_have_defaults() -> None:
    table = SPEC.to_proto()
    table.ClearField("pull_compressor")
    assert TableSpec.from_proto(table).pull_compressor == NoCompression()
    record = SPEC.to_json()
    del record["pull_compressor"], record["origin"]
    spec = TableSpec.from_json(record)
    assert (spec.pull_compressor, spec.origin) == (NoCompression(), Origin())


def test_names_without_arguments_have_the_defaults() -> None:
    table = SPEC.to_proto()
    table.rule.CopyFrom(pb.Plugin(name="ssgd"))
    assert TableSpec.from_proto(table).rule == SSGD()


def test_a_compressor_that_is_not_for_pulls_is_refused() -> None:
    table = SPEC.to_proto()
    table.pull_compressor.name = "qsgd"
    with pytest.raises(ConfigError, match="pull_compression is 'qsgd"):
        TableSpec.from_proto(table)
    record = SPEC.to_json() | {"pull_compressor": ["qsgd", {}]}
    with pytest.raises(ConfigError, match="pull_compression is 'qsgd"):
        TableSpec.from_json(record)


@pytest.mark.parametrize("origin", [(0, -1), (COUNT_MAX + 1, 0)])
def test_an_origin_out_of_range_is_refused(origin: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="must be an integer in 0"):
        TableSpec.from_json(SPEC.to_json() | {"origin": origin})


@pytest.mark.parametrize("arguments", ["[]", "{", "[" * 100_000])
def test_arguments_that_are_not_a_json_object_are_refused(arguments: str) -> None:
    table = SPEC.to_proto()
    table.rule.arguments = arguments
    with pytest.raises(ConfigError, match="arguments of 'ssd' are not"):
        TableSpec.from_proto(table)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (RowTable(init="zeros"), "row table 'b' has init 'zeros' here and 'normal(1)' in the job"),
        (RowTable(seed=7, ttl=3), "row table 'b' has seed 7 here and 0 in the job"),
        (RowTable(max_norm=0.5), "row table 'b' has max_norm 0.5 here and 0.0 in the job"),
        (RowTable(padding_idx=0), "row table 'b' has padding_idx 0 here and None in the job"),
        (RowTable(), None),
    ],
)
def test_row_tables_that_differ_are_told_apart_by_name(
    other: RowTable, sentence: str | None
) -> None:
    tensors = tuple(TensorSpec(name=name, shape=(0, 4), dtype="float32") for name in "abc")
    job, here = (
        replace(
            SPEC,
            tensors=tensors,
            rule=SSGD(),
            compressor=NoCompression(),
            optimizer="sgd",
            content=Rows(tables=(RowTable(), table, RowTable())),
        )
        for table in (RowTable(), other)
    )
    assert here.difference(job) == sentence
