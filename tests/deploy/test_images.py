"""Other builds of deploy/Dockerfile: for GPUs, with a compiler, on a base that is pinned."""

import pytest

from scripts.check_engine import BUILDS
from tests.deploy.test_docker import answers, check

pytestmark = [
    pytest.mark.skipif(
        not answers(), reason="no Docker engine answers: start one, or set DOCKER_HOST"
    ),
    pytest.mark.timeout(3600),
]


@pytest.mark.parametrize("section", BUILDS)
def test_a_build_of_deploy_check_passes(section: str) -> None:
    check(section)
