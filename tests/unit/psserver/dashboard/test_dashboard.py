"""The dashboard's history and events, its requests, and its view for a terminal."""

import asyncio
import base64
import copy
import http.client
import io
import json
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from rich.console import Console

from psserver.dashboard import terminal
from psserver.dashboard.events import changes
from psserver.dashboard.history import COARSE, FINE_MAX, History
from psserver.dashboard.server import FILES, Guard, Page
from psserver.service.web import WebServer

TOKEN = "0123456789abcdef-token"
WAIT_S = 200.0
WAIT = "step 7 of worker 63 (process 9 on h)"


def worker(rank: int, **values: Any) -> dict[str, Any]:
    pace = {"num_steps": 0, "steps_s": 0.0, "waits_s": 0.0, "requests_s": 0.0, "step_s": 0.0}
    return {
        "rank": rank, "host": "h", "pid": 10 + rank, "state": "live", "step": 0, "staleness": 0,
        "last_heard_s": 0.1, "reported": {}, "peers": [], "pace": pace, "waited_for_s": 0.0,
        **values,
    }  # fmt: skip


def shard(index: int, **values: Any) -> dict[str, Any]:
    return {
        "index": index, "address": f"h:{index}", "pid": 70 + index, "uptime_s": 1.0,
        "memory_nbytes": 1 << 20, "under_way_nbytes": 0, "num_recoveries": 0, **values,
    }  # fmt: skip


def status(**values: Any) -> dict[str, Any]:
    table = {
        "name": "model", "mode": "ssgd", "compressor": "none", "optimizer": "sgd",
        "num_slices": 1, "nbytes": 4, "version_min": 0, "version_max": 0, "waiting_for": [],
    }  # fmt: skip
    job = {
        "name": "train", "num_workers": 2, "min_workers": 0, "num_pushes": 0, "num_updates": 0,
        "waiting_for": [], "pushed_nbytes": 0, "pulled_nbytes": 0, "raw_pushed_nbytes": 0,
        "raw_pulled_nbytes": 0, "state": "live", "step": 0, "open_steps": 0, "num_lost": 0,
        "checkpoint_age_s": None, "reported": {}, "workers": [worker(0), worker(1)],
        "tables": [table],
    }  # fmt: skip
    return {
        "cluster": "c", "version": "1", "protocol": 1, "shards": [shard(0), shard(1)],
        "silent": [], "jobs": [{**job, **values}],
    }  # fmt: skip


