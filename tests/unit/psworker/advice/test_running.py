"""Advice from a job that runs, and from a script that is measured."""

from dataclasses import replace
from pathlib import Path

import pytest

from pscore.errors import ConfigError
from pscore.net.credentials import ANYONE
from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import control_pb2_grpc
from pscore.timing.deployment import GBIT
from pscore.timing.waiting import PaceSums
from psworker.advice import running
from psworker.advice.measuring import measure_script
from psworker.advice.report import advise
from psworker.advice.request import AdviceRequest
from psworker.advice.running import ObservedJob, situation_of_job
from psworker.advice.shown import lines_of
from psworker.advice.situation import read_situation

SCRIPT = """
import torch, psworker
model = torch.nn.Linear(64, 16)
optimizer = psworker.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
for _ in range(8000):  # Some seconds: its pace is asked twice a second.
    optimizer.zero_grad()
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
"""


def pace(rank: int, step_s: float, wait_s: float, requests_s: float, num: int = 100) -> PaceSums:
    return PaceSums(
        rank=rank,
        num_steps=num,
        steps_s=num * (step_s + wait_s),
        waits_s=num * wait_s,
        requests_s=num * requests_s,
        step_s=step_s,
    )


def job(paces: list[PaceSums], **changes: object) -> ObservedJob:
    fields = {
        "name": "night",
        "mode": "ssgd(backup=0)",
        "optimizer": "adam",
        "nbytes": 400 << 20,
        "hosts": ["a", "a", "b", "b"],
        "paces": paces,
        "moved_nbytes": round(2 * 2 * 100 * 0.4 * GBIT),
    }
    return ObservedJob(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_running_job_gives_computing_hosts_and_a_lower_bound_of_its_link() -> None:
    situation = situation_of_job(
        job([pace(rank, 0.3, 0.3, 0.4) for rank in range(4)]), None, tls=False
    )
    assert situation.groups == (2, 2)
    assert situation.numel == 100 << 20
    assert situation.compute_s == pytest.approx(0.3)
    # 0.4 s of 1 Gbit/s each way on each of two hosts in 0.4 s of requests.
    assert situation.link == pytest.approx(GBIT, rel=0.01)
    assert situation.sources["link"].value.startswith("at least 1 Gbit/s")
    assert "workers waited 50% of the time" in situation.sources["waits"].value
    assert not situation.slow
    assert situation.sources["connections"].value == "not encrypted"
    given = situation_of_job(job([pace(0, 0.3, 0.3, 0.4)], hosts=["a"]), 10.0, tls=False)
    assert given.link == 10 * GBIT
    assert advise(situation).rows


def test_a_job_is_advised_for_the_connections_of_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = job([pace(rank, 0.3, 0.3, 0.4) for rank in range(4)])
    monkeypatch.setattr(running, "read_job", lambda *_: asked)
    ca = tmp_path / "ca.pem"
    ca.touch()
    for path, tls, shown in (
        ("", None, "not enc"),
        (str(ca), None, "TLS"),
        (str(ca), False, "not"),
    ):
        monkeypatch.setenv("PACELINE_TLS_CA", path)
        situation = request(tls=tls).of_job("night", ["a:1"])
        assert situation.sources["connections"].value.startswith(shown)
        assert situation.tls == (shown == "TLS")


def test_a_slow_worker_of_a_job_is_one_in_its_advice() -> None:
    paces = [pace(0, 0.1, 0.2, 0.2), pace(1, 0.1, 0.2, 0.2), pace(2, 0.3, 0.0, 0.2)]
    small = job(paces, hosts=["a", "b", "c"], nbytes=4 << 20)
    situation = situation_of_job(small, 100.0, tls=False)
    assert situation.slow == {2: pytest.approx(3.0)}
    modes = {row.mode: row.time for row in advise(situation, "any").rows}
    assert modes["ssgd"].limit == "computing of worker 2"
    assert modes["ssgd(backup=1)"].step_s < 0.5 * modes["ssgd"].step_s


def test_a_slow_host_of_several_workers_is_one_backup_worker() -> None:
    situation = read_situation(model="resnet50", groups=(8,) * 4, gbit=100.0, compute_ms=500.0)
    modes = {row.mode for row in advise(replace(situation, slow={0: 3.0}), "any").rows}
    assert "ssgd(backup=1)" in modes


def test_workers_of_a_job_stand_on_their_hosts_in_any_order_of_ranks() -> None:
    paces = [pace(0, 0.1, 0.2, 0.2), pace(1, 0.3, 0.0, 0.2), pace(2, 0.1, 0.2, 0.2)]
    situation = situation_of_job(job(paces, hosts=["a", "b", "a"]), 100.0, latency_ms=20.0)
    assert situation.groups == (2, 1)
    assert situation.slow == {2: pytest.approx(3.0)}
    assert situation.worker_hosts[2] == 1
    assert situation.round_trip_s == 0.02


def test_a_job_on_cpus_is_said_to_be_one() -> None:
    paces = [pace(0, 0.1, 0.2, 0.2)]
    situation = situation_of_job(job(paces, hosts=["a"]), 1.0, on_gpu=False)
    assert situation.sources["device"].value == "a CPU"


def test_a_job_that_has_just_begun_is_asked_later() -> None:
    with pytest.raises(ConfigError, match="fewer than 4 steps yet: ask later"):
        situation_of_job(job([pace(0, 0.1, 0.1, 0.1, num=1)], hosts=["a"]), 1.0, tls=False)


class Shard:
    """The answers of a shard to questions."""

    def __init__(self, *tables: tuple[str, int]) -> None:
        self.job = pb.JobStatus(job="night")
        for name, nbytes in tables:
            mode = "asgd" if name.startswith("buffers") else "ssgd(backup=0)"
            self.job.tables.add(name=name, mode=mode, optimizer="adam", nbytes=nbytes)
        worker = self.job.workers.add(rank=0, host="a", state=running.LIVE)
        worker.pace.num_steps = 10

    def Status(self, _: pb.StatusRequest, timeout: float) -> pb.StatusReply:  # noqa: N802
        return pb.StatusReply(jobs=[self.job])

    def read(self, monkeypatch: pytest.MonkeyPatch) -> ObservedJob:
        monkeypatch.setattr(control_pb2_grpc, "ControlStub", lambda channel: self)
        return running.read_job(["a:1"], ANYONE, "night")


def test_a_model_that_has_grown_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards keep the table of the smaller model, which no step pushes to."""
    tables = (("model", 100), ("buffers.0", 4), ("model+1", 200), ("model+2", 300))
    found = Shard(*tables).read(monkeypatch)
    assert (found.nbytes, found.mode) == (304, "ssgd(backup=0)")


def test_a_job_with_row_tables_gets_no_advice_for_dense_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its tables have room for rows that no step touches."""
    found = Shard(("model", 100), ("model/rows", 1 << 40)).read(monkeypatch)
    assert found.nbytes == 100
    with pytest.raises(ConfigError, match="job 'night' trains row tables, of which a step sends"):
        request().of_job("night", ["a:1"])


def request(**given: object) -> AdviceRequest:
    names = ("model", "workers", "hosts", "gpus", "gbit", "compute_ms", "latency_ms", "sites")
    fields = dict.fromkeys([*names, "between_gbit"]) | {
        "optimizer": "sgd", "tls": False, "overlap": True,
    }  # fmt: skip
    return AdviceRequest(**{**fields, **given})  # type: ignore[arg-type]


def test_flags_that_a_job_or_script_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="leave them out"):
        request(workers=2).of_job("night", ["a:1"])
    with pytest.raises(ConfigError, match="--job needs --servers"):
        request(gpus=0).of_job("night", [])
    with pytest.raises(ConfigError, match="leave them out"):
        request(gpus=2).of_job("night", ["a:1"])
    with pytest.raises(ConfigError, match="have no effect with a script"):
        request(model="gpt2", gbit=1.0).of_script(["train.py"])
    with pytest.raises(ConfigError, match="--gbit is missing"):
        request(workers=2).of_script(["train.py"])


