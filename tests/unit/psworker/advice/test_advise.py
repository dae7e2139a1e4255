"""Advice: its answers in constructed situations, its evidence, and its refusals."""

import json
import math
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pscore.errors import ConfigError
from pscore.timing.choice import CANDIDATES
from pscore.timing.deployment import RATE_SOURCES, MachineRates
from pscore.timing.evidence import EVIDENCE
from psworker.advice import report
from psworker.advice.choices import ERROR, is_grouped, plan_shards
from psworker.advice.situation import parse_sites, read_situation, split_hosts
from psworker.advice.sizes import NUMELS, parse_model, shown_nbytes, shown_numel
from psworker.commands import cli
from psworker.commands.model_plan import shapes_of
from psworker.commands.models import MODELS

DOCS = Path(__file__).resolve().parents[4] / "docs"
CONVERGENCE = (DOCS / "convergence.md").read_text()


def answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    monkeypatch.setattr(sys, "argv", ["psworker", "advise", *flags])
    try:
        cli.main()
    except SystemExit as ended:
        code = ended.code or 0
        assert code == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str
) -> str:
    monkeypatch.setattr(sys, "argv", ["psworker", "advise", *flags])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    return capsys.readouterr().err


FIRST = ("--model", "gpt2-xl", "--workers", "8", "--hosts", "2", "--gbit", "10")


def test_the_first_question_gets_the_whole_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started_s = time.process_time()
    found = json.loads(answer(monkeypatch, capsys, *FIRST, "--compute-ms", "900", "--json"))
    assert time.process_time() - started_s < 5.0
    keys = {"verdict", "also", "use", "limit", "risk", "table", "error_source", "beyond_measured"}
    assert found.keys() == {*keys, "shards", "lines", "given", "rates"}
    assert {"mode", "step_ms", "limit", "error", "accuracy", "parts_ms"} <= found["table"][0].keys()
    assert all(each["source"] for each in found["given"].values())
    assert all(row["accuracy"]["source"] for row in found["table"])
    assert found["shards"]["number"] == 2
    assert found["beyond_measured"]
    assert found["table"][0]["error"] is None
    assert any(
        "DistributedOptimizer" in line or "DistributedData" in line for line in found["lines"]
    )
    times = {(row["mode"], row["host_is_a_worker"]): row["step_ms"] for row in found["table"]}
    # A host's link carries 4 workers' halves twice, or one's, as NCCL's tree does.
    assert times["ddp", False] == pytest.approx(times["ssgd", True], rel=0.02)
    assert times["ssgd", True] < times["ssgd", False]


def test_people_read_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = answer(monkeypatch, capsys, *FIRST, "--compute-ms", "900")
    for part in (
        "1,557,611,200",
        "[known: gpt2-xl",
        "ms a step",
        "shards: 2",
        "=> use",
        "psserver",
    ):
        assert part in shown


def advised(
    model: str,
    groups: tuple[int, ...],
    gbit: float,
    compute_ms: float,
    *,
    risk: str = "low",
    between_gbit: float | None = None,
) -> report.AdviceReport:
    situation = read_situation(
        model=model, groups=groups, gbit=gbit, compute_ms=compute_ms, between_gbit=between_gbit
    )
    return report.advise(situation, risk)


def test_a_fast_network_and_equal_workers_use_ddp() -> None:
    found = advised("resnet50", (1,) * 4, 100.0, 500.0)
    assert found.verdict.row.mode == "ddp"
    assert "DistributedDataParallel" in found.lines[-1]
    assert not found.verdict.also


def test_a_slow_network_needs_rounds_and_says_so_at_a_low_risk_too() -> None:
    low = advised("350M", (1,) * 8, 1.0, 500.0)
    assert "diloco" in low.verdict.also
    assert advised("350M", (1,) * 8, 1.0, 500.0, risk="any").verdict.row.mode == "diloco(steps=100)"
    assert advised("350M", (1,) * 8, 1.0, 500.0, risk="none").verdict.row.mode == "ddp"


def test_an_error_is_printed_only_for_modes_and_links_that_were_measured() -> None:
    near = advised("resnet50", (1,) * 4, 1.0, 1300.0)
    errors = {row.mode.partition("(")[0]: near.error_of(row) for row in near.rows}
    assert {errors[name] for name in ("ssgd", "ssd", "cd", "ddp")} == {ERROR}
    assert errors["diloco"] is None
    assert not near.beyond
    far = read_situation(
        model="resnet50", groups=(1,) * 4, gbit=1.0, compute_ms=1300.0, latency_ms=50.0
    )
    assert "a round trip of 50 ms" in report.advise(far).beyond


