"""Two hosts for the commands of a page: network namespaces, with a shell and a folder on each."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from benchmarks.netlab import Lab

FIRST, SECOND = HOSTS = ("10.0.0.1", "10.0.0.2")


class TwoHosts(Lab):
    """Namespaces with the addresses of the pages, in which the own name means the own address."""

    def address(self, host: int) -> str:
        return f"10.0.0.{host + 1}"

    def __enter__(self) -> Self:
        super().__enter__()
        for number, address in enumerate(HOSTS):
            # `ip netns exec` mounts this file; torchrun looks up the own name.
            self._etc(number).mkdir(parents=True)
            names = f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n"
            (self._etc(number) / "hosts").write_text(names)
        return self

    def close(self) -> None:
        for number in range(len(HOSTS)):
            shutil.rmtree(self._etc(number), ignore_errors=True)
        super().close()

    def _etc(self, host: int) -> Path:
        return Path("/etc/netns") / self.name(host)


@dataclass
class Shell:
    """A shell on one host: each block runs in a new one, after the exports of those before."""

    inside: Sequence[str]
    folder: Path
    exports: list[str] = field(default_factory=list)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, commands: str) -> subprocess.Popen[str]:
        kept = {key: it for key, it in os.environ.items() if not key.startswith("PACELINE_")}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        script = "\n".join(["set -e", *self.exports, commands])
        self.exports += re.findall(r"^export .*$", commands, re.MULTILINE)
        self.started.append(subprocess.Popen(
            [*self.inside, "bash", "-c", script], cwd=self.folder,
            env={**kept, "PATH": path, "XDG_RUNTIME_DIR": str(self.folder)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
        ))  # fmt: skip
        return self.started[-1]

    def run(self, commands: str) -> tuple[int, str]:
        """Returns exit status and output."""
        running = self.start(commands)
        said = running.communicate()[0]
        return running.returncode, " ".join(said.split())


@contextmanager
def two_hosts(folder: Path) -> Iterator[dict[str, Shell]]:
    """Yields a shell for each host, by address; each works in a folder of its own."""
    with TwoHosts(2, "1gbit") as lab:
        made: dict[str, Shell] = {}
        for number, host in enumerate(HOSTS):
            (folder / host).mkdir(mode=0o700)
            made[host] = Shell(lab.inside(number), folder / host)
        try:
            yield made
        finally:
            for shell in made.values():  # A failed test leaves workers and shards.
                for process in shell.started:
                    process.terminate()
                shell.run(
                    "unset PACELINE_SERVERS; psserver stop --port 7070 || true; "
                    "for state in state anew; do psserver stop --state-dir $state || true; done"
                )
