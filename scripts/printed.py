"""The commands of a documentation page, as it prints them."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def commands(page: str, heading: str = "") -> list[str]:
    """Returns the blocks of shell commands of a page, in order.

    Args:
        page: File in docs/.
        heading: Heading of the section to read, without its hashes; empty: that of the page.
    """
    found: dict[str, list[str]] = {}
    title, fence = "", None
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines(keepends=True):
        if line.startswith("```"):
            fence = line.strip("`\n") if fence is None else None
            if fence == "bash":
                found.setdefault(title, []).append("")
        elif fence == "bash":
            found[title][-1] += line
        elif fence is None and (matched := re.match(r"#+ (.+)", line)):
            title = matched[1]
    return found[heading or next(iter(found))]
