"""Rule 9: The site of the documentation builds strictly: no link, anchor or page is lost."""

import subprocess
import sys
from pathlib import Path

from tests.house.source import ROOT


def test_the_site_builds_and_every_page_is_in_its_navigation(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "api.html").read_text()
    for name in ("DistributedOptimizer", "push_pull", "ServerUnavailableError"):
        assert f">{name}</" in page or f"{name}(" in page, name
