"""A Slurm of two nodes with four processors each, for a test: munged, slurmctld and slurmds.

Each node has a network namespace with an address, a host name, a table of names and a boot of its
own; all share the machine's files, as the nodes of a cluster share a file system.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

DAEMONS = ("munged", "slurmctld", "slurmd")
CONFIGURATION = """\
ClusterName=test
SlurmctldHost=head(10.79.0.10)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
RequeueExit=99
SchedulerParameters=bf_interval=1,sched_interval=1,requeue_delay=1
KillWait=20
SlurmdTimeout=20
Epilog={folder}/epilog
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node1 NodeAddr=10.79.0.11 CPUs=4 RealMemory=1000 State=UNKNOWN
NodeName=node2 NodeAddr=10.79.0.12 CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=node1,node2 Default=YES State=UP PriorityTier=1 GraceTime={grace_s}
PartitionName=urgent Nodes=node1,node2 State=UP PriorityTier=2 PreemptMode=OFF
"""
GRACE_S = 90  # Notice of a preemption.
HOSTS = {"head": "10.79.0.10", "node1": "10.79.0.11", "node2": "10.79.0.12"}
# Runs in a namespace of a host: gives it what is its own, becomes the command.
ENTER = """
set -e
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/boot-{name} /proc/sys/kernel/random/boot_id
hostname {name}
exec {command}
"""


@dataclass
class Slurm:
    """The daemons, inside a `with` block."""

    folder: Path

    def __enter__(self) -> Slurm:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.call("scancel", "--user=root")
            self.wait("end of all jobs", lambda: not self.call("squeue", "--noheader").strip())
        finally:
            self._stop()

    def _start(self) -> None:
        for name in ("munge", "state", "spool-node1", "spool-node2"):
            (self.folder / name).mkdir(mode=0o700)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(folder=self.folder, grace_s=GRACE_S)
        )
        epilog = self.folder / "epilog"  # A node stays with a job for a while after its end.
        epilog.write_text("#!/bin/sh\nsleep 3\n")
        epilog.chmod(0o755)
        for name in HOSTS:
            self._boot(name)
        (self.folder / "hosts").write_text(
            "127.0.0.1 localhost\n"
            + "".join(f"{address} {name}\n" for name, address in HOSTS.items())
        )
        self._connect()
        munge = self.folder / "munge"
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log"}
        words = [f"--{option}={munge / name}" for option, name in files.items()]
        self.call("munged", "--force", f"--seed-file={munge / 'seed'}", *words)
        configuration = ("-c", "-f", str(self.folder / "slurm.conf"))
        self.call("slurmctld", *configuration)
        for name in ("node1", "node2"):
            self.start(name)
        self.wait("two nodes", self._has_two_nodes)

    def start(self, name: str) -> None:
        """Starts the daemon of a node."""
        self.call("slurmd", "-c", "-f", str(self.folder / "slurm.conf"), host=name)

    def lose(self, name: str) -> None:
        """Kills all that runs on a node; when its daemon is started again, it has been rebooted."""
        words = ("ip", "netns", "pids", self._namespace(name))
        for pid in subprocess.run(words, capture_output=True, text=True, check=True).stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        (self.folder / f"slurmd-{name}.pid").unlink()
        self._boot(name)

    def _boot(self, name: str) -> None:
        (self.folder / f"boot-{name}").write_text(str(uuid.uuid4()))

    def _has_two_nodes(self) -> bool:
        return self.call("sinfo", "-h", "-N", "-p", "main").count("idle") == 2

    def _stop(self) -> None:
        for path in (*self.folder.glob("slurm*.pid"), *self.folder.glob("munge/pid")):
            os.kill(int(path.read_text()), signal.SIGTERM)
        for name in ("switch", *HOSTS):
            subprocess.run(["ip", "netns", "delete", self._namespace(name)], check=False)

    def _namespace(self, name: str) -> str:
        return f"slurm-{os.getpid()}-{name}"

    def _connect(self) -> None:
        """Makes a network namespace for each host, and a bridge between them."""
        for name in ("switch", *HOSTS):
            _ip("netns", "add", self._namespace(name))
            _ip("-n", self._namespace(name), "link", "set", "lo", "up")
        switch = self._namespace("switch")
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for name, address in HOSTS.items():
            inner = self._namespace(name)
            pair = ("type", "veth", "peer", "name", "eth0", "netns", inner)
            _ip("-n", switch, "link", "add", f"to-{name}", *pair)
            _ip("-n", switch, "link", "set", f"to-{name}", "master", "bridge", "up")
            _ip("-n", inner, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", inner, "link", "set", "eth0", "up")

    @property
    def environment(self) -> dict[str, str]:
        """Variables under which Slurm's commands find these daemons."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PACELINE_"))}
        return kept | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def call(self, *words: str, cwd: Path | None = None, host: str = "head") -> str:
        """Runs a command on a host; returns its standard output."""
        script = ENTER.format(folder=self.folder, name=host, command=shlex.join(words))
        # Not `ip netns exec`: that would hide the control groups, which slurmd looks for.
        within = ["nsenter", f"--net=/run/netns/{self._namespace(host)}", "unshare"]
        done = subprocess.run(
            [*within, "--mount", "--uts", "sh", "-c", script],
            env=self.environment, cwd=cwd, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def state(self, job: str) -> str:
        """Returns the state of a job, such as RUNNING."""
        shown = self.call("scontrol", "show", "job", job)
        matched = re.search(r"JobState=(\w+)", shown)
        assert matched is not None
        return matched[1]

    def wait(self, what: str, is_there: Callable[[], bool], timeout_s: float = 600.0) -> None:
        """Waits for a condition.

        Raises:
            TimeoutError: It did not come in time.
        """
        deadline_s = time.monotonic() + timeout_s
        while not is_there():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no {what} within {timeout_s} s")
            time.sleep(0.3)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
