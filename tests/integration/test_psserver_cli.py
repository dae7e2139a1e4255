"""`psserver` as its users see it: real processes, free ports, exit codes."""

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pscore.net.rpc import RETRYABLE
from pscore.pb.ps.v1 import data_pb2
from tests.integration.command import (
    Command,
    eventually,
    free_ports,
    gone,
    lasting_ports,
    taken_port,
)
from tests.integration.worker import Worker, nested


@pytest.fixture
def psserver(tmp_path: Path) -> Command:
    return Command(tmp_path)


@pytest.fixture
def fresh(tmp_path: Path) -> Command:
    """Starts an interpreter for each process, as a user's shell does."""
    return Command(tmp_path, fresh=True)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Command, dict[str, Any]]]:
    """Two detached shards that no test changes; a job with one worker on shard 0."""
    command = Command(tmp_path_factory.mktemp("run"))
    with command.detached("--shards", 2) as run:
        worker = Worker(run["addresses"][0])
        worker.join()
        worker.define(num_shards=2)
        yield command, run
        worker.close()


def servers(run: dict[str, Any]) -> str:
    return ",".join(run["addresses"])


# ----- start and stop


@pytest.mark.slow
def test_start_in_the_foreground_prints_the_addresses_and_sigint_ends_it_with_0(
    fresh: Command,
) -> None:
    with fresh.spawn("start", "--shards", 2, "--port", 0) as process:
        assert process.stdout is not None
        name, _, addresses = process.stdout.readline().strip().partition("=")
        assert name == "PACELINE_SERVERS"
        fresh.run("health", PACELINE_SERVERS=addresses)
        shards = [shard["pid"] for shard in fresh.run_file()["shards"]]
        process.send_signal(signal.SIGINT)
        assert process.wait(200) == 0
    assert all(map(gone, shards))
    assert not list(fresh.folder.rglob("run.json"))


@pytest.mark.slow
def test_stop_ends_what_start_detached(fresh: Command) -> None:
    with fresh.detached("--shards", 2) as run:
        assert len(run["addresses"]) == 2
        done = fresh.run("stop")
        assert done.stdout == f"stopped {', '.join(run['addresses'])}\n"
        assert all(gone(pid) for pid in [run["pid"], *(s["pid"] for s in run["shards"])])
    refused = fresh.run("stop", "--port", run["port"], code=6)
    assert "nothing was stopped there" in refused.stderr
    assert "psserver start" not in refused.stderr


def test_stop_by_address_drains_every_shard_and_so_ends_the_supervisor(psserver: Command) -> None:
    with psserver.detached("--shards", 2) as run:
        psserver.run("stop", "--servers", servers(run))
        eventually(lambda: gone(run["pid"]))


def test_stop_names_the_address_that_is_silent_and_waits_for_the_others(psserver: Command) -> None:
    with psserver.detached() as run:
        done = psserver.run("stop", "--servers", f"127.0.0.1:1,{servers(run)}", code=6)
        assert done.stdout == f"stopped {servers(run)}\n"
        assert "nothing answers at 127.0.0.1:1, and nothing was stopped there" in done.stderr
        assert gone(run["shards"][0]["pid"])


def test_several_runs_have_to_be_told_apart(psserver: Command) -> None:
    with psserver.detached() as first:
        psserver.run("start", "--port", 0, "--detach")
        assert len(list(psserver.folder.glob("paceline/free-*"))) == 2
        runs = [json.loads(path.read_text()) for path in psserver.folder.rglob("run.json")]
        (second,) = [run for run in runs if run["pid"] != first["pid"]]
        refused = psserver.run("stop", code=2)
        assert f"{first['port']}" in refused.stderr
        assert "--port" in refused.stderr
        psserver.run("stop", "--port", second["port"])
        psserver.run("health", "--port", first["port"])


def test_sigterm_gives_up_on_pulls_that_nothing_can_answer_and_exits_0(psserver: Command) -> None:
    with psserver.spawn("start", "--port", 0, "--log-level", "error") as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip().partition("=")[2]
        worker = Worker(address, num_workers=2)
        worker.join()
        worker.define()
        worker.push_weights()
        codes: list[grpc.StatusCode] = []

        def wait() -> None:
            with pytest.raises(grpc.RpcError) as caught:
                worker.pull(min_version=1, wait_ms=10_000)
            codes.append(caught.value.code())

        waiting = threading.Thread(target=wait)
        waiting.start()
        eventually(lambda: "waiting_for" in psserver.run("status", "--json").stdout)
        process.send_signal(signal.SIGTERM)
        assert process.wait(200) == 0
        waiting.join()
        worker.close()
    assert codes[0] in RETRYABLE


