"""Log files of bounded size, and programs that read them meanwhile."""

import subprocess
import sys
from pathlib import Path

from psserver.commands.logview import LogView
from psserver.logs.rotation import former

WRITER = """
import sys
from pathlib import Path
from psserver.logs import setup
from psserver.logs.rotation import RotatingLog
import structlog

setup.configure("text", "info", RotatingLog(Path(sys.argv[1]), int(sys.argv[2])))
for number in range(int(sys.argv[3])):
    structlog.get_logger().warning(f"line {number:04}")
"""


def write(path: Path, nbytes_max: int, lines: int) -> None:
    with path.open("ab") as file:
        command = [sys.executable, "-c", WRITER, str(path), str(nbytes_max), str(lines)]
        subprocess.run(command, stderr=file, check=True, timeout=200)


def numbers(lines: list[str]) -> list[int]:
    return [int(line.partition("line ")[2][:4]) for line in lines]


def test_a_full_log_becomes_the_former_one_and_a_new_one_is_begun(tmp_path: Path) -> None:
    path = tmp_path / "shard-0.log"
    write(path, 1000, 100)
    assert path.stat().st_size < 1100
    assert 1000 <= former(path).stat().st_size < 1100
    assert {file.name for file in tmp_path.iterdir()} == {"shard-0.log", "shard-0.log.1"}
    # No line is lost between the two.
    shown = numbers(LogView([path]).read())
    assert shown == list(range(shown[0], 100))


def test_a_log_without_a_bound_grows(tmp_path: Path) -> None:
    path = tmp_path / "shard-0.log"
    write(path, 0, 100)
    assert numbers(LogView([path]).read()) == list(range(100))
    assert not former(path).exists()


def test_a_follower_continues_in_the_next_file(tmp_path: Path) -> None:
    path = tmp_path / "shard-0.log"
    path.write_text("line 0000\nline 00")
    view = LogView([path])
    assert numbers(view.read()) == [0]
    with path.open("a") as file:
        file.write("01\nline 0002\n")
    path.replace(former(path))
    path.write_text("line 0003\n")
    assert numbers(view.read()) == [1, 2, 3]
    assert view.read() == []
