"""Docker for scripts/check_engine.py: compose projects, the status of shards, a second host."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[1]
LIMIT_S = 600.0  # Against a hang only.
os.environ.setdefault("COMPOSE_HTTP_TIMEOUT", f"{LIMIT_S:.0f}")  # Compose 1 waits a minute.
IMAGE, SHARD_IMAGE = "paceline:local", "paceline:shard"
VERSIONS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
(TORCH,) = re.findall(r"^torch==(.*)$", VERSIONS, re.MULTILINE)
PYPI_TORCH = f"torch==={TORCH}"  # Not a wheel for CPUs, `+cpu`, that a configuration of pip finds.
# For a shell: drops an argument.
NO_BUILD = 'for word; do shift; [ "$word" = --build ] || set -- "$@" "$word"; done; '


class CheckError(Exception):
    """A check has found something."""


class NotRunError(Exception):
    """A check needs what this machine or user lacks."""


def run(*words: str, env: Mapping[str, str] | None = None, check: bool = True) -> str:
    """Returns the output of a program, standard error last.

    Raises:
        CheckError: It ended with another status than 0, and `check` is set.
    """
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, **(env or {})}, capture_output=True, text=True
    )
    if check and done.returncode:
        raise CheckError(f"{' '.join(words)} ended with {done.returncode}: {tail(done.stderr)}")
    return done.stdout + done.stderr


def tail(text: str) -> str:
    """Returns the last lines of a text."""
    return "\n".join(text.strip().splitlines()[-12:])


def wait(what: str, is_so: Callable[[], Any]) -> Any:
    """Returns the first true answer; asks each half second.

    Raises:
        CheckError: None came in time.
    """
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        try:
            if found := is_so():
                return found
        except CheckError:
            pass  # A container that is just starting answers nothing.
        time.sleep(0.5)
    raise CheckError(f"{what}: not within {LIMIT_S:.0f} s")


def composer() -> list[str]:
    """Returns the words that call compose: the plug-in of version 2, else the program."""
    found = subprocess.run(["docker", "compose", "version"], capture_output=True)
    return ["docker", "compose"] if found.returncode == 0 else ["docker-compose"]


class Shell:
    """Runs commands as a page prints them, in a clone of this repository.

    Where this machine has compose as a program of its own, `docker compose` calls that. Images are
    built with the host's network, which also works with an engine without bridges; where the
    engine reaches no registry, `up --build` takes the images that it has.

    Attributes:
        root: The clone. Its name is that of the compose project.
    """

    def __init__(self, folder: Path, name: str, builds: bool = True, /, **variables: str) -> None:
        """Clones the repository.

        Args:
            folder: Holds the clone, and the program `docker` that the commands call.
            name: Name of the clone.
            builds: Whether `--build` of compose does so.
            variables: Variables of the commands.
        """
        self.root = folder / name
        run("git", "clone", "--quiet", str(ROOT), str(self.root))
        programs = folder / f"{name}-bin"
        programs.mkdir()
        docker = shutil.which("docker")
        program = programs / "docker"
        program.write_text(
            "#!/bin/sh\ncase $1 in\n"
            f"compose) shift; {'' if builds else NO_BUILD}"
            f'exec {" ".join(composer())} "$@";;\n'
            'build) shift; case "$*" in *"--target cuda"*) '
            f'set -- --build-arg TORCH={PYPI_TORCH} "$@";; esac; '
            f'exec {docker} build --network host "$@";;\n'
            f'esac\nexec {docker} "$@"\n'
        )
        program.chmod(0o755)
        path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._env = {**os.environ, **variables, "PATH": path}

    def __call__(self, command: str) -> str:
        """Returns what a command prints on a terminal.

        Raises:
            CheckError: It ended with another status than 0.
        """
        words = ("script", "--quiet", "--return", "--command", command, "/dev/null")
        done = subprocess.run(
            words,
            cwd=self.root,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if done.returncode:
            raise CheckError(f"{command!r} ended with {done.returncode}: {tail(done.stdout)}")
        return done.stdout

    def write_env(self, variables: Mapping[str, str]) -> None:
        """Writes `.env`: the example of a host with other values of some variables."""
        lines = (self.root / "deploy/compose/host.env").read_text().splitlines()
        kept = [line for line in lines if line.partition("=")[0] not in variables]
        added = [f"{name}={value}" for name, value in variables.items()]
        (self.root / ".env").write_text("\n".join([*kept, *added]) + "\n")


class Project:
    """The containers of some compose files; all are removed at the end."""

    def __init__(
        self,
        name: str,
        files: Sequence[str],
        servers: str,
        host: str = "",
        root: Path = ROOT,
        **variables: str,
    ) -> None:
        """Starts nothing.

        Args:
            name: Name of the project.
            files: Compose files, below the root of the repository.
            servers: Addresses of the shards.
            host: The engine; empty: that of DOCKER_HOST.
            root: The project's folder, the root of the repository.
            variables: Variables of the files.
        """
        self.name = name
        self.servers = servers
        self._env = {**variables, **({"DOCKER_HOST": host} if host else {})}
        self._words = [*composer(), "--project-name", name, "--project-directory", str(root)]
        for file in files:
            self._words += ["--file", str(root / file)]

    def __enter__(self) -> Self:
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "5")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names(""):
            run("docker", "rm", "--force", name, env=self._env, check=False)
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "5")

    def compose(self, *words: str, **variables: str) -> str:
        """Returns the output of a command of compose; `variables` are for this command alone."""
        return run(*self._words, *words, env={**self._env, **variables})

    def docker(self, *words: str, check: bool = True) -> str:
        """Returns the output of a command of the engine."""
        return run("docker", *words, env=self._env, check=check)

    def names(self, service: str) -> list[str]:
        """Returns the names of a service's running containers; empty: of all that exist."""
        words = ["ps", "--format", "{{.Names}}", "--filter"]
        words += [f"label=com.docker.compose.project={self.name}"]
        words += (
            ["--filter", f"label=com.docker.compose.service={service}"] if service else ["--all"]
        )
        return sorted(self.docker(*words).split())

    def inspect(self, name: str) -> dict[str, Any]:
        """Returns the state and the settings of a container."""
        found: dict[str, Any] = json.loads(self.docker("inspect", name))[0]
        return found

    def only(self, service: str) -> str:
        """Returns the name of the one container of a service, also of one that has ended."""
        words = ["ps", "--all", "--format", "{{.Names}}", "--filter"]
        words += [f"label=com.docker.compose.project={self.name}", "--filter"]
        (name,) = self.docker(*words, f"label=com.docker.compose.service={service}").split()
        return name

    def wait_healthy(self, services: Sequence[str]) -> None:
        """Waits until containers are healthy."""
        for service in services:
            wait(
                f"{service} healthy",
                lambda service=service: (  # type: ignore[misc]
                    self.inspect(self.only(service))["State"]["Health"]["Status"] == "healthy"
                ),
            )

    def wait_end(self, service: str) -> str:
        """Returns the log of a container that has ended with status 0."""
        name = self.only(service)
        wait(f"the end of {service}", lambda: self.inspect(name)["State"]["Status"] == "exited")
        log = self.docker("logs", name)
        if (code := self.inspect(name)["State"]["ExitCode"]) != 0:
            raise CheckError(f"{service} ended with {code}: {tail(log)}")
        return log

    def job(self, shard: str, name: str) -> dict[str, Any]:
        """Returns the status of a job, asked for in a shard's container."""
        words = [
            "exec",
            self.only(shard),
            "psserver",
            "status",
            "--servers",
            self.servers,
            "--json",
        ]
        text = self.docker(*words)
        jobs: list[dict[str, Any]] = json.loads(text[text.index("{") : text.rindex("}") + 1])[
            "jobs"
        ]
        found = [job for job in jobs if job["name"] == name]
        if not found:
            raise CheckError(f"no job {name} yet")
        return found[0]

    def live(self, shard: str, name: str) -> list[dict[str, Any]]:
        """Returns the live workers of a job."""
        return [worker for worker in self.job(shard, name)["workers"] if worker["state"] == "live"]


