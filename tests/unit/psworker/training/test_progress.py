"""The samples behind a worker: of its own steps, and of those that it was told of."""

from types import SimpleNamespace
from typing import Any, cast

from pscore.types import Origin
from psworker.training.progress import TrainingProgress


def test_each_step_counts_with_its_samples_and_others_steps_with_those_of_then() -> None:
    replica: Any = SimpleNamespace(step=0, to=0, left_out=0)

    def locate(origin: Origin) -> None:
        replica.step = replica.to

    replica.locate = locate
    progress = TrainingProgress(4.0, replica, cast(Any, SimpleNamespace(origin=Origin())))

    def go(step: int, **known: Any) -> float:
        replica.to = step
        progress.locate(**known)
        return progress.seen

    assert go(10) == 40.0  # It has joined at step 10.
    progress.samples = 3.0
    replica.step = 11  # `Replica.finish` has counted.
    assert go(11, former=10) == 43.0
    assert go(8) == 34.0  # A round is lost.
    assert go(22, former=20, seen=100.0) == 106.0  # Loaded at step 20; others have continued.
    assert go(0, former=50) == 0.0
    replica.left_out = 4  # It leaves out steps 3 to 6 of a round by speed.
    assert go(7, former=2, seen=6.0) == 9.0
    assert go(7, seen=9.0) == 9.0  # Located again.