def test_a_worker_may_join_no_shard_that_drains(psserver: Command) -> None:
    with psserver.detached() as run:
        worker = Worker(run["addresses"][0])
        psserver.run("stop")
        with pytest.raises(grpc.RpcError):
            worker.join()
        worker.close()


# ----- failures of start


def test_a_taken_port_is_named(psserver: Command) -> None:
    with taken_port() as listener:
        port = listener.getsockname()[1]
        for extra in ([], ["--detach"]):
            done = psserver.run("start", "--port", port, "--metrics-port", 0, *extra, code=3)
            assert f"127.0.0.1:{port}" in done.stderr
            assert "--port" in done.stderr
            assert not done.stdout


def test_a_taken_metrics_port_is_named(psserver: Command) -> None:
    with taken_port() as listener:
        port = listener.getsockname()[1]
        done = psserver.run("start", "--port", 0, "--metrics-port", port, code=3)
        assert f"127.0.0.1:{port}" in done.stderr
        assert "--metrics-port" in done.stderr


def test_a_taken_data_port_is_named(psserver: Command) -> None:
    with taken_port() as listener:
        port = listener.getsockname()[1]
        done = psserver.run("start", "--port", 0, "--data-port", port, code=3)
        assert f"127.0.0.1:{port}" in done.stderr
        assert "--data-port" in done.stderr


def test_data_sockets_listen_where_they_were_told(psserver: Command) -> None:
    (port,) = free_ports(1)
    with psserver.detached("--data-port", port):
        socket.create_connection(("127.0.0.1", port), timeout=200).close()


def test_a_host_of_another_machine_is_named(psserver: Command) -> None:
    # 192.0.2.0/24 is for documentation: RFC 5737.
    done = psserver.run("start", "--port", 0, "--host", "192.0.2.1", "--insecure", code=10)
    assert "192.0.2.1" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv to give up rights with")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give up root's rights")
