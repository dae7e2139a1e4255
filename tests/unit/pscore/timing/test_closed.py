"""Closed forms beside numbers worked by hand, and the limits that they name."""

from dataclasses import replace

import pytest

from pscore.compressors import parse_compressor
from pscore.errors import ConfigError
from pscore.rules import parse_mode
from pscore.timing.closed import closed_form, ring_form
from pscore.timing.deployment import GBIT, Deployment, MachineRates, cut_slices
from pscore.timing.plans import period, traffic_by_step, without_warmup

# A machine with a CPU that costs nothing, and links without headers.
FREE = MachineRates(
    link_share=1.0,
    memory=1e18,
    receive=1e18,
    send=1e18,
    update=1e18,
    worker=1e18,
    ring=1e18,
    local=1e18,
    encode=1e18,
    decode=1e18,
    message_s=0.0,
    tls=1e18,
)
M = 1 << 20


def spread(number: int, hosts: range) -> tuple[int, ...]:
    return tuple(hosts[place * len(hosts) // number] for place in range(number))


def deployment(
    hosts: int = 4,
    workers: int = 4,
    shards: int = 4,
    numel: int = 24 * M,
    gbit: float = 1.0,
    compute_s: float = 0.5,
    *,
    dedicated: bool = False,
    rates: MachineRates = FREE,
    **more: object,
) -> Deployment:
    own = range(hosts, hosts + shards) if dedicated else range(hosts)
    made = Deployment(
        worker_hosts=spread(workers, range(hosts)),
        shard_hosts=spread(shards, own),
        slices=cut_slices(numel, shards),
        link=gbit * GBIT,
        compute_s=compute_s,
        round_trip_s=0.0,
        rates=rates,
    )
    return replace(made, **more)  # type: ignore[arg-type]


def step_s(mode: str, of: Deployment, compression: str = "none") -> float:
    return closed_form(of, parse_mode(mode), parse_compressor(compression)).step_s


def test_a_delayed_step_takes_the_longer_of_computing_and_the_busiest_link() -> None:
    # 96 MiB; each host sends 3/4 as a worker and 3/4 as a shard.
    link_s = 1.5 * 96 * M / GBIT
    assert step_s("od", deployment()) == pytest.approx(link_s)
    assert step_s("od", deployment(compute_s=2.0)) == pytest.approx(2.0)


def test_a_synchronous_step_adds_forward_and_the_last_slice() -> None:
    # Four shards of six slices: the first of each is ready after a sixth of backward.
    link_s = 1.5 * 96 * M / GBIT
    first_s = 0.5 * (1 / 3 + 2 / 3 / 6)
    tail_s = 3 * 4 * M / GBIT
    assert step_s("ssgd", deployment()) == pytest.approx(first_s + link_s + tail_s)
    late = deployment(overlap=False)
    assert step_s("ssgd", late) == pytest.approx(0.5 + link_s + tail_s)


def test_dedicated_shards_receive_what_all_workers_send() -> None:
    two = deployment(shards=2, dedicated=True)
    assert step_s("od", two) == pytest.approx(4 / 2 * 96 * M / GBIT)
    assert closed_form(two, parse_mode("od")).limit == "shards' links"


def test_a_delay_of_k_steps_pulls_state_over_two_of_them() -> None:
    # Two of five steps pull half of the slices each, twice as long with momentum's state.
    push_s, pull_s = (0.75 * nbytes / GBIT for nbytes in (96 * M, 96 * M))
    expected = (2 * (push_s + pull_s) + 3 * push_s) / 5
    assert step_s("ssd(steps=5)", deployment(compute_s=0.1)) == pytest.approx(expected)


def test_rounds_wait_once_in_h_steps_and_hide_with_an_overlap() -> None:
    link_s, tail_s = 1.5 * 96 * M / GBIT, 3 * 4 * M / GBIT
    assert step_s("local(steps=10)", deployment()) == pytest.approx(0.5 + (link_s + tail_s) / 10)
    assert step_s("local(steps=10, overlap=mirror)", deployment()) == pytest.approx(0.5)


def test_a_ring_sends_as_much_as_a_shard_on_each_host() -> None:
    ring = ring_form(deployment(compute_s=0.0))
    assert ring.step_s == pytest.approx(1.5 * 96 * M / GBIT)
    assert step_s("od", deployment(compute_s=0.0)) == pytest.approx(ring.step_s)
    assert step_s("allreduce", deployment(compute_s=0.0)) == pytest.approx(ring.step_s)


def test_nccl_sends_a_model_once_between_two_hosts() -> None:
    two = deployment(hosts=2, workers=8, compute_s=0.0)
    assert ring_form(two).step_s == pytest.approx(2 * 7 / 8 * 96 * M / GBIT)
    tree = replace(FREE, tree_hosts=2)
    assert ring_form(replace(two, rates=tree)).step_s == pytest.approx(96 * M / GBIT)
    four = deployment(hosts=4, workers=8, compute_s=0.0, rates=tree)
    assert ring_form(four).step_s == pytest.approx(2 * 7 / 8 * 96 * M / GBIT)
    one = deployment(hosts=1, workers=8, shards=1, compute_s=0.01, rates=tree)
    assert ring_form(one).step_s == pytest.approx(0.01)


def test_the_slowest_worker_counts_unless_backup_workers_replace_it() -> None:
    slow = deployment(numel=M, gbit=100, slow={2: 3.0})
    assert step_s("od", slow) == pytest.approx(1.5)
    assert step_s("ssgd(backup=1)", slow) < 0.6
    assert step_s("asgd", slow) < 0.6


def test_unequal_steps_cost_the_expected_largest_of_all() -> None:
    noisy = deployment(numel=M, gbit=100, deviation=0.1)
    assert noisy.computing_s() == pytest.approx(0.5 * 1.103, rel=0.01)  # Of four normal values.
    assert noisy.computing_s(2) < noisy.computing_s(3) < noisy.computing_s()


@pytest.mark.parametrize(
    ("limit", "mode", "changes"),
    [
        ("computing", "ssgd", {"gbit": 100.0}),
        ("computing", "od", {"compute_s": 2.0}),
        ("computing", "local(steps=100)", {}),
        ("computing", "allreduce", {"gbit": 100.0}),
        ("computing of worker 1", "ssgd", {"gbit": 100.0, "slow": {1: 4.0}}),
        ("computing", "ssgd(backup=1)", {"gbit": 100.0, "slow": {1: 4.0}}),
        ("computing", "asgd", {"gbit": 100.0, "slow": {1: 4.0}}),
        ("links", "ssgd", {}),
        ("links", "od", {"gbit": 0.1}),
        ("links", "ssd(steps=5)", {"gbit": 0.1}),
        ("links", "allreduce", {"gbit": 0.1}),
        ("links", "diloco(steps=10)", {"gbit": 0.1}),
        ("shards' links", "ssgd", {"shards": 1, "dedicated": True}),
        ("shards' links", "asgd", {"shards": 2, "dedicated": True}),
        ("workers' links", "od", {"hosts": 2, "workers": 4, "shards": 8, "dedicated": True}),
        ("link of host 2", "ssgd", {"link_factors": {2: 0.1}}),
        (
            "shard CPU",
            "ssgd",
            {"gbit": 400.0, "rates": MachineRates(), "workers": 16, "compute_s": 0.01},
        ),
        ("worker CPU", "od", {"gbit": 400.0, "rates": replace(FREE, worker=1e8)}),
        ("worker CPU", "cd", {"gbit": 1.0, "rates": replace(FREE, encode=1e7)}),
        ("round trips", "ssgd", {"numel": M, "gbit": 10.0, "compute_s": 0.01, "round_trip_s": 0.2}),
        ("round trips", "od", {"numel": M, "gbit": 10.0, "compute_s": 0.01, "round_trip_s": 0.2}),
    ],
)
def test_the_limit_is_named(limit: str, mode: str, changes: dict[str, object]) -> None:
    compressor = parse_compressor("2bit" if mode == "cd" else "none")
    of = deployment(**changes)  # type: ignore[arg-type]
    assert closed_form(of, parse_mode(mode), compressor).limit == limit


def test_the_parts_add_up_and_what_waits_is_not_computing() -> None:
    found = closed_form(deployment(), parse_mode("ssgd"))
    assert sum(found.parts_s.values()) == pytest.approx(found.step_s)
    assert found.waited == pytest.approx(1 - found.parts_s["computing"] / found.step_s)


def test_modes_that_mix_models_have_no_closed_form() -> None:
    with pytest.raises(ConfigError, match="no closed form for dpsgd"):
        closed_form(deployment(), parse_mode("dpsgd"))
    with pytest.raises(ConfigError, match=r"ssgd\.backup is 4"):
        closed_form(deployment(), parse_mode("ssgd(backup=4)"))


def test_traffic_repeats_with_the_period_behind_the_warm_up() -> None:
    rule = without_warmup(parse_mode("ssd(steps=4, warmup=7, spread=1, mirror=kept)"))
    assert period(rule) == range(4)
    steps = traffic_by_step(cut_slices(M, 1), rule, (parse_compressor("none"),) * 2, 1)
    assert [each.pulled for each in steps] == [0, 0, 0, 4 * M]
    assert {each.pushed for each in steps} == {4 * M}


def test_a_coarse_layout_has_a_bounded_number_of_slices() -> None:
    slices = cut_slices(7_000_000_000, 16, per_shard_max=8)
    assert len(slices) == 128
    assert sum(each.numel for each in slices) == pytest.approx(7e9, rel=1e-6)
    assert len(cut_slices(4 * M, 2, per_shard_max=8)) == len(cut_slices(4 * M, 2))
    with pytest.raises(ConfigError, match="0 elements"):
        cut_slices(0, 2)


def test_a_far_link_is_filled_in_part_where_the_system_paces() -> None:
    paced = replace(deployment(), rates=replace(deployment().rates, far_share=0.8))
    near, far = (replace(paced, round_trip_s=seconds) for seconds in (4e-3, 20e-3))
    assert far.payload_rate(0) == pytest.approx(0.8 * near.payload_rate(0))
    assert near.payload_rate(0) == deployment().payload_rate(0)
