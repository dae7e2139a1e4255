"""Training where everything is asked for: TLS on both sides and a token, on every data plane."""

import http.client
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pscore.errors import AccessError
from pscore.net.credentials import Credentials
from pscore.net.rpc import error_of
from tests.attacks.fortress import EVERYTHING, OTHER, Fortress, fortress, secrets_of
from tests.integration import warm
from tests.integration.cluster import clean_environment
from tests.integration.command import Command
from tests.integration.worker import Worker

SCRIPT = """
import logging, sys, torch, psworker
logging.basicConfig(level=logging.INFO)
torch.manual_seed(1)
model = torch.nn.Linear(300, 300)
optimizer = psworker.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.ones(4, 300)).square().mean().backward()
    optimizer.step()
names = [link.transport.name for link in psworker.job.context.current().session.links]
shares = [link.transport.shares_memory for link in psworker.job.context.current().session.links]
with optimizer.global_weights():
    print(names[0], shares[0], float(model.weight.double().sum()))
"""


@pytest.fixture(scope="module")
def strong(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fortress]:
    with fortress(tmp_path_factory.mktemp("fortress")) as made:
        yield made


def train(environment: dict[str, str]) -> tuple[str, str, float]:
    done = warm.run(["-c", SCRIPT], env=clean_environment() | environment, timeout=200)
    assert done.returncode == 0, done.stderr
    name, shares, total = done.stdout.split()
    return name, shares, float(total)


@pytest.mark.slow
def test_every_plane_trains_to_the_same_weights_as_without(
    strong: Fortress, tmp_path: Path
) -> None:
    tokens = secrets_of(tmp_path, f"secured {EVERYTHING}\n")
    secured = strong.environment(tokens)
    totals = []
    for plane, shares in (("local", "True"), ("tcp", "False"), ("grpc", "False")):
        variables = {"PACELINE_DATA_PLANE": plane, "PACELINE_JOB": "secured"}
        name, shared, total = train(secured | variables)
        assert (name, shared) == (plane, shares)
        totals.append(total)
    with Command(tmp_path).detached() as run:
        totals.append(train({"PACELINE_SERVERS": run["addresses"][0]})[2])
    assert len(set(totals)) == 1
    strong.still_works()


def test_the_metrics_page_is_behind_tls_and_token_and_its_health_only_behind_tls(
    strong: Fortress,
) -> None:
    port = strong.command.run_file()["shards"][0]["metrics_port"]
    context = ssl.create_default_context(cafile=strong.files / "ca.pem")

    def ask(path: str, token: str) -> tuple[int, str]:
        page = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=200.0)
        page.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
        answer = page.getresponse()
        text = answer.read().decode()
        page.close()
        return answer.status, text

    assert ask("/healthz", "") == (200, "ready\n")
    for token in ("", "0" * 32, OTHER):
        status, text = ask("/metrics", token)
        assert (status, "PACELINE_TOKEN_FILE" in text) == (401, True)
    status, text = ask("/metrics", EVERYTHING)
    assert (status, "paceline_jobs" in text) == (200, True)
    plain = http.client.HTTPConnection("127.0.0.1", port, timeout=200.0)
    plain.request("GET", "/healthz")
    with pytest.raises((http.client.HTTPException, OSError)):
        plain.getresponse()


def test_the_dashboard_shows_such_shards_behind_tls_and_the_same_token(
    strong: Fortress, tmp_path: Path
) -> None:
    command = Command(tmp_path)
    command.environment |= strong.environment(secrets_of(tmp_path, f"{EVERYTHING}\n"))
    context = ssl.create_default_context(cafile=strong.files / "ca.pem")
    flags = ("--tls-cert", strong.files / "server.pem", "--tls-key", strong.files / "server.key")
    with command.spawn("dashboard", "--listen", "127.0.0.1:0", *flags) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "the password is the token" in line
        port = int(line.partition("https://127.0.0.1:")[2].partition("/")[0])

        def ask(token: str) -> tuple[int, bytes]:
            page = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=200.0)
            page.request("GET", "/api/view", headers={"Authorization": f"Bearer {token}"})
            answer = page.getresponse()
            body = answer.read()
            page.close()
            return answer.status, body

        assert ask(OTHER)[0] == 401
        status, body = ask(EVERYTHING)
        assert status == 200
        (job,) = [j for j in json.loads(body)["status"]["jobs"] if j["name"] == "train"]
        assert job["workers"][0]["state"] == "live"
    shown = command.run("top", "--once", "--job", "train").stdout
    assert "job train, live, ssgd" in shown
    refused = command.run("dashboard", "--listen", "0.0.0.0:0", code=2).stderr
    assert "needs --tls-cert and --tls-key" in refused
    assert "must be host:port" in command.run("dashboard", "--listen", "8090", code=2).stderr
    strong.still_works()


def test_shards_that_a_worker_starts_let_in_nobody_else(tmp_path: Path) -> None:
    """Loopback is open to every user of the machine; the token's file is not."""
    psserver = Command(tmp_path)
    with psserver.spawn("embedded", "--token") as process:
        assert process.stdout is not None
        ready: dict[str, Any] = json.loads(process.stdout.readline())
        (address,) = ready["addresses"]
        token_file = Path(ready["token_file"])
        assert token_file.stat().st_mode & 0o777 == 0o600
        stranger = Worker(address)
        with pytest.raises(grpc.RpcError) as caught:
            stranger.join()
        assert isinstance(error_of(caught.value, address), AccessError)
        stranger.close()
        worker = Worker(address, credentials=Credentials(token=token_file.read_text().strip()))
        worker.join()
        worker.close()
        assert process.stdin is not None
        process.stdin.close()
        process.wait(200)
        process.stdin = None
    assert not token_file.exists()
