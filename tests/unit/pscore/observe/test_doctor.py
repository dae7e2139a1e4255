"""The conclusions of `doctor` from its findings."""

import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from pscore.net import wire
from pscore.observe import doctor
from pscore.pb.ps.v1 import control_pb2 as pb
from psserver.access import certs

DAY = datetime.timedelta(days=1)


def replies(*shards: int, **fields: Any) -> dict[str, pb.DescribeReply]:
    values: dict[str, Any] = {"num_shards": 2, "cluster": "c"} | fields
    return {f"h:{n}": pb.DescribeReply(shard=shard, **values) for n, shard in enumerate(shards)}


def test_shards_in_order_are_fine() -> None:
    (finding,) = doctor.judge_order(["h:0", "h:1"], replies(0, 1))
    assert finding.state == doctor.OK


@pytest.mark.parametrize(
    ("found", "what", "do"),
    [
        (replies(1, 0), "not in the order of the shards: h:0 is shard 1 of 2", "h:1,h:0"),
        (replies(0, 0), "2 addresses for 2 shards", "give all 2 addresses, each once"),
        (replies(0, 1, num_shards=3), "2 addresses for 3 shards", "give all 3 addresses"),
        (
            replies(0) | {"h:1": pb.DescribeReply(shard=1, num_shards=2, cluster="d")},
            "these were not started together",
            "give --cluster the same name",
        ),
    ],
)
def test_a_wrong_order_is_put_right(found: Any, what: str, do: str) -> None:
    (finding,) = doctor.judge_order(["h:0", "h:1"], found)
    assert finding.state == doctor.WRONG
    assert finding.what.startswith(what)
    assert do in finding.do


@pytest.mark.parametrize(
    ("protocol", "version", "state"),
    [
        (wire.PROTOCOL, None, doctor.OK),
        (wire.PROTOCOL, "0.0.7", doctor.WARNING),
        (wire.PROTOCOL + 1, None, doctor.WRONG),
    ],
)
def test_versions_are_compared(protocol: int, version: str | None, state: str) -> None:
    ours = metadata.version("paceline")
    reply = pb.DescribeReply(protocol=protocol, version=version or ours)
    (finding,) = doctor.judge_version("h:0", reply)
    assert finding.state == state
    assert bool(finding.do) == (state != doctor.OK)


@pytest.mark.parametrize(
    ("skew_s", "state", "words"),
    [
        (0.2, doctor.OK, "0.2 s ahead"),
        (-4.9, doctor.OK, "4.9 s behind"),
        (60.0, doctor.WARNING, "60.0 s ahead"),
        (-301.0, doctor.WRONG, "301.0 s behind"),
    ],
)
def test_clocks_are_compared(skew_s: float, state: str, words: str) -> None:
    (finding,) = doctor.judge_clock("h:0", skew_s)
    assert (finding.state, words in finding.what) == (state, True)


@pytest.mark.parametrize(
    ("after", "state"),
    [(0, doctor.OK), (20, doctor.WARNING), (31, doctor.WRONG), (-2, doctor.WRONG)],
)
def test_certificates_are_good_for_a_time(tmp_path: Path, after: int, state: str) -> None:
    now = datetime.datetime.now(datetime.UTC)
    certs.make(tmp_path, ["shard0"], days=30, now=now)
    certificate = x509.load_pem_x509_certificate((tmp_path / "server.pem").read_bytes())
    (finding,) = doctor.judge_certificate("h:0", certificate, now=now + after * DAY)
    assert finding.state == state
    if after >= 0:
        assert "shard0" in finding.what
    else:  # No new certificate helps.
        assert finding.what.startswith("is not valid before 20")
        assert f"this machine's clock says {now + after * DAY:%Y-%m-%d %H:%M} UTC" in finding.what
        assert (finding.do.startswith("check the clocks"), "certs" in finding.do) == (True, False)


def test_a_model_is_one_on_all_shards_and_here() -> None:
    states = [
        doctor.judge_model("j", "model", prints, wanted).state
        for prints, wanted in (
            ({"aa": {"h:0", "h:1"}}, ""),
            ({"aa": {"h:0", "h:1"}}, "aa"),
            ({"aa": {"h:0", "h:1"}}, "bb"),
            ({"aa": {"h:0"}, "bb": {"h:1"}}, ""),
        )
    ]
    assert states == [doctor.OK, doctor.OK, doctor.WRONG, doctor.WRONG]


def test_lost_workers_and_what_waits_are_named() -> None:
    workers = [pb.WorkerStatus(rank=0, state="live"), pb.WorkerStatus(rank=1, state="lost")]
    tables = [pb.TableStatus(name="model", waiting_for="worker 1, step 7")]
    job = pb.JobStatus(job="j", num_workers=2, workers=workers, tables=tables)
    (finding,) = doctor.judge_workers("h:0", job)
    assert finding.state == doctor.WARNING
    assert finding.what == ("1 of 2 workers live; lost: worker 1; model waits for worker 1, step 7")


@pytest.mark.parametrize(
    ("limit", "state"),
    [(-1, doctor.OK), (1024, doctor.OK), (1023, doctor.WARNING), (255, doctor.WRONG)],
)
def test_the_limit_of_open_files_is_judged(limit: int, state: str) -> None:
    assert doctor.judge_files(limit).state == state


def test_a_disk_is_judged_by_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.disk(tmp_path / "new" / "deep")[0].state != doctor.WRONG
    monkeypatch.setattr(doctor, "DISK_NBYTES_MIN", 1 << 60)
    (finding,) = doctor.disk(tmp_path)
    assert finding.state == doctor.WRONG
    assert "make room" in finding.do


def test_warnings_do_not_count_as_wrong() -> None:
    findings = [doctor.good("a", "b", "c"), doctor.doubtful("a", "b", "c", "d")]
    assert doctor.as_json(findings)["ok"] is True
    assert doctor.as_json([*findings, doctor.wrong("a", "b", "c")])["ok"] is False
