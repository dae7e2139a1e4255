"""docker-compose.yml and the Dockerfile, read without an engine: properties that they must have."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from typer.main import get_command

from pscore.observe.doctor import names_of
from psserver.commands.cli import app
from psworker.job.environment import Environment
from tests.house.source import ROOT
from tests.integration.command import Command
from tests.integration.worker import Worker

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SHARDS = [name for name in SERVICES if name.startswith("shard")]
ALL_WORKERS = [name for name in SERVICES if "worker" in name]
WORKERS = [name for name in ALL_WORKERS if name[-1].isdecimal()]  # Those with ranks of their own.
OURS = [name for name in SERVICES if name != "prometheus"]
ACCESS: dict[str, str] = COMPOSE["x-access"]  # Variables of every client.
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()


def options(service: str) -> dict[str, Any]:
    """Returns the options of a shard's command, as psserver reads them."""
    program, command, *words = shlex.split(SERVICES[service]["command"])
    assert (program, command) == ("psserver", "start")
    start = get_command(app).commands["start"]  # type: ignore[attr-defined]
    given: dict[str, Any] = start.make_context("start", words).params
    return given


def test_two_shards_and_two_workers_start_by_default() -> None:
    started = [name for name in SERVICES if not SERVICES[name].get("profiles")]
    assert sorted(started) == ["certs", "shard0", "shard1", "worker0", "worker1"]


@pytest.mark.parametrize("name", SHARDS)
def test_a_shard_is_checked_and_has_time_to_end(name: str) -> None:
    service = SERVICES[name]
    assert service["healthcheck"]["test"] == ["CMD", "psserver", "health"]
    assert int(service["stop_grace_period"].removesuffix("s")) > 20  # Twice server.grace_s.
    assert "ports" not in service


@pytest.mark.parametrize("name", SHARDS)
def test_a_shard_finds_its_state_again(name: str) -> None:
    folder = SERVICES[name]["environment"]["PACELINE_STATE_DIR"]
    assert f"{name}:{folder}" in SERVICES[name]["volumes"]
    assert name in COMPOSE["volumes"]
    assert f"install --directory --owner paceline {folder}" in DOCKERFILE


def test_shard_0_takes_checkpoints_of_all_shards() -> None:
    first, *others = [options(name) for name in SHARDS]
    assert float(first["checkpoint_s"]) > 0
    assert first["shard_addresses"] == ",".join(f"{name}:7070" for name in SHARDS)
    assert not any(values["checkpoint_s"] or values["shard_addresses"] for values in others)
    assert "PACELINE_TLS_CA" in SERVICES[SHARDS[0]]["environment"]


def test_the_shards_are_one_cluster() -> None:
    given = [options(name) for name in SHARDS]
    assert [int(values["shard_index"]) for values in given] == list(range(len(SHARDS)))
    assert {int(values["shards"]) for values in given} == {len(SHARDS)}
    assert len({values["cluster"] for values in given}) == 1
    assert all(values["host"] == "0.0.0.0" and not values["insecure"] for values in given)


@pytest.mark.parametrize("name", ALL_WORKERS)
def test_a_worker_starts_when_every_shard_is_healthy(name: str) -> None:
    wanted = {shard: {"condition": "service_healthy"} for shard in SHARDS}
    assert SERVICES[name]["depends_on"] == wanted


@pytest.mark.parametrize("name", ALL_WORKERS)
def test_a_worker_can_be_stopped(name: str) -> None:
    assert SERVICES[name]["init"] is True
    assert "stop_grace_period" in SERVICES[name]
    assert SERVICES[name]["healthcheck"] == {"disable": True}


@pytest.mark.parametrize("name", [*SHARDS, *ALL_WORKERS])
def test_failed_containers_are_restarted(name: str) -> None:
    """A worker that has come to its end (0) is not; a shard is, as it ends with 0 at a reboot."""
    assert SERVICES[name]["restart"] == ("always" if name in SHARDS else "on-failure")


@pytest.mark.parametrize("file", ["deploy/compose/host.yml", "deploy/stack.yml"])
def test_a_shard_on_another_host_comes_back_when_that_reboots(file: str) -> None:
    services = yaml.safe_load((ROOT / file).read_text())["services"]
    shards = [service for name, service in services.items() if name.startswith("shard")]
    assert shards
    for shard in shards:
        restart = shard.get("restart") or shard["deploy"]["restart_policy"]["condition"]
        assert restart in ("always", "any")


@pytest.mark.parametrize("name", ALL_WORKERS)
def test_a_worker_has_memory_to_pass_the_batches_of_a_loader(name: str) -> None:
    assert SERVICES[name]["shm_size"] == "${SHM_SIZE:-1gb}"


