"""The commands of a documentation page, as it prints them."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def commands(page: str, heading: str = "", language: str = "bash") -> list[str]:
    """Returns the blocks of shell commands of a page, or of another language, in order.

    Args:
        page: File in docs/.
        heading: Heading of the section to read, without its hashes; empty: that of the page.
        language: Word after the first mark of a block, such as `yaml`.
    """
    found: dict[str, list[str]] = {}
    title, fence = "", None
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines(keepends=True):
        if line.startswith("```"):
            fence = line.strip("`\n") if fence is None else None
            if fence == language:
                found.setdefault(title, []).append("")
        elif fence == language:
            found[title][-1] += line
        elif fence is None and (matched := re.match(r"#+ (.+)", line)):
            title = matched[1]
    return found[heading or next(iter(found))]
