"""Messages of `psserver start` to systemd, and the units in deploy/systemd."""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from psserver.exits import Exit
from psserver.process.notify import ALIVE_S, ServiceManager
from tests.house.source import ROOT
from tests.integration.command import Command, eventually

UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.*"))
WATCHDOG_S = 3.0


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(200)
        yield listener


def heard(systemd: socket.socket) -> str:
    return systemd.recv(4096).decode()


def test_messages_go_to_the_socket_that_systemd_names(systemd: socket.socket) -> None:
    environment = {"NOTIFY_SOCKET": str(systemd.getsockname()), "WATCHDOG_USEC": "2500000"}
    manager = ServiceManager.of(environment=environment)
    assert manager.watchdog_s == 2.5
    manager.ready("2 shard(s)")
    manager.alive()
    manager.stopping()
    assert [heard(systemd) for _ in range(3)] == [
        "READY=1\nSTATUS=2 shard(s)",
        "WATCHDOG=1",
        "STOPPING=1",
    ]


def test_a_watchdog_for_another_process_is_not_ours(tmp_path: Path) -> None:
    environment = {"NOTIFY_SOCKET": "x", "WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}
    assert ServiceManager.of(environment=environment).watchdog_s == 0.0
    assert ServiceManager.of(environment={}) == ServiceManager()
    ServiceManager(str(tmp_path / "nobody")).ready("")


def test_systemd_hears_of_the_start_of_a_hanging_shard_and_of_the_end(
    tmp_path: Path, systemd: socket.socket
) -> None:
    psserver = Command(tmp_path)
    psserver.environment |= {
        "NOTIFY_SOCKET": str(systemd.getsockname()),
        "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6)),
    }
    with psserver.spawn("start", "--port", 0) as process:
        assert re.fullmatch(r"READY=1\nSTATUS=1 shard\(s\) ready at .*", heard(systemd))
        assert heard(systemd) == "WATCHDOG=1"
        (shard,) = (each["pid"] for each in psserver.run_file()["shards"])
        os.kill(shard, signal.SIGSTOP)
        try:
            eventually(lambda: is_silent(systemd))
        finally:
            os.kill(shard, signal.SIGCONT)
        assert heard(systemd) == "WATCHDOG=1"
        process.terminate()
        while (message := heard(systemd)) == "WATCHDOG=1":
            pass
        assert message == "STOPPING=1"


@pytest.mark.slow
def test_the_file_for_signs_of_life_grows_old_while_a_shard_hangs(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    psserver = Command(tmp_path)
    psserver.environment["PACELINE_ALIVE_FILE"] = str(alive)
    with psserver.spawn("start", "--port", 0) as process:
        eventually(alive.exists)
        first_ns = alive.stat().st_mtime_ns
        eventually(lambda: alive.stat().st_mtime_ns > first_ns)
        (shard,) = (each["pid"] for each in psserver.run_file()["shards"])
        os.kill(shard, signal.SIGSTOP)
        try:
            # Older than the 30 s after which a silent shard counts as one that hangs, and a part.
            eventually(lambda: time.time() - alive.stat().st_mtime > 1.5 * ALIVE_S)
        finally:
            os.kill(shard, signal.SIGCONT)
        eventually(lambda: time.time() - alive.stat().st_mtime < ALIVE_S)
        process.terminate()


def is_silent(systemd: socket.socket) -> bool:
    """Returns whether no message comes for half of the watchdog's time."""
    systemd.settimeout(WATCHDOG_S / 2)
    try:
        heard(systemd)
    except TimeoutError:
        return True
    finally:
        systemd.settimeout(200)
    return False


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    binary = tmp_path / "psserver"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    for unit in UNITS:
        text = unit.read_text().replace("/opt/paceline/bin/psserver", str(binary))
        (tmp_path / unit.name).write_text(text)
    names = [str(tmp_path / unit.name.replace("@.", "@0.")) for unit in UNITS]
    (tmp_path / "psserver@0.service").symlink_to(tmp_path / "psserver@.service")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *names],
        capture_output=True,
        text=True,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if str(tmp_path) in line]
    assert (done.returncode, said) == (0, [])


def test_a_unit_without_its_files_or_with_a_wrong_setting_is_not_started_again() -> None:
    """Else systemd tries again each second, and says "Failed to set up credentials"."""
    assert "`Assertion failed`" in (ROOT / "docs" / "systemd.md").read_text()
    text = (ROOT / "deploy" / "systemd" / "psserver@.service").read_text()
    needed = re.findall(r"^(?:EnvironmentFile=|LoadCredential=\S+:)(/\S+)$", text, re.M)
    assert len(needed) == 5
    assert re.findall(r"^AssertPathExists=(\S+)$", text, re.M) == needed
    assert f"RestartPreventExitStatus={Exit.USAGE.value}\n" in text


@pytest.mark.skipif(shutil.which("systemctl") is None, reason="no systemctl")
def test_an_enabled_shard_starts_with_its_machine(tmp_path: Path) -> None:
    units = tmp_path / "etc" / "systemd" / "system"
    units.mkdir(parents=True)
    for unit in UNITS:
        shutil.copy(unit, units)
    words = ["systemctl", f"--root={tmp_path}", "enable", "psserver@0"]
    subprocess.run(words, capture_output=True, check=True)
    links = {str(path.relative_to(units)) for path in units.rglob("*") if path.is_symlink()}
    assert links == {
        "multi-user.target.wants/paceline.target",
        "paceline.target.wants/psserver@0.service",
    }


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_the_unit_gives_up_what_a_shard_does_not_need() -> None:
    unit = ROOT / "deploy" / "systemd" / "psserver@.service"
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(unit)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
