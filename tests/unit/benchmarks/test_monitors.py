"""The monitors of the kill loop: which probes and which waits for a checkpoint count."""

from benchmarks.survival.injector import DISK, Absence
from benchmarks.survival.monitors import Probe, longest_gap, unexcused


def test_a_probe_of_a_shard_that_is_away_does_not_count() -> None:
    probes = [
        Probe(shard=shard, began_s=began_s, took_s=1.0, tries=1)
        for shard in (0, 1)
        for began_s in (0.0, 8.0, 9.5, 12.0, 15.0)
    ]
    away = [Absence("shard 1", 10.0, 13.0), Absence("worker 0", 0.0, 20.0), Absence(DISK, 0, 20)]
    counted = unexcused(probes, away)
    assert [probe.began_s for probe in counted if probe.shard == 0] == [0.0, 8.0, 9.5, 12.0, 15.0]
    assert [probe.began_s for probe in counted if probe.shard == 1] == [0.0, 8.0, 15.0]


def test_the_longest_gap_is_that_between_checkpoints_while_all_shards_are_there() -> None:
    times = [5.0, 10.0, 16.0, 45.0, 50.0]
    assert longest_gap(times, 0.0, 52.0, []) == 29.0
    workers = [Absence("worker 1", 16.0, 45.0)]
    assert longest_gap(times, 0.0, 52.0, workers) == 29.0
    away = [Absence("shard 0", 20.0, 40.0), Absence(DISK, 18.0, 30.0)]
    assert longest_gap(times, 0.0, 52.0, away) == 6.0
    assert longest_gap(times, 0.0, 57.0, away) == 7.0
    assert longest_gap([], 0.0, 9.0, []) == 9.0