class SecondHost:
    """A network namespace with an address and an engine of its own, joined to this machine's.

    Attributes:
        here: Address of this machine on the link.
        there: Address of the other host.
        data: Its engine's images and volumes; `kept_data` sets it.
        engine: For DOCKER_HOST.
    """

    here, there = "10.77.3.1", "10.77.3.2"
    data: Path

    def __init__(self, *options: str) -> None:
        """Starts nothing; `options` are those of its engine."""
        self._options = options
        self._containerd: subprocess.Popen[bytes] | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-host-"))
        self._name = f"pace{os.getpid()}"
        self.engine = f"unix://{self._folder}/docker.sock"

    def __enter__(self) -> Self:
        near, far = f"{self._name}a", f"{self._name}b"
        run("ip", "netns", "add", self._name)
        run("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", self._name)
        run("ip", "addr", "add", f"{self.here}/24", "dev", near)
        run("ip", "link", "set", near, "up")
        inside = ("ip", "-n", self._name)
        run(*inside, "addr", "add", f"{self.there}/24", "dev", far)
        run(*inside, "link", "set", far, "up")
        run(*inside, "link", "set", "lo", "up")
        self._prepare()
        self._start()
        for image in (IMAGE, SHARD_IMAGE):
            self._copy(image)
        return self

    def _prepare(self) -> None:
        """Prepares the engine's environment."""
        self._environment = dict(os.environ)

    def _start(self) -> None:
        """Starts the engine, after containerd if that does not run: a service, as on real hosts."""
        at = f"{self._folder}/containerd.sock"
        if self._containerd is None:
            places = (f"--root={self._folder}/containers", f"--state={self._folder}/tasks")
            self._containerd = self._run("containerd", f"--address={at}", *places)
        words = ["--host", self.engine, "--containerd", at]
        for option, name in (("exec-root", "exec"), ("pidfile", "pid")):
            words.append(f"--{option}={self._folder / name}")
        words += [f"--data-root={self.data}", "--iptables=false", "--bridge=none", *self._options]
        self._daemon = self._run("dockerd", *words)
        there = {"DOCKER_HOST": self.engine}
        wait("the second engine", lambda: run("docker", "info", env=there))

    def _run(self, *words: str) -> subprocess.Popen[bytes]:
        # Not `ip netns exec`, which hides the control groups that an engine needs.
        place = ("nsenter", f"--net=/run/netns/{self._name}")
        with (self._folder / "log").open("ab") as log:
            return subprocess.Popen([*place, *words], env=self._environment, stdout=log, stderr=log)

    def reboot(self) -> None:
        """Ends the engine in order, which stops its containers, and starts it again."""
        self._daemon.terminate()
        self._daemon.wait(300)
        self._start()

    def crash(self) -> None:
        """Kills the engine, and starts it again."""
        self._daemon.kill()
        self._daemon.wait(300)
        self._start()

    def __exit__(self, *_: object) -> None:
        for program in (self._daemon, self._containerd):
            if program is not None:
                program.terminate()
                program.wait(300)
        # The engine leaves mounts behind, which would keep the namespace, the link and the folder.
        for mount in (*(self._folder / "exec" / "netns").glob("*"), self.data):
            run("umount", "--lazy", str(mount), check=False)
        run("ip", "link", "del", f"{self._name}a", check=False)
        run("ip", "netns", "del", self._name)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _copy(self, image: str) -> None:
        there = ("docker", "--host", self.engine)
        if not subprocess.run([*there, "image", "inspect", image], capture_output=True).returncode:
            return
        with subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE) as save:
            words = [*there, "load", "--quiet"]
            subprocess.run(words, stdin=save.stdout, check=True, stdout=subprocess.DEVNULL)


