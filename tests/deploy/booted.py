"""Boots deploy/systemd: a copy of this machine's file system in memory, with systemd as process 1.

`systemd-nspawn` starts it, with a network of its own that has loopback alone. Nothing of this
machine is changed, and none of its services is started there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from scripts.printed import commands
from tests.house.source import ROOT

PAGE = (ROOT / "docs" / "systemd.md").read_text(encoding="utf-8")
STANDBY_PAGE = (ROOT / "docs" / "standby.md").read_text(encoding="utf-8")
MAKE = "sudo python3 -m venv /opt/paceline && sudo /opt/paceline/bin/pip install ."

# Runs in a mount namespace of its own, which takes its mounts with it.
ENTER = """
set -e
mkdir -p {root}/scratch {root}/merged
mountpoint -q {root}/scratch || mount -t tmpfs -o mode=755 scratch {root}/scratch
mkdir -p {root}/scratch/upper {root}/scratch/work
mount -t overlay overlay {root}/merged \
    -o lowerdir=/,upperdir={root}/scratch/upper,workdir={root}/scratch/work
cd {root}/merged/etc
rm -rf systemd/system/*.wants systemd/system/default.target
# Without one, the first boot would enable every unit.
tr --delete - < /proc/sys/kernel/random/uuid > machine-id
cp {files}/inside.service systemd/system/
mkdir -p systemd/system/multi-user.target.wants systemd/system/psserver@.service.d
ln -s ../inside.service systemd/system/multi-user.target.wants/
cp {files}/quick.conf systemd/system/psserver@.service.d/
echo '127.0.0.1 localhost gpu1.example gpu2.example' > hosts
mkdir -p ../opt/python ../opt/paceline ../opt/dependencies ../opt/work
cd /
for boot in 1 2; do
    systemd-nspawn --quiet --boot --directory {root}/merged --register=no --keep-unit \
        --link-journal=no --private-network --machine=paceline-{number} --console=pipe \
        --bind-ro={base}:/opt/python --bind-ro={files}/paceline:/opt/paceline \
        --bind-ro={packages}:/opt/dependencies --bind={files}/work:/opt/work \
        -- systemd.unit=multi-user.target </dev/null
done
"""
INSIDE = """\
[Unit]
Description=The test, inside
After=multi-user.target
[Service]
Type=oneshot
Environment=LD_LIBRARY_PATH=/opt/python/lib
ExecStart=/opt/paceline/bin/python /opt/work/inside.py
ExecStopPost=/usr/bin/systemctl --no-block poweroff
StandardOutput=append:/opt/work/log
StandardError=inherit
TimeoutStartSec=700
"""
# A minute is too long for a test, and an interpreter has its library where it was installed.
QUICK = "[Service]\nWatchdogSec=15\nEnvironment=LD_LIBRARY_PATH=/opt/python/lib\n"


def printed() -> str:
    """Returns the commands of docs/systemd.md for a machine that has both shards.

    The environment of its first line is there, and root needs no sudo.
    """
    make, *rest = commands("systemd.md")[0].splitlines()
    assert make == MAKE
    row = re.search(
        r"^\| two shards on one machine \| `(\S+)` with `(\S+)`; `(.+)` \|$", PAGE, re.M
    )
    assert row is not None
    second = f"echo {row[2]} > {row[1]}"
    # Where the second shard is, its port is that of the row.
    text = "\n".join(["set -eux", 'sudo() { "$@"; }', *rest[:-1], second, row[3]])
    return text.replace("gpu2.example:7070", "gpu2.example:7080")


def exec_stop() -> str:
    """Returns the line of docs/standby.md that moves a shard away before its unit ends."""
    (line,) = re.findall(r"^\| systemd: .*\| `(ExecStop=.*)` \|$", STANDBY_PAGE, re.M)
    return str(line)


def install(folder: Path) -> None:
    """Writes a copy of the environment, and the pages' commands with the files that they copy."""
    (folder / "inside.service").write_text(INSIDE)
    (folder / "quick.conf").write_text(QUICK)
    shutil.copytree(ROOT / "deploy" / "systemd", folder / "work" / "deploy" / "systemd")
    (folder / "work" / "commands").write_text(printed())
    (folder / "work" / "exec-stop").write_text(exec_stop())
    made = folder / "paceline"
    venv.create(made, with_pip=False, symlinks=True)
    (packages,) = made.glob("lib/python*/site-packages")
    for package in ("pscore", "psserver", "pssim", "psworker"):
        shutil.copytree(ROOT / package, packages / package)
    (packages / "dependencies.pth").write_text("/opt/dependencies\n")
    # The interpreter and the environment have other places inside.
    interpreter = f"/opt/python/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
    for link in (made / "bin").glob("python*"):
        link.unlink()
        link.symlink_to(interpreter)
    (made / "pyvenv.cfg").write_text(
        "home = /opt/python/bin\ninclude-system-site-packages = false\n"
    )
    script = made / "bin" / "psserver"
    script.write_text("#!/opt/paceline/bin/python\nfrom psserver.__main__ import main\nmain()\n")
    script.chmod(0o755)


def boot_twice(folder: Path) -> str:
    """Boots, and boots again when `inside.py` has ended; returns its output.

    Args:
        folder: Has the files of `install`, and `work/inside.py`, which is run in each boot.
    """
    root = folder.parent / "root"
    text = ENTER.format(
        root=root, files=folder, base=sys.base_prefix, number=os.getpid(),
        packages=sysconfig.get_path("purelib"),
    )  # fmt: skip
    subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "bash", "-c", text],
        check=True, timeout=1500,
    )  # fmt: skip
    return (folder / "work" / "log").read_text()
