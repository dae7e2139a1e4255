"""The commands of the release workflow that need neither its host nor a registry."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pscore.version import VERSION
from scripts.check_deploy import TOOLS, make_tools

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(900)
JOBS: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A clone with this environment in it, and a changelog that has this version."""
    folder = tmp_path / "paceline"
    subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
    (folder / ".venv").symlink_to(sys.prefix)
    changelog = folder / "CHANGELOG.md"
    text = changelog.read_text()
    if f"## {VERSION} - " not in text:
        changelog.write_text(text.replace("## Unreleased", f"## {VERSION} - 2026-11-28"))
    return folder


def run(folder: Path, job: str, name: str, **variables: str) -> int:
    """Runs a step as the host of the workflow does; returns its exit code."""
    (script,) = [step["run"] for step in JOBS[job]["steps"] if step.get("name") == name]
    path = f"{TOOLS / 'bin'}:{os.environ['PATH']}"
    words = ["bash", "-e", "-c", script]
    return subprocess.run(
        words, cwd=folder, env={**os.environ, "PATH": path, **variables}, check=False
    ).returncode


def test_a_tag_has_to_be_the_version_of_package_chart_and_changelog(checkout: Path) -> None:
    name = "The tag is the version of package, chart and changelog"
    assert run(checkout, "wheel", name, GITHUB_REF_NAME=f"v{VERSION}") == 0
    for file in ("pyproject.toml", "deploy/chart/Chart.yaml", "CHANGELOG.md"):
        text = (checkout / file).read_text()
        (checkout / file).write_text(text.replace(VERSION, "0.0.9"))
        assert run(checkout, "wheel", name, GITHUB_REF_NAME=f"v{VERSION}") == 1
        (checkout / file).write_text(text)


def test_wheel_and_chart_of_a_release_are_built(checkout: Path) -> None:
    make_tools()
    assert run(checkout, "wheel", "Build") == 0
    assert run(checkout, "chart", "Package") == 0
    made = {path.name for path in (checkout / "dist").iterdir()}
    assert {f"paceline-{VERSION}-py3-none-any.whl", f"paceline-{VERSION}.tar.gz"} <= made
    assert f"paceline-{VERSION}.tgz" in made


@pytest.mark.parametrize(("said", "code"), [("sha256:0a1b", 0), ("", 1)])
def test_the_images_of_a_release_have_one_base_pinned_by_its_digest(
    checkout: Path, tmp_path: Path, said: str, code: int
) -> None:
    """A program that is called docker stands for the registry's answer."""
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(f"#!/bin/sh\necho {said}\n")
    docker.chmod(0o755)
    output = tmp_path / "output"
    output.touch()
    path = f"{docker.parent}:{os.environ['PATH']}"
    assert run(checkout, "base", "Pin the base", PATH=path, GITHUB_OUTPUT=str(output)) == code
    assert output.read_text() == (f"image=python:3.11-slim@{said}\n" if said else "")
    (build,) = [step for step in JOBS["images"]["steps"] if step.get("id") == "build"]
    assert "BASE=${{ needs.base.outputs.image }}" in build["with"]["build-args"].splitlines()
