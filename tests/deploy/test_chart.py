"""Chart, manifests, alert rules, workflows and dashboard, by scripts/check_deploy.py."""

import pytest

from scripts.check_deploy import TOOLS, checks
from scripts.engine import NotRunError

pytestmark = pytest.mark.skipif(
    not (TOOLS / "ready").exists(), reason="no helm: make check-deploy installs it"
)


@pytest.mark.parametrize("name", checks())
def test_a_check_of_deploy_passes(name: str) -> None:
    try:
        checks()[name]()
    except NotRunError as reason:
        pytest.skip(str(reason))
