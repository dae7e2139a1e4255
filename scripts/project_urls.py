"""Adds the addresses of the repository that a package is built of to the package's metadata.

hatchling calls it for a wheel and for a source package (`[tool.hatch.metadata.hooks.custom]` in
pyproject.toml). A clone of a fork names the fork. The addresses are those that GitHub, GitLab and
Gitea have in common. A clone of a local folder gives a package without addresses, as files without
a git repository do: a path of the machine that has built a package helps nobody else.
"""

import re
import subprocess
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# https://user:token@host/path.git, ssh://git@host:22/path.git, git@host:path.git
WEB = re.compile(r"https?://(?:[^/@]*@)?(?P<host>[^/]+)/(?P<path>.+)")
SSH = re.compile(r"(?:ssh://)?[^/@]+@(?P<host>[^/:]+)(?::\d+/|[:/])(?P<path>.+)")


def urls_of(remote: str) -> dict[str, str]:
    """Returns the addresses of a repository by label, without names and tokens.

    Args:
        remote: Address that the checkout was cloned from; empty if it was not cloned.
    """
    found = WEB.fullmatch(remote) or SSH.fullmatch(remote)
    if found is None:
        return {}
    base = f"https://{found['host']}/{found['path'].removesuffix('/').removesuffix('.git')}"
    return {"Source": base, "Documentation": f"{base}#readme", "Issues": f"{base}/issues"}


def answer_of_git(root: Path, *args: str) -> str:
    """Returns what git prints; empty if it fails or is not installed."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(root), *args], capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return answer.stdout.strip()


class ProjectUrls(MetadataHookInterface):
    """Adds the addresses to the metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Sets `urls`, which pyproject.toml declares as dynamic."""
        root = Path(self.root)
        top = answer_of_git(root, "rev-parse", "--show-toplevel")
        remote = answer_of_git(root, "config", "--get", "remote.origin.url")
        is_checkout = bool(top) and Path(top).samefile(root)
        metadata["urls"] = urls_of(remote) if is_checkout else {}
