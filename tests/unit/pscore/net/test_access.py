"""Token files: their contents, their readers, and the owner of each token."""

import errno
import os
from pathlib import Path

import pytest

from pscore.errors import ConfigError
from pscore.net.credentials import ANYONE, EVERY, pick, read_credentials, read_tokens

A, B, C = "a" * 16, "b" * 16, "c" * 256


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tokens"


def written(file: Path, text: str, mode: int = 0o600) -> Path:
    file.write_text(text)
    file.chmod(mode)
    return file


def test_a_lone_token_is_for_everything(file: Path) -> None:
    (token,) = read_tokens(written(file, f"{A}\n"))
    assert (token.job, token.secret) == (EVERY, A)
    assert A not in repr(token)


def test_jobs_have_tokens_of_their_own_and_a_second_one_to_change_to(file: Path) -> None:
    tokens = read_tokens(written(file, f"# ours\n\n* {A}\njob {B}\njob {C}\n"))
    assert [(token.job, token.secret) for token in tokens] == [(EVERY, A), ("job", B), ("job", C)]
    assert pick(tokens, "job", file) == B
    assert pick(tokens, "another", file) == A
    assert pick(tokens, EVERY, file) == A


def test_a_file_without_ones_own_job_is_refused_by_name(file: Path) -> None:
    tokens = read_tokens(written(file, f"x {A}\ny {B}"))
    with pytest.raises(ConfigError, match="has no token for job 'z', only for 'x', 'y'"):
        pick(tokens, "z", file)
    assert pick(tokens, EVERY, file) == "", "the shard says what it needs, and health needs none"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds 0 tokens"),
        ("# nothing\n", "holds 0 tokens"),
        ("a" * 15, "line 1 of .* ends in 15 characters, a token is 16 to 256"),
        ("a" * 257, "ends in 257 characters"),
        (f"\njob {A} {B}", "line 2 of .* has 3 words, must be: job token"),
        ("t\u00f6ken" * 5, "printable ones; make one with: openssl rand -hex 32"),
        (f"x {A}\ny {A}", "holds the same token twice: give each job its own"),
        ("\n".join(f"j{i} {i:016}" for i in range(1025)), "holds 1025 tokens"),
        ("x" * (1 << 20), "is longer than 524288 bytes"),
    ],
)
def test_a_wrong_token_file_is_refused_without_showing_it(
    file: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_tokens(written(file, text))
    assert A not in str(caught.value)


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o602, 0o620, 0o666, 0o601])
def test_a_file_that_is_open_to_others_is_refused(file: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match=f"can be read by others .mode 0{mode:o}.*chmod 600"):
        read_tokens(written(file, A, mode))


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o440])
def test_a_file_for_this_user_or_group_is_read(file: Path, mode: int) -> None:
    assert len(read_tokens(written(file, A, mode))) == 1


def test_a_file_that_is_not_there_is_named(file: Path) -> None:
    with pytest.raises(ConfigError, match=f"cannot read the token file {file}: No such file"):
        read_tokens(file)


def test_a_file_of_another_user_is_named_with_this_user(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    with pytest.raises(ConfigError, match=f"{file}: Permission denied for user 10001; .*chown"):
        read_tokens(file)


def test_variables_name_files(file: Path, tmp_path: Path) -> None:
    assert read_credentials({}) == ANYONE
    found = read_credentials({"PACELINE_TOKEN_FILE": str(written(file, f"j {A}"))}, job="j")
    assert found.token == A
    assert A not in repr(found)
    assert read_credentials({}, token_file=str(file), job="j") == found
    with pytest.raises(ConfigError, match=r"cannot read PACELINE_TLS_CA .*: No such file"):
        read_credentials({"PACELINE_TLS_CA": str(tmp_path / "none")})
    with pytest.raises(ConfigError, match="PACELINE_TLS_CERT and PACELINE_TLS_KEY belong together"):
        read_credentials({"PACELINE_TLS_CA": str(file), "PACELINE_TLS_CERT": str(file)})
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"PACELINE_TLS_KEY .* can be read by others"):
        read_credentials({"PACELINE_TLS_KEY": str(file)})
