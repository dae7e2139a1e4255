"""Hooks of mkdocs: parts of the site beyond `docs/`, and links that leave that folder.

README.md is the first page, and the other pages at the top of the repository are pages too. A
linked file of the repository becomes a page with its text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from pscore.rules import RULES

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
    "CHANGELOG.md": "changelog.md",
}
SOURCES = "source"  # Folder of the pages that show files of the repository.
# Words of a script would hide those of the pages.
UNSEARCHED = "---\nsearch: {exclude: true}\n---\n\n"
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sbatch": "bash", ".json": "json"}


def on_config(config: Any) -> Any:
    """Adds the page of each mode to the navigation, behind the page that compares them."""
    modes = next(section["Modes"] for section in config.nav if "Modes" in section)
    modes[1:1] = [{name: f"rules/{name}.md"} for name in RULES.own]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are not in `docs/`."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    linked = {
        target
        for file in list(files.documentation_pages())
        for target in _targets(_original(file.src_uri), file.content_string)
        if not target.endswith(".md")
    }
    for target in sorted(linked):
        files.append(File.generated(config, _source_page(target), content=_shown(target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links to files of the repository into links to pages of the site."""
    where = page.file.src_uri

    def replaced(matched: re.Match[str]) -> str:
        target = _in_repository(_original(where), matched[2])
        if target is None:
            return matched[0]
        to = posixpath.relpath(_page_of(target), posixpath.dirname(where) or ".")
        return f"{matched[1]}{to}{matched[3] or ''}{matched[4]}"

    return LINK.sub(replaced, markdown)


def _targets(where: str, text: str) -> list[str]:
    """Returns the files of the repository that a page links to and that are not in the site."""
    found = (_in_repository(where, matched[2]) for matched in LINK.finditer(text))
    return [
        each for each in found if each is not None and not _is_in_site(each) and each not in PAGES
    ]


def _in_repository(where: str, link: str) -> str | None:
    """Returns the path in the repository that a link means; None if it is no file there."""
    if "://" in link:
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(where), link))
    return path if (ROOT / path).is_file() else None


def _original(page: str) -> str:
    """Returns the file in the repository that a page was made of."""
    return next((name for name, made in PAGES.items() if made == page), f"docs/{page}")


def _page_of(path: str) -> str:
    """Returns the page of the site that shows a file of the repository."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if _is_in_site(path) else _source_page(path)


def _is_in_site(path: str) -> bool:
    return path.startswith("docs/") and not path.startswith("docs/results/")


def _source_page(path: str) -> str:
    return f"{SOURCES}/{path}.md"


def _shown(path: str) -> str:
    """Returns a page with the text of a file; the site's search does not find it."""
    language = LANGUAGES.get(Path(path).suffix, "text")
    fence = "````"
    return f"{UNSEARCHED}# {path}\n\n{fence}{language}\n{(ROOT / path).read_text()}\n{fence}\n"
