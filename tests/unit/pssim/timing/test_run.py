"""A job in time: beside committed runs on shaped links, beside closed forms, and on its own."""

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from pscore.compressors import parse_compressor
from pscore.rules import parse_mode
from pscore.timing.closed import closed_form
from pscore.timing.deployment import GBIT, Deployment, cut_slices
from pssim.network import Loop
from pssim.timing.links import HostLinks, Servers, Turns
from pssim.timing.run import run_in_time

RESULTS = Path(__file__).resolve().parents[4] / "docs" / "results"
M = 1 << 20


def four_hosts(numel: int, gbit: float, compute_s: float) -> Deployment:
    return Deployment(
        worker_hosts=(0, 1, 2, 3),
        shard_hosts=(0, 1, 2, 3),
        slices=cut_slices(numel, 4),
        link=gbit * GBIT,
        compute_s=compute_s,
    )


def measured() -> list[tuple[str, Deployment, float]]:
    """Returns modes, deployments and measured ms of the committed runs on four hosts."""
    small = json.loads((RESULTS / "hosts.json").read_text())["four_hosts"]["step_ms"]
    (large,) = json.loads((RESULTS / "step_hosts.json").read_text()).values()
    found = []
    for ms, of in (
        (small, four_hosts(6_400_000, 0.5, 0.3)),
        (large["step_ms"], four_hosts(25_557_032, 1.0, 0.818)),
    ):
        modes = {"ssgd": "ssgd", "od": "od", "ssd": "ssd(steps=5)"}
        found += [(mode, of, ms[name]) for name, mode in modes.items()]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "of", "ms"), measured())
def test_committed_runs_are_predicted_within_a_tenth(mode: str, of: Deployment, ms: float) -> None:
    rule = parse_mode(mode)
    assert 1e3 * run_in_time(of, rule).step_s == pytest.approx(ms, rel=0.1)
    assert 1e3 * closed_form(of, rule).step_s == pytest.approx(ms, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", ["ssgd", "od", "ssd(steps=5)", "asgd", "ssp(bound=3)", "local(steps=4)", "staleness"]
)
def test_every_kind_of_mode_runs_and_agrees_with_its_closed_form(mode: str) -> None:
    of = Deployment(
        worker_hosts=(0, 0, 1, 1),
        shard_hosts=(2, 3),
        slices=cut_slices(2 * M, 2),
        link=0.2 * GBIT,
        compute_s=0.5,
    )
    rule = parse_mode(mode)
    run = run_in_time(of, rule)
    assert run.step_s == pytest.approx(closed_form(of, rule).step_s, rel=0.2)


