"""Rule 9: The site of the documentation builds strictly: no link, anchor or page is lost."""

import posixpath
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import psworker
from pscore.compressors import COMPRESSORS
from pscore.rules import RULES
from tests.house.source import ROOT


def test_the_site_builds_and_every_page_is_in_its_navigation(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "api.html").read_text()
    elsewhere = {each.__name__ for each in RULES.own.values()}
    elsewhere |= {each.__name__ for each in COMPRESSORS.own.values()}
    elsewhere |= {"Compressor", "Rule", "RULES", "modes"}
    for name in sorted(set(dir(psworker)) - elsewhere):
        assert re.search(rf'id="[\w.]+\.{name}"', page), name
    for name in ("DistributedOptimizer.report", "Subscriber.wait"):  # Of their base classes.
        assert f'.{name}"' in page, name
    assert [link for link in _links(tmp_path) if not (tmp_path / link).exists()] == []


def _links(site: Path) -> list[str]:
    """Returns the files of the site that its pages link to."""
    found = set()
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # Its links are those of the first page, from the root.
            continue
        for link in re.findall(r'(?:href|src)="?([^"\s>#?]+)', page.read_text()):
            if "://" not in link and not link.startswith(("mailto:", "data:")):
                where = page.parent.relative_to(site).as_posix()
                found.add(posixpath.normpath(posixpath.join(where, unquote(link))))
    return sorted(found)
