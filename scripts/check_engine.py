"""Checks the image, docker-compose.yml, deploy/compose and deploy/stack.yml with a real engine.

    deploy/check            # all checks; exit code 1 if one fails
    deploy/check --write    # also writes its log to docs/results, by section

Needs Docker and compose, 6 GiB of disk, about 8 minutes; root to kill a container's process from
outside, and for the check of two hosts, with `ip` and `nsenter`: the second host is a network
namespace with an engine of its own. Where no image of Prometheus can be pulled, one is made of this
machine's `prometheus`, and the log says so.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from scripts.engine import (
    IMAGE,
    PYPI_TORCH,
    ROOT,
    SHARD_IMAGE,
    TORCH,
    CheckError,
    GpuHost,
    NotRunError,
    Project,
    SecondHost,
    Shell,
    kept_data,
    run,
    tail,
    wait,
)
from scripts.printed import commands

PAGE = ROOT / "docs" / "deploy.md"
LOG = ROOT / "docs" / "results" / "deploy-check.txt"
BASE = ["docker-compose.yml"]
SERVERS = "shard0:7070,shard1:7070"
TARGETS = {"shard": SHARD_IMAGE, "worker": IMAGE}
BASE_IMAGE = "python:3.11-slim"
CUDA_IMAGE = "paceline:cuda"
RESULT = ROOT / "docs" / "results" / "images.json"
OCI = "org.opencontainers.image"
# Says whether the image has a loop's code for this processor.
USED = """
import numpy
from pscore.memory import kernels
assert kernels.all_finite(numpy.zeros(1, numpy.float32))
print(sum(kernels.all_finite_loop.stats.cache_hits.values()) == 1)
"""
# Compiles the kernels for a GPU of 2022; that needs none.
COMPILED = """
import cupy, torch
from cupy.cuda import nvrtc
from pscore.cuda.runtime import compiled
print(
    "torch", torch.__version__, "CuPy", cupy.__version__,
    "NVRTC", ".".join(map(str, nvrtc.getVersion())), "kernels of", len(compiled((9, 0))), "bytes",
)
"""
IMAGE_USER = 10001  # User of the images.
PAIR = 2  # Shards and workers of a job here.
PAUSE_S = 30  # Longer than a lease.
ACCURACY = 0.75  # After two epochs of examples/mnist.py, at least.
PROMETHEUS = "prom/prometheus:v3.5.0"
# Ports of a shard; a worker takes none.
PORTS = {"PORT": "17470", "DATA_PORT": "17570", "METRICS_PORT": "17670"}


class Log:
    """Lines of the checks, for the terminal and for the page."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.num_failed = 0
        self._start_s = time.monotonic()

    def say(self, text: str) -> None:
        """Writes a line with the seconds since the start."""
        line = f"{time.monotonic() - self._start_s:5.0f} s  {text}"
        self.lines.append(line)
        print(line, flush=True)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Says whether the code inside was run and raised no error."""
        try:
            yield
        except NotRunError as reason:
            self.say(f"      {name} was not run: {reason}")
        except (
            CheckError, subprocess.CalledProcessError, OSError, ValueError, LookupError
        ) as problem:  # fmt: skip
            self.num_failed += 1
            self.say(f"FAIL  {name}: {problem}")
        else:
            self.say(f"ok    {name}")


def main() -> int:
    """Runs the checks; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the log to docs/results")
    parser.add_argument("--only", help="names of sections, with commas")
    given = parser.parse_args()
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "info"], capture_output=True).returncode
    ):
        print("no Docker engine answers: start one, or set DOCKER_HOST", file=sys.stderr)
        return 1
    log = Log()
    about = machine()
    log.say(about)
    sections: dict[str, list[str]] = {}
    with kept_data():
        for name, check in SECTIONS.items():
            if given.only is None or name in given.only.split(","):
                begin = len(log.lines)
                with log.section(name):
                    check(log)
                sections[name] = [f"{name}: {about}", *log.lines[begin:]]
    log.say(f"{log.num_failed} of the checks failed" if log.num_failed else "every check passed")
    if given.write and not log.num_failed:
        keep(sections)
    return 1 if log.num_failed else 0


def machine() -> str:
    """Returns the date, the versions of the engine, and the number of cores."""
    versions = [
        run("docker", "version", "--format", f"{{{{.{side}.Version}}}}").strip()
        for side in ("Client", "Server")
    ]
    engine = f"Docker {versions[1]} (client {versions[0]})"
    return f"{datetime.now(UTC):%Y-%m-%d}, {engine}, {os.cpu_count()} cores"


def check_section(name: str, *, keeps: bool) -> None:
    """Runs a section; if it passes, keeps its lines for the page if so wanted.

    Raises:
        NotRunError: This machine lacks what it needs.
    """
    # An engine that leaves a Swarm forgets the names of containers in all of its networks.
    others = locked(ROOT / "docker-compose.yml", is_shared=name != "swarm")
    with nullcontext() if name in BUILDS else others:
        log = Log()
        SECTIONS[name](log)
        log.say(f"ok    {name}")
    if keeps:
        keep({name: [f"{name}: {machine()}", *log.lines]})


def keep(sections: dict[str, list[str]]) -> None:
    """Writes the lines of sections; the others keep those of their last run."""
    with locked(LOG):
        texts = {text.partition(":")[0]: text for text in LOG.read_text().strip().split("\n\n")}
        texts |= {name: "\n".join(lines) for name, lines in sections.items()}
        LOG.write_text("\n\n".join(texts[name] for name in SECTIONS if name in texts) + "\n")


@contextmanager
def locked(path: Path, *, is_shared: bool = False) -> Iterator[None]:
    """Locks a file meanwhile against other processes of the same tests."""
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX)
        yield


def build(log: Log) -> None:
    """Builds the images, and looks at their sizes, users, labels and paths."""
    base = json.loads(run("docker", "image", "inspect", BASE_IMAGE))[0]
    sizes = {"base": base["Size"]}
    build_images()
    for target, name in TARGETS.items():
        image = json.loads(run("docker", "image", "inspect", name))[0]
        sizes[target] = image["Size"]
        log.say(
            f"      {name}: {image['Size'] / 1e9:.2f} GB, of which {base['Size'] / 1e9:.2f} GB are "
            f"the base; user {image['Config']['User']}"
        )
        if image["Config"]["User"] != "paceline":
            raise CheckError("the image runs as root")
        look = ("docker", "run", "--rm", "--network", "none", name)
        if "No such file" not in run(*look, "ls", "/src", check=False):
            raise CheckError("the stage that builds is in the image")
        has_torch = "No module" not in run(*look, "python", "-c", "import torch", check=False)
        if has_torch == (target == "shard"):
            raise CheckError(f"torch is {'' if has_torch else 'not '}in {name}")
        run(*look, "psserver", "rules")
        used = run(*look, "python", "-c", USED).split()
        log.say(f"      {name}: a loop's compiled code is used as it is in the image: {used[-1]}")
        if used[-1] != "True":
            raise CheckError(f"{name} compiles a loop that it should have")
    note_sizes(sizes)
    check_labels()
    no_gpu(log)


