"""The version, with and without an installed distribution."""

import importlib
from importlib import metadata

import pytest

from pscore import version


def test_a_tree_that_is_not_installed_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `make test-gpu GPU_PYTHON=` imports it."""

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    with monkeypatch.context() as patched:
        patched.setattr(metadata, "version", missing)
        assert importlib.reload(version).VERSION == "0+unknown"
    assert metadata.version("paceline") == importlib.reload(version).VERSION
