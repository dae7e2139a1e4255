"""The file for signs of life."""

from pathlib import Path

import pytest

from pscore.errors import ConfigError
from psserver.process.notify import ServiceManager


@pytest.mark.parametrize("name", ["", "missing/alive"])
def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot write --alive-file"):
        ServiceManager.of(tmp_path / name, {})


def test_the_file_is_there_from_the_start(tmp_path: Path) -> None:
    ServiceManager.of(tmp_path / "alive", {})
    assert (tmp_path / "alive").exists()
