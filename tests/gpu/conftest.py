"""Where the tests of this folder run: on a GPU, and on the CPU in place of one."""

from collections.abc import Iterator

import pytest
import torch

from tests.gpu import stand_in
from tests.integration.test_device import STAND_IN

PLACES = [
    pytest.param(STAND_IN, marks=pytest.mark.slow, id="cpu"),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="module", params=PLACES)
def gpu(request: pytest.FixtureRequest) -> Iterator[str]:
    """The last GPU, since nothing may be left to the one that is current by default; or the CPU."""
    where = request.param
    if where != STAND_IN:
        where = f"cuda:{torch.cuda.device_count() - 1}"
    with stand_in.cuda(where):
        yield where


@pytest.fixture(scope="module")
def device(gpu: str) -> torch.device:
    """The current GPU, or the CPU."""
    if gpu == STAND_IN:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
