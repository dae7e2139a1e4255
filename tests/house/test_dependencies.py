"""Rule 11: Imports and the dependencies in pyproject.toml agree, both ways."""

import ast
import functools
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from benchmarks.peers.environments import IF_INSTALLED, REQUIREMENTS
from tests.house.source import GENERATED, PACKAGES, ROOT, file_imports, modules_or_skip, name

DEVELOPMENT = ("tests", "benchmarks", "examples", "scripts")
OURS = {*PACKAGES, *DEVELOPMENT}

# Where the name to import does not lead to one installed distribution.
KNOWN = {
    "cupy": "cupy-cuda12x",
    "fbgemm_gpu": "fbgemm-gpu-cpu",
    "google.protobuf": "protobuf",
    "opentelemetry.exporter": "opentelemetry-exporter-otlp-proto-grpc",
    "opentelemetry.instrumentation": "opentelemetry-instrumentation-grpc",
    "opentelemetry.proto": "opentelemetry-proto",
    "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry.trace": "opentelemetry-sdk",
    "tensorflow": "tensorflow-cpu",
}


def canonical(requirement: str) -> str:
    """Returns the distribution's name in a requirement such as `Torch[x]>=2.4`."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].replace("_", "-").lower()


def declared(*extras: str) -> set[str]:
    """Returns the distributions that pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(entry for extra in extras for entry in optional[extra])]
    return {canonical(entry) for entry in wanted}


@functools.cache
def packages() -> Mapping[str, list[str]]:
    """Returns the distributions of each installed package; asking takes a tenth of a second."""
    return importlib.metadata.packages_distributions()


def distributions(imported: Iterable[str]) -> set[str]:
    """Returns the distributions that dotted names come from; a name itself where none has it."""
    installed = packages()
    found: set[str] = set()
    for dotted in imported:
        top = dotted.split(".")[0]
        if top in sys.stdlib_module_names or top in OURS:
            continue
        known = [KNOWN[key] for key in KNOWN if f"{dotted}.".startswith(f"{key}.")]
        found |= {canonical(entry) for entry in known or set(installed.get(top, [top]))}
    return found


def imported_by(paths: Iterable[Path]) -> dict[str, list[str]]:
    """Returns for each distribution the files that import it."""
    users: dict[str, list[str]] = {}
    for path in paths:
        for distribution in distributions(file_imports(path)):
            users.setdefault(distribution, []).append(name(path))
    return users


def undeclared(paths: list[Path], allowed: set[str]) -> dict[str, list[str]]:
    return {user: files for user, files in imported_by(paths).items() if user not in allowed}


def test_the_packages_import_only_what_is_declared() -> None:
    paths = [*modules_or_skip(*PACKAGES), *GENERATED.rglob("*.py")]
    extras = ("cuda12", "cuda13", "demo", "lightning", "otel", "ray", "transformers", "vllm")
    assert not undeclared(paths, declared(*extras))


def test_everything_else_imports_only_what_is_declared() -> None:
    peers = {canonical(entry) for entries in REQUIREMENTS.values() for entry in entries}
    allowed = (
        declared("cuda12", "cuda13", "dev", "fuzz", "lightning", "transformers")
        | peers
        | {*IF_INSTALLED}
    )  # Each in its environment.
    beside = {path.stem for path in modules_or_skip("examples")}  # An example may use another.
    assert not undeclared(modules_or_skip(*DEVELOPMENT), allowed | beside)


def test_every_dependency_is_imported() -> None:
    mains = [ROOT / side / "__main__.py" for side in ("psserver", "psworker")]
    if not all(main.exists() for main in mains):
        pytest.skip("the command lines are not written yet, so some dependencies have no use yet")
    paths = [*modules_or_skip(*PACKAGES), *GENERATED.rglob("*.py")]
    assert not declared() - imported_by(paths).keys()


def test_names_lead_to_their_distributions() -> None:
    tree = ast.parse("import os, numpy.linalg, google.protobuf.message, cupy, nonesuch, pscore")
    names = [
        alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names
    ]
    assert distributions(names) == {"numpy", "protobuf", "cupy-cuda12x", "nonesuch"}
    assert canonical("Typing_Extensions>=4; python_version<'3.12'") == "typing-extensions"
