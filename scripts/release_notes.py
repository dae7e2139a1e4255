"""Prints the changelog's section of one version: `python3 scripts/release_notes.py 1.2.3`."""

import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"


def notes_of(changelog: str, version: str) -> str:
    """Returns the text below a version's heading, up to the next version's.

    Raises:
        SystemExit: The changelog has no section of this version, or an empty one.
    """
    for section in re.split("^## ", changelog, flags=re.MULTILINE)[1:]:
        heading, _, notes = section.partition("\n")
        if heading.startswith(f"{version} - ") and notes.strip():
            return notes.strip()
    raise SystemExit(f"CHANGELOG.md has no section of version {version}")


if __name__ == "__main__":
    print(notes_of(CHANGELOG.read_text(), sys.argv[1]))
