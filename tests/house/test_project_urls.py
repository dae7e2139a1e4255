"""Rule 9: A package names the addresses of the repository that it is built of."""

import subprocess
import sys
from pathlib import Path

import pytest
from packaging.metadata import Metadata

from scripts.project_urls import urls_of

ROOT = Path(__file__).resolve().parents[2]
BASE = "https://code.example.org/team/paceline"
URLS = {"Source": BASE, "Documentation": f"{BASE}#readme", "Issues": f"{BASE}/issues"}


@pytest.mark.parametrize(
    "remote",
    [
        BASE,
        f"{BASE}/",
        f"{BASE}.git",
        "https://me:secret@code.example.org/team/paceline.git",
        "git@code.example.org:team/paceline.git",
        "ssh://git@code.example.org:2222/team/paceline.git",
        "ssh://git@code.example.org/team/paceline",
    ],
)
def test_the_addresses_hold_neither_names_nor_tokens(remote: str) -> None:
    assert urls_of(remote) == URLS


@pytest.mark.parametrize(
    "remote", ["", "/srv/git/paceline", "file:///srv/git/paceline.git", "../up"]
)
def test_a_package_names_no_path_of_the_machine_that_has_built_it(remote: str) -> None:
    assert urls_of(remote) == {}


def metadata_of(folder: Path) -> Metadata:
    """Returns the metadata of a package built of a folder."""
    code = "import hatchling.build as b; print(b.prepare_metadata_for_build_wheel('out'))"
    made = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, check=True, capture_output=True, text=True
    )
    text = (folder / "out" / made.stdout.strip() / "METADATA").read_text(encoding="utf-8")
    return Metadata.from_email(text, validate=True)


def test_the_metadata_of_a_clone_name_its_origin(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE", "scripts/project_urls.py"):
        copy = tmp_path / name
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    (tmp_path / "out").mkdir()
    assert not metadata_of(tmp_path).project_urls  # No repository.
    for args in (["init", "--quiet"], ["remote", "add", "origin", f"{BASE}.git"]):
        subprocess.run(["git", *args], cwd=tmp_path, check=True)
    assert metadata_of(tmp_path).project_urls == URLS
