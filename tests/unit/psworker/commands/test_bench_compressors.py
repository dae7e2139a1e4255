"""`psworker bench compressors`: the model of a step by hand, and the advice."""

import json
import sys

import pytest

from pscore import partition
from pscore.compressors import parse_compressor
from pscore.compressors.base import Compressor
from pscore.errors import ConfigError
from psworker.commands import bench_compressors, cli
from psworker.commands.bench_compressors import (
    CompressorCost,
    Row,
    Wire,
    advise,
    make_report,
    measure_cost,
    pipeline_s,
)

SHAPES = [("weight", (1024, 1024)), ("bias", (16,))]  # Two slices; the first is compressed.
COSTS = {
    "none": CompressorCost(nbytes=4.0, encode_s=0.0, add_s=0.0),
    "bf16": CompressorCost(nbytes=2.0, encode_s=1e-9, add_s=0.0),
    "2bit": CompressorCost(nbytes=0.25, encode_s=2e-9, add_s=0.0),
    "qsgd": CompressorCost(nbytes=1.0, encode_s=1e-9, add_s=0.0),
}


@pytest.fixture(autouse=True)
def one_slice_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves a model of 4 MiB in one slice, so that its pipeline can be worked out by hand."""
    monkeypatch.setattr(partition, "SLICES_PER_SHARD", 1)


def cost_of(compressor: Compressor, numel: int, num_slices: int) -> CompressorCost:
    assert numel * num_slices == 1 << 20
    return COSTS[compressor.name]


def report(gbit: float, **options: float) -> bench_compressors.CompressorReport:
    return make_report(
        "model",
        SHAPES,
        Wire.given(gbit, 1e-3),
        names=["bf16", "2bit", "qsgd"],
        cost_of=cost_of,
        **options,  # type: ignore[arg-type]
    )


def row(name: str, step_s: float, both_ways_s: float | None = None) -> Row:
    return Row(
        compression=name,
        pushed_nbytes=0.0,
        encode_s=0.0,
        add_s=0.0,
        step_s=step_s,
        both_ways_s=both_ways_s,
    )


def test_a_pipeline_is_its_slowest_stage_and_one_slice_of_the_others() -> None:
    assert pipeline_s([3.0, 6.0, 1.0], 4) == 6.0 + 4.0 / 4
    assert pipeline_s([2.0], 7) == 2.0


def test_a_slow_link_makes_a_step_as_long_as_its_bytes() -> None:
    """8 Gbit/s are 10^9 bytes per second: 4.19 ms for a push of 2^20 floats, as for a pull."""
    rows = {item.compression: item for item in report(8.0).rows}
    raw_s = 4 * ((1 << 20) + 16) / 1e9
    assert rows["none"].step_s == pytest.approx(2 * (raw_s + 1e-3))
    assert rows["none"].pushed_nbytes == 4 * ((1 << 20) + 16)
    # Encoding is the slowest stage; sending one of the two slices comes behind it.
    push_s = 2e-9 * (1 << 20) + (0.25 * (1 << 20) + 4 * 16) / 1e9 / 2 + 1e-3
    assert rows["2bit"].step_s == pytest.approx(push_s + raw_s + 1e-3)
    assert rows["2bit"].both_ways_s is not None
    assert rows["2bit"].both_ways_s < rows["2bit"].step_s
    assert rows["qsgd"].both_ways_s is None  # It keeps no residual: not one for pulls.


def test_workers_share_the_link_of_a_shard() -> None:
    one, four = report(8.0).rows[0].step_s, report(8.0, num_workers=4).rows[0].step_s
    assert four - 2e-3 == pytest.approx(4 * (one - 2e-3))
    many = report(8.0, num_workers=4, num_shards=4).rows[0]
    assert many.step_s == pytest.approx(one, rel=0.01)


def test_a_fast_link_needs_no_compressor() -> None:
    found = report(1000.0)
    assert (found.advice, found.both_ways) == ("none", False)
    assert found.text.startswith("do not compress: of the ")


def test_a_slow_link_needs_one() -> None:
    found = report(0.1)
    assert (found.advice, found.both_ways) == ("2bit", True)
    assert 'compression="2bit", pull_compression="2bit": saves' in found.text


def test_no_compressor_is_advised_where_computing_hides_the_transfer() -> None:
    found = report(0.1, compute_s=1.0)
    assert found.advice == "none"
    assert found.text == "do not compress: computing hides all traffic of a step"


def test_of_nearly_equal_ones_the_mildest_is_advised() -> None:
    rows = [row("none", 1.0), row("bf16", 0.3), row("2bit", 0.2), row("topk", 0.15, 0.14)]
    assert advise(rows)[:2] == ("bf16", False)
    rows[1] = row("bf16", 0.5)
    assert advise(rows)[:2] == ("2bit", False)
    rows[1] = row("bf16", 0.5, 0.3)
    assert advise(rows)[:2] == ("bf16", True)


def test_small_savings_are_not_advised() -> None:
    assert advise([row("none", 1.0), row("bf16", 0.91)])[0] == "none"
    assert advise([row("none", 1.0), row("bf16", 1.5)])[0] == "none"
    assert advise([row("none", 1.0)])[0] == "none"


@pytest.mark.parametrize("name", ["none", "2bit", "topk(ratio=0.01)"])
def test_a_cost_is_measured_per_element(name: str) -> None:
    compressor = parse_compressor(name)
    cost = measure_cost(compressor, 4096, 3)
    assert cost.nbytes == pytest.approx(compressor.payload_nbytes_max(4096) / 4096)
    assert cost.add_s > 0
    assert (cost.encode_s > 0) == (name != "none")


def test_a_compressor_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="no compression 'zip'"):
        make_report("model", SHAPES, Wire.given(1.0, 0.0), names=["zip"], cost_of=cost_of)


@pytest.mark.parametrize("as_json", [True, False])
def test_the_command_says_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, as_json: bool
) -> None:
    arguments = ["bench", "compressors", "lenet", "--gbit", "0.01", "--only", "2bit"]
    monkeypatch.setattr(sys, "argv", ["psworker", *arguments, *(["--json"] if as_json else [])])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    out = capsys.readouterr().out
    if as_json:
        found = json.loads(out)
        assert [item["compression"] for item in found["rows"]] == ["none", "2bit"]
        assert (found["advice"], found["both_ways"]) == ("2bit", True)
    else:
        assert "0.01 Gbit/s, as given" in out
        assert 'compression="2bit", pull_compression="2bit": saves' in out
