"""Log lines that cannot be written are lost, and nothing else is."""

import io
from pathlib import Path

from psserver.logs.patient import Patient


def test_a_full_disk_raises_nothing_and_is_told_of_later(tmp_path: Path) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        log = Patient(full)
        log.write("one\n")
        log.write("two\n")
    with (tmp_path / "log").open("w", encoding="utf-8") as file:
        log._raw = file.buffer.raw  # type: ignore[attr-defined]
        log.write("three\n")
        log.write("four\n")
    written = (tmp_path / "log").read_text()
    assert written == "\n(2 lines before this could not be written)\nthree\nfour\n"


def test_a_stream_without_a_file_is_written_to() -> None:
    stream = io.StringIO()
    Patient(stream).write("one\n")
    assert stream.getvalue() == "one\n"


def test_a_closed_stream_raises_nothing() -> None:
    stream = io.StringIO()
    stream.close()
    Patient(stream).write("one\n")