def build_images() -> None:
    """Builds the images for CPUs, unless another process of the same tests does it just now."""
    with locked(ROOT / "deploy" / "Dockerfile"):
        for target, name in TARGETS.items():
            build_target(target, name)


def check_labels() -> None:
    """Builds the stage that has the labels, with values; in an image they would be built anew."""
    name = f"{IMAGE}-labels"
    build_target("base", name, "--build-arg", "VERSION=0.1.0", "--build-arg", "REVISION=checked")
    found = json.loads(run("docker", "image", "inspect", name))[0]["Config"]["Labels"]
    run("docker", "rmi", name)
    if (found[f"{OCI}.version"], found[f"{OCI}.base.name"]) != ("0.1.0", BASE_IMAGE):
        raise CheckError(f"the labels are {found}")


def note_sizes(sizes: dict[str, int]) -> None:
    """Writes sizes of images; those of other targets stay."""
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    with locked(RESULT):
        found = json.loads(RESULT.read_text())
        found |= {target: {"nbytes": nbytes, "date": today} for target, nbytes in sizes.items()}
        RESULT.write_text(json.dumps(found) + "\n")


def build_target(target: str, name: str, *options: str, check: bool = True) -> str:
    """Builds a target of the Dockerfile; returns the output."""
    words = ("--force-rm", "--network", "host", "-f", "deploy/Dockerfile", "--target", target)
    return run("docker", "build", *words, *options, "-t", name, ".", check=check)


def cuda(log: Log, version: str = "13", torch: str = PYPI_TORCH) -> None:
    """Builds the image for NVIDIA GPUs with a torch of PyPI, compiles our kernels, removes it."""
    start_s = time.monotonic()
    words = ("--build-arg", f"CUDA={version}", "--build-arg", f"TORCH={torch}")
    name = CUDA_IMAGE if version == "13" else f"{CUDA_IMAGE}{version}"
    build_target("cuda", name, *words)
    try:
        size = json.loads(run("docker", "image", "inspect", name))[0]["Size"]
        # Read-only as in the compose files: CuPy makes a folder when it is imported.
        places = ("--network", "none", "--read-only", "--tmpfs", "/tmp")
        look = ("docker", "run", "--rm", *places, name, "python", "-c")
        found = run(*look, COMPILED).splitlines()[-1]
        log.say(
            f"      {name} has {found}, {size / 1e9:.2f} GB, in {time.monotonic() - start_s:.0f} s"
        )
        if f"NVRTC {version}." not in found:
            raise CheckError(f"that is not CUDA {version}")
        note_sizes({"cuda" if version == "13" else f"cuda, CUDA={version}": size})
    finally:
        run("docker", "rmi", name, check=False)


def cuda12(log: Log) -> None:
    """Builds that image for CUDA 12, with the torch that the page names for it."""
    (torch,) = re.findall(r"`TORCH=(torch==[\d.]+)`", PAGE.read_text())
    cuda(log, "12", torch)


def refusals(log: Log) -> None:
    """Builds the image for GPUs with a torch for another CUDA, and for none: it is refused."""
    with served_wheels() as options:
        for torch, wanted, built in (
            (f"{TORCH}+cu126", "13", "for CUDA 12.6"),
            (f"{TORCH}+cu130", "12", "for CUDA 13.0"),
            (f"{TORCH}+none", "13", "without CUDA"),
        ):
            args = (f"TORCH=torch=={torch}", f"TORCH_OPTIONS={options}", f"CUDA={wanted}")
            words = [word for arg in args for word in ("--build-arg", arg)]
            said = build_target("cuda", f"{CUDA_IMAGE}-refused", *words, check=False)
            expected = f"torch {torch} is built {built}, and CUDA is {wanted}: "
            if expected not in said:
                raise CheckError(f"{expected!r} was expected: {tail(said)}")
            log.say(f"      refused: {expected}...")


@contextmanager
def served_wheels() -> Iterator[str]:
    """Serves stand-ins for wheels of torch; yields the options of pip that find them."""
    with tempfile.TemporaryDirectory() as folder:
        for version, cuda in (
            (f"{TORCH}+cu126", "12.6"),
            (f"{TORCH}+cu130", "13.0"),
            (f"{TORCH}+none", ""),
        ):
            about = f"torch-{version}.dist-info"
            files = {
                "torch/__init__.py": f"from torch import version\n__version__ = {version!r}\n",
                "torch/bin/torch_shm_manager": "",
                "torch/version.py": f"cuda = {cuda or None!r}\n",
                f"{about}/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n",
                f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: us\nRoot-Is-Purelib: true\n"
                "Tag: py3-none-any\n",
            }
            record = "".join(f"{name},,\n" for name in [*files, f"{about}/RECORD"])
            wheel = Path(folder) / f"torch-{version}-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                for name, text in (files | {f"{about}/RECORD": record}).items():
                    archive.writestr(name, text)
        handler = partial(QuietHandler, directory=folder)
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"--no-index --find-links http://127.0.0.1:{server.server_port}/"
            server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, *_: object) -> None:
        """Writes nothing."""


def compiler(log: Log) -> None:
    """Builds the image for workers with a compiler, and compiles a model as the page says."""
    name = f"{IMAGE}-compiler"
    build_target("worker", name, "--build-arg", "COMPILER=g++")
    script = (
        "import torch; model = torch.compile(torch.nn.Linear(4, 4)); x = torch.ones(2, 4); "
        "expected = x @ model.weight.T + model.bias; torch.testing.assert_close(model(x), expected)"
    )
    places = (
        "--network",
        "none",
        "--read-only",
        "--tmpfs",
        "/tmp",
        "--volume",
        f"{name[9:]}:/compiled",
    )
    variable = ("--env", "TORCHINDUCTOR_CACHE_DIR=/compiled/inductor")
    try:
        owner = ("docker", "run", "--rm", "--user", "0", *places, name, "chown", str(IMAGE_USER))
        run(*owner, "/compiled")
        run("docker", "run", "--rm", *places, *variable, name, "python", "-c", script)
        log.say(f"      COMPILER=g++: torch.compile works in {name}, read-only, with its folder")
    finally:
        run("docker", "volume", "rm", "--force", name[9:], check=False)
        run("docker", "rmi", name, check=False)


def no_gpu(log: Log) -> None:
    """Starts workers for GPUs where there is none: in a container, and with the compose file."""
    look = ("docker", "run", "--rm", "--network", "none", IMAGE, "psworker", "run")
    said = run(*look, "--workers", "gpu", "--", "examples/elastic.py", check=False)
    log.say(f"      a container without a GPU: {said.strip()}")
    if "--workers gpu finds no GPU" not in said or len(said.strip().splitlines()) > 1:
        raise CheckError("that is not one sentence about the missing GPU")


