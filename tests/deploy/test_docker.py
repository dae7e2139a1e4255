"""docker-compose.yml, deploy/compose, deploy/stack.yml and docs/deploy.md on a Docker engine."""

import os
import shutil
import subprocess

import pytest

from scripts.check_engine import BUILDS, FAULTS, HOSTS, SECTIONS, check_section
from scripts.engine import NotRunError


def answers() -> bool:
    docker = shutil.which("docker")
    return (
        docker is not None and subprocess.run([docker, "info"], capture_output=True).returncode == 0
    )


pytestmark = [
    pytest.mark.skipif(
        not answers(), reason="no Docker engine answers: start one, or set DOCKER_HOST"
    ),
    pytest.mark.timeout(3600),
]


# In this order: the first one builds the images.
@pytest.mark.parametrize(
    "section", [name for name in SECTIONS if name not in BUILDS | FAULTS | HOSTS]
)
def test_a_section_of_deploy_check_passes(section: str) -> None:
    check(section)


def check(section: str) -> None:
    """Runs a section; CHECK_DEPLOY=write keeps its lines for the page."""
    try:
        check_section(section, keeps=os.environ["CHECK_DEPLOY"] == "write")
    except NotRunError as reason:
        pytest.skip(str(reason))