def test_a_privileged_port_is_not_for_everybody(psserver: Command) -> None:
    limit = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
    if int(limit.read_text()) <= 80:
        pytest.skip(f"{limit} lets everybody have port 80")
    line = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *psserver.line("start")]
    done = subprocess.run(
        [*line, "--port", "80", "--metrics-port", "0"],
        env=psserver.environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 4, done.stderr
    assert "127.0.0.1:80" in done.stderr


@pytest.mark.parametrize("detach", [[], ["--detach"]])
def test_a_state_directory_that_is_a_file_is_named(psserver: Command, detach: list[str]) -> None:
    file = psserver.folder / "state"
    file.touch()
    done = psserver.run("start", "--port", 0, "--state-dir", file, *detach, code=5)
    assert f"{file} is not a directory" in done.stderr
    psserver.run("start", "--port", 0, "--state-dir", "/proc/paceline", *detach, code=5)


def test_a_second_start_on_the_port_says_that_the_first_runs(psserver: Command) -> None:
    folder = ("--state-dir", psserver.folder / "state")
    with psserver.detached(*folder) as run:
        done = psserver.run("start", "--port", run["port"], *folder, "--detach", code=7)
        assert f"process {run['pid']}" in done.stderr
        assert done.stderr.endswith(f"psserver stop --port {run['port']} --state-dir {folder[1]}\n")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--shards", "0"], "server.shards is 0"),
        (["--shards", "65"], "must be in 1..64"),
        (["--shards", "two"], "server.shards is 'two' (flag --shards), must be in 1..64"),
        (["--host", "0.0.0.0"], "--insecure"),
        (["--log-format", "xml"], "log.format is 'xml'"),
        (["--config", "nonesuch.toml"], "nonesuch.toml"),
        (["--insecure"], "--insecure has no effect"),
        (["--log-max-mb", "8"], "--log-max-mb 8 has no effect without --detach"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_starts(
    psserver: Command, arguments: list[str], named: str
) -> None:
    assert named in psserver.run("start", *arguments, code=2).stderr


@pytest.mark.parametrize("command", ["status", "jobs", "health", "stop", "doctor"])
def test_servers_are_named_in_one_way(psserver: Command, command: str) -> None:
    for flag in ("--port", "--state-dir"):
        told = psserver.run(command, "--servers", "127.0.0.1:1", flag, 1, code=2).stderr
        assert told.startswith(f"psserver: {flag} 1 has no effect with --servers")


def test_a_checkpoint_that_is_exported_comes_from_no_server(psserver: Command) -> None:
    for flag, value in (("--servers", "127.0.0.1:1"), ("--port", 1), ("--state-dir", "here")):
        told = psserver.run("export", "x", "--from", "y", flag, value, code=2).stderr
        assert told.startswith(f"psserver: {flag} {value} has no effect with --from")


def test_python_without_assertions_is_refused(tmp_path: Path) -> None:
    done = Command(tmp_path, fresh=True).run("start", code=2, PYTHONOPTIMIZE="1")
    assert "PYTHONOPTIMIZE" in done.stderr


# ----- a shard that dies


@pytest.mark.slow
def test_a_killed_shard_comes_back_on_its_port(fresh: Command) -> None:
    with fresh.detached("--shards", 2, *lasting_ports()) as run:
        victim = run["shards"][1]["pid"]
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: fresh.run_file()["shards"][1]["pid"] != victim)
        assert fresh.run_file()["addresses"] == run["addresses"]
        fresh.run("health", "--servers", servers(run))
        logged = fresh.run("logs").stdout
        assert "shard died" in logged
        assert "SIGKILL" in logged
        assert "shard restarted" in logged


@pytest.mark.slow
def test_a_spare_process_takes_the_place_of_a_killed_shard(fresh: Command) -> None:
    with fresh.detached("--shards", 2, *lasting_ports(), "--spare") as run:
        supervisor, shards = psutil.Process(run["pid"]), {each["pid"] for each in run["shards"]}
        (spare,) = eventually(lambda: {each.pid for each in supervisor.children()} - shards)
        os.kill(run["shards"][1]["pid"], signal.SIGKILL)
        eventually(lambda: fresh.run_file()["shards"][1]["pid"] == spare)
        fresh.run("health", "--servers", servers(run))
    assert gone(spare)


def test_a_killed_shard_ends_all_without_restart(psserver: Command) -> None:
    with psserver.spawn("start", "--shards", 2, "--port", 0, "--no-restart") as process:
        assert process.stdout is not None
        process.stdout.readline()
        shards = [shard["pid"] for shard in psserver.run_file()["shards"]]
        os.kill(shards[0], signal.SIGKILL)
        assert process.wait(200) == 8
    assert all(map(gone, shards))


def test_shards_end_when_their_supervisor_is_killed(psserver: Command) -> None:
    with psserver.detached("--shards", 2) as run:
        os.kill(run["pid"], signal.SIGKILL)
        eventually(lambda: all(gone(shard["pid"]) for shard in run["shards"]))
        psserver.run("status", code=6)  # The run file that is left does not count.
        last = psserver.run("logs", "--follow")
        assert "no psserver runs; these are the last logs in" in last.stderr
        assert "shard ended" in last.stdout


def test_nonsense_is_refused_and_stops_nothing(psserver: Command) -> None:
    with psserver.detached() as run:
        worker = Worker(run["addresses"][0])
        worker.join()
        with pytest.raises(grpc.RpcError, match="not JSON"):
            worker.define(arguments=nested(100_000))
        worker.define()
        worker.push_weights()
        for wrong in ({"role": 9}, {"role": 3, "counts": [1, 2, 3]}, {"slice": 5}):
            with pytest.raises(grpc.RpcError):
                worker.push(worker.header(**wrong), b"")
        assert worker.push_gradient().verdict == data_pb2.VERDICT_ACCEPTED
        worker.close()
        assert psserver.run_file()["shards"] == run["shards"]


# ----- looking


def test_status_as_json_has_shards_jobs_workers_and_tables(
    running: tuple[Command, dict[str, Any]],
) -> None:
    command, run = running
    status = json.loads(command.run("status", "--json").stdout)
    assert [shard["address"] for shard in status["shards"]] == run["addresses"]
    assert [shard["pid"] for shard in status["shards"]] == [s["pid"] for s in run["shards"]]
    assert status["cluster"] == run["cluster"]
    (job,) = status["jobs"]
    (worker,) = job["workers"]
    (table,) = job["tables"]
    assert worker == {
        "rank": 0,
        "host": "here",
        "pid": 1,
        "state": worker["state"],
        "step": 0,
        "staleness": 0,
        "last_heard_s": worker["last_heard_s"],
        "reported": {},
        "peers": [],
        "pace": {
            "num_steps": 0,
            "steps_s": 0.0,
            "waits_s": 0.0,
            "requests_s": 0.0,
            "step_s": 0.0,
            "round_steps": 0,
        },
        "waited_for_s": 0.0,
        "data_planes": [],
        "stage": None,
    }
    assert table["mode"].startswith("ssgd")
    assert table["version_min"] == -1
    assert set(job) == {
        "name",
        "min_workers",
        "num_workers",
        "num_pushes",
        "num_updates",
        "pushed_nbytes",
        "pulled_nbytes",
        "raw_pushed_nbytes",
        "raw_pulled_nbytes",
        "state",
        "step",
        "silent_s",
        "open_steps",
        "num_lost",
        "checkpoint_age_s",
        "chosen",
        "reported",
        "workers",
        "tables",
        "published",
        "waiting_for",
    }


def test_status_shows_tables_to_a_person(running: tuple[Command, dict[str, Any]]) -> None:
    command, run = running
    shown = command.run("status", "--servers", servers(run)).stdout
    assert run["addresses"][1] in shown
    assert "job train (workers: 1," in shown
    assert "no weights" in shown


def test_status_names_what_a_pull_waits_for(psserver: Command) -> None:
    with psserver.detached() as run:
        worker = Worker(run["addresses"][0], num_workers=2)
        worker.join()
        worker.define()
        worker.push_weights()
        pulling = threading.Thread(target=worker.pull, args=(1, 3_000))
        pulling.start()
        text = eventually(
            lambda: json.loads(psserver.run("status", "--json").stdout)["jobs"][0]["tables"][0][
                "waiting_for"
            ]
        )
        assert "worker 1 (has not joined yet)" in text[0]
        pulling.join()
        worker.close()


def test_a_wrong_address_is_one_clear_line(psserver: Command) -> None:
    with taken_port() as listener:
        free = listener.getsockname()[1]
    for command, advice in (("status", f"psserver start --port {free}"), ("stop", "is wrong")):
        done = psserver.run(command, "--servers", f"127.0.0.1:{free}", code=6)
        (line,) = done.stderr.splitlines()
        assert f"nothing answers at 127.0.0.1:{free}" in line
        assert advice in line
    psserver.run("status", "--servers", "nonsense", code=2)


def test_a_proxy_for_the_web_is_not_asked(running: tuple[Command, dict[str, Any]]) -> None:
    command, _ = running
    command.run("status", http_proxy="http://127.0.0.1:1", no_proxy="")


def test_health_by_command_and_by_the_standard_service(
    running: tuple[Command, dict[str, Any]],
) -> None:
    command, run = running
    assert command.run("health").stdout.splitlines() == [f"{a} ready" for a in run["addresses"]]
    with grpc.insecure_channel(run["addresses"][1]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "liveness", "readiness"):
            reply = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=200)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
    with taken_port() as listener:
        free = listener.getsockname()[1]
    broken = f"{run['addresses'][0]},127.0.0.1:{free}"
    done = command.run("health", "--servers", broken, code=1)
    assert done.stdout.splitlines()[1] == f"127.0.0.1:{free} not ready"


