"""The commands of docs/kubernetes.md, as they are printed there, on a stand-in for a cluster."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.printed import commands
from tests.deploy import standin
from tests.house.source import ROOT

TOOLS = ROOT / ".venv-deploy" / "bin"
PAGE = "kubernetes.md"
LONGEST = "a-release-whose-name-has-as-many-letters-as-helm-allow"[:53]

pytestmark = pytest.mark.skipif(
    not (TOOLS / "helm").exists(), reason="no helm: make check-deploy installs it"
)


class Shell:
    """Runs commands in a folder that has deploy/, where docker, helm and kubectl are stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.cluster = folder / "cluster"
        self.folder = folder / "work"
        binaries = folder / "bin"
        for made in (self.cluster, self.folder, binaries):
            made.mkdir()
        (self.folder / "deploy").symlink_to(ROOT / "deploy")
        for tool in ("docker", "helm", "kubectl"):
            script = binaries / tool
            script.write_text(f'#!/bin/sh\nexec {sys.executable} {standin.__file__} {tool} "$@"\n')
            script.chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{binaries}:{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}",
            "STANDIN": str(self.cluster),
            "HELM": str(TOOLS / "helm"),
            "KUBECTL": str(TOOLS / "kubectl"),
        }

    def run(self, *blocks: str) -> None:
        """Runs blocks of commands one after the other in one shell."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", "\n".join([*blocks, "wait"])],
            cwd=self.folder, env=self.environment, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def documents(self, monkeypatch: pytest.MonkeyPatch) -> list[standin.Document]:
        monkeypatch.setattr(standin, "HERE", self.cluster)
        return standin.documents()


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


@pytest.mark.parametrize("name", ["paceline", "paceline-b"])
def test_the_first_commands_name_what_is_there(shell: Shell, name: str) -> None:
    first, dashboard = commands(PAGE)
    shell.run(first.replace("NAME=paceline", f"NAME={name}"), dashboard)


@pytest.mark.parametrize("name", ["paceline", "train", "v1.2", LONGEST])
def test_the_notes_of_a_release_are_commands_for_it(
    shell: Shell, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(name) <= 53
    install = "\n".join(commands(PAGE)[0].splitlines()[:4])
    shell.run(install.replace("NAME=paceline", f"NAME={name}"))
    notes = (shell.cluster / "notes").read_text()
    shell.run(*(line for line in notes.splitlines() if "kubectl" in line))
    found = shell.documents(monkeypatch)
    for each in found:
        assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", each["metadata"]["name"])
        assert len(each["metadata"]["name"]) <= 63
    (shards,) = (each for each in found if each["kind"] == "StatefulSet")
    assert len(shards["metadata"]["name"]) <= 52  # Its pods' names, and a label with a hash.
    (job,) = (each for each in found if each["kind"] == "Job")
    images = {pod["containers"][0]["image"] for each in (shards, job) for pod in pods(each)}
    assert images == {f"registry.example/paceline:1{suffix}" for suffix in ("", "-shard")}


def test_without_helm(shell: Shell) -> None:
    variables, shards, build, *_ = commands(PAGE)[0].splitlines()
    shell.run(variables, shards, build, *commands(PAGE, "Without Helm"))


def test_certificates_of_cert_manager(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    variables, shards, build, _, _, _, workers, *_ = commands(PAGE)[0].splitlines()
    (values,) = commands(PAGE, "Values")
    shell.run(variables, shards, build, values, workers)
    made = [each for each in shell.documents(monkeypatch) if each["kind"] == "Certificate"]
    assert len(made) == 2


def pods(document: standin.Document) -> list[standin.Document]:
    return list(standin.pods_in(document))