def test_between_two_hosts_ddp_costs_no_more_than_one_worker_a_host() -> None:
    assert advised("1.3B", (4, 4), 10.0, 900.0, risk="none").verdict.row.mode == "ddp"
    on_cpus = read_situation(model="1.3B", groups=(4, 4), gbit=10.0, compute_ms=900.0, on_gpu=False)
    assert report.advise(on_cpus, "none").verdict.row.grouped
    assert on_cpus.sources["all-reduce"].value == "a ring"


def test_a_delay_is_advised_where_it_hides_the_link() -> None:
    found = advised("resnet50", (1,) * 4, 1.0, 1300.0)
    assert found.verdict.row.mode.startswith("ssd(steps=1")
    assert "overlap=True" in found.lines[-2]


def test_shards_stand_on_the_site_with_most_workers() -> None:
    for sites, expected in (("6,2", (0,)), ("2,6", (1,))):
        found = advised("350M", parse_sites(sites), 10.0, 500.0, between_gbit=0.5)
        assert found.shards.hosts == expected
        assert not is_grouped(found.situation)
        workers = [f"{number} on site {site}" for site, number in enumerate(parse_sites(sites))]
        assert f"# workers: {', '.join(workers)}" in found.lines


def test_fast_links_need_more_shards() -> None:
    slow = advised("7B", (8,) * 4, 10.0, 2000.0)
    fast = advised("7B", (8,) * 4, 400.0, 100.0)
    assert len(slow.shards.hosts) == 4
    assert len(fast.shards.hosts) > 4


def test_the_share_of_shards_threads_counts_hidden_work_too() -> None:
    situation = advised("gpt2-xl", (4, 4), 10.0, 900.0).situation
    nbytes, rates = 4 * 1_557_611_200, MachineRates()
    # Two workers, two shards of half a model, two threads; 1,485 slices of 4 MiB.
    bytes_s = 2 * nbytes * (1 / rates.receive + 1 / rates.send) + nbytes / rates.update
    busy_s = (bytes_s / 2 + 2 * 1485 * rates.message_s) / 2
    rows = {(row.mode, row.grouped): row.time.step_s for row in report.advise(situation).rows}
    assert plan_shards(situation).cpu_share == pytest.approx(busy_s / rows["ssgd", True], rel=0.01)


def test_one_worker_needs_no_job() -> None:
    found = advised("gpt2", (1,), 1.0, 100.0)
    assert found.verdict.row.mode == "one process"
    assert found.verdict.row.time.step_s == pytest.approx(0.1)
    assert found.lines == ["python train.py"]
    assert not found.verdict.also


def test_a_model_that_no_job_accepts_gets_no_lines_of_one() -> None:
    found = advised("llama-70b", (8,) * 8, 10.0, 3000.0, risk="any")
    assert [row.mode for row in found.rows] == ["ddp"]
    assert "at most 2^36 parameters" in found.verdict.text


def test_a_thousand_hosts_are_advised_at_once() -> None:
    started_s = time.process_time()
    assert advised("llama-13b", (8,) * 128, 400.0, 3000.0).rows
    assert advised("llama-7b", (1,) * 1000, 0.1, 3000.0).rows
    assert time.process_time() - started_s < 10.0


def test_shards_are_no_more_than_slices() -> None:
    assert len(advised("1000", (1,) * 3, 1.0, 0.001).shards.hosts) == 3


def test_the_processes_of_several_hosts_find_each_other() -> None:
    for hosts, expected in ((2, True), (1, False)):
        lines = "\n".join(advised("gpt2", (2,) * hosts, 1.0, 100.0).lines)
        assert "torchrun " in lines
        assert ("--rdzv-endpoint host0:" in lines) is expected


def test_memory_is_that_of_a_shard_with_a_journal() -> None:
    shards = plan_shards(advised("100M", (1,) * 4, 1.0, 100.0).situation)
    # Weights twice; momentum and a sum, each twice: six arrays of a quarter of the model.
    assert shards.nbytes == pytest.approx(6 * 4 * 100e6 / 4, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*NUMELS} & {*MODELS}))
def test_known_numbers_are_those_of_the_models(name: str) -> None:
    assert parse_model(name)[0] == sum(math.prod(shape) for _, shape in shapes_of(name))


def test_numbers_are_read_and_shown_as_people_write_them() -> None:
    assert [parse_model(text)[0] for text in ("350M", "1.3B", "7e9", "61,706")] == [
        350_000_000, 1_300_000_000, 7_000_000_000, 61_706,
    ]  # fmt: skip
    assert (shown_numel(1_557_611_200), shown_numel(999)) == ("1.56B", "999")
    assert (shown_nbytes(5 << 30), shown_nbytes(12)) == ("5 GiB", "12 B")


