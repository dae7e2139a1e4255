"""Environments of peers: each has one of its own below `.peers`, made at its first use."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from benchmarks import kit

FOLDER = kit.ROOT / ".peers"
REQUIREMENTS = {
    "mxnet": ("mxnet==1.9.1", "numpy==1.23.5"),
    "ray": ("ray==2.60.0", "numpy"),
    "tensorflow": ("tensorflow-cpu==2.21.0",),
}
# benchmarks.rows measures them where the environment that runs it has them.
IF_INSTALLED = ("torchrec", "fbgemm-gpu-cpu")


class LeftOutError(Exception):
    """This peer cannot be measured here; says why."""


def python_of(name: str) -> Path:
    """Returns the interpreter of the environment with a peer of REQUIREMENTS installed.

    Raises:
        LeftOutError: pip cannot install them for this Python.
    """
    folder, requirements = FOLDER / name, REQUIREMENTS[name]
    stamp, wanted = folder / "installed", "\n".join([sys.version, *requirements])
    python = folder / "bin" / "python"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"installing {' '.join(requirements)} for {name}", flush=True)
    venv.create(folder, clear=True, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", *requirements]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise LeftOutError(f"pip cannot install it here: {' '.join(lines[-2:])}")
    stamp.write_text(wanted)
    return python
