"""A Slurm of one node with eight processors, for a test: munged, slurmctld and slurmd."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

DAEMONS = ("munged", "slurmctld", "slurmd")
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmdPort={other}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
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
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@dataclass
class Slurm:
    """The daemons, inside a `with` block."""

    folder: Path

    def __enter__(self) -> Slurm:
        for name in ("munge", "state", "spool"):
            (self.folder / name).mkdir(mode=0o700)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        first = 21_000 + os.getpid() % 4000 * 2  # Below the ports that the kernel gives away.
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=socket.gethostname().split(".")[0],
                folder=self.folder,
                port=first,
                other=first + 1,
            )
        )
        munge = self.folder / "munge"
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log"}
        words = [f"--{option}={munge / name}" for option, name in files.items()]
        self.call("munged", "--force", f"--seed-file={munge / 'seed'}", *words)
        for daemon in ("slurmctld", "slurmd"):
            self.call(daemon, "-c", "-f", str(self.folder / "slurm.conf"))
        self.wait("a node", lambda: " idle" in self.call("sinfo", "--noheader"))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        subprocess.run(["scancel", "--state=RUNNING"], env=self.environment, check=False)
        for path in (
            self.folder / "slurmd.pid",
            self.folder / "slurmctld.pid",
            self.folder / "munge/pid",
        ):
            if path.exists():
                os.kill(int(path.read_text()), signal.SIGTERM)

    @property
    def environment(self) -> dict[str, str]:
        """Variables under which Slurm's commands find these daemons."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PACELINE_"))}
        return kept | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def call(self, *words: str, cwd: Path | None = None) -> str:
        """Runs a command of Slurm; returns its standard output."""
        done = subprocess.run(
            words, env=self.environment, cwd=cwd, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def state(self, job: str) -> str:
        """Returns the state of a job, such as RUNNING."""
        shown = self.call("scontrol", "show", "job", job)
        matched = re.search(r"JobState=(\w+)", shown)
        assert matched is not None
        return matched[1]

    def wait(self, what: str, is_there: Callable[[], bool], timeout_s: float = 120.0) -> None:
        """Waits for a condition.

        Raises:
            TimeoutError: It did not come in time.
        """
        deadline_s = time.monotonic() + timeout_s
        while not is_there():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no {what} within {timeout_s} s")
            time.sleep(0.3)