def texts(former: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [f"{event.kind}: {event.text}" for event in changes(former, now)]


def row(history: History) -> dict[str, float | None]:
    view = history.view()
    return dict(zip(view["columns"], view["rows"]["train"][-1], strict=True))


# ----- history


def test_rates_are_differences_of_two_answers() -> None:
    history = History()
    history.add(100.0, status(step=10, pushed_nbytes=100, raw_pushed_nbytes=800))
    assert row(history)["steps_per_s"] is None
    workers = [worker(0, staleness=2), worker(1, staleness=5, state="left")]
    after = status(
        step=14, pushed_nbytes=300, raw_pushed_nbytes=2400, reported={"loss": 0.5}, workers=workers
    )
    history.add(102.0, after)
    found = row(history)
    assert (found["t"], found["step"], found["steps_per_s"]) == (102.0, 14, 2.0)
    assert (found["pushed_per_s"], found["push_ratio"]) == (100.0, 8.0)
    assert (found["pulled_per_s"], found["pull_ratio"]) == (0.0, None)
    assert (found["loss"], found["tokens_per_s"], found["staleness"]) == (0.5, None, 2.0)


def test_steps_per_second_are_those_of_training_where_workers_report_their_pace() -> None:
    history = History()
    for second in range(20):  # Rounds of five steps: the shards see one step a second.
        pace = {
            "num_steps": 5 * second,
            "steps_s": second,
            "waits_s": 0.0,
            "requests_s": 0.0,
            "step_s": 0.0,
        }
        workers = [worker(0, pace=pace), worker(1, pace=pace, state="lost")]
        history.add(100.0 + second, status(step=second, workers=workers))
    assert row(history)["steps_per_s"] == 5.0


def test_sums_of_other_processes_are_not_compared() -> None:
    history = History()
    other = [shard(0), shard(1, pid=9)]
    history.add(100.0, status(step=10, pushed_nbytes=500))
    history.add(101.0, {**status(step=11, pushed_nbytes=600), "shards": other})
    assert row(history)["pushed_per_s"] is None
    history.add(102.0, {**status(step=12, pushed_nbytes=50), "shards": other})
    assert row(history)["pushed_per_s"] is None
    assert row(history)["steps_per_s"] == 1.0


def test_a_worker_has_means_of_the_last_seconds() -> None:
    history = History()
    for second in range(30):
        pace = {
            "num_steps": 4 * second, "steps_s": 1.0 * second, "waits_s": 0.25 * second,
            "requests_s": 0.5 * second,
            "step_s": 0.0,
        }  # fmt: skip
        workers = [worker(0, pace=pace), worker(1, waited_for_s=0.4 * second)]
        history.add(100.0 + second, status(workers=workers))
    zero, one = history.view()["status"]["jobs"][0]["workers"]
    assert zero["recent"] == pytest.approx(
        {"step_s": 0.25, "wait": 0.25, "hidden": 0.5, "waited_for": 0.0}
    )
    assert one["recent"]["waited_for"] == pytest.approx(0.4)
    assert row(history)["waited_for"] == pytest.approx(0.4)


def test_old_rows_become_means_and_memory_is_bounded() -> None:
    history = History()
    for second in range(2 * FINE_MAX):
        history.add(float(second), status(step=second))
    rows = history.view()["rows"]["train"]
    assert len(rows) == FINE_MAX + FINE_MAX // COARSE
    times = [each[0] for each in rows]
    assert times == sorted(set(times))
    assert rows[0][:2] == [COARSE - 1.0, COARSE - 1]
    assert len(history.view(since_s=2.0 * FINE_MAX - 4.0)["rows"]["train"]) == 3


def test_a_cluster_that_falls_silent_keeps_its_last_numbers() -> None:
    history = History()
    history.add(1.0, None)
    assert history.view()["status"] is None
    history.add(2.0, status(step=7))
    for now_s in (3.0, 4.0):
        history.add(now_s, None)
    view = history.view()
    assert view["status"]["jobs"][0]["step"] == 7
    assert [each["index"] for each in view["status"]["silent"]] == [0, 1]
    assert [event["text"] for event in view["events"]] == [
        "shard 0 at h:0 does not answer",
        "shard 1 at h:1 does not answer",
    ]
    assert (view["now_s"], view["answered_s"]) == (4.0, 2.0)
    history.add(5.0, status(step=8))
    assert history.view()["status"]["silent"] == []


# ----- events


def test_a_shard_dies_and_recovers() -> None:
    before = status()
    silent = {**status(), "shards": [shard(0)], "silent": [{"index": 1, "address": "h:1"}]}
    back = {**status(), "shards": [shard(0), shard(1, pid=99, num_recoveries=1)]}
    assert texts(before, silent) == ["bad: shard 1 at h:1 does not answer"]
    assert texts(silent, silent) == []
    assert texts(silent, back) == ["good: shard 1 answers again (process 99)"]
    assert texts(before, back) == [
        "bad: shard 1 died and was started again (process 71, now 99)",
        "good: shard 1 has continued its jobs from its journal",
    ]


def test_workers_come_and_go_and_checkpoints_are_taken() -> None:
    before = status(workers=[worker(0), worker(1), worker(2, state="lost")])
    after = copy.deepcopy(before)
    job = after["jobs"][0]
    job["workers"][0] |= {"state": "lost", "step": 4}
    job["workers"][1] |= {"pid": 99}
    job["workers"][2] |= {"state": "live"}
    job["workers"].append(worker(3))
    job["tables"][0]["mode"] = "ssd"
    job |= {"checkpoint_age_s": 0.5, "step": 9}
    assert texts(before, after) == [
        "bad: worker 0 of job train was lost or ended with an error at step 4",
        "good: worker 1 of job train has come back (process 99)",
        "good: worker 2 of job train has joined",
        "info: worker 3 of job train has joined",
        "info: job train is in mode ssd from step 9",
        "good: checkpoint of job train, about step 9",
    ]
    older = copy.deepcopy(after)
    older["jobs"][0]["checkpoint_age_s"] = 1.5
    assert texts(after, older) == []
    assert texts({**before, "jobs": []}, before) == ["info: job train is there"]


# ----- requests


@dataclass
class Served:
    page: Page
    port: int


@pytest.fixture(params=["", TOKEN])
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    history = History()
    history.add(1.0, status(step=3))
    page = Page(history, Guard(request.param, is_local=True))
    ports: queue.Queue[int] = queue.Queue()
    loop, over = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        web = WebServer(page.answer, seconds_max=WAIT_S)
        ports.put(await web.start("127.0.0.1", 0))
        await over.wait()
        await web.stop()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    yield Served(page, ports.get(timeout=WAIT_S))
    loop.call_soon_threadsafe(over.set)
    thread.join()
    loop.close()


def get(server: Served, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body, dict(answer.headers)


def basic(secret: str) -> str:
    return "Basic " + base64.b64encode(f"any:{secret}".encode()).decode()


def test_the_page_and_its_numbers_need_the_token_if_there_is_one(server: Served) -> None:
    is_open = server.page.guard.admits("")
    paths = [*FILES, "/api/view"]
    for path in paths:
        assert get(server, path)[0] == (200 if is_open else 401)
        assert get(server, path, Authorization=f"Bearer {TOKEN}")[0] == 200
        assert get(server, path, Authorization=basic(TOKEN))[0] == 200
    if not is_open:
        for wrong in (basic("x"), "Basic %", "Basic \xff", "Bearer ", f"Digest {TOKEN}", "Basic"):
            code, _, headers = get(server, "/api/view", Authorization=wrong)
            assert code == 401
            assert headers["www-authenticate"].startswith("Basic ")
    _, body, headers = get(server, "/api/view", Authorization=f"Bearer {TOKEN}")
    assert json.loads(body)["status"]["jobs"][0]["step"] == 3
    assert "default-src 'none'" in headers["content-security-policy"]
    assert get(server, "/../pyproject.toml", Authorization=f"Bearer {TOKEN}")[0] == 404
    assert get(server, "/api/view?since=x", Authorization=f"Bearer {TOKEN}")[0] == 200


def test_a_name_that_points_here_reads_nothing_without_a_token() -> None:
    guard = Guard("", is_local=True)
    assert all(guard.names_us(host) for host in ("localhost:8090", "127.0.0.1", "[::1]:80"))
    assert not any(guard.names_us(host) for host in ("", "evil.example:8090", "127.0.0.1.evil"))
    assert Guard(TOKEN, is_local=False).names_us("gpu1.example")


def test_the_page_loads_nothing_from_elsewhere_and_makes_no_html_of_texts(server: Served) -> None:
    text = "".join(body.decode() for body, _ in server.page.files.values())
    assert "//" not in text.replace("http://www.w3.org/2000/svg", "").replace("// ", "")
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert word not in text


# ----- terminal


def test_the_terminal_shows_the_same_numbers_and_no_control_characters() -> None:
    evil = "\x1b[2J[red]x\u202e"
    history = History()
    for second, loss in enumerate((3.0, 2.0, 1.0)):
        workers = [worker(0, step=second, host=evil), worker(1, state="lost")]
        job = status(
            step=2 * second, name=evil, workers=workers, reported={"loss": loss},
            pushed_nbytes=second << 20, raw_pushed_nbytes=second << 24, checkpoint_age_s=90.0,
        )  # fmt: skip
        history.add(10.0 + second, job)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(terminal.picture(history.view()))
    shown = console.export_text()
    assert all(line.isprintable() for line in shown.splitlines())
    for text in ("step 4, 2 steps/s", "loss 1", "1.0 MiB/s", "compressed 16.0x", "1.5 min ago",
                 "█▄▁", "lost"):  # fmt: skip
        assert text in shown
    assert terminal.sparks([1.0, 1.0]) == "▁▁ 1 to 1"
    console.print(terminal.picture(History().view()))
    assert "no shard answers" in console.export_text()


def shown(jobs: list[dict[str, Any]], height: int | None = None, width: int = 200) -> str:
    """Returns the terminal's view of some jobs."""
    history = History()
    history.add(10.0, {**status(), "jobs": jobs})
    return printed(history, height, width)


def printed(history: History, height: int | None = None, width: int = 200) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(terminal.picture(history.view(), height=height))
    return console.export_text()


def test_the_terminal_shows_live_jobs_else_the_first_which_is_the_newest() -> None:
    (live,) = status(name="live")["jobs"]
    (newest,) = status(name="newest", state="ended")["jobs"]
    (older,) = status(name="older", state="interrupted")["jobs"]
    assert "job live" in shown([live, newest])
    assert "newest" not in shown([live, newest])
    assert "job newest" in shown([newest, older])
    assert "older" not in shown([newest, older])
    assert "job" not in shown([])


def test_the_terminal_counts_the_workers_that_it_leaves_out() -> None:
    workers = [worker(rank) for rank in range(terminal.WORKERS_SHOWN + 3)]
    assert "and 3 more (" in shown(status(workers=workers)["jobs"])
    assert " more (" not in shown(status(workers=workers[:-3])["jobs"])


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40)])
def test_the_terminal_fits_into_its_window_and_shows_the_worker_that_others_wait_for(
    width: int, height: int
) -> None:
    workers = [worker(rank, step=8) for rank in range(64)]
    (job,) = status(workers=workers, num_workers=64)["jobs"]
    job["tables"][0]["waiting_for"] = [f"{WAIT}, at slice {n} of 'm' on shard {n}" for n in (0, 1)]
    history, silent = History(), {"index": 1, "address": "h:1"}
    for second in range(20):
        job["workers"][63]["waited_for_s"] = 1.0 * second
        now = {**status(), "jobs": [copy.deepcopy(job)]}
        history.add(10.0 + second, {**now, "shards": [shard(0)], "silent": [silent]})
        history.add(10.5 + second, now)
    lines = printed(history, height, width).splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert [line for line in lines if line.startswith("63 ")]
    assert len([line for line in lines if WAIT in line]) == 1
    assert [line for line in lines if line.startswith("and ")]


@pytest.mark.parametrize(("width", "last"), [(40, "wait for"), (200, "host")])
def test_the_terminal_shows_whole_columns_where_it_is_narrow(width: int, last: str) -> None:
    lines = shown(status(workers=[worker(0, step=1234)])["jobs"], width=width).splitlines()
    (row,) = (line for line in lines if line.startswith("0 ") and "1234" in line)
    assert "…" not in row
    assert [line for line in lines if line.rstrip().endswith(last)]


def test_waits_at_several_slices_for_one_worker_are_one() -> None:
    (job,) = status(waiting_for=["worker 1 at barrier 'x'"])["jobs"]
    places = ["slice 0 of 'm' on shard 0", "slice 1 of 'm' on shard 1"]
    job["tables"][0]["waiting_for"] = [f"{WAIT}, at {place}" for place in places]
    history = History()
    history.add(10.0, {**status(), "jobs": [job]})
    (seen,) = history.view()["status"]["jobs"]
    assert seen["waits"] == [
        {"text": "worker 1 at barrier 'x'", "places": []},
        {"text": WAIT, "places": places},
    ]
    assert f"waits for {WAIT}, at slice 0 of 'm' on shard 0, and 1 more" in shown([job])