def test_the_metrics_page_counts_what_a_worker_does(psserver: Command) -> None:
    with psserver.detached() as run:
        worker = Worker(run["addresses"][0])
        worker.join()
        worker.define()
        worker.push_weights()
        worker.push_gradient()
        worker.push_gradient()
        worker.pull(min_version=1, wait_ms=1000)
        worker.close()
        port = run["shards"][0]["metrics_port"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=200) as answer:
            lines = answer.read().decode().splitlines()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=200) as answer:
            assert answer.read() == b"ready\n"
    for line in (
        'paceline_push_requests_total{job="train",verdict="accepted"} 2.0',
        'paceline_push_requests_total{job="train",verdict="duplicate"} 1.0',
        'paceline_pull_requests_total{answer="weights",job="train"} 1.0',
        "paceline_updates_total 1.0",
        'paceline_staleness_steps_bucket{le="0"} 1.0',
        "paceline_apply_seconds_count 2.0",
        "paceline_jobs 1.0",
        'paceline_workers_live{job="train"} 1.0',
        "# TYPE paceline_published_version gauge",
    ):
        assert line in lines
    assert any(line.startswith("paceline_build_info{") for line in lines)
    sent = next(
        line for line in lines if line.startswith("paceline_wire_bytes_total") and "sent" in line
    )
    assert float(sent.split()[1]) >= 4 * 4096


