"""Workers whose model is on a GPU, with real shards: they agree, and a NaN is refused by name."""

from collections.abc import Iterator

import pytest

from tests.integration.cluster import Shards
from tests.integration.models import relative_error, same
from tests.integration.test_device import expect_refusal, train

pytestmark = pytest.mark.gpu

CASES = [
    ("ssgd", "none"),
    ("ssgd", "2bit"),
    ("ssgd", "dgc(ratio=0.1, clip=1.0)"),  # Encoded by the host.
    ("od(warmup=2)", "int8"),
    ("ssd(steps=2, warmup=2)", "topk(ratio=0.1)"),
    ("ssd(steps=2, warmup=2, local=mirror)", "none"),
    ("cd(warmup=2, steps=3)", "2bit"),
]


@pytest.fixture(scope="module")
def shards() -> Iterator[Shards]:
    with Shards(2) as started:
        yield started


@pytest.mark.parametrize(("mode", "compression"), CASES)
def test_workers_on_a_gpu_agree_with_each_other_and_about_with_the_cpu(
    shards: Shards, mode: str, compression: str
) -> None:
    first, second = shards.run(train, mode, compression, "cuda")
    assert same(first, second)
    if compression == "none":  # Else a sum in another order is sent as another code.
        host, _ = shards.run(train, mode, compression, "cpu")
        for name, weight in host.items():
            assert relative_error(first[name], weight) < 1e-3


@pytest.mark.parametrize("compression", ["none", "2bit", "topk(ratio=0.1)"])
def test_a_nan_on_a_gpu_is_refused_by_name_and_stays_out_of_the_residual(
    shards: Shards, compression: str
) -> None:
    expect_refusal(shards, compression, "cuda")
