"""docs/deploy.md on engines of several hosts, with GPUs, and in a Swarm."""

from collections.abc import Iterator

import pytest

from scripts.check_engine import HOSTS, build_images
from scripts.engine import kept_data
from tests.deploy.test_docker import answers, check

pytestmark = [
    pytest.mark.skipif(
        not answers(), reason="no Docker engine answers: start one, or set DOCKER_HOST"
    ),
    pytest.mark.timeout(3600),
]


@pytest.fixture(scope="module", autouse=True)
def images() -> Iterator[None]:
    build_images()
    with kept_data():
        yield


@pytest.mark.parametrize("section", HOSTS)
def test_a_section_of_deploy_check_on_other_hosts_passes(section: str) -> None:
    check(section)