def test_a_fast_network_leaves_computing() -> None:
    of = replace(four_hosts(M // 2, 100.0, 0.5), slow={2: 2.0})
    run = run_in_time(of, parse_mode("ssgd"))
    assert run.step_s == pytest.approx(1.0, rel=0.05)
    assert run.limit == "computing"
    assert 0.3 < run.waited < 0.5  # Three of four workers wait half of their time.


def test_a_step_does_not_wait_for_a_slow_worker_if_there_is_a_backup() -> None:
    of = replace(four_hosts(M // 2, 100.0, 0.5), slow={2: 3.0})
    run = run_in_time(of, parse_mode("ssgd(backup=1)"))
    assert run.step_s == pytest.approx(0.5, rel=0.05)
    assert run.limit == "computing"


def test_a_slow_link_is_the_limit_and_memory_is_none() -> None:
    of = four_hosts(M // 2, 0.05, 0.02)
    assert run_in_time(of, parse_mode("od")).limit in ("link out", "link in")
    one = replace(of, worker_hosts=(0,) * 4, shard_hosts=(0,) * 4)
    alone = run_in_time(one, parse_mode("od"))
    assert alone.busy["link out"] == 0.0
    assert alone.step_s < 0.05


def test_the_same_seed_gives_the_same_time() -> None:
    of = replace(four_hosts(M // 4, 1.0, 0.1), deviation=0.2)
    rule = parse_mode("ssgd(backup=1)")
    times = [run_in_time(of, rule, seed=seed).step_s for seed in (1, 1, 2)]
    assert times[0] == times[1] != times[2]


@pytest.mark.slow
def test_eight_slices_of_a_shard_stand_for_more() -> None:
    fine = replace(four_hosts(1, 1.0, 0.5), slices=cut_slices(96 * M, 4))
    coarse = replace(fine, slices=cut_slices(96 * M, 4, per_shard_max=8))
    for mode in ("ssgd", "od"):
        times = [run_in_time(of, parse_mode(mode)).step_s for of in (fine, coarse)]
        assert times[1] == pytest.approx(times[0], rel=0.02)


@pytest.mark.slow
def test_seven_billion_parameters_need_no_memory() -> None:
    of = Deployment(
        worker_hosts=tuple(place // 4 for place in range(32)),
        shard_hosts=tuple(range(8)),
        slices=cut_slices(7_000_000_000, 8, per_shard_max=6),
        link=10 * GBIT,
        compute_s=2.0,
    )
    started_s = time.process_time()
    run = run_in_time(of, parse_mode("od"), num_steps=2)
    assert time.process_time() - started_s < 60
    assert run.step_s == pytest.approx(closed_form(of, parse_mode("od")).step_s, rel=0.1)


def test_connections_take_turns_on_a_link() -> None:
    loop = Loop()
    order: list[tuple[str, float]] = []
    link = Turns(loop, rate=10.0)
    for name in "aab":
        link.carry(name, 10.0, partial(_note, order, name, loop))
    loop.run()
    assert order == [("a", 1.0), ("b", 2.0), ("a", 3.0)]
    assert link.busy_s == 3.0


def _note(order: list[tuple[str, float]], name: str, loop: Loop) -> None:
    order.append((name, loop.now_s))


def test_two_threads_work_at_once() -> None:
    loop = Loop()
    ends: list[float] = []
    threads = Servers(loop, 2)
    for seconds in (3.0, 1.0, 1.0):
        threads.work(seconds, lambda: ends.append(loop.now_s))
    loop.run()
    assert ends == [1.0, 2.0, 3.0]


def test_threads_of_several_hosts_wait_for_the_cores_that_these_share() -> None:
    loop = Loop()
    ends: list[tuple[str, float]] = []
    cores = Servers(loop, 2)
    for name in ("one", "two", "three"):
        Servers(loop, 1, cores).work(2.0, partial(_note, ends, name, loop))
    loop.run()
    assert ends == [("one", 2.0), ("two", 2.0), ("three", 4.0)]
    assert cores.busy_s == 6.0


def test_fewer_cores_make_no_step_shorter_and_enough_change_nothing() -> None:
    of, cd = four_hosts(3_200_000, 10.0, 0.05), parse_mode("cd(steps=2)")
    compressor = parse_compressor("2bit")
    took_s = [
        run_in_time(replace(of, cores=cores), cd, compressor).step_s for cores in (1, 2, 64, None)
    ]
    assert took_s[0] > took_s[1] > took_s[2]
    assert took_s[2] == took_s[3]


def test_bytes_within_a_host_pass_through_memory() -> None:
    of, loop = four_hosts(M, 1.0, 0.1), Loop()
    ends: list[float] = []
    links = HostLinks(loop, of)
    links.send(0, 0, "near", 3.2e9, lambda: ends.append(loop.now_s))
    links.send(0, 1, "far", 1.0 * GBIT, lambda: ends.append(loop.now_s))
    loop.run()
    assert ends[0] == pytest.approx(1.0)
    assert 1.0 / 0.93 < ends[1] < 1.2 / 0.93  # Its last piece enters the other host later.
    assert links.out[0].busy_s == pytest.approx(1.0 / 0.93)
