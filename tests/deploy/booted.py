"""Boots deploy/systemd: a copy of this machine's file system in memory, with systemd as process 1.

`systemd-nspawn` starts it, with a network of its own that has loopback alone. Nothing of this
machine is changed, and none of its services is started there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from tests.house.source import ROOT

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
cp {files}/units/* systemd/system/
mkdir -p systemd/system/multi-user.target.wants systemd/system/psserver@.service.d paceline
ln -s ../inside.service systemd/system/multi-user.target.wants/
cp {files}/quick.conf systemd/system/psserver@.service.d/
install --mode 600 {files}/secrets/* paceline/
cp {files}/*.env paceline/
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
TimeoutStartSec=240
"""
# A minute is too long for a test, and an interpreter has its library where it was installed.
QUICK = "[Service]\nWatchdogSec=6\nEnvironment=LD_LIBRARY_PATH=/opt/python/lib\n"
SHARED = """\
PACELINE_CLUSTER=night
PACELINE_SHARDS=2
PACELINE_HOST=0.0.0.0
PACELINE_SHARD_ADDRESSES=127.0.0.1:7070,127.0.0.1:7080
"""


def install(folder: Path, psserver: Path) -> None:
    """Writes the files of docs/systemd.md: the units, an environment, secrets and settings."""
    shutil.copytree(ROOT / "deploy" / "systemd", folder / "units")
    (folder / "units" / "inside.service").write_text(INSIDE)
    (folder / "quick.conf").write_text(QUICK)
    (folder / "shards.env").write_text(SHARED)
    (folder / "shard-1.env").write_text("PACELINE_PORT=7080\n")
    words = (psserver, "certs", folder / "certs", "--host", "127.0.0.1")
    subprocess.run(words, check=True, capture_output=True)
    (folder / "secrets").mkdir()
    for name in ("server.pem", "server.key", "ca.pem", "token", "client.pem", "client.key"):
        shutil.copy(folder / "certs" / name, folder / "secrets" / name)
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
        check=True, timeout=500,
    )  # fmt: skip
    return (folder / "work" / "log").read_text()
