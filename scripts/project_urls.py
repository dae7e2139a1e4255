"""Adds the addresses of the repository that a package is built of to the package's metadata.

hatchling calls it for a wheel and for a source package (`[tool.hatch.metadata.hooks.custom]` in
pyproject.toml). A clone of a fork names the fork. The addresses are those that GitHub, GitLab and
Gitea have in common. A checkout without a remote repository on the web gives a package without
addresses.
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
    """Returns addresses by label, without names and tokens; empty for a folder on this machine."""
    found = WEB.fullmatch(remote) or SSH.fullmatch(remote)
    if found is None:
        return {}
    base = f"https://{found['host']}/{found['path'].removesuffix('/').removesuffix('.git')}"
    return {"Source": base, "Documentation": f"{base}#readme", "Issues": f"{base}/issues"}


def remote_of(root: Path) -> str:
    """Returns the address that a checkout was cloned from; empty without one, or without git."""
    command = ["git", "-C", str(root), "config", "--get", "remote.origin.url"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return answer.stdout.strip()


class ProjectUrls(MetadataHookInterface):
    """Adds the addresses to the metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Sets `urls`, which pyproject.toml declares as dynamic."""
        metadata["urls"] = urls_of(remote_of(Path(self.root)))
