"""The parts of a result of published weights are put together: counts are added."""

from benchmarks.publish import add


def test_a_part_adds_its_counts_and_replaces_other_figures() -> None:
    found = {"commits": 5, "torn": 0, "kills": {"shard": 1, "relay": 2, "reader": 0}, "step_s": 1.0}
    part = {"commits": 7, "torn": 1, "kills": {"shard": 1, "relay": 0, "reader": 3}}
    assert add(found, part) == {
        "commits": 12,
        "torn": 1,
        "kills": {"shard": 2, "relay": 2, "reader": 3},
        "step_s": 1.0,
    }
    assert add(found, {"step_s": 2.0}) == found | {"step_s": 2.0}
    assert add({}, part) == part