def test_logs_of_a_detached_start_carry_the_shard(psserver: Command) -> None:
    with psserver.detached("--shards", 2, "--log-format", "json") as run:
        lines = [json.loads(line) for line in psserver.run("logs").stdout.splitlines()]
        assert sorted(line["shard"] for line in lines if line["event"] == "shard ready") == [0, 1]
        only = psserver.run("logs", "--shard", 1).stdout.splitlines()
        assert {json.loads(line)["shard"] for line in only} == {1}
        psserver.run("logs", "--shard", 2, code=2)
        with psserver.spawn("logs", "--follow") as following:
            assert following.stdout is not None
            following.stdout.readline()
            psserver.run("stop", "--port", run["port"])
            assert "shard ended" in following.stdout.read()
            assert following.wait(200) == 0


def test_rules_and_settings_are_listed(psserver: Command) -> None:
    rules = {rule["name"]: rule for rule in json.loads(psserver.run("rules", "--json").stdout)}
    assert rules["ssgd"]["source"]
    assert {a["name"] for a in rules["ssd"]["arguments"]} >= {"steps", "warmup"}
    shown = json.loads(
        psserver.run("config", "show", "--json", "--port", 9000, PACELINE_SHARDS="3").stdout
    )
    assert shown["server.port"] == {"value": "9000", "origin": "flag --port"}
    assert shown["server.shards"] == {"value": "3", "origin": "environment PACELINE_SHARDS"}
    assert shown["log.level"]["origin"] == "default"


# ----- embedded


def read_addresses(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    addresses = json.loads(process.stdout.readline())["addresses"]
    assert isinstance(addresses, list)
    return addresses


def test_embedded_shards_say_only_their_addresses_and_end_with_standard_input(
    psserver: Command,
) -> None:
    with psserver.spawn("embedded", "--shards", 2) as process:
        addresses = read_addresses(process)
        psserver.run("health", "--servers", ",".join(addresses))
        out, err = process.communicate(timeout=200)  # Closes standard input.
        assert (process.returncode, out, err) == (0, "", "")
        psserver.run("health", "--servers", ",".join(addresses), code=1)


def test_embedded_shards_end_all_when_one_dies(psserver: Command) -> None:
    with psserver.spawn("embedded", "--shards", 2) as process:
        read_addresses(process)
        shards = psutil.Process(process.pid).children()
        shards[0].kill()
        assert process.wait(200) == 8
        assert process.stderr is not None
        assert "was killed by SIGKILL" in process.stderr.read()
    eventually(lambda: all(gone(shard.pid) for shard in shards))


def test_ctrl_c_at_the_terminal_leaves_embedded_shards_to_their_parent(psserver: Command) -> None:
    with psserver.spawn("embedded") as process:
        (address,) = read_addresses(process)
        process.send_signal(signal.SIGINT)
        psserver.run("health", "--servers", address)
        process.communicate(timeout=200)
        assert process.returncode == 0


PARENT = """
import os, sys
from psserver.access.files import Trust
from psserver.process.embedded import make_token, start_embedded
trust = Trust(token_file=make_token())
servers = start_embedded(2, trust=trust)
if os.fork() == 0:  # Holds the pipes open, as a data loader's process would.
    print(os.getpid(), trust.token_file, *servers.addresses, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_embedded_shards_end_with_a_parent_that_is_killed(psserver: Command) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        env=psserver.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child, token_file, *addresses = parent.stdout.readline().split()
    assert len(Path(token_file).read_text().strip()) == 64
    psserver.run("health", "--servers", ",".join(addresses))
    parent.kill()
    parent.wait()
    eventually(lambda: is_closed(addresses[0]))
    # The token was in the memory of the process that was killed: nothing is left of it.
    eventually(lambda: not Path(token_file).exists())
    assert not gone(int(child))
    os.kill(int(child), signal.SIGKILL)
    parent.communicate()


def is_closed(address: str) -> bool:
    """Returns whether nothing listens at an address: a shard that is only slow does."""
    host, _, port = address.rpartition(":")
    with socket.socket() as connection:
        return connection.connect_ex((host, int(port))) == errno.ECONNREFUSED


@pytest.mark.slow
def test_embedded_servers_are_a_context_manager(psserver: Command) -> None:
    from psserver.process.embedded import start_embedded

    with start_embedded(1) as embedded:
        psserver.run("health", "--servers", ",".join(embedded.addresses))
    assert is_closed(embedded.addresses[0])