@pytest.mark.parametrize("name", SERVICES)
def test_the_logs_of_a_container_have_a_limit(name: str) -> None:
    assert SERVICES[name]["logging"]["options"] == {"max-size": "16m", "max-file": "4"}


@pytest.mark.parametrize("name", ALL_WORKERS)
def test_a_worker_waits_longer_than_a_shard_is_away(name: str) -> None:
    """Longer than the default, and than a container needs that its engine starts again."""
    place = Environment.read(SERVICES[name]["environment"])
    assert place.timeout_s >= 300 > Environment.read({}).timeout_s


def test_the_workers_of_a_job_have_every_rank_once() -> None:
    places = [Environment.read(SERVICES[name]["environment"]) for name in WORKERS]
    assert [place.rank for place in places] == [0, 1]
    assert {place.num_workers for place in places} == {2}
    assert len({place.job for place in places}) == 1
    assert {place.servers for place in places} == {tuple(f"{name}:7070" for name in SHARDS)}


def test_the_jobs_do_not_meet() -> None:
    assert len({SERVICES[name]["environment"]["PACELINE_JOB"] for name in ALL_WORKERS}) == 3


@pytest.mark.parametrize("name", ALL_WORKERS)
def test_only_workers_of_the_gpu_profile_ask_for_a_gpu(name: str) -> None:
    if SERVICES[name].get("profiles") != ["gpu"]:
        assert "deploy" not in SERVICES[name]
        return
    (device,) = SERVICES[name]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


def test_one_container_starts_a_worker_for_each_gpu() -> None:
    """Two services with `count: 1` would both get GPU 0: Docker counts from the first one."""
    files = [("docker-compose.yml", "gpu-workers"), ("deploy/compose/host.yml", "gpu-workers")]
    for file, name in [*files, ("deploy/stack.gpu.yml", "worker")]:
        service = yaml.safe_load((ROOT / file).read_text())["services"][name]
        assert service["command"][:4] == ["psworker", "run", "--workers", "gpu"]
        assert (ROOT / service["command"][5]).is_file()
    variables = {key: value or "" for key, value in SERVICES["gpu-workers"]["environment"].items()}
    assert variables["CUDA_VISIBLE_DEVICES"] == ""  # That of compose's own environment, if any.
    place = Environment.read(variables)
    assert (place.rank, place.min_workers, place.num_workers) == (-1, 1, 64)


def test_a_job_of_several_hosts_has_ranks_for_all_their_gpus() -> None:
    """As many as that of one host: with fewer, the GPUs of later hosts would wait in vain."""
    for file in ("host.env", "host.yml", "../stack.yml"):
        (most,) = re.findall(
            r"MAX_WORKERS(?:[=]|: \"|: \$\{MAX_WORKERS:-)(\d+)",
            (ROOT / "deploy/compose" / file).read_text(),
        )
        assert most == SERVICES["gpu-workers"]["environment"]["PACELINE_MAX_WORKERS"], file


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_writes_nothing_but_its_volumes(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


def test_the_number_of_elastic_workers_is_left_to_compose() -> None:
    place = Environment.read(SERVICES["worker"]["environment"])
    assert (place.rank, place.min_workers, place.num_workers) == (-1, 1, 8)


def test_a_command_that_ends_the_project_ends_the_services_of_profiles() -> None:
    """Compose 2 leaves them running without `--profile`, which version 1 does not."""
    text = "".join((ROOT / file).read_text() for file in ("docs/deploy.md", "docker-compose.yml"))
    ends = re.findall(r"docker compose (.*?)\b(?:down|stop)\b", text)
    assert len(ends) == 3
    assert set(ends) == {"--profile '*' "}


def test_prometheus_asks_every_shard_with_the_token() -> None:
    config = yaml.safe_load((ROOT / "deploy/compose/prometheus.yml").read_text())
    (scrape,) = config["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": [f"{name}:8070" for name in SHARDS]}]
    assert scrape["authorization"]["credentials_file"].startswith("/etc/paceline/worker/")
    assert all(
        (ROOT / volume.split(":")[0]).is_file() for volume in SERVICES["prometheus"]["volumes"][:2]
    )


def test_the_page_counts_the_alerts() -> None:
    rules = yaml.safe_load((ROOT / "deploy/chart/files/rules.yaml").read_text())
    alerts = [rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule]
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    assert f"[rules.yaml](../deploy/chart/files/rules.yaml) has {len(alerts)} alerts: " in page


def test_every_service_of_the_overlay_shares_one_network() -> None:
    overlay = yaml.safe_load((ROOT / "deploy/compose/local.yml").read_text())["services"]
    assert set(overlay) == {"network", "dashboard", *SHARDS, *ALL_WORKERS}
    modes = {overlay[name].get("network_mode") for name in (*SHARDS, *ALL_WORKERS)}
    assert modes == {"service:network"}


