"""Backup workers over several slices: nobody waits for a worker that waits for it."""

import pytest

from pscore.rules import SSGD
from pssim.case import ONE_SLICE, SHAPES, Case
from pssim.faulty import simulate
from pssim.network import MessageFaults

SEEDS = 12


def with_backup(
    seed: int, num_workers: int, backup: int, shapes: tuple[tuple[int, ...], ...]
) -> Case:
    """Workers alike, on a network that drops every fifth message."""
    return Case(
        seed=seed,
        rule=SSGD(backup=backup),
        num_shards=1,
        steps=(6,) * num_workers,
        compute_s=(0.1,) * num_workers,
        dies_s=(None,) * num_workers,
        back_s=(None,) * num_workers,
        samples=(1.0,) * num_workers,
        faults=MessageFaults(drop=0.2, delay_s_max=0.01, until_s=30.0),
        shapes=shapes,
    )


@pytest.mark.parametrize(("num_workers", "backup"), [(3, 1), (4, 2)])
def test_one_slice_is_never_waited_for_in_vain(num_workers: int, backup: int) -> None:
    for seed in range(SEEDS):
        simulate(with_backup(seed, num_workers, backup, ONE_SLICE))


@pytest.mark.slow
@pytest.mark.parametrize(("num_workers", "backup"), [(3, 1), (4, 2)])
def test_slices_do_not_make_workers_wait_for_each_other(num_workers: int, backup: int) -> None:
    for seed in range(SEEDS):
        simulate(with_backup(seed, num_workers, backup, SHAPES))
