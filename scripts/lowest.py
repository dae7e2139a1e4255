"""Prints the lowest version of each dependency that pyproject.toml allows, as constraints for pip.

    python scripts/lowest.py --python 3.13 --replace torch==2.13.0 > lowest.txt

Every requirement of the package and of its extra `dev` needs a lower bound; where several apply to
a Python (`numba>=0.61; python_version >= '3.13'`), the highest of them counts.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def lowest(requirements: Iterable[str], python: str) -> dict[str, str]:
    """Returns the lowest version by distribution.

    Args:
        requirements: As in pyproject.toml.
        python: Version of the interpreter that they are for, such as `3.13`.

    Raises:
        ValueError: A requirement has no lower bound.
    """
    found: dict[str, str] = {}
    for text in requirements:
        requirement = Requirement(text)
        environment = {"python_version": python, "python_full_version": f"{python}.0"}
        if requirement.marker is not None and not requirement.marker.evaluate(environment):
            continue
        bounds = [s.version for s in requirement.specifier if s.operator in (">=", "==", "~=")]
        if not bounds:
            raise ValueError(f"{text!r} has no lower bound, write one such as {text}>=1.2")
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        found[name] = max(*bounds, found.get(name, bounds[0]), key=Version)
    return found


def main() -> None:
    """Prints the constraints."""
    parser = argparse.ArgumentParser(description="Lowest versions that pyproject.toml allows.")
    parser.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}")
    parser.add_argument("--replace", action="append", default=[], metavar="NAME==VERSION")
    arguments = parser.parse_args()
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    found = lowest(wanted, arguments.python)
    for text in arguments.replace:
        name, _, version = text.partition("==")
        if name not in found or not version:
            parser.error(f"--replace is {text!r}, must be NAME==VERSION of a dependency")
        found[name] = version
    for name, version in sorted(found.items()):
        print(f"{name}=={version}")


if __name__ == "__main__":
    main()
