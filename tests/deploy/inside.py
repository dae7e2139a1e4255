"""Runs in a machine that tests/deploy/booted.py has booted: faults on the units of deploy/systemd.

At the first boot the commands of docs/systemd.md are run, and a shard moves to a second place and
back as docs/standby.md says; at the second boot the units have to be there by themselves. The
findings go to /opt/work/found.json.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

WORK = Path("/opt/work")
BIN = Path("/opt/paceline/bin")
SECRETS = WORK / "certs"
UNITS = ("psserver@0", "psserver@1")
PORTS = {"1": 7080, "2": 7090}  # Of the units of shard 1; the second one is its second place.
OTHER = {"1": "2", "2": "1"}
SERVERS = "gpu1.example:7070,gpu2.example:7080"
ENVIRONMENT = {
    **os.environ,
    "PACELINE_SERVERS": SERVERS,
    "PACELINE_TLS_CA": str(SECRETS / "ca.pem"),
    "PACELINE_TLS_CERT": str(SECRETS / "client.pem"),
    "PACELINE_TLS_KEY": str(SECRETS / "client.key"),
    "PACELINE_TOKEN_FILE": str(SECRETS / "token"),
    "PACELINE_TIMEOUT_S": "300",  # A unit takes as long as a busy machine to start again.
}


def call(*words: str | Path) -> str:
    done = subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    said = f"{done.stdout[-300:]} {done.stderr[-1000:]}"
    sys.stdout.write(f"$ {words} {done.returncode} {said}\n")
    return done.stdout


def show(unit: str, name: str) -> str:
    return call("systemctl", "show", "--value", "--property", name, unit).strip()


def status() -> dict[str, Any]:
    """Returns the status, also while a shard is silent; nothing if none answers."""
    text = call(BIN / "psserver", "status", "--json")
    found: dict[str, Any] = json.loads(text) if text else {"shards": [], "jobs": []}
    return found


def until(claim: Callable[[], Any], what: str, limit_s: float = 300.0) -> Any:
    deadline_s = time.monotonic() + limit_s
    while not (found := claim()):
        if time.monotonic() > deadline_s:
            raise TimeoutError(what)
        time.sleep(1.0)
    return found


def step() -> int:
    jobs = status()["jobs"]
    return int(jobs[0]["step"]) if jobs else 0


def goes_on(what: str) -> None:
    """Waits until both shards answer and the training is some steps further."""
    until(lambda: len(status()["shards"]) == len(UNITS), f"shards after {what}")
    begin = step()
    until(lambda: step() > begin + 5, f"steps after {what}")


def train() -> subprocess.Popen[bytes]:
    with (WORK / "worker.log").open("ab") as log:
        words = [BIN / "python", WORK / "train.py"]
        return subprocess.Popen(words, env=ENVIRONMENT, stdout=log, stderr=log)


def shard_pid(index: int) -> int:
    shards = {shard["index"]: shard["pid"] for shard in status()["shards"]}
    return int(shards[index])


def restarts(unit: str) -> int:
    return int(show(unit, "NRestarts"))


def set_places(settings: Mapping[str, str]) -> None:
    """Writes the files of the two units of shard 1, and restarts the first one.

    Args:
        settings: Further settings of each unit; none: the unit is as before.
    """
    for unit, port in PORTS.items():
        lines = f"PACELINE_SHARD_INDEX=1\nPACELINE_PORT={port}\n{settings.get(unit, '')}"
        Path(f"/etc/paceline/shard-{unit}.env").write_text(lines)
        stop = (WORK / "exec-stop").read_text().replace("127.0.0.1:7070", f"127.0.0.1:{port}")
        folder = Path(f"/etc/systemd/system/psserver@{unit}.service.d")
        folder.mkdir(exist_ok=True)
        (folder / "drain.conf").write_text(f"[Service]\n{stop}\n" if settings else "")
    call("systemctl", "daemon-reload")
    call("systemctl", "restart", UNITS[1])


def move(unit: str) -> bool:
    """Stops the unit with shard 1 once the other one is its standby; returns whether it moved."""
    await_standby(unit)
    before = count_moves(unit)
    call("systemctl", "stop", f"psserver@{unit}")
    return has_moved(unit, before)


def replace(unit: str) -> tuple[str, bool]:
    """Restarts both units of shard 1 at once; returns the one that has it then, and as `move`."""
    await_standby(unit)
    before = count_moves(unit)
    call("systemctl", "restart", "psserver@1", "psserver@2")
    # Not always the other one: its own command, if begun after the move, has moved it back.
    until(lambda: any(map(is_followed, PORTS)), "a standby of shard 1")
    (holder,) = filter(is_followed, PORTS)
    return holder, has_moved(unit, before)


def await_standby(unit: str) -> None:
    """Starts the other unit of shard 1, and waits until it is the standby of this one."""
    call("systemctl", "start", f"psserver@{OTHER[unit]}")
    until(lambda: is_followed(unit), f"a standby of psserver@{unit}")


def is_followed(unit: str) -> bool:
    """Returns whether a unit has shard 1, and the other one is its standby."""
    at, there = (f"127.0.0.1:{PORTS[name]}" for name in (unit, OTHER[unit]))
    return f"followed, to {there}" in call(BIN / "psserver", "status", "--servers", at)


def count_moves(unit: str) -> int:
    journal = call("journalctl", "--no-pager", "--output=cat", f"--unit=psserver@{unit}")
    return journal.count(f"shard moved to 127.0.0.1:{PORTS[OTHER[unit]]}")


def has_moved(unit: str, before: int) -> bool:
    """Waits for steps; returns whether a unit has given its shard to the other one meanwhile."""
    begin = step()
    until(lambda: step() > begin + 5, "steps after a move")
    return count_moves(unit) == before + 1


def refused(unit: str) -> list[str]:
    """Starts a unit; returns its state, how often systemd has restarted it, and its status."""
    call("systemctl", "start", unit)
    state = [show(unit, "ActiveState"), show(unit, "NRestarts")]
    return [*state, call("systemctl", "status", "--no-pager", "--full", unit)]


def first_boot(found: dict[str, Any]) -> None:
    """Starts the units and a training; kills a process of each kind, and stops one."""
    call("cp", *(WORK / "deploy" / "systemd").iterdir(), "/etc/systemd/system")
    found["without files"] = refused(UNITS[0])
    done = subprocess.run(
        ["bash", WORK / "commands"], cwd=WORK, capture_output=True, text=True, check=False
    )
    found["commands"] = [done.returncode, done.stdout + done.stderr]
    found["wrong number"] = refused("psserver@7")
    found["active"] = [show(unit, "ActiveState") for unit in UNITS]
    found["text"] = [show(unit, "StatusText") for unit in UNITS]
    main = int(show(UNITS[0], "MainPID"))
    state = Path(f"/proc/{main}/status").read_text()
    found["user"] = int(re.findall(r"Uid:\s+(\d+)", state)[0])
    found["capabilities"] = re.findall(r"Cap(?:Eff|Bnd):\s+(\S+)", state)
    found["exposure"] = call("systemd-analyze", "security", "--no-pager", UNITS[0])[-200:]
    worker = train()
    until(lambda: step() > 5, "the first steps")

    os.kill(shard_pid(1), signal.SIGKILL)
    goes_on("kill -9 of a shard's process")
    found["after a shard"] = [restarts(unit) for unit in UNITS]

    os.kill(main, signal.SIGKILL)
    until(lambda: restarts(UNITS[0]) == 1, "a restart by systemd")
    goes_on("kill -9 of a supervisor")
    found["after a supervisor"] = [restarts(unit) for unit in UNITS]

    os.kill(shard_pid(1), signal.SIGSTOP)
    until(lambda: restarts(UNITS[1]) == 1, "a restart by the watchdog")
    goes_on("a shard that hangs")
    journal = call("journalctl", "--no-pager", "--output=cat", f"--unit={UNITS[1]}")
    found["watchdog"] = "Watchdog timeout" in journal

    set_places({
        "1": "PACELINE_OWN_ADDRESS=127.0.0.1:7080\nPACELINE_STANDBY_AT=127.0.0.1:7090\n",
        "2": "PACELINE_OWN_ADDRESS=127.0.0.1:7090\nPACELINE_STANDBY_OF=127.0.0.1:7080\n",
    })  # fmt: skip
    found["moves"] = [move("1"), move("2")]
    holder = "1"
    for _ in range(2):
        holder, moves = replace(holder)
        found["moves"].append(moves)
    if holder == "2":
        found["moves"].append(move("2"))
    set_places({})  # The second boot knows one place.
    goes_on("two moves")

    (WORK / "enough").touch()
    found["worker"] = worker.wait(300)
    found["step"] = step()


def second_boot(found: dict[str, Any]) -> None:
    """Continues the training on the units that the boot has started, and stops them in order."""
    until(lambda: len(status()["shards"]) == len(UNITS), "the units after a boot")
    found["step after the boot"] = step()
    found["enabled"] = [call("systemctl", "is-enabled", unit).strip() for unit in UNITS]
    (WORK / "enough").unlink()
    worker = train()
    until(lambda: step() > found["step after the boot"] + 20, "steps after a boot")
    (WORK / "last").touch()
    found["second worker"] = worker.wait(300)
    call("systemctl", "stop", "paceline.target")
    stopped = ["inactive", "inactive"]
    until(lambda: [show(unit, "ActiveState") for unit in UNITS] == stopped, "the end")
    found["results"] = [show(unit, "Result") for unit in UNITS]
    manifests = Path("/var/lib/paceline/0/checkpoints").glob("*-*/manifest.json")
    tables = [json.loads(path.read_text())["tables"][0] for path in manifests]
    found["saved"] = sorted(table["version"] for table in tables)


def main() -> None:
    path = WORK / "found.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    try:
        (second_boot if found else first_boot)(found)
    except (OSError, ValueError, LookupError, subprocess.SubprocessError) as problem:
        found.setdefault("problem", repr(problem))  # That of the first boot brings others.
        call("journalctl", "--no-pager", "--lines=40", "--unit=psserver@*")
    path.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
