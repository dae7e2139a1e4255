"""Graphs of decentralised modes by name. A new graph is one file here and one line in `GRAPHS`."""

from __future__ import annotations

from pscore.errors import ConfigError
from pscore.graphs import complete, directed, exp, exp_bipartite, exp_static, listed, ring, torus
from pscore.graphs.base import Edge, Graph, is_joined

GRAPHS: dict[str, Graph] = {
    "complete": complete.edges,
    "exp": exp.edges,
    "exp_bipartite": exp_bipartite.edges,
    "exp_static": exp_static.edges,
    "ring": ring.edges,
    "torus": torus.edges,
}

__all__ = ["GRAPHS", "Edge", "Graph", "directed_graph_of", "graph_of", "require_joined"]


def graph_of(text: str) -> Graph:
    """Returns the graph of a name, or of edges such as `0-1 1-2 2-0`; else raises ConfigError."""
    if text in GRAPHS:
        return GRAPHS[text]
    if "-" not in text:
        named = ", ".join(sorted(GRAPHS))
        raise ConfigError(f"graph is {text!r}, must be one of {named}, or edges such as '0-1 1-2'")
    return listed.parse(text)


def directed_graph_of(text: str) -> Graph:
    """Returns the graph of a name, or of a list of edges: `0-1 1-2`, or one way, `0>1 1>2 2>0`.

    Raises:
        ConfigError: It is none of these.
    """
    return directed.parse(text) if ">" in text else graph_of(text)


def require_joined(text: str, num_workers: int) -> None:
    """Refuses a list of edges that leaves workers apart, whose models would never meet.

    Args:
        text: As for `directed_graph_of`. Graphs with a name join any workers.

    Raises:
        ConfigError: Some workers are apart.
    """
    if text in GRAPHS or num_workers == 1:
        return
    edges = directed_graph_of(text)(range(num_workers), 0)
    pairs = {(edge.giver, edge.taker) for edge in edges}
    lonely = sorted(set(range(num_workers)).difference(*pairs))
    if lonely or not is_joined(pairs):
        who = f"worker {lonely[0]} has no edge" if lonely else "no edges join one part to another"
        raise ConfigError(
            f"graph {text!r} leaves some of {num_workers} workers apart, whose models would never "
            f"meet: {who}"
        )