@contextmanager
def kept_data() -> Iterator[None]:
    """Keeps the images of second hosts meanwhile; each would write and remove 2 GB."""
    with tempfile.TemporaryDirectory(prefix="paceline-data-", ignore_cleanup_errors=True) as folder:
        SecondHost.data = Path(folder)
        yield


# A library that counts GPUs as NVIDIA's driver does: all of the container, or those chosen.
DRIVER = """
#include <glob.h>
#include <stdlib.h>
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) {
  glob_t found;
  *count = glob("/dev/nvidia[0-9]*", 0, 0, &found) ? 0 : (int)found.gl_pathc;
  const char *chosen = getenv("CUDA_VISIBLE_DEVICES");
  if (chosen) for (*count = chosen[0] != 0; *chosen; chosen++) *count += *chosen == ',';
  return 0;
}
"""
# The hook that Docker calls for `driver: nvidia`, with a stand-in for each GPU that it asks for.
HOOK = """#!{python}
import json, subprocess, sys

state = json.load(sys.stdin)
with open(state["bundle"] + "/config.json") as file:
    config = json.load(file)
variables = dict(entry.split("=", 1) for entry in config["process"]["env"])
wanted, root = variables["NVIDIA_VISIBLE_DEVICES"], config["root"]["path"]
with open("{gpus}") as file:
    there = range(int(file.read()))
numbers = there if wanted == "all" else [int(number) for number in wanted.split(",")]
if not set(numbers) <= set(there):
    sys.exit("nvidia-container-cli: device error: unknown device")
script = f"cp {driver} {{root}}/usr/lib/x86_64-linux-gnu/libcuda.so.1"
for number in numbers:
    script += f" && mknod -m 666 {{root}}/dev/nvidia{{number}} c 195 {{number}}"
subprocess.run(["nsenter", "-t", str(state["pid"]), "-m", "sh", "-c", script], check=True)
"""


class GpuHost(SecondHost):
    """A second host with stand-ins for GPUs: a hook under the name of NVIDIA's, and a driver."""

    def plug(self, num_gpus: int) -> None:
        """Sets the number of GPUs of the host; containers that run keep theirs."""
        (self._folder / "gpus").write_text(str(num_gpus))

    def _prepare(self) -> None:
        source, driver = self._folder / "driver.c", self._folder / "libcuda.so.1"
        source.write_text(DRIVER)
        run("cc", "-shared", "-fPIC", "-o", str(driver), str(source))
        programs = self._folder / "bin"
        programs.mkdir()
        hook = programs / "nvidia-container-runtime-hook"
        hook.write_text(
            HOOK.format(python=sys.executable, gpus=self._folder / "gpus", driver=driver)
        )
        hook.chmod(0o755)
        # Docker looks for the hook in its own path, once, when it starts.
        self._environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
