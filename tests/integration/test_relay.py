"""A relay gives its readers what the shards would give them, also when relays and shards die."""

import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

import psworker
from tests.integration.cluster import Worker, new_job
from tests.integration.command import Command, eventually, free_row, lasting_ports
from tests.integration.test_publish import WAIT_S, publishes_always, why_none

pytestmark = pytest.mark.timeout(400)


class Relay:
    """A relay in a process of its own, which can be killed and started again."""

    def __init__(self, command: Command, servers: str, job: str) -> None:
        port = free_row(2)
        self.servers = f"127.0.0.1:{port},127.0.0.1:{port + 1}"
        words = ("relay", "--job", job, "--servers", servers, "--listen", f"127.0.0.1:{port}")
        self._words = (*words, "--metrics-port", "0", "--data-port", str(free_row(2)))
        self._command = command
        self._running = ExitStack()
        self.start()

    def start(self) -> None:
        self._process = self._running.enter_context(self._command.spawn(*self._words))
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == f"PACELINE_SERVERS={self.servers}\n"
        self.metrics = self._process.stdout.readline().removeprefix("metrics: ").strip()

    def kill(self) -> None:
        self._process.kill()
        self._running.close()


@contextmanager
def relayed(command: Command, servers: str, job: str) -> Iterator[Relay]:
    made = Relay(command, servers, job)
    try:
        yield made
    finally:
        made.kill()


@pytest.mark.slow
def test_readers_behind_two_relays_get_the_bytes_of_the_shards_while_all_are_killed(
    tmp_path: Path,
) -> None:
    job, command, commits = new_job(), Command(tmp_path), 0
    with ExitStack() as stack:
        run = stack.enter_context(command.detached("--shards", 2, *lasting_ports()))
        servers = ",".join(run["addresses"])
        launched = {"RANK": "0", "WORLD_SIZE": "1", "PACELINE_SERVERS": servers}
        worker = Worker(publishes_always, 0, (), launched | {"PACELINE_JOB": job})
        stack.callback(worker.close)
        near = stack.enter_context(relayed(command, servers, job))
        far = stack.enter_context(relayed(command, near.servers, job))
        direct = stack.enter_context(psworker.Subscriber(servers, job=job, dtype="bf16"))
        behind = stack.enter_context(psworker.Subscriber(far.servers, job=job))
        weights = behind.wait(timeout_s=WAIT_S)
        lineage = weights.version.lineage
        shards = psutil.Process(run["pid"]).children()
        deaths = {10: near.kill, 11: near.start, 20: far.kill, 21: far.start, 30: shards[0].kill}
        while commits < 40:
            commits += 1
            if commits in deaths:
                deaths[commits]()
                if commits in (10, 20):  # Nothing comes now.
                    continue
            former = weights
            weights = behind.wait(newer_than=former.version, timeout_s=WAIT_S)
            assert weights.version > former.version
            values = np.concatenate(list(weights.arrays.values()))
            assert (values == weights.step % 200).all(), "slices of several versions"
        assert weights.version.lineage == lineage
        worker.tell()
        num_steps, last = worker.result(), direct.wait(timeout_s=WAIT_S)
        while last.step < num_steps:  # The shards publish it a moment after they have it.
            last = direct.wait(newer_than=last.version, timeout_s=WAIT_S)
        while weights.version < last.version:
            weights = behind.wait(newer_than=weights.version, timeout_s=WAIT_S)
        assert weights.version == last.version
        assert weights.bits.tobytes() == last.bits.tobytes()
        with urllib.request.urlopen(near.metrics) as answer:
            page = answer.read().decode()
        version = f'paceline_published_version{{job="{job}",table="model"}}'
        assert f"{version} {float(last.version.number)}\n" in page
        assert "paceline_reader_resyncs_total{" in page  # Of the far relay.


@pytest.mark.slow
def test_a_relay_admits_readers_with_a_token_and_no_workers(tmp_path: Path) -> None:
    job, command = new_job(), Command(tmp_path)
    tokens, wrong = tmp_path / "tokens", tmp_path / "wrong"
    for path, secret in ((tokens, "r" * 20), (wrong, "w" * 20)):
        path.write_text(f"{job}:read {secret}\n")
        path.chmod(0o600)
    port = free_row(1)
    words = ("--servers", "127.0.0.1:1", "--listen", f"127.0.0.1:{port}", "--token-file", tokens)
    with command.spawn("relay", "--job", job, *words) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"PACELINE_SERVERS=127.0.0.1:{port}\n"
        servers = [f"127.0.0.1:{port}"]
        with psworker.Subscriber(servers, job=job, token_file=str(tokens)) as reader:
            eventually(lambda: "of the relay: " in why_none(reader, None))
        assert process.stderr is not None
        assert f"no version of job {job!r} within 1 s" in process.stderr.readline()
        reader = psworker.Subscriber(servers, job=job, token_file=str(wrong))
        with reader, pytest.raises(psworker.PacelineError, match="does not know the token"):
            reader.wait(timeout_s=30.0)
        found = ("--to", tmp_path / "to", "--job", job, "--servers", servers[0])
        done = command.run("publish", *found, code=11, PACELINE_TOKEN_FILE=str(wrong))
        assert "does not know the token" in done.stderr
        assert "Traceback" not in done.stderr
    assert process.returncode == 0
    done = command.run("relay", "--job", job, "--servers", "a:1", "--listen", "0.0.0.0:0", code=2)
    assert "open to other machines" in done.stderr
