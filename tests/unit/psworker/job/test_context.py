"""This process's place in a job: made once, closed in order, with or without shards of its own."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pscore.errors import ConfigError, ServerUnavailableError
from psworker.job import context as module
from psworker.job import local_shards, own_shards
from psworker.job.context import Context, join, shutdown
from psworker.job.environment import Environment


class FakeSession:
    """A session that keeps what was asked of it."""

    def __init__(
        self, servers: Any, environment: Environment, group: Any = None, timeline: Any = None
    ) -> None:
        self.group = group
        self.environment = environment
        self.job, self.rank = environment.job, environment.rank
        self.num_workers = environment.num_workers
        self.min_workers = environment.min_workers
        patience = SimpleNamespace(limit_s=environment.timeout_s)
        self.links = [SimpleNamespace(address=address, patience=patience) for address in servers]
        self.left: list[str] = []
        self.has_failed = False
        self.timeline = timeline

    def require_own(self) -> None: ...

    def leave(self, reason: str, *, failed: bool = False) -> None:
        self.left.append(reason)
        self.has_failed = failed


@pytest.fixture(autouse=True)
def fake_session(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith(("PACELINE_", "DMLC_", "TORCHELASTIC_")) or name in (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "MASTER_PORT",
        ):
            monkeypatch.delenv(name)
    monkeypatch.setattr(module, "open_session", FakeSession)
    yield
    shutdown()


def session_of(context: Context) -> FakeSession:
    assert isinstance(context.session, FakeSession)
    return context.session


def test_arguments_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_SERVERS", "a:1")
    monkeypatch.setenv("PACELINE_JOB", "day")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    session = session_of(join(job="night", servers=["b:2", "c:3"], timeout_s=7.0))
    assert [link.address for link in session.links] == ["b:2", "c:3"]
    assert (session.job, session.rank, session.num_workers) == ("night", 2, 4)
    assert session.environment.timeout_s == 7.0


@pytest.mark.parametrize(
    ("size", "rank"),
    [({}, 0), ({"num_workers": 2}, -1), ({"min_workers": 1, "max_workers": 1}, -1)],
)
def test_the_shards_choose_the_rank_of_a_worker_that_may_not_be_the_only_one(
    monkeypatch: pytest.MonkeyPatch, size: dict[str, int], rank: int
) -> None:
    monkeypatch.setenv("PACELINE_SERVERS", "a:1")
    assert session_of(join(**size)).rank == rank  # type: ignore[arg-type]


def test_a_rank_of_the_environment_is_compared_with_the_size_of_the_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PACELINE_SERVERS", "a:1")
    monkeypatch.setenv("PACELINE_RANK", "1")
    assert session_of(join(num_workers=2)).rank == 1
    shutdown()
    with pytest.raises(ConfigError, match=r"rank 2 of 2 workers, must be in 0\.\.1"):
        join(rank=2, num_workers=2)


def test_a_process_joins_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_SERVERS", "a:1")
    first = join(job="night")
    assert join() is first
    assert join(job="night", servers="a:1", rank=0, num_workers=1) is first
    assert module.current() is first


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"job": "day"}, "joined with job='night'; call .* before joining with job='day'"),
        ({"rank": 1}, "joined with rank=0; call"),
        ({"num_workers": 3}, "joined with num_workers=1; call"),
        ({"timeout_s": 60.0}, r"joined with timeout_s=30\.0; .* with timeout_s=60\.0"),
        ({"servers": "b:1"}, r"joined with servers=\('a:1',\); .* with servers=\('b:1',\)"),
    ],
)
def test_a_process_does_not_join_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("PACELINE_SERVERS", "a:1")
    join(job="night")
    with pytest.raises(ConfigError, match=message):
        join(**given)


def test_open_resources_are_closed_before_the_worker_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PACELINE_SERVERS", "a:1")
    context = join()
    session = session_of(context)
    order: list[str] = []
    for name in ("first", "second"):
        context.at_close(
            lambda name=name: order.append(f"{name} {session.left}")  # type: ignore[misc]
        )
    shutdown()
    assert order == ["second []", "first []"]
    assert session.left == ["finished"]
    shutdown()
    with pytest.raises(ConfigError, match=r"call psworker.init\(\) or make a DistributedOptimizer"):
        module.current()


def test_a_script_that_ends_leaves_without_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_SERVERS", "a:1")
    context = join()
    context.at_close(lambda: pytest.fail("nothing may be waited for"))
    module.at_exit()
    assert session_of(context).left == ["its process ended"]
    assert not session_of(context).has_failed


def test_a_script_that_ends_with_an_exception_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_SERVERS", "a:1")
    context = join()
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    module.at_exit()
    assert session_of(context).left == ["its process failed"]
    assert session_of(context).has_failed


def test_least_and_most_workers_come_from_arguments_or_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PACELINE_SERVERS", "a:1")
    session = session_of(join(min_workers=2, max_workers=5))
    assert (session.min_workers, session.num_workers) == (2, 5)
    with pytest.raises(ConfigError, match="joined with min_workers=2"):
        join(min_workers=1)
    shutdown()
    session = session_of(join(max_workers=5))
    assert (session.min_workers, session.num_workers) == (1, 5)
    shutdown()
    monkeypatch.setenv("PACELINE_MIN_WORKERS", "3")
    monkeypatch.setenv("PACELINE_MAX_WORKERS", "4")
    session = session_of(join())
    assert (session.min_workers, session.num_workers) == (3, 4)
    shutdown()
    with pytest.raises(ConfigError, match="num_workers is 2 and max_workers 5: give one"):
        join(num_workers=2, max_workers=5)


def test_workers_that_come_and_go_need_shards_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_MAX_WORKERS", "4")
    with pytest.raises(
        ConfigError, match="1 to 4 workers that may join and leave, and no server address"
    ):
        join()


@pytest.mark.parametrize("end", [module.at_exit, shutdown])
def test_a_forked_child_does_not_leave_for_its_parent(
    monkeypatch: pytest.MonkeyPatch, end: Callable[[], None]
) -> None:
    monkeypatch.setenv("PACELINE_SERVERS", "a:1")
    context = join()
    context.at_close(lambda: pytest.fail("the parent trains on"))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    end()
    assert session_of(context).left == []


def test_tables_of_one_name_are_numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_SERVERS", "a:1")
    context = join()
    for name in ("model", "model.1", "model.2"):
        assert [context.next_name("model") for _ in range(2)] == [name, name]  # Not taken yet.
        context.take_name("model")
    assert context.next_name("other") == "other"


# ----- shards of one's own


def environment(**variables: str) -> Environment:
    return Environment.read(variables)


def test_workers_on_other_machines_need_an_address() -> None:
    message = "4 workers, 2 of them on this machine, and no server address: start shards with"
    with pytest.raises(ConfigError, match=message):
        local_shards.find_or_start(environment(WORLD_SIZE="4", LOCAL_WORLD_SIZE="2", RANK="0"))


def test_workers_without_ranks_need_an_address() -> None:
    with pytest.raises(ConfigError, match="2 workers, but neither a server address nor this"):
        local_shards.find_or_start(environment(WORLD_SIZE="2"))


@pytest.mark.parametrize("name", ["PACELINE_TOKEN_FILE", "PACELINE_TLS_CA", "PACELINE_STATE_DIR"])
def test_a_variable_for_other_shards_needs_an_address(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "/there")
    with pytest.raises(ConfigError, match=f"{name} is set, and no server address is given"):
        local_shards.find_or_start(environment())


class FakeShards:
    """Shards of one's own that are never started."""

    def __init__(self) -> None:
        self.has_ended = False
        self.process = SimpleNamespace(
            stdin=SimpleNamespace(close=self._end),
            stdout=SimpleNamespace(close=lambda: None),
            wait=lambda: 0,
        )

    def _end(self) -> None:
        self.has_ended = True


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeShards:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    fake = FakeShards()
    process: Any = fake.process
    own = own_shards.OwnShards(addresses=("h:1",), process=process, token_file="")
    monkeypatch.setattr(local_shards, "start_shards", lambda: own)
    return fake