def gpus(log: Log) -> None:
    """Starts a worker for each GPU of a host with stand-ins for GPUs; then reboots the host."""
    require_root()
    first, chosen = commands("deploy.md", "GPUs")[0].splitlines()
    variables = {"CUDA_IMAGE": IMAGE, "STEPS": "100000"}
    with tempfile.TemporaryDirectory() as folder, GpuHost() as host:
        shell = Shell(Path(folder), "pacegpus", False, DOCKER_HOST=host.engine, **variables)
        with Project("pacegpus", BASE, SERVERS, host.engine, shell.root, **variables) as project:
            for count in (1, 2, 4, 8, 2, 1):
                host.plug(count)
                seen = devices_seen(project)
                log.say(f"      a host with {count}: {count} workers use {', '.join(seen)}")
                if len(seen) != count:
                    raise CheckError(f"{count} workers were expected, each with a GPU of its own")
            one = chosen.replace("=0,1", "=0")
            for command, has, count in ((first, 1, 1), (chosen, 2, 2), (one, 2, 1)):
                host.plug(has)
                shell(command)
                wait(f"{count} workers", partial(has_workers, project, "mnist-gpu", count))
                log.say(f"      {command!r}: {count} workers are live")
            check_gpu_job(log, project, host)
        several_with_gpus(log, shell, host)


def check_gpu_job(log: Log, project: Project, host: GpuHost) -> None:
    """Looks at the example's line about its GPU; then reboots the host."""
    text = project.docker("logs", project.only("gpu-workers"))
    (line,) = set(re.findall(r"no GPU that torch can use: .*", text))
    log.say(f"      the example says: {line}")
    before = int(project.job("shard0", "mnist-gpu")["step"])
    host.reboot()
    wait("the job", partial(has_workers, project, "mnist-gpu", 1))
    after = int(wait("steps", lambda: (now := gpu_step(project)) > before and now))
    log.say(
        f"      the host reboots in order at step {before}: shards and workers come back with "
        f"it, and the job is at step {after}"
    )


def host_variables(log: Log) -> None:
    """Leaves out each variable of a host's `.env` that its file requires: compose has to say so."""
    file = ROOT / "deploy" / "compose" / "host.yml"
    required = dict(re.findall(r"\$\{(\w+):\?([^}]+)\}", file.read_text()))
    (_, up) = commands("deploy.md", "Several hosts")[0].splitlines()
    with tempfile.TemporaryDirectory() as folder:
        shell = Shell(Path(folder), "pacevars")
        example = (shell.root / "deploy/compose/host.env").read_text().splitlines()
        for name, meaning in required.items():
            lines = [line for line in example if line.partition("=")[0] != name]
            (shell.root / ".env").write_text("\n".join(lines))
            try:
                said = shell(up)
            except CheckError as problem:
                said = str(problem)
            # Compose 1 breaks no lines, and names what the variable means; compose 2 names both.
            if f": {meaning}" not in said:
                raise CheckError(f"without {name} in .env {up!r} says {tail(said)}")
    log.say(f"      without {', '.join(required)} in .env {up!r} says what is missing")


def several_with_gpus(log: Log, shell: Shell, host: GpuHost) -> None:
    """Runs the command for several hosts on one that has a shard, and workers for its GPUs."""
    certs, up = commands("deploy.md", "Several hosts")[0].splitlines()
    address = f"{host.there}:{PORTS['PORT']}"
    shell(certs.replace("10.0.0.1", host.there))
    choice = {"SERVERS": address, "SHARDS": "1", "COMPOSE_PROFILES": "shard,gpu"}
    shell.write_env({**PORTS, **choice})
    host.plug(2)
    with Project(
        "pacegpus", ["deploy/compose/host.yml"], address, host.engine, shell.root
    ) as project:
        shell(up)
        wait("2 workers", lambda: len(project.live("shard", "mnist")) == PAIR)
        log.say("      several hosts with GPUs: 2 workers of a host with 2 are live")


def devices_seen(project: Project) -> list[str]:
    """Returns the GPUs that the workers of a container use, each once."""
    probe = 'echo "uses $(ls /dev/nvidia[0-9]* | sed -n "$((LOCAL_RANK + 1))p")"'
    words = ("--profile", "gpu", "run", "--rm", "--no-deps", "-T", "gpu-workers")
    launch = ("psworker", "run", "--workers", "gpu", "--servers", "127.0.0.1:1", "--")
    said = project.compose(*words, *launch, "sh", "-c", probe)
    return sorted(set(re.findall(r"uses (/dev/nvidia\d)", said)))


def gpu_step(project: Project) -> int:
    """Returns the step of the job on GPUs."""
    return int(project.job("shard0", "mnist-gpu")["step"])


def has_workers(project: Project, job: str, count: int) -> bool:
    """Returns whether a job has so many live workers, and all have made a step."""
    live = project.live("shard0", job)
    return len(live) == count and all(worker["step"] for worker in live)