def test_the_example_of_a_host_sets_every_variable_that_its_file_requires() -> None:
    text = (ROOT / "deploy/compose/host.yml").read_text()
    required = set(re.findall(r"\$\{(\w+):\?", text))
    given = re.findall(r"^(\w+)=", (ROOT / "deploy/compose/host.env").read_text(), re.MULTILINE)
    assert required <= set(given)


@pytest.mark.parametrize(
    ("services", "message"),
    [
        ("shard,wrker", "COMPOSE_PROFILES is 'shard,wrker': shard, worker, gpu, or several with"),
        ("shard, gpu", "COMPOSE_PROFILES is 'shard, gpu': shard, worker, gpu, or several with"),
        ("shard,gpu", "no token in the folder SECRETS of .env: psserver certs makes one"),
    ],
)
def test_a_host_with_a_wrong_name_of_a_service_or_no_secrets_is_told(
    services: str, message: str, tmp_path: Path
) -> None:
    host = yaml.safe_load((ROOT / "deploy/compose/host.yml").read_text())["services"]["secrets"]
    (script,) = host["command"]
    line = [*host["entrypoint"], script.replace("$$", "$").replace("/secrets/", f"{tmp_path}/")]
    done = subprocess.run(line, env=os.environ | {"SERVICES": services}, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr.decode().startswith(message)


def test_every_container_runs_an_image_of_the_dockerfile_and_what_is_in_it() -> None:
    images = {"shard": "paceline:shard", "worker": "paceline:local"}
    images |= {"cuda": "${CUDA_IMAGE:-paceline:cuda}"}
    for name in OURS:
        build = SERVICES[name]["build"]
        assert build["dockerfile"] == "deploy/Dockerfile"
        assert f" AS {build['target']}\n" in DOCKERFILE
        assert SERVICES[name]["image"] == images[build["target"]]
        assert (build["target"] == "shard") == (name not in ALL_WORKERS)
    scripts = {word for name in ALL_WORKERS for word in SERVICES[name]["command"] if ".py" in word}
    assert len(scripts) == 2
    assert all((ROOT / script).is_file() for script in scripts)
    assert "COPY examples /app/examples" in DOCKERFILE
    assert "WORKDIR /app" in DOCKERFILE


@pytest.mark.parametrize("name", OURS)
def test_a_build_argument_that_is_not_set_has_the_default_of_the_dockerfile(name: str) -> None:
    """Compose 1 passes an argument without a value as an empty one."""
    for argument, value in SERVICES[name]["build"]["args"].items():
        (default,) = set(re.findall(rf'^ARG {argument}="?([^"\n]+)"?$', DOCKERFILE, re.M)) or {""}
        assert value == f"${{{argument}:-{default}}}"


def test_a_release_builds_the_image_for_cuda_12_with_the_torch_of_the_page() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    images = release["jobs"]["images"]["strategy"]["matrix"]["include"]
    (torch,) = [image["torch"] for image in images if image["cuda"] == "12"]
    assert f"`TORCH={torch}`" in page


@pytest.mark.parametrize("name", [*SHARDS, *ALL_WORKERS])
def test_every_client_has_a_certificate_and_a_token(name: str) -> None:
    side = "shard" if name in SHARDS else "worker"
    folder = f"/etc/paceline/{side}"
    assert f"{side}-secrets:{folder}:ro" in SERVICES[name]["volumes"]
    variables = SERVICES[name]["environment"]
    wanted = ["TLS_CERT", "TLS_KEY", "TLS_CA", "TOKEN_FILE"]
    named = [variables[f"PACELINE_{suffix}"] for suffix in wanted]
    assert all(path.startswith(f"{folder}/") for path in named)
    assert f"--mode 700 {folder}" in DOCKERFILE or f" {folder}\n" in DOCKERFILE
    if name in SHARDS:
        assert variables["PACELINE_TLS_CLIENT_CA"] == f"{folder}/ca.pem"
        done = {"certs": {"condition": "service_completed_successfully"}}
        assert SERVICES[name]["depends_on"] == done


@pytest.mark.slow
def test_the_secrets_are_made_once_and_fit_the_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service's own script, elsewhere; then a shard as in the file, which is healthy."""
    (tmp_path / "shard").mkdir()
    (tmp_path / "worker").mkdir()
    (tmp_path / "psserver").write_text(f'#!/bin/sh\nexec {sys.executable} -m psserver "$@"\n')
    (tmp_path / "psserver").chmod(0o700)
    service = SERVICES["certs"]
    (script,) = service["command"]
    line = [*service["entrypoint"], script.replace("/etc/paceline", str(tmp_path))]
    path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(line, env=path, check=True, capture_output=True)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.*")}
    subprocess.run(line, env=path, check=True, capture_output=True)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*.*")} == before
    for file in (tmp_path / "shard").iterdir():  # As `docker volume rm` of one of both volumes.
        file.unlink()
    subprocess.run(line, env=path, check=True, capture_output=True)
    assert sorted(file.name for file in (tmp_path / "worker").iterdir()) == [
        "ca.pem", "client.key", "client.pem", "token",
    ]  # fmt: skip
    assert not list(tmp_path.rglob("ca.key"))
    names = certs_names(tmp_path / "shard" / "server.pem")
    assert set(SHARDS) <= names

    def moved(name: str) -> dict[str, str]:
        variables = SERVICES[name]["environment"]
        return {
            key: value.replace("/etc/paceline", str(tmp_path))
            for key, value in variables.items()
            if "/etc/paceline" in value
        }

    psserver = Command(tmp_path / "run")
    psserver.environment |= moved("shard0")
    with psserver.detached() as run:
        assert "ready" in psserver.run("health").stdout
        for key, value in moved("worker0").items():
            monkeypatch.setenv(key, value)
        worker = Worker(run["addresses"][0], credentials=Environment.read().credentials())
        worker.join()
        worker.close()
        look_at_page(run["addresses"][0], (tmp_path / "worker" / "token").read_text().strip())


def look_at_page(shard: str, token: str) -> None:
    """Runs the command of the service `dashboard` for a shard, with the variables of a worker."""
    assert SERVICES["dashboard"]["environment"] == {
        **ACCESS,
        "PACELINE_SERVERS": "shard0:7070,shard1:7070",
    }
    words = [word.replace(":8090", ":0") for word in SERVICES["dashboard"]["command"][1:]]
    page = subprocess.Popen(
        [sys.executable, "-m", "psserver", *words, "--servers", shard],
        stdout=subprocess.PIPE,
        text=True,
    )
    with page:
        try:
            assert page.stdout is not None
            found = re.search(r"http://[^/]*:(\d+)/", page.stdout.readline())
            assert found is not None
            url = f"http://127.0.0.1:{found[1]}/api/view"
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(url, timeout=200)
            request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(request, timeout=200) as answer:
                assert json.load(answer)["status"]["shards"]
        finally:
            page.terminate()


def certs_names(path: Path) -> set[str]:
    return set(names_of(x509.load_pem_x509_certificate(path.read_bytes())))


def test_the_image_is_checked_unprivileged_and_pinned() -> None:
    stages = {part.split()[2]: part for part in DOCKERFILE.split("\nFROM ")[1:] if " AS " in part}
    health = r'^HEALTHCHECK .* CMD \["psserver", "health"\]$'
    assert re.search(health, stages["base"], re.MULTILINE)
    for target in ("shard", "worker", "cuda"):
        assert stages[target].startswith("base AS ")
        assert "\nUSER paceline" in stages[target]
    froms = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert set(froms) <= {"${BASE}", *stages}  # BASE may be name@sha256:...
    for library in ("NUMBA", "CUPY"):  # The root is read-only, and the home with it.
        assert f" {library}_CACHE_DIR=/tmp/" in stages["base"]
    # All versions of the file hold; for torch another one may be asked for.
    assert "sed -E '/^(torch|cuda-bindings)==/d' constraints.txt > without-torch.txt" in DOCKERFILE
    assert "PIP_CONSTRAINT=/src/without-torch.txt" in DOCKERFILE
    assert DOCKERFILE.count('"${TORCH:-$(grep ^torch== constraints.txt)}"') == 1
    assert not re.search(r"https?://|index-url|find-links", DOCKERFILE)


def test_files_that_the_image_copies_are_not_ignored() -> None:
    kept = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    needed = {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "examples"}
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]
    needed.add(hatch["metadata"]["hooks"]["custom"]["path"])  # The build reads it.
    assert needed | {"pscore", "pssim", "psserver", "psworker"} <= kept


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("SHARDS", value) for value in ("abc", "0", "65", "-1", "1.5", " 2", "08")),
        *(("CHECKPOINT_S", value) for value in ("abc", "-1", "1e3", "five")),
    ],
)
def test_the_script_for_slurm_refuses_a_wrong_variable_before_it_starts_anything(
    name: str, value: str
) -> None:
    script = ROOT / "deploy" / "slurm" / "train.sbatch"
    done = subprocess.run(
        ["bash", str(script), "train.py"],
        env={"PATH": os.environ["PATH"], name: value},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{name} is '{value}', must be ")
    assert done.stderr.count("\n") == 1
