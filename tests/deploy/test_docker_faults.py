"""docs/deploy.md on faults: killed, paused and restarted containers, lost and full volumes."""

import pytest

from scripts.check_engine import FAULTS, build_images
from tests.deploy.test_docker import answers, check

pytestmark = [
    pytest.mark.skipif(
        not answers(), reason="no Docker engine answers: start one, or set DOCKER_HOST"
    ),
    pytest.mark.timeout(3600),
]


@pytest.fixture(scope="module", autouse=True)
def images() -> None:
    build_images()


@pytest.mark.parametrize("section", FAULTS)
def test_a_section_of_deploy_check_with_faults_passes(section: str) -> None:
    check(section)