def page(log: Log) -> None:
    """Runs the commands of docs/deploy.md as they are printed, in a clone of this repository.

    Those for GPUs, several hosts and a Swarm have sections of their own.
    """
    ports = {"PROMETHEUS_PORT": "19490", "DASHBOARD_PORT": "18490"}
    variables = {"PROMETHEUS_IMAGE": prometheus_image(log), **ports}
    up, logs, status, down = commands("deploy.md")[0].splitlines()
    tasks = re.findall(r"^\| .* \| `(docker compose .*)` \|$", PAGE.read_text(), re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder, Project("pacepage", BASE, SERVERS) as project:
        shell = Shell(Path(folder), "pacepage", **variables)
        for line in commands("deploy.md", "The images")[0].splitlines():
            shell(line)
        shell(up)
        said = shell(logs)
        found = [float(value) for value in re.findall(r"test: accuracy ([\d.]+)", said)]
        if len(found) != 2 * PAIR or max(found) < ACCURACY:
            raise CheckError(f"{logs!r} shows the accuracies {found}")
        if "mnist" not in (said := shell(status)):
            raise CheckError(f"{status!r} shows no job: {tail(said)}")
        log.say(f"      {up!r}, {logs!r}, {status!r}: accuracy {max(found)}")
        (elastic,) = [task for task in tasks if "--scale" in task]
        for count in (4, 2):  # "Up and down", says the page.
            scale(log, project, shell, elastic.replace("worker=4", f"worker={count}"))
        (monitoring,) = [task for task in tasks if "monitoring" in task]
        shell(monitoring)
        wait("Prometheus", lambda: len(asked(project, 'up{job="paceline"} == 1')) == PAIR)
        wait("the dashboard", lambda: shards_on_page(project) == PAIR)
        log.say(f"      {monitoring!r}: both shards are on the dashboard and in Prometheus")
        shell(down)
        if left := project.names(""):
            raise CheckError(f"{down!r} leaves {left}")
        # The next command trains with secrets that are made anew.
        (remove,) = re.findall(r"`(docker volume rm .*?)`", PAGE.read_text())
        shell(remove.replace("paceline_", f"{project.name}_"))
        (memory,) = [task for task in tasks if "local.yml" in task]
        shell(memory)
        check_accuracy(log, project, "worker1")
        log.say(f"      {memory!r}: both workers end well")
    one_shard_per_container(log)


def scale(log: Log, project: Project, shell: Shell, command: str) -> None:
    """Runs a command that scales the workers of the elastic job, and waits for them."""
    count = int(command.partition("worker=")[2].split()[0])
    shell(command)
    wait(f"{count} workers", lambda: len(project.live("shard0", "mnist-elastic")) == count)
    log.say(f"      {command!r}: {count} workers are live")


def one_shard_per_container(log: Log) -> None:
    """Starts two shards in a container each, with the commands of the page."""
    printed = commands("deploy.md", "One shard per container")[0].splitlines()
    network = "pacepage-shards"
    files = {"CERT": "server.pem", "KEY": "server.key", "CLIENT_CA": "ca.pem", "CA": "ca.pem"}
    variables = {f"TLS_{name}": file for name, file in files.items()} | {"TOKEN_FILE": "token"}
    with tempfile.TemporaryDirectory() as folder:
        make_certs(folder, "shard0", "shard1")
        words = ["docker", "run", "--detach", "--network", network, "--volume", f"{folder}:/certs"]
        for name, file in variables.items():
            words += ["--env", f"PACELINE_{name}=/certs/{file}"]
        give(folder, IMAGE_USER)
        run("docker", "network", "create", network)
        try:
            for index, command in enumerate(printed):
                place = ("--name", f"{network}{index}", "--network-alias", f"shard{index}")
                run(*words, *place, SHARD_IMAGE, *command.split())
            health = ("docker", "exec", f"{network}1", "psserver", "health", "--servers", SERVERS)
            said = wait("both shards", lambda: run(*health))
            log.say(f"      one shard per container, as printed: {' '.join(said.split())}")
        finally:
            for index in range(PAIR):
                run("docker", "rm", "--force", f"{network}{index}", check=False)
            run("docker", "network", "rm", network, check=False)
            give(folder, os.getuid())


def require_root() -> None:
    """Raises NotRunError if this is not root."""
    if os.getuid() != 0:
        raise NotRunError("only root makes a second host")


def give(folder: str, owner: int) -> None:
    """Changes the owner of a folder and its files, as root of a container can."""
    words = ("--user", "0", "--network", "none", "--volume", f"{folder}:/folder")
    run("docker", "run", "--rm", *words, SHARD_IMAGE, "chown", "-R", str(owner), "/folder")


def loader(log: Log) -> None:
    """Passes batches of 96 MB from two processes of a DataLoader, in a worker's container."""
    script = (
        "import torch; from torch.utils.data import DataLoader as L; "
        "print(sum(1 for _ in L(torch.zeros(4, 24 << 20), batch_size=1, num_workers=2)), 'batches')"
    )
    with Project("pacecheck", BASE, SERVERS) as project:
        said = project.compose("run", "--rm", "--no-deps", "-T", "worker0", "python", "-c", script)
    if "4 batches" not in said:
        raise CheckError(tail(said))
    log.say("      a DataLoader with two processes passes batches of 96 MB in a worker's container")


def train(log: Log) -> None:
    """Trains the example on two workers, with Prometheus beside them."""
    prometheus = prometheus_image(log)
    with Project(
        "pacecheck", BASE, SERVERS, PROMETHEUS_IMAGE=prometheus, PROMETHEUS_PORT="19490",
        DASHBOARD_PORT="18490", EPOCHS="10",
    ) as project:  # fmt: skip
        start_s = time.monotonic()
        project.compose("up", "--detach", "--no-build")
        project.wait_healthy(["shard0", "shard1"])
        log.say(
            f"      shards healthy and workers started after {time.monotonic() - start_s:.0f} s"
        )
        check_containers(log, project)
        check_plane(log, project, "tcp")
        watching = ("prometheus", "dashboard")
        project.compose("--profile", "monitoring", "up", "--detach", "--no-build", *watching)
        wait("Prometheus", lambda: len(asked(project, 'up{job="paceline"} == 1')) == PAIR)
        # The training may have ended before the first scrape; its pushes stay counted.
        counted = "sum(paceline_push_requests_total) > 0"
        (found,) = wait("pushes in Prometheus", lambda: asked(project, counted))
        log.say(
            "      Prometheus scrapes both shards over TLS with the token; it has counted "
            f"{found['value'][1]} pushes"
        )
        wait("the dashboard", lambda: shards_on_page(project) == PAIR)
        log.say("      the dashboard shows both shards to a browser with the token")
        for worker in ("worker0", "worker1"):
            check_accuracy(log, project, worker)
        codes = stop_shards(project)
        log.say(f"      docker compose stop: shards end with {codes}")
        if codes != [0, 0]:
            raise CheckError("a shard did not end by itself")


def faults(log: Log) -> None:
    """Scales the workers of a running job, kills workers and shards, refuses a stranger."""
    with Project("pacefaults", BASE, SERVERS, STEPS="100000") as project:
        up = ("--profile", "elastic", "up", "--detach", "--no-build", "--scale")

        def scale(count: int) -> None:
            start_s = time.monotonic()
            project.compose(*up, f"worker={count}", "worker")
            wait(f"{count} workers", lambda: len(project.live("shard0", "mnist-elastic")) == count)
            advance(project)
            log.say(
                f"      {count} workers are live and train, "
                f"{time.monotonic() - start_s:.0f} s after the command"
            )

        for count in (2, 4, 2):
            scale(count)
        victim = project.names("worker")[0]
        before = step(project)
        project.docker("kill", victim)
        wait("the loss of a worker", lambda: len(project.live("shard0", "mnist-elastic")) == 1)
        advance(project)
        log.say(
            f"      docker kill of a worker at step {before}: the other trains on, "
            f"now at {step(project)}"
        )
        scale(2)
        before = step(project)
        project.docker("kill", project.only("shard1"))
        project.compose("up", "--detach", "--no-build", "shard1")
        after = advance(project, before)
        log.say(
            f"      docker kill of shard1 at step {before}, compose up: the workers waited, "
            f"now at step {after}"
        )
        before, shard = step(project), project.only("shard1")
        crash(project, shard)
        after = advance(project, before)
        log.say(
            f"      SIGKILL of shard1's first process at step {before}: restarted by the engine, "
            f"now at step {after}"
        )
        before, worker = step(project), project.names("worker")[0]
        crash(project, worker)
        wait("two workers", lambda: len(project.live("shard0", "mnist-elastic")) == PAIR)
        after = advance(project, before)
        log.say(
            f"      SIGKILL of a worker's first process at step {before}: back in the job, "
            f"now at step {after}"
        )
        refused(log, project)


def returns(log: Log) -> None:
    """Restarts a shard; takes the project down and up, also without some of its volumes.

    The job of the volume that is lost continues from the last checkpoint, which `down` takes.
    """
    with Project("pacefaults", BASE, SERVERS, STEPS="100000") as project:
        start_elastic(project)
        before = step(project)
        project.compose("restart", "shard1")
        log.say(f"      restart of shard1 at step {before}: now at {advance(project, before)}")
        for volume in ("", "shard-secrets", "shard1"):
            before = step(project)
            project.compose("--profile", "*", "down")
            saved = saved_step(project)
            if saved < before:
                raise CheckError(f"down at step {before} leaves the checkpoint of step {saved}")
            if volume:
                project.docker("volume", "rm", f"{project.name}_{volume}")
            start_elastic(project, is_torn=volume == "shard1")
            if volume == "shard1":
                restore = re.findall(r"`psserver (restore .*) SERVERS`", PAGE.read_text())[0]
                words = restore.replace("NAME", "mnist-elastic").split()
                project.docker("exec", project.only("shard0"), "psserver", *words, SERVERS)
            log.say(
                f"      down{f', the volume {volume} is lost' if volume else ''}, and up "
                f"at step {before}: a checkpoint of step {saved}, now at "
                f"{advance(project, before)}"
            )


def saved_step(project: Project) -> int:
    """Returns the step of the newest checkpoint in the volume of shard 0."""
    script = (
        "import json, pathlib; print(max(json.loads(path.read_text())['tables'][0]['version'] "
        "for path in pathlib.Path('/state/checkpoints').glob('mnist-elastic-*/manifest.json')))"
    )
    volume = f"{project.name}_shard0:/state:ro"
    words = ("run", "--rm", "--network", "none", "--volume", volume, SHARD_IMAGE)
    return int(project.docker(*words, "python", "-c", script).split()[-1])


def engine(log: Log) -> None:
    """Kills the engine of a host while a job trains there, and starts it again."""
    require_root()
    for options in ((), ("--live-restore",)):
        with (
            SecondHost(*options) as host,
            Project("paceengine", BASE, SERVERS, host.engine, STEPS="100000") as project,
        ):
            start_elastic(project)
            before, started = step(project), starts(project)
            host.crash()
            wait("2 workers", partial(has_workers, project, "mnist-elastic", PAIR))
            after = advance(project, before)
            again = len(starts(project) - started)
            log.say(
                f"      SIGKILL of dockerd{' with live-restore' if options else ''} at step "
                f"{before}, started again: it has started {again} of {len(started)} containers "
                f"anew, now at step {after}"
            )
            if options and again:
                raise CheckError("with live-restore containers run on")


def starts(project: Project) -> set[str]:
    """Returns the time at which each container of the project was started."""
    return {project.inspect(name)["State"]["StartedAt"] for name in project.names("")}


def pauses(log: Log) -> None:
    """Pauses a worker and shards for longer than a lease, as `docker pause` does."""
    with Project("pacefaults", BASE, SERVERS, STEPS="100000") as project:
        start_elastic(project)
        victim, before = project.names("worker")[0], step(project)
        pause(project, victim)
        wait("the loss of a worker", lambda: len(project.live("shard0", "mnist-elastic")) == 1)
        during = advance(project)
        project.docker("unpause", victim)
        wait("the worker", lambda: len(project.live("shard0", "mnist-elastic")) == PAIR)
        log.say(
            f"      docker pause of a worker at step {before}: the other trains on, at {during}; "
            f"after unpause both, at {advance(project)}"
        )
        for service in ("shard0", "shard1"):
            shard, before = project.only(service), step(project)
            pause(project, shard)
            time.sleep(PAUSE_S)
            project.docker("unpause", shard)
            wait("workers", lambda: len(project.live("shard0", "mnist-elastic")) == PAIR)
            log.say(
                f"      docker pause of {service} for {PAUSE_S} s at step {before}: "
                f"the workers waited, now at step {advance(project, before)}"
            )


def pause(project: Project, name: str) -> None:
    """Pauses a container; a busy kernel may refuse to freeze it at first."""
    wait(f"the pause of {name}", lambda: project.docker("pause", name))


def full_disks(log: Log) -> None:
    """Fills the volumes of both shards while a job trains, kills both shards, makes room again."""
    opts = {"type": "tmpfs", "device": "tmpfs", "o": f"size=64m,uid={IMAGE_USER}"}
    small = {name: {"driver": "local", "driver_opts": opts} for name in ("shard0", "shard1")}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "small.json"
        file.write_text(json.dumps({"volumes": small}))
        with Project("pacefaults", [*BASE, str(file)], SERVERS, STEPS="100000") as project:
            start_elastic(project)
            # It keeps the volumes mounted, and so their contents, while a shard is away.
            words = ["run", "--detach", "--rm", "--network", "none", "--name", "pacefaults-holder"]
            for name in small:
                words += ["--volume", f"{project.name}_{name}:/{name}"]
            project.docker(*words, SHARD_IMAGE, "sleep", "infinity")
            try:
                fill_disks(log, project, list(small))
            finally:
                project.docker("rm", "--force", "pacefaults-holder", check=False)


def fill_disks(log: Log, project: Project, shards: Sequence[str]) -> None:
    """Fills the volumes that a container holds, and kills the shards one by one."""
    hold = ("exec", "pacefaults-holder", "sh", "-c")
    before = step(project)
    for shard in shards:
        project.docker(*hold, f"cat /dev/zero > /{shard}/ballast", check=False)
    said = project.docker(*hold, f"df --output=avail {' '.join(f'/{name}' for name in shards)}")
    log.say(
        f"      the shards' volumes are full at step {before} (free: {said.split()[1:]}): "
        f"training goes on, at step {advance(project)}"
    )
    for service in shards:
        before, shard = step(project), project.only(service)
        crash(project, shard)
        log.say(
            f"      SIGKILL of {service}'s first process at step {before}, its disk full: "
            f"restarted by the engine, now at step {advance(project, before)}"
        )
    for shard in shards:
        project.docker(*hold, f"rm /{shard}/ballast")
    before = step(project)
    words = ("exec", project.only("shard0"), "psserver", "checkpoint", "/var/lib/paceline/now")
    project.docker(*words, "--servers", SERVERS)
    log.say(
        f"      with room again: a checkpoint is written, now at step {advance(project, before)}"
    )


def start_elastic(project: Project, *, is_torn: bool = False) -> None:
    """Starts a job of two workers; waits for its first steps, or until the workers wait."""
    words = ("--profile", "elastic", "up", "--detach", "--no-build", "--scale", "worker=2")
    project.compose(*words, "worker")
    wait("2 workers", lambda: len(project.live("shard0", "mnist-elastic")) == PAIR)
    if is_torn:
        worker = project.names("worker")[0]
        wait("the wait of a worker", lambda: "is restored" in project.docker("logs", worker))
    else:
        advance(project)


def refused(log: Log, project: Project) -> None:
    """Starts a worker without the token, which no shard may let in."""
    words = (
        "--profile",
        "elastic",
        "run",
        "--rm",
        "--no-deps",
        "-e",
        "PACELINE_TOKEN_FILE=",
        "worker",
    )
    try:
        project.compose(*words)
    except CheckError as problem:
        (line,) = [line for line in str(problem).splitlines() if "token" in line][-1:] or [""]
        log.say(f"      a worker without the token: {line.strip()}")
        if not line:
            raise
    else:
        raise CheckError("a worker without the token was let in")


def shared_memory(log: Log) -> None:
    """Trains with deploy/compose/local.yml."""
    files = [*BASE, "deploy/compose/local.yml"]
    # A look at the workers takes a while, and two epochs may be over before it.
    with Project("pacecheck", files, "shard0:7070,shard1:7071", EPOCHS="10") as project:
        project.compose("up", "--detach", "--no-build")
        check_plane(log, project, "local")
        check_accuracy(log, project, "worker1")


def two_hosts(log: Log) -> None:
    """Trains on two engines over TLS: a shard on each, two workers on the second."""
    require_root()
    certs, up = commands("deploy.md", "Several hosts")[0].splitlines()
    with tempfile.TemporaryDirectory() as folder, SecondHost() as other:
        certs = certs.replace("10.0.0.1", other.here).replace("10.0.0.2", other.there)
        servers = f"{other.here}:{PORTS['PORT']},{other.there}:{PORTS['PORT']}"
        file = ["deploy/compose/host.yml"]
        first = Shell(Path(folder), "pacehosta")
        second = Shell(Path(folder), "pacehostb", DOCKER_HOST=other.engine)
        first(certs)
        shutil.copytree(first.root / "secrets", second.root / "secrets")
        first.write_env({**PORTS, "SERVERS": servers})
        second.write_env({
            **PORTS,
            "SERVERS": servers,
            "SHARD_INDEX": "1",
            "COMPOSE_PROFILES": "shard,worker",
            "MIN_WORKERS": "2",
        })  # fmt: skip
        with (
            Project("pacehosta", file, servers, root=first.root) as a,
            Project("pacehostb", file, servers, other.engine, root=second.root) as b,
        ):
            first(up)
            second(f"{up} --scale worker=2")
            planes = wait("a step", lambda: worker_planes(a, "shard", "mnist"))
            log.say(
                f"      two engines, {other.here} and {other.there}, TLS: "
                f"data plane {', '.join(sorted(planes))}"
            )
            if planes != {"tcp", "local"}:
                raise CheckError("TCP to the other host and shared memory within one were expected")
            if answer := spoken_plainly(other.here):
                raise CheckError(f"a connection without TLS is answered: {answer!r}")
            log.say("      a connection without TLS is closed without an answer")
            for name in wait("workers", lambda: b.names("worker")):
                wait("the end of a worker", partial(ended, b, name))
            at = a.job("shard", "mnist")["step"]
            log.say(f"      both workers reached the end, step {at}, exit status 0")


def upgrade(log: Log) -> None:
    """Names other tags in a host's `.env` during a training, and runs the page's command again."""
    certs, up = commands("deploy.md", "Several hosts")[0].splitlines()
    address = f"127.0.0.1:{PORTS['PORT']}"
    choice = {"SERVERS": address, "SHARDS": "1", "COMPOSE_PROFILES": "shard,worker"}
    variables = {**PORTS, **choice, "STEPS": "100000"}
    following = {"IMAGE": f"{IMAGE}-next", "SHARD_IMAGE": f"{SHARD_IMAGE}-next"}
    with tempfile.TemporaryDirectory() as folder:
        shell = Shell(Path(folder), "paceup")
        shell(certs.replace("10.0.0.1", "127.0.0.1"))
        shell.write_env(variables)
        file = ["deploy/compose/host.yml"]
        with Project("paceup", file, address, root=shell.root) as project:
            shell(up)
            before = wait("steps", lambda: project.job("shard", "mnist")["step"])
            run("docker", "tag", IMAGE, following["IMAGE"])
            run("docker", "tag", SHARD_IMAGE, following["SHARD_IMAGE"])
            shell.write_env({**variables, **following})
            shell(up)
            after = wait(
                "more steps",
                lambda: (now := project.job("shard", "mnist")["step"]) > before and now,
            )
            used = {project.inspect(name)["Config"]["Image"] for name in project.names("")}
            if used != set(following.values()):
                raise CheckError(f"the containers run {used}")
            log.say(f"      other tags in .env at step {before}, {up!r}: now at step {after}")
            renew(log, shell, project, certs.replace("10.0.0.1", "127.0.0.1"), up)
        for name in following.values():
            run("docker", "rmi", name)


def renew(log: Log, shell: Shell, project: Project, certs: str, up: str) -> None:
    """Makes new certificates and a new token for a host, as the page says."""
    (option,) = re.findall(r"the second command with `(--\S+)`", PAGE.read_text())
    before = project.job("shard", "mnist")["step"]
    token = (shell.root / "secrets/token").read_text()
    shell(f"{certs.partition('  #')[0]} --force")
    if (shell.root / "secrets/token").read_text() == token:
        raise CheckError("the token is the former one")
    shell(f"{up} {option}")
    after = wait(
        "more steps", lambda: (now := project.job("shard", "mnist")["step"]) > before and now
    )
    log.say(f"      new secrets at step {before}, {up + ' ' + option!r}: now at step {after}")


def digests(log: Log) -> None:
    """Builds on a base that is pinned by its digest, and starts the image by its own."""
    program = shutil.which("docker-registry")
    if program is None:
        raise NotRunError("no registry: apt-get install docker-registry")
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
        probe.close()
        config = {
            "version": "0.1",
            "storage": {"filesystem": {"rootdirectory": folder}},
            "http": {"addr": place},
        }
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(config))
        with subprocess.Popen(
            [program, "serve", str(file)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as registry:
            try:
                base = pushed(BASE_IMAGE, f"{place}/python:3.11-slim")
                build_target("shard", f"{place}/paceline:pinned", "--build-arg", f"BASE={base}")
                image = pushed(f"{place}/paceline:pinned", f"{place}/paceline:pinned")
                said = run("docker", "run", "--rm", "--network", "none", image, "psserver", "rules")
                labels = json.loads(run("docker", "image", "inspect", image))[0]["Config"]["Labels"]
                if labels[f"{OCI}.base.name"] != base or "ssgd" not in said:
                    raise CheckError(f"the labels are {labels}")
                log.say(f"      built on {base.partition('/')[2]}")
                log.say(f"      starts as {image.partition('/')[2]}")
            finally:
                registry.terminate()
                for name in ("python:3.11-slim", "paceline:pinned"):
                    run("docker", "rmi", f"{place}/{name}", check=False)


def pushed(image: str, name: str) -> str:
    """Pushes an image under a name of a registry; returns its name with the digest."""
    run("docker", "tag", image, name)
    said = wait("the registry", lambda: run("docker", "push", name))
    (digest,) = re.findall(r"digest: (sha256:[0-9a-f]{64})", said)
    return f"{name.rpartition(':')[0]}@{digest}"


def move(log: Log) -> None:
    """Moves a shard from one project to another one during a training, by the page's command."""
    certs, up = commands("deploy.md", "Several hosts")[0].splitlines()
    page = (ROOT / "docs" / "standby.md").read_text(encoding="utf-8")
    (drain,) = re.findall(r"^\| compose: .*\| `(docker compose .*)` \|$", page, re.MULTILINE)
    here, there = (f"127.0.0.1:{int(PORTS['PORT']) + place}" for place in range(2))
    drain = drain.replace("127.0.0.1:7070", here).replace("hostC:7070", there)
    choice = {"SHARDS": "1", "STEPS": "100000", "COMPOSE_PROFILES": "shard,worker"}
    with tempfile.TemporaryDirectory() as folder:
        old, new = (Shell(Path(folder), name) for name in ("pacefrom", "paceto"))
        old(certs.replace("10.0.0.1", "127.0.0.1"))
        shutil.copytree(old.root / "secrets", new.root / "secrets")
        old.write_env({**PORTS, **choice, "SERVERS": here})
        following = {name: str(int(port) + 1) for name, port in PORTS.items()}
        new.write_env({**following, **choice, "SERVERS": there, "COMPOSE_PROFILES": "shard"})
        file = ["deploy/compose/host.yml"]
        with (
            Project("pacefrom", file, here, root=old.root) as former,
            Project("paceto", file, there, root=new.root) as latter,
        ):
            old(up)
            new(up)
            latter.wait_healthy(["shard"])
            before = wait("steps", lambda: former.job("shard", "mnist")["step"])
            said = old(drain).strip().splitlines()[-1]
            former.compose("stop", "shard")
            begin = latter.job("shard", "mnist")["step"]
            after = wait(
                "more steps", lambda: (now := latter.job("shard", "mnist")["step"]) > begin and now
            )
            log.say(f"      at step {before}: {said}; at step {after} without the old one")


def swarm(log: Log) -> None:
    """Runs the page's commands for a Swarm on two engines: two nodes, with a shard each."""
    state = run("docker", "info", "--format", "{{.Swarm.LocalNodeState}}").strip()
    require_root()
    if state != "inactive":
        raise NotRunError(f"this engine's Swarm is {state}: docker swarm leave --force")
    certs, label, deploy, scale = commands("deploy.md", "Swarm")[0].splitlines()
    name = deploy.split()[-1]
    with tempfile.TemporaryDirectory() as folder, SecondHost() as other:
        shell = Shell(Path(folder), "paceswarm", STEPS="100000")
        try:
            nodes = join_swarm(other, dict(re.findall(r"(\w+)=(\S+)", deploy)))
            shell(certs)
            require_told(log, shell, deploy)
            for printed, node in zip(("NODE_A", "NODE_B"), nodes, strict=True):
                label = label.replace(printed, node)
            shell(label)
            shell(deploy)
            for command, count in (("", 2), (scale, 4), (scale.replace("=4", "=2"), 2)):
                if command:
                    shell(command)
                wait(f"{count} workers", partial(has_swarm_workers, name, count))
                log.say(f"      {command or deploy!r}: {count} workers are live")
            tasks = run("docker", "stack", "ps", "--filter", "desired-state=running", name)
            log.say(f"      the nodes {' and '.join(nodes)} run {tail(tasks)}")
            renew_swarm(log, shell, certs, deploy)
            replace_after_end(log, shell, deploy, name)
        except CheckError:
            log.say(tail(run("docker", "stack", "ps", "--no-trunc", name, check=False)))
            raise
        finally:
            run("docker", "stack", "rm", name, check=False)
            for engine in ({"DOCKER_HOST": other.engine}, {}):
                wait("the end of the Swarm", partial(has_left_swarm, engine))
            # A stack leaves its volumes behind, and the next run would continue from this one's.
            volume = ("docker", "volume", "rm", "--force", f"{name}_shard0")
            wait("the end of the shard", lambda: run(*volume))
            run("docker", "network", "rm", "docker_gwbridge", check=False)  # Of the Swarm.


def require_told(log: Log, shell: Shell, deploy: str) -> None:
    """Deploys the stack where no node has a label yet; the page's command says so."""
    (ask,) = re.findall(r"`(docker stack ps [^`]+)`", PAGE.read_text())
    (said,) = re.findall(r"`(no suitable node)`", PAGE.read_text())
    shell(deploy)
    wait(said, lambda: run(*ask.split()).count(said) == PAIR)
    log.say(f"      without the labels {ask!r} says {said!r} of both shards")


def renew_swarm(log: Log, shell: Shell, certs: str, deploy: str) -> None:
    """Makes new certificates and a new token for the stack, as the page says; its job continues."""
    (remove,) = re.findall(r"`(docker stack rm \w+)`", PAGE.read_text())
    name = remove.split()[-1]
    (before,) = [int(job["step"]) for job in swarm_jobs(name)]
    shell(remove)
    networks = ("docker", "network", "ls", "--quiet", "--filter", f"name={name}_")
    wait("the end of the stack", lambda: not run(*networks).strip())
    shell(f"{certs} --force")
    shell(deploy)
    wait(f"{PAIR} workers", partial(has_swarm_workers, name, PAIR))
    wait("more steps", lambda: max(int(job["step"]) for job in swarm_jobs(name)) > before)
    log.say(f"      new secrets at step {before}, {remove!r}, and deployed again: it continues")


def has_left_swarm(engine: dict[str, str]) -> bool:
    """Leaves the Swarm; returns whether the engine has: a busy one may miss its own deadline."""
    run("docker", "swarm", "leave", "--force", env=engine, check=False)
    state = run("docker", "info", "--format", "{{.Swarm.LocalNodeState}}", env=engine)
    return state.strip() == "inactive"


def replace_after_end(log: Log, shell: Shell, deploy: str, name: str) -> None:
    """Ends the stack's job, by a deployment of fewer steps; then replaces its workers."""

    def ends() -> list[int]:
        return [int(job["step"]) for job in swarm_jobs(name) if job["state"] == "ended"]

    def are_complete(count: int) -> bool:
        states = run("docker", "service", "ps", "--format", "{{.CurrentState}}", f"{name}_worker")
        return states.count("Complete") >= count

    shell(f"STEPS=1 {deploy}")
    ended = wait("the job's end", ends)
    wait("the end of its workers", partial(are_complete, PAIR))
    run("docker", "service", "update", "--detach", "--force", f"{name}_worker")
    wait("the end of those in their places", partial(are_complete, 2 * PAIR))
    log.say(f"      ended at step {ended[0]}; its workers are replaced: at step {ends()}")
    if ends() != ended:
        raise CheckError("they have begun the job again")


def join_swarm(other: SecondHost, images: dict[str, str]) -> list[str]:
    """Makes a Swarm of this engine and the second one, which have the images by the page's names.

    Returns:
        Ids of both nodes.
    """
    there = {"DOCKER_HOST": other.engine}
    run("docker", "swarm", "init", "--advertise-addr", other.here)
    token = run("docker", "swarm", "join-token", "--quiet", "worker").strip()
    place = ("--advertise-addr", other.there, f"{other.here}:2377")
    run("docker", "swarm", "join", "--token", token, *place, env=there)
    for engine in ({}, there):
        run("docker", "tag", IMAGE, images["IMAGE"], env=engine)
        run("docker", "tag", SHARD_IMAGE, images["SHARD_IMAGE"], env=engine)
    run("docker", "rmi", IMAGE, SHARD_IMAGE, env=there)  # As on a node that pulls from a registry.
    ids = ("docker", "info", "--format", "{{.Swarm.NodeID}}")
    return [run(*ids, env=engine).strip() for engine in ({}, there)]


# These need no container of another section.
BUILDS: dict[str, Callable[[Log], None]] = {
    "digests": digests,
    "refusals": refusals,
    "cuda12": cuda12,
    "compiler": compiler,
}
# In a project of their own, beside that of the others.
FAULTS: dict[str, Callable[[Log], None]] = {
    "faults": faults,
    "returns": returns,
    "pauses": pauses,
    "disk": full_disks,
}
# These have an engine of their own, or ports of this machine.
HOSTS: dict[str, Callable[[Log], None]] = {
    "gpus": gpus,
    "engine": engine,
    "variables": host_variables,
    "upgrade": upgrade,
    "move": move,
    "hosts": two_hosts,
    "swarm": swarm,
}
SECTIONS: dict[str, Callable[[Log], None]] = {
    "image": build,
    "page": page,  # Builds the image for GPUs, which the next one only has to look at.
    "cuda": cuda,
    **BUILDS,
    "training": train,
    "loader": loader,
    "memory": shared_memory,
    **FAULTS,
    **HOSTS,
}


def make_certs(folder: str, *hosts: str) -> None:
    """Writes certificates and a token for shards on hosts."""
    words = [word for host in hosts for word in ("--host", host)]
    run(sys.executable, "-m", "psserver", "certs", folder, "--force", *words)


# ----- questions to containers


def prometheus_image(log: Log) -> str:
    """Returns the name of an image of Prometheus that is here."""
    if not subprocess.run(
        ["docker", "pull", "--quiet", PROMETHEUS], capture_output=True
    ).returncode:
        return PROMETHEUS
    program = shutil.which("prometheus")
    if program is None:
        raise CheckError("no image of Prometheus can be pulled, and there is no prometheus here")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(program, folder)
        (Path(folder) / "Dockerfile").write_text(
            "FROM python:3.11-slim\nCOPY prometheus /bin/prometheus\n"
            'ENTRYPOINT ["/bin/prometheus"]\n'
        )
        run("docker", "build", "--tag", "pacecheck-prometheus", folder)
    log.say(
        "      stand-in for the image of Prometheus: this machine's program in python:3.11-slim"
    )
    return "pacecheck-prometheus"


def asked(project: Project, query: str) -> list[dict[str, Any]]:
    """Returns the answer of the project's Prometheus."""
    script = (
        "import json, sys, urllib.parse, urllib.request as r; "
        "print(json.dumps(json.load(r.urlopen('http://prometheus:9090/api/v1/query?query='"
        " + urllib.parse.quote(sys.argv[1])))['data']['result']))"
    )
    text = project.docker("exec", project.only("shard0"), "python", "-c", script, query)
    found: list[dict[str, Any]] = json.loads(text)
    return found


def shards_on_page(project: Project) -> int:
    """Returns the number of shards that the dashboard shows."""
    script = (
        "import json, pathlib, urllib.request as r; "
        "token = pathlib.Path('/etc/paceline/shard/token').read_text().strip(); "
        "asked = r.Request('http://dashboard:8090/api/view', "
        "headers={'Authorization': 'Bearer ' + token}); "
        "status = json.load(r.urlopen(asked))['status'] or {'shards': []}; "
        "print(len(status['shards']))"
    )
    return int(project.docker("exec", project.only("shard0"), "python", "-c", script))


def check_plane(log: Log, project: Project, plane: str) -> None:
    """Looks whether all workers of the example use one data plane."""
    planes = wait("a step", lambda: worker_planes(project, "shard0", "mnist"))
    log.say(f"      psserver status: data plane {', '.join(sorted(planes))}")
    if planes != {plane}:
        raise CheckError(f"the containers use {planes}, not {plane}")


def check_accuracy(log: Log, project: Project, worker: str) -> None:
    """Waits until a worker of the example has ended, and looks at its accuracy."""
    found = re.findall(r"test: accuracy ([\d.]+)", project.wait_end(worker))
    log.say(f"      {worker}: accuracy {', '.join(found)}, exit status 0")
    if float(found[-1]) < ACCURACY:
        raise CheckError(f"accuracy {found[-1]} is below {ACCURACY}")


def check_containers(log: Log, project: Project) -> None:
    """Looks whether every container has a read-only root, no capability and no root user."""
    names = project.names("")
    for name in names:
        found = project.inspect(name)
        config = found["HostConfig"]
        if not config["ReadonlyRootfs"] or config["CapDrop"] != ["ALL"]:
            raise CheckError(f"{name} may write its root, or has capabilities")
    shard = project.only("shard0")
    text = project.docker("exec", shard, "sh", "-c", "id -u; touch /app/file", check=False)
    if "10001" not in text or "Read-only" not in text:
        raise CheckError(f"a shard may write its root: {tail(text)}")
    log.say(f"      {len(names)} containers: user 10001, read-only root, no capabilities")


def spoken_plainly(host: str) -> bytes:
    """Returns the answer of a shard to the first bytes of HTTP/2 without TLS."""
    with socket.create_connection((host, int(PORTS["PORT"])), timeout=5) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        try:
            return connection.recv(64)
        except OSError:
            return b""


def worker_planes(project: Project, shard: str, job: str) -> set[str]:
    """Returns the data planes of a job's live workers; empty until two of them have made a step."""
    workers = project.live(shard, job)
    if len(workers) < PAIR or not all(
        worker["step"] and len(worker["data_planes"]) == PAIR for worker in workers
    ):
        return set()
    return {plane for worker in workers for plane in worker["data_planes"]}


def step(project: Project) -> int:
    """Returns the step of the elastic job."""
    return int(project.job("shard0", "mnist-elastic")["step"])


def advance(project: Project, since: int = 0) -> int:
    """Returns the step of the elastic job once it is ten further than now, and than `since`."""
    start = max(since, wait("a status", lambda: step(project) + 1) - 1)
    return int(wait("ten more steps", lambda: (now := step(project)) >= start + 10 and now))


def crash(project: Project, name: str) -> None:
    """Kills the first process of a container from outside, and waits until the engine restarts it.

    Raises:
        PermissionError: Only root can.
    """
    found = project.inspect(name)
    os.kill(found["State"]["Pid"], signal.SIGKILL)
    count = found["RestartCount"]
    wait("the restart", lambda: project.inspect(name)["RestartCount"] > count)


def stop_shards(project: Project) -> list[int]:
    """Stops both shards; returns their exit statuses."""
    project.compose("stop", "shard0", "shard1")
    return [
        project.inspect(project.only(name))["State"]["ExitCode"] for name in ("shard0", "shard1")
    ]


def ended(project: Project, name: str) -> bool:
    """Returns whether a container has ended with status 0."""
    state = project.inspect(name)["State"]
    if state["Status"] == "exited" and state["ExitCode"]:
        raise ValueError(
            f"{name} ended with {state['ExitCode']}: {tail(project.docker('logs', name))}"
        )
    return bool(state["Status"] == "exited")


def has_swarm_workers(name: str, count: int) -> bool:
    """Returns whether the stack's job has so many live workers."""
    return swarm_live(name) == count


def swarm_live(name: str) -> int:
    """Returns the number of live workers of the stack's job."""
    workers = [worker for job in swarm_jobs(name) for worker in job["workers"]]
    return sum(worker["state"] == "live" for worker in workers if worker["step"])


def swarm_jobs(name: str) -> list[dict[str, Any]]:
    """Returns the jobs of the stack's shards; empty: there is no shard yet."""
    words = ("ps", "--quiet", "--filter", f"label=com.docker.swarm.service.name={name}_shard0")
    container = run("docker", *words).split()[0:1]
    if not container:
        return []
    text = run("docker", "exec", *container, "psserver", "status", "--servers", SERVERS, "--json")
    jobs: list[dict[str, Any]] = json.loads(text[text.index("{") : text.rindex("}") + 1])["jobs"]
    return jobs


if __name__ == "__main__":
    sys.exit(main())
