"""The answers of several shards become one picture."""

from typing import Any

import pytest

from pscore.pb.ps.v1 import control_pb2 as pb
from pscore.pb.ps.v1 import publish_pb2
from psserver.exits import CommandError
from psserver.remote import readers, status
from psserver.remote.waits import advice_of


def worker(rank: int, **values: object) -> pb.WorkerStatus:
    defaults = {"rank": rank, "host": "h", "pid": 9, "state": "live"}
    return pb.WorkerStatus(**{**defaults, **values})  # type: ignore[arg-type]


def table(**values: object) -> pb.TableStatus:
    defaults = {"name": "model", "mode": "ssgd", "compressor": "none", "optimizer": "sgd"}
    return pb.TableStatus(**{**defaults, **values})  # type: ignore[arg-type]


def reply(index: int, *jobs: pb.JobStatus) -> pb.StatusReply:
    about = pb.DescribeReply(cluster="c", shard=index, num_shards=2, version="1", protocol=1)
    return pb.StatusReply(shard=about, jobs=jobs, pid=70 + index, uptime_s=1, memory_nbytes=1 << 20)


def test_a_reader_without_a_version_is_said_to_have_none() -> None:
    one = {"host": "far", "pid": 9, "lag": 2, "lag_steps": 8, "lag_s": 3.0, "resyncs": 0}
    two = [one | {"version": 5}, one | {"version": -1, "lag": -1, "lag_s": 1.0}]
    published = {"job": "a", "table": "m", "version": 7, "step": 28, "sent": {}, "readers": two}
    assert status.published_lines([published], 9)[1:] == [
        "  far pid 9: version 5, 2 behind (8 steps, 3 s), 0 resyncs",
        "  far pid 9: no version yet, since 1 s",
    ]


def combined() -> dict[str, Any]:
    first = pb.JobStatus(
        job="train",
        num_workers=2,
        workers=[worker(0, step=5, staleness=1), worker(1, step=4, last_heard_s=2.0)],
        tables=[
            table(num_slices=2, nbytes=100, version_min=3, version_max=4, waiting_for="step 4")
        ],
        num_pushes=10,
        pushed_nbytes=1000,
    )
    second = pb.JobStatus(
        job="train",
        num_workers=2,
        workers=[worker(0, step=4, staleness=3), worker(1, step=5, state="lost")],
        tables=[table(num_slices=1, nbytes=50, version_min=4, version_max=5)],
        num_pushes=5,
        pushed_nbytes=500,
    )
    return status.combine(["a:1", "b:2"], [reply(0, first), reply(1, second)])


def test_counts_add_up_and_workers_are_as_late_as_the_latest_shard_says() -> None:
    (job,) = combined()["jobs"]
    assert (job["num_pushes"], job["pushed_nbytes"]) == (15, 1500)
    zero, one = job["workers"]
    assert (zero["step"], zero["staleness"], zero["state"]) == (5, 3, "live")
    assert (one["step"], one["last_heard_s"], one["state"]) == (5, 2.0, "lost")
    (model,) = job["tables"]
    assert (model["num_slices"], model["nbytes"]) == (3, 150)
    assert (model["version_min"], model["version_max"]) == (3, 5)
    assert model["waiting_for"] == ["step 4"]


def test_steps_of_workers_that_exchange_models_are_those_that_they_have_made() -> None:
    peers = [pb.PeerReport(table=0, step=70, partner=1)]
    workers = [worker(0, step=1, peers=peers), worker(1, step=1)]
    answer = reply(0, pb.JobStatus(job="train", num_workers=2, step=1, workers=workers))
    (job,) = status.combine(["a:1"], [answer])["jobs"]
    assert [each["step"] for each in job["workers"]] == [70, 1]
    assert job["step"] == 70


