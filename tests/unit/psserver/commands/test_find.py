"""Commands find the servers that are meant."""

from pathlib import Path

import pytest

from pscore.errors import ConfigError
from psserver.commands.find import find, run_directory


@pytest.mark.parametrize("given", ["x" * 256, " state", "state "])
def test_a_directory_that_cannot_be_meant_is_refused(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"--state-dir \(PACELINE_STATE_DIR\) is"):
        run_directory(Path(given))
    monkeypatch.setenv("PACELINE_STATE_DIR", given)
    with pytest.raises(ConfigError, match="give another path"):
        run_directory(None)


def test_the_directory_is_that_of_the_flag_then_that_of_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_STATE_DIR", "state")
    assert run_directory(Path()).path == tmp_path
    assert run_directory(None).path == tmp_path / "state"


def test_a_file_that_is_no_certificate_is_refused_before_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_text("no certificate")
    monkeypatch.setenv("PACELINE_TLS_CA", str(ca))
    with pytest.raises(ConfigError, match=f"{ca} holds no certificate of a CA"):
        find("127.0.0.1:7070", None, None)
