"""Graphs: rows and columns sum to 1 for any members, and means come as fast as their papers say."""

import itertools
import math

import numpy as np
import pytest

from pscore.errors import ConfigError
from pscore.graphs import GRAPHS, directed_graph_of, graph_of
from pscore.graphs.base import Edge, is_joined
from pscore.graphs.sides import sides_of

ALL = 33
CHAIN = " ".join(f"{i}-{i + 1}" for i in range(ALL))
STAR = " ".join(f"0-{i}" for i in range(1, ALL))
NAMES = [*sorted(GRAPHS), CHAIN, STAR, "0-1 1-2 2-0 5-7"]


def matrix(name: str, members: list[int], step: int = 0) -> np.ndarray:
    places = {rank: place for place, rank in enumerate(members)}
    mixing = np.zeros((len(members), len(members)))
    for taker, giver, weight in graph_of(name)(members, step):
        assert taker != giver
        mixing[places[taker], places[giver]] += weight
    return mixing + np.diag(1 - mixing.sum(axis=1))


def rho(name: str, num: int) -> float:
    values = np.abs(np.linalg.eigvals(matrix(name, list(range(num)))))
    return float(sorted(values)[-2])


@pytest.mark.parametrize("name", NAMES)
def test_rows_and_columns_sum_to_one_for_any_members(name: str) -> None:
    rng = np.random.default_rng(1)
    for num in range(1, ALL + 1):
        for members in (list(range(num)), sorted(rng.choice(100, num, replace=False).tolist())):
            for step in range(7):
                mixing = matrix(name, members, step)
                assert (mixing >= -1e-15).all()
                np.testing.assert_allclose(mixing.sum(axis=0), 1, atol=1e-12)
                np.testing.assert_allclose(mixing.sum(axis=1), 1, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_one_worker_takes_from_nobody(name: str) -> None:
    assert graph_of(name)([3], 5) == []


@pytest.mark.parametrize("num", [4, 8, 16, 64])
def test_spectral_gaps_are_those_of_the_closed_forms(num: int) -> None:
    assert rho("complete", num) == pytest.approx(0, abs=1e-9)
    assert 1 - rho("ring", num) == pytest.approx(2 / 3 * (1 - math.cos(2 * math.pi / num)))
    assert 1 - rho("exp_static", num) == pytest.approx(2 / (1 + math.log2(num)))


@pytest.mark.parametrize(("num", "gap"), [(16, 0.40), (64, 0.117)])
def test_spectral_gaps_of_the_torus(num: int, gap: float) -> None:
    assert 1 - rho("torus", num) == pytest.approx(gap, abs=5e-4)


def left_after_a_cycle(num: int) -> float:
    product = np.eye(num)
    for step in range(max(1, (num - 1).bit_length())):
        product = matrix("exp", list(range(num)), step) @ product
    return float(np.abs(product - 1 / num).max())


@pytest.mark.parametrize("num", [1, 2, 4, 8, 16, 32])
def test_the_one_peer_graph_makes_the_exact_mean_in_a_cycle(num: int) -> None:
    assert left_after_a_cycle(num) < 1e-12


@pytest.mark.parametrize(("num", "left"), [(6, 0.083), (12, 0.042)])
def test_the_one_peer_graph_comes_close_for_other_numbers(num: int, left: float) -> None:
    assert left_after_a_cycle(num) == pytest.approx(left, abs=1e-3)


def test_metropolis_weights_by_hand() -> None:
    assert graph_of("0-1 1-2")([0, 1, 2], 0) == [
        (0, 1, 1 / 3),
        (1, 0, 1 / 3),
        (1, 2, 1 / 3),
        (2, 1, 1 / 3),
    ]


@pytest.mark.parametrize("text", ["wheel", "0-0", "0-1,1-2", "a-b", "", "0-1 x"])
def test_a_wrong_graph_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must"):
        graph_of(text)


def test_columns_of_a_directed_graph_sum_to_one_for_any_members() -> None:
    graph = directed_graph_of("0>1 1>2 2>0 0>2 7>0 2>7")
    for members in ([0, 1, 2, 7], [0, 2], [1], [0, 1, 7]):
        sent = dict.fromkeys(members, 0.0)
        for taker, giver, weight in graph(members, 3):
            assert taker in members
            sent[giver] += weight
        assert all(0 <= share < 1 for share in sent.values())
    assert [tuple(edge) for edge in graph([0, 2], 0)] == [(0, 2, 0.5), (2, 0, 0.5)]
    assert directed_graph_of("ring") is graph_of("ring")


@pytest.mark.parametrize("text", ["0>0", "0>1 1-2", "0>x"])
def test_a_wrong_directed_edge_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must look like 0>1"):
        directed_graph_of(text)


def test_a_directed_graph_that_cuts_a_worker_off_is_refused() -> None:
    with pytest.raises(ConfigError, match="must lead from each of its workers to each other"):
        directed_graph_of("0>1 1>2 2>1")


def test_graphs_that_are_given_join_all_members_when_workers_are_absent() -> None:
    assert {(a, b) for a, b, _ in graph_of("0-1 1-2")([0, 2], 0)} == {(0, 2), (2, 0)}
    star, cycle = graph_of("0-1 0-2 0-3 0-4"), directed_graph_of("0>1 1>2 2>3 3>4 4>0 1>0")
    for members in itertools.chain(*(itertools.combinations(range(5), num) for num in (2, 3, 4))):
        assert len(joined([*members], star(members, 0))) == 1
        assert is_joined([(edge.giver, edge.taker) for edge in cycle(members, 0)])


def joined(members: list[int], edges: list[Edge]) -> set[frozenset[int]]:
    """Returns the groups of members that the edges join."""
    groups = {rank: {rank} for rank in members}
    for taker, giver, _ in edges:
        both = groups[taker] | groups[giver]
        groups |= dict.fromkeys(both, both)
    return {frozenset(group) for group in groups.values()}


@pytest.mark.parametrize("name", NAMES)
def test_edges_between_the_sides_join_all_members_that_the_graph_joins(name: str) -> None:
    for members in ([0], [0, 1], [0, 1, 2, 5, 7], list(range(12)), [3, 8, 9, 20, 21, 30, 31]):
        active = sides_of(graph_of(name), members).active
        edges = [edge for step in range(7) for edge in graph_of(name)(members, step)]

        crossing = [edge for edge in edges if (edge.taker in active) != (edge.giver in active)]
        assert joined(members, crossing) == joined(members, edges)


def test_an_even_bipartite_exponential_graph_has_one_partner_for_each_active_worker() -> None:
    for num in (2, 4, 6, 16, 32):
        graph = graph_of("exp_bipartite")
        sides = sides_of(graph, range(num))
        assert sides == (frozenset(range(1, num, 2)), True)
        for step in range(7):
            edges = [edge for edge in graph(range(num), step) if edge.taker in sides.active]
            assert sorted(edge.giver for edge in edges) == list(range(0, num, 2))
