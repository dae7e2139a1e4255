"""`psserver doctor` and `psworker doctor` against real shards: they find faults and name them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pscore.net import wire
from pscore.net.credentials import ANYONE
from pscore.observe import doctor
from psworker.commands.doctor import examine as examine_worker
from tests.attacks.fortress import (
    TRAIN,
    YESTERDAY,
    certificates,
    client,
    flags_of,
    fortress,
    secrets_of,
)
from tests.integration import warm
from tests.integration.cluster import Shards
from tests.integration.command import Command, taken_port
from tests.integration.worker import Worker


@pytest.fixture(scope="module")
def shards() -> Iterator[Shards]:
    with Shards(2) as started:
        for address in started.addresses:
            worker = Worker(address)
            worker.join()
            worker.define(num_shards=2)
            worker.close()
        yield started


def wrong_of(findings: list[doctor.Finding]) -> list[tuple[str, str]]:
    return [(finding.check, finding.about) for finding in findings if finding.state == doctor.WRONG]


def test_nothing_is_wrong_where_nothing_is(shards: Shards) -> None:
    findings = doctor.examine(shards.addresses, ANYONE, "train")
    assert wrong_of(findings) == []
    checks = {finding.check for finding in findings}
    assert {"port", "version", "clock", "data port", "order", "job", "model"} <= checks


def test_a_wrong_address_and_a_closed_port_are_told_apart(shards: Shards) -> None:
    with taken_port() as listener:
        closed = f"127.0.0.1:{listener.getsockname()[1]}"
    findings = doctor.examine(["nohost.invalid:7070", closed, *shards.addresses], ANYONE, None)
    assert wrong_of(findings) == [("address", "nohost.invalid:7070"), ("port", closed)]


def test_a_listener_that_is_no_shard_is_named(shards: Shards, monkeypatch: Any) -> None:
    monkeypatch.setattr(doctor, "ASK_TIMEOUT_S", 0.5)
    with taken_port() as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setattr("pscore.net.tls.PROBE_TIMEOUT_S", 0.5)
        (finding,) = [f for f in doctor.examine([address], ANYONE, None) if f.state == doctor.WRONG]
    assert (finding.check, finding.about) == ("shard", address)
    assert "no answer within 0.5 s" in finding.what


def test_a_wrong_order_is_put_right(shards: Shards) -> None:
    first, second = shards.addresses
    (finding,) = [
        f for f in doctor.examine([second, first], ANYONE, None) if f.state == doctor.WRONG
    ]
    assert (finding.check, finding.do) == ("order", f"the order is {first},{second}")


def test_another_protocol_is_named(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PROTOCOL", 99)
    findings = doctor.examine(shards.addresses, ANYONE, None)
    assert wrong_of(findings) == [("version", address) for address in shards.addresses]


def test_another_model_than_the_jobs_is_named(shards: Shards) -> None:
    findings = examine_worker(shards.servers, "train", "lenet")
    assert wrong_of(findings) == [("model", "train/model")]
    findings = examine_worker(shards.servers, "nobody", None)
    assert wrong_of(findings) == []
    assert "no job 'nobody'; jobs there: train" in " ".join(f.what for f in findings)


def test_certificates_and_tokens_are_looked_at(tmp_path: Path) -> None:
    with fortress(tmp_path) as strong:
        right = doctor.examine([strong.address], strong.credentials(TRAIN), None)
        assert wrong_of(right) == []
        (finding,) = [f for f in right if f.check == "certificate" and f.about == strong.address]
        assert "localhost" in finding.what
        bare = doctor.examine([strong.address], strong.credentials(), None)
        assert wrong_of(bare) == [("shard", strong.address)]
        assert "PACELINE_TOKEN_FILE" in " ".join(f.do for f in bare)
        assert wrong_of(doctor.examine([strong.address], ANYONE, None)) == [("TLS", strong.address)]


def test_an_expired_certificate_is_dated(tmp_path: Path) -> None:
    files, tokens = certificates(tmp_path, now=YESTERDAY), secrets_of(tmp_path)
    command = Command(tmp_path)
    flags = flags_of(files, tokens)[:4]
    with command.detached(*flags) as run:
        (address,) = run["addresses"]
        findings = doctor.examine([address], client(files), None)
    assert ("TLS", address) in wrong_of(findings)
    (finding,) = [f for f in findings if f.about == address and f.check == "certificate"]
    assert finding.what.startswith("expired: good until 20")
    assert "psserver certs" in finding.do


def test_the_commands_end_with_1_if_something_is_wrong(tmp_path: Path, shards: Shards) -> None:
    psserver = Command(tmp_path)
    done = psserver.run("doctor", "--servers", shards.servers, "--json")
    assert json.loads(done.stdout)["ok"] is True
    done = psserver.run("doctor", "--servers", "127.0.0.1:1", "--json", code=1)
    found = json.loads(done.stdout)
    assert [f["about"] for f in found["findings"] if f["state"] == "wrong"] == ["127.0.0.1:1"]
    assert "1 wrong" in psserver.run("doctor", "--servers", "127.0.0.1:1", code=1).stdout
    line = ["-m", "psworker", "doctor", "--servers"]
    for servers, code in ((shards.servers, 0), ("127.0.0.1:1", 1)):
        ended = warm.run([*line, servers], env=psserver.environment, timeout=200)
        assert ended.returncode == code, ended.stdout
