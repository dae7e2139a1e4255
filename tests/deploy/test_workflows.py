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
from scripts.release_notes import notes_of

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


def before(job: str) -> set[str]:
    """Returns the jobs that have succeeded when a job starts."""
    needs = JOBS[job].get("needs", [])
    direct = {needs} if isinstance(needs, str) else set(needs)
    return direct.union(*(before(other) for other in direct))


def test_a_tag_has_to_be_the_version_of_package_chart_and_changelog(checkout: Path) -> None:
    name = "The tag is the version of package, chart and changelog"
    assert run(checkout, "wheel", name, GITHUB_REF_NAME=f"v{VERSION}") == 0
    changelog = (checkout / "CHANGELOG.md").read_text()
    assert (checkout / "notes.md").read_text().strip() == notes_of(changelog, VERSION)
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


def test_images_have_a_name_without_capitals_in_every_job(checkout: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    names = {"REGISTRY": "images.example", "GITHUB_REPOSITORY": "Some-Owner/Paceline"}
    assert run(checkout, "base", "Name the images", GITHUB_OUTPUT=str(output), **names) == 0
    assert output.read_text() == "name=images.example/some-owner/paceline\n"
    assert JOBS["base"]["outputs"]["name"] == "${{ steps.name.outputs.name }}"
    for job in ("images", "chart"):
        assert JOBS[job]["env"]["IMAGE"] == "${{ needs.base.outputs.name }}"
        assert "base" in JOBS[job]["needs"]


def test_a_release_without_a_registry_ends_in_its_first_step(
    checkout: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "output"
    names = {"REGISTRY": "", "GITHUB_REPOSITORY": "owner/paceline"}
    assert run(checkout, "base", "Name the images", GITHUB_OUTPUT=str(output), **names) == 1
    assert "IMAGE_REGISTRY" in capfd.readouterr().out
    assert not output.exists()
    first = JOBS["base"]["steps"][0]
    assert first["name"] == "Name the images"
    assert first["env"]["REGISTRY"] == "${{ vars.IMAGE_REGISTRY }}"
    assert all("base" in before(job) for job in JOBS if job != "base")


def test_only_the_last_job_publishes_what_cannot_be_replaced() -> None:
    publishes = {
        job
        for job, told in JOBS.items()
        for step in told["steps"]
        if step.get("uses", "").startswith("pypa/gh-action-pypi-publish@")
        or step.get("run", "").startswith("gh release create")
    }
    assert publishes == {"publish"}
    assert before("publish") == set(JOBS) - {"publish"}
    rights = {job: told.get("permissions", {}) for job, told in JOBS.items()}
    assert {job for job in JOBS if rights[job].get("contents") == "write"} == publishes
    (release,) = [step["run"] for step in JOBS["publish"]["steps"] if "run" in step]
    assert release.split()[-2:] == ["--notes-file", "notes.md"]
    (kept,) = [s["with"] for s in JOBS["wheel"]["steps"] if "upload-artifact@" in s.get("uses", "")]
    assert kept["path"].split() == ["dist", "sbom.spdx.json", "notes.md"]
    assert JOBS["publish"]["steps"][0]["with"]["name"] == kept["name"]


def test_notes_of_a_release_are_its_section_of_the_changelog() -> None:
    text = "# All\n\n## Unreleased\n\n## 1.2.0 - day\n\n### Added\n\n- B\n\n## 1.1.0 - day\n\n- A\n"
    assert notes_of(text, "1.2.0") == "### Added\n\n- B"
    assert notes_of(text, "1.1.0") == "- A"
    for missing in ("1.0.0", "1.2", "Unreleased"):
        with pytest.raises(SystemExit, match=f"no section of version {missing}"):
            notes_of(text, missing)