def test_a_worker_alone_starts_shards_which_end_with_it(
    started: FakeShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_PORT", "tcp://10.0.0.1:7070")  # Of a Service of Kubernetes.
    session = session_of(join())
    assert [link.address for link in session.links] == ["h:1"]
    assert not started.has_ended
    shutdown()
    assert started.has_ended


def test_the_first_of_the_local_workers_tells_the_others(
    started: FakeShards, tmp_path: Path
) -> None:
    variables = {"WORLD_SIZE": "2", "MASTER_PORT": "29500", "PACELINE_JOB": "a/b"}
    own = environment(RANK="0", LOCAL_RANK="0", **variables)
    addresses, token_file, shards = local_shards.find_or_start(own)
    assert (addresses, token_file) == (("h:1",), "")
    assert shards is not None
    others = local_shards.find_or_start(environment(RANK="1", LOCAL_RANK="1", **variables))
    assert others == (("h:1",), "", None)
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    (file,) = folder.iterdir()
    assert json.loads(file.read_text()) == [["h:1"], ""]
    shards.end()
    assert list(folder.iterdir()) == []
    assert started.has_ended


def test_files_of_killed_launches_are_removed(tmp_path: Path) -> None:
    gone, here = tmp_path / "a-b-4194305-0-0.json", tmp_path / f"a-{os.getpid()}-29500-1.json"
    other, started = tmp_path / "notes.json", gone.with_suffix(".pid")
    for file in (gone, here, other, started):
        file.touch()
    local_shards.sweep(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([here, other])


def test_a_folder_that_others_may_write_is_refused(started: FakeShards, tmp_path: Path) -> None:
    folder = tmp_path / f"paceline-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match=f"{folder} must belong to this user, without access"):
        local_shards.find_or_start(environment(WORLD_SIZE="2", RANK="0", LOCAL_RANK="0"))


def test_a_worker_that_waits_in_vain_for_addresses_says_for_what(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(local_shards, "EMBEDDED_TIMEOUT_S", 0.1)
    path = tmp_path / "addresses.json"
    message = f"the first worker on this machine has not started shards within 0.1 s .no {path}"
    with pytest.raises(ServerUnavailableError, match=message):
        local_shards.await_addresses(path)


def test_a_worker_waits_longer_while_the_first_one_starts_shards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(local_shards, "EMBEDDED_TIMEOUT_S", 0.0)
    path = tmp_path / "addresses.json"
    path.with_suffix(".pid").write_text(str(os.getpid()))
    draft = tmp_path / "draft"
    draft.write_text('[["127.0.0.1:1"], "token"]')
    writer = threading.Timer(0.2, draft.replace, [path])
    writer.start()
    assert local_shards.await_addresses(path) == (("127.0.0.1:1",), "token")
    writer.join()


def test_a_worker_does_not_wait_for_a_first_one_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(local_shards, "EMBEDDED_TIMEOUT_S", 0.0)
    path = tmp_path / "addresses.json"
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # Its parent has not asked yet.
    try:
        for pid in (ended.pid, 4194305):  # The other is above the largest number of a process.
            path.with_suffix(".pid").write_text(str(pid))
            with pytest.raises(ServerUnavailableError):
                local_shards.await_addresses(path)
    finally:
        ended.wait()


def test_shards_that_do_not_start_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    message = r"shards on this machine did not start \(exit status 1\); their message is above"
    with pytest.raises(ServerUnavailableError, match=message):
        own_shards.start_shards()