def test_reported_values_are_shown_for_each_worker_and_for_the_job(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens add up over the live workers, other values are means; only the first shard has any."""
    job = pb.JobStatus(
        job="j",
        workers=[
            worker(0, reported={"loss": 0.5, "tokens_per_s": 300.0, "aux": 3.0}),
            worker(1, reported={"loss": 0.25, "tokens_per_s": 100.0}),
            worker(2, reported={"loss": 100.0}, state="lost"),
        ],
    )
    other = pb.JobStatus(job="j", workers=[worker(rank) for rank in range(3)])
    picture = status.combine(["a:1", "b:2"], [reply(0, job), reply(1, other)])
    (found,) = picture["jobs"]
    assert found["reported"] == {"loss": 0.375, "tokens_per_s": 400.0, "aux": 3.0}
    assert found["workers"][1]["reported"] == {"loss": 0.25, "tokens_per_s": 100.0}
    monkeypatch.setenv("COLUMNS", "200")
    status.show(picture)
    text = capsys.readouterr().out
    assert "loss 0.5, tokens_per_s 300, aux 3" in text
    assert "reported by live workers: loss 0.375, tokens_per_s 400, aux 3" in text
    status.show(combined())
    assert "reported" not in capsys.readouterr().out


def test_a_shard_without_slices_of_a_table_has_no_say_about_its_version() -> None:
    one = pb.JobStatus(job="j", tables=[table(num_slices=1, version_min=7, version_max=7)])
    none = pb.JobStatus(job="j", tables=[table(num_slices=0, version_min=-1, version_max=-1)])
    picture = status.combine(["a:1", "b:2"], [reply(0, one), reply(1, none)])
    (model,) = picture["jobs"][0]["tables"]
    assert (model["version_min"], model["version_max"]) == (7, 7)


def test_a_job_that_one_shard_does_not_know_is_shown() -> None:
    picture = status.combine(
        ["a:1", "b:2"], [reply(0), reply(1, pb.JobStatus(job="j", num_workers=1))]
    )
    assert [job["name"] for job in picture["jobs"]] == ["j"]


def test_a_person_sees_what_is_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    status.show(combined())
    shown = capsys.readouterr().out
    for text in (
        "cluster c",
        "a:1",
        "job train (workers: 2, pushes: 15",
        "3..5",
        "waits for step 4",
    ):
        assert text in shown


def test_steps_of_a_round_are_shown_where_they_go_by_speed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for lengths, is_shown in (((20, 10), True), ((0, 0), False)):
        workers = [worker(n, pace=pb.Pace(round_steps=it)) for n, it in enumerate(lengths)]
        job = pb.JobStatus(job="train", num_workers=2, workers=workers)
        status.show(status.combine(["a:1"], [reply(0, job)]))
        shown = capsys.readouterr().out
        assert ("of a round" in shown) is is_shown
        assert all(str(it) in shown for it in lengths)


def test_markup_in_a_name_is_only_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    job = pb.JobStatus(job="[red]x[/nonesuch]", workers=[worker(0, host="[/]")])
    status.show(status.combine(["a:1"], [reply(0, job)]))
    assert "[red]x[/nonesuch]" in capsys.readouterr().out


def test_text_of_peers_cannot_control_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Shards refuse and escape such names; one of another version may not."""
    evil = "\x1b[2J\x9b31m\u202e\n[ok]"
    job = pb.JobStatus(
        job=evil,
        num_workers=1,
        workers=[worker(0, host=evil, state=evil)],
        tables=[table(name=evil, mode=evil, waiting_for=evil)],
        waiting_for=[evil],
    )
    status.show(status.combine([evil], [reply(0, job)]))
    shown = capsys.readouterr().out
    assert all(line.isprintable() for line in shown.splitlines())
    assert r"\x1b[2J" in shown


def test_tables_beyond_a_few_are_only_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    tables = [table(name=f"tensor{i}") for i in range(status.LISTED_MAX + 2)]
    status.show(status.combine(["a:1"], [reply(0, pb.JobStatus(job="j", tables=tables))]))
    assert "and 2 more tables" in capsys.readouterr().out


def job(name: str, silent_s: float, state: str, *workers: pb.WorkerStatus) -> pb.JobStatus:
    return pb.JobStatus(job=name, num_workers=2, silent_s=silent_s, state=state, workers=workers)


def several() -> dict[str, Any]:
    jobs = [
        job("old", 90.0, "ended", worker(0, state="left")),
        job("broken", 500.0, "interrupted", worker(0, state="lost")),
        job("loaded", 0.0, "restored"),
        job("recent", 8.0, "ended", worker(0, state="lost"), worker(1, state="left")),
        job("now", 2.0, "live", worker(0), worker(1, state="left")),
        job("also", 1.0, "live", worker(0)),
    ]
    return status.combine(["a:1"], [reply(0, *jobs)])


def test_live_jobs_come_first_then_the_newest_and_ended_ones_in_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The newest is the one whose workers were heard last; without workers a job has no age."""
    found = [(job["name"], job["silent_s"]) for job in several()["jobs"]]
    assert found == [
        *(("also", 1.0), ("now", 2.0), ("recent", 8.0), ("old", 90.0), ("broken", 500.0)),
        ("loaded", None),
    ]
    status.show(several())
    shown = capsys.readouterr().out
    assert shown.index("job now (") < shown.index("job broken (") < shown.index("2 ended jobs: ")
    assert "2 ended jobs: recent, old (--job NAME or --json shows more)" in shown
    assert "job old (" not in shown


def test_the_newest_job_is_the_one_that_any_shard_has_heard_last() -> None:
    heard, other = (job("j", silent_s, "ended", worker(0, state="left")) for silent_s in (9.0, 3.0))
    unknown = job("j", 0.0, "ended")
    picture = status.combine(["a", "b", "c"], [reply(0, heard), reply(1, other), reply(2, unknown)])
    assert picture["jobs"][0]["silent_s"] == 3.0


def test_one_job_is_shown_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    status.show(status.only(several(), "old"))
    shown = capsys.readouterr().out
    assert "job old (" in shown
    assert "now" not in shown
    with pytest.raises(CommandError, match=r"no job 'noon' here; there are also, now, recent, old"):
        status.only(several(), "noon")


def test_a_table_that_goes_into_a_file_is_not_cut_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    host = "gpu-" + "7" * 100
    job = pb.JobStatus(job="now", num_workers=1, workers=[worker(0, host=host)])
    status.show(status.combine(["a:1"], [reply(0, job)]))
    assert host in capsys.readouterr().out


def test_the_readers_of_a_job_are_shown_those_furthest_behind_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    states = [
        publish_pb2.ReaderStatus(
            reader=publish_pb2.Reader(id=n + 1, host=f"h{n}", number=9 - n, resyncs=n),
            lag=n,
            lag_steps=4 * n,
            lag_s=0.5 * n,
        )
        for n in range(status.LISTED_MAX + 2)
    ]
    publications = [
        publish_pb2.PublicationStatus(
            job=name, table="model", newest=9, step=36, nbytes={"sparse": 2048}, readers=states
        )
        for name in ("train", "other")
    ]
    picture = status.combine(["a:1"], [reply(0, pb.JobStatus(job="train", num_workers=1))])
    readers.add(picture, [publish_pb2.ListReply(publications=publications)])
    status.show(picture)
    shown = capsys.readouterr().out
    assert "train/model: version 9 (step 36), 10 readers; sent: sparse 2.0 KiB" in shown
    assert "h9 pid 0: version 0, 9 behind (36 steps, 4.5 s), 9 resyncs" in shown
    assert "h1 pid" not in shown
    assert "and 2 more readers" in shown
    assert "other/model" not in shown
    readers.show(picture["jobs"][0]["published"])
    assert "h1 pid" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("beside", "mode", "names_mode"),
    [
        ("buffers.0", "asgd", True),
        ("model/rows", "ssgd(backup=0)", False),
        ("model+1", "od", False),
        ("model+1", "ssgd(backup=0)", True),
    ],
)
def test_a_mode_is_named_for_a_dense_model_in_ssgd(
    beside: str, mode: str, names_mode: bool
) -> None:
    """Modes with a delay are refused for rows; a model that has grown has the newest one."""
    pace = {"num_steps": 100, "steps_s": 100.0, "waits_s": 60.0, "requests_s": 70.0, "step_s": 0.4}
    picture = {
        "tables": [{"name": "model", "mode": "ssgd(backup=0)"}, {"name": beside, "mode": mode}],
        "workers": [{"rank": 0, "state": "live", "pace": pace}],
    }
    line = advice_of(picture)
    assert line.startswith("workers waited 60% of the time")
    assert ("`od` would take" in line) is names_mode