@pytest.mark.slow
def test_a_script_is_measured_with_one_worker(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    found = measure_script([str(script)], seconds=120.0)
    assert found.nbytes // 4 in range(64 * 16 + 16, 64 * 16 + 64)
    assert found.optimizer == "sgd"
    assert found.paces[0].num_steps >= 3
    script.write_text(SCRIPT.replace("8000", "1") + "import time; time.sleep(2.0)\n")
    with pytest.raises(ConfigError, match=r"made fewer than 4 steps .* before it ended"):
        measure_script([str(script)], seconds=3000.0)
    script.write_text("raise SystemExit(3)")
    with pytest.raises(ConfigError, match="failed with exit code 3: run it alone first"):
        measure_script([str(script)], seconds=3000.0)  # It is over at once.
    script.write_text("import time; time.sleep(1.0)")
    with pytest.raises(
        ConfigError, match=r"made no psworker.DistributedOptimizer .* before it end"
    ):
        measure_script([str(script)], seconds=3000.0)


def test_a_script_that_is_not_there_is_named_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="there is no script 'python': name it alone"):
        measure_script(["python", "train.py"])
    with pytest.raises(ConfigError, match="with a script, here 'params'"):
        request(model="1.3b", compute_ms=3.0, gbit=1.0).of_script(["params"])


def test_hosts_that_nobody_gave_are_assumed() -> None:
    given = {"model": "gpt2", "gbit": 1.0, "compute_ms": 100.0}
    said = request(gpus=8, **given).read().sources["workers"]
    assert (said.value, said.source) == (
        "8 on 8 hosts",
        "given; assumed: a host for each (--hosts)",
    )
    said = request(gpus=8, hosts=1, **given).read().sources["workers"]
    assert (said.value, said.source) == ("8 on 1 host", "given")


def test_shards_that_are_not_used_are_not_shown_as_if_they_were() -> None:
    given = {"gbit": 100.0, "compute_ms": 2000.0, "hosts": 8, "workers": 64}
    large = "\n".join(lines_of(advise(request(model="70B", **given).read())))
    assert "shards:" not in large
    assert "2,730x more parameters" in " ".join(large.split())
    fast = "\n".join(lines_of(advise(request(model="gpt2", **given).read())))
    assert "use DDP" in fast
    assert "shards, if you use some: " in fast