def test_the_evidence_is_that_of_the_page() -> None:
    rows = [[cell.strip(" `") for cell in line.split("|")] for line in CONVERGENCE.splitlines()]
    by_name: dict[str, list[str]] = {}
    for cells in rows:
        if len(cells) > 3:  # The first table with a row of this name.
            by_name.setdefault(cells[1].replace("`", ""), cells)
    columns = by_name["k"]
    for key, each in EVIDENCE.items():
        if not each.points:
            continue
        assert each.source.startswith("docs/convergence.md, row ")
        row = each.source.partition(", row ")[2].strip("`")
        if matched := re.fullmatch(r"k=(\d+), `([\w ]+)", row):
            cell = by_name[matched[1]][columns.index(matched[2])]
        else:
            cell = by_name[row][3]
        assert float(cell) == each.points, key
    assert {candidate.evidence for candidate in CANDIDATES} <= EVIDENCE.keys()


def test_every_rate_has_a_source() -> None:
    assert RATE_SOURCES.keys() == set(MachineRates.__dataclass_fields__)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "gtp2", "--workers", "2", "--gbit", "1", "--compute-ms", "1"), "mean 'gpt2'"),
        (("--model", "1e999", "--workers", "2"), "--gbit is missing"),
        (("--model", "1e999", *FIRST[2:], "--compute-ms", "1"), "inf parameters"),
        (("--model", "0", "--workers", "2", "--gbit", "1", "--compute-ms", "1"), "must be 1 to"),
        (("--model", "gpt2", "--workers", "0", "--gbit", "1", "--compute-ms", "1"), "--workers is"),
        ((*FIRST[:2], "--workers", "10000000", "--gbit", "1", "--compute-ms", "1"), "is 10000000,"),
        ((*FIRST[:-2], "--gbit", "0", "--compute-ms", "1"), "--gbit is 0, must be"),
        ((*FIRST, "--compute-ms", "-1"), "--compute-ms is -1, must be"),
        ((*FIRST, "--compute-ms", "1", "--risk", "all"), "must be one of none, low, any"),
        ((*FIRST, "--compute-ms", "1", "--optimizer", "adm"), "optimizer is 'adm'"),
        (FIRST, "--compute-ms is missing"),
        ((*FIRST[:2], "--gbit", "1", "--compute-ms", "1"), "--workers is missing"),
        ((*FIRST, "--compute-ms", "1", "--sites", "4,4"), "belong together"),
        (("--workers", "4"), "--model is missing"),
        # Not after a minute in which the script is measured.
        (("--workers", "2", "--gbit", "nan", "--", "train.py"), "--gbit is nan, must be"),
        (("--workers", "2", "--gbit", "1", "--risk", "all", "--", "x.py"), "--risk is 'all'"),
        (("--workers", "2", "--gbit", "1", "--latency-ms", "-1", "--", "x.py"), "--latency-ms is"),
        (("--workers", "2", "--gbit", "1", "--optimizer", "adm", "--", "x.py"), "optimizer is"),
        (("--job", "night", "--", "train.py"), "leave out the script, 'train.py'"),
        ((*FIRST, "--compute-ms", "1", "--servers", "a:1"), "--servers has no effect without"),
    ],
)
def test_bad_input_is_refused_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    message: str,
) -> None:
    assert message in refusal(monkeypatch, capsys, *flags)


def test_hosts_and_gpus_have_to_fit() -> None:
    assert split_hosts(None, 2, 8) == (4, 4)
    assert split_hosts(3, None, None) == (1, 1, 1)
    for wrong in ((2, 4, None), (7, 2, None), (8, 2, 4), (None, 2, None)):
        with pytest.raises(ConfigError):
            split_hosts(*wrong)
    for number in (10_000, -4):
        with pytest.raises(ConfigError, match=f"--gpus is {number}, must be 0 to"):
            split_hosts(None, None, number)
    with pytest.raises(ConfigError, match="such as 6,2"):
        parse_sites("6")
    with pytest.raises(ConfigError, match="workers of --sites is 10000"):
        parse_sites("5000,5000")


def test_the_error_is_the_worst_of_the_predicted_runs() -> None:
    run = json.loads((DOCS / "results" / "predictions.json").read_text())
    assert ERROR >= max(run["worst_error"], run["closed_worst_error"]) > ERROR - 0.01


def test_pacing_counts_on_far_links_only() -> None:
    asked: dict[str, Any] = {
        "model": "1M",
        "groups": (1, 1),
        "gbit": 1.0,
        "compute_ms": 1.0,
        "paces": True,
    }
    near, far = (read_situation(**asked, latency_ms=ms) for ms in (1.0, 20.0))
    assert near.sources["payload"].value == "93% of the link"
    assert far.sources["payload"].value == "74% of the link"
    assert "BBR" in far.sources["payload"].source
