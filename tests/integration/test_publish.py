"""Published weights: each version is bfloat16 of one step of all shards."""

from collections.abc import Iterator

import numpy as np
import pytest

import psworker
from pscore.net.credentials import ANYONE
from pscore.publish.codec import round_to_bf16
from psserver.remote import checkpoint
from tests.integration.cluster import Shards, Station, new_job
from tests.integration.models import backward, batch, make_model, sgd

pytestmark = pytest.mark.timeout(300)
WAIT_S = 120.0


@pytest.fixture(scope="module")
def publishing() -> Iterator[Shards]:
    """Two shards that publish each update of each job."""
    with Shards(2, env={"PACELINE_PUBLISH": "*:every=1"}) as started:
        yield started
        started.require_alive()


def exported(shards: Shards, job: str) -> dict[str, np.ndarray]:
    """Returns a job's weights as `psserver export` writes them, rounded to bfloat16."""
    found = checkpoint.capture(shards.addresses, ANYONE, job, weights_only=True)
    arrays = dict(found.tables[0].arrays["weights"])
    return {
        name: round_to_bf16(np.ascontiguousarray(array).reshape(-1)).reshape(array.shape)
        for name, array in arrays.items()
    }


def trains(station: Station, mode: str, num_steps: int) -> None:
    """Trains; makes a step each time that the test says so."""
    model = make_model()
    optimizer = psworker.DistributedOptimizer(
        sgd(model.parameters()), named_parameters=model.named_parameters(), mode=mode
    )
    for step in range(num_steps):
        station.hear()
        backward(model, *batch(step, station.rank))
        optimizer.step()
        station.tell(step)
    station.hear()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ssgd", "ssd(steps=2, warmup=1)", "diloco(steps=1, warmup=1)"])
def test_each_version_is_bf16_of_the_shards_at_its_step(publishing: Shards, mode: str) -> None:
    job, num_steps = new_job(), 4
    with publishing.workers(trains, mode, num_steps, num_workers=1, job=job) as (worker,):
        with psworker.Subscriber(publishing.addresses, job=job, dtype="bf16") as subscriber:
            weights = subscriber.wait(timeout_s=WAIT_S)
            first = {name: array.copy() for name, array in weights.arrays.items()}
            assert weights.step == 0
            for _ in range(num_steps):
                former = weights
                worker.tell()
                worker.hear()
                weights = subscriber.wait(newer_than=former.version, timeout_s=WAIT_S)
                assert weights.version == (former.version.lineage, former.version.number + 1)
                assert weights.exact
                assert weights.step == former.step + 1
                expected = exported(publishing, job)
                for name, array in weights.arrays.items():
                    np.testing.assert_array_equal(array, expected[name], err_msg=name)
            assert subscriber.resyncs == 0
        worker.tell()
        worker.result()
    for name, array in first.items():
        assert (array != weights.arrays[name]).any(), name
