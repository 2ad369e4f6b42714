"""Graphs of clusters, rings and branches, of 190 to 600 nodes, and copies with some edges moved.

Whole clusters, arcs and branches can be sent to wrong places, where they keep their own edges.
``COMMUNITIES`` are compared by their edges, ``PATHS`` by the lengths of shortest paths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.quality.instances import Instance
from benchmarks.quality.unseen import moved_edges, moved_lengths, random_graph

__all__ = ["COMMUNITIES", "PATHS"]

Draw = Callable[[np.random.Generator], Instance]


def _connected(name: str, *arguments: Any) -> Callable[[int], Any]:
    """The largest component of a random graph of NetworkX."""
    drawn = random_graph(name, *arguments)

    def make(seed: int) -> Any:
        import networkx as nx

        graph = drawn(seed)
        return nx.Graph(graph.subgraph(max(nx.connected_components(graph), key=len)))

    return make


def _blocks(seed: int) -> Any:
    """Fifty blocks of ten nodes."""
    return _connected("stochastic_block_model", [10] * 50, 0.8 * np.eye(50) + 0.004)(seed)


def _roads(seed: int) -> Any:
    """A grid of 12 x 18 nodes without a fifth of its edges."""
    import networkx as nx

    graph = nx.convert_node_labels_to_integers(nx.grid_2d_graph(12, 18))
    edges = np.random.default_rng(seed).permutation(np.array(graph.edges()))
    graph.remove_edges_from(map(tuple, edges[: len(edges) // 5]))
    return nx.Graph(graph.subgraph(max(nx.connected_components(graph), key=len)))


_CAVEMEN = _connected("relaxed_caveman_graph", 20, 10, 0.1)
_RING = _connected("connected_watts_strogatz_graph", 300, 6, 0.1)
_BLOCKS = _connected("stochastic_block_model", [20] * 15, 0.5 * np.eye(15) + 0.008)
_POWER_LAW = _connected("powerlaw_cluster_graph", 250, 3, 0.4)
_GEOMETRIC = _connected("random_geometric_graph", 220, 0.13)

COMMUNITIES: dict[str, Draw] = {
    "cavemen-16x12": moved_edges(_connected("relaxed_caveman_graph", 16, 12, 0.08), 0.03),
    "cavemen-40x15": moved_edges(_connected("relaxed_caveman_graph", 40, 15, 0.1), 0.03),
    "ring-200": moved_edges(_connected("connected_watts_strogatz_graph", 200, 8, 0.05), 0.04),
    "ring-400": moved_edges(_connected("connected_watts_strogatz_graph", 400, 6, 0.1), 0.05),
    "ring-500": moved_edges(_connected("connected_watts_strogatz_graph", 500, 10, 0.05), 0.03),
    "branches-400": moved_edges(_connected("random_labeled_tree", 400), 0.02),
    "blocks-50x10": moved_edges(_blocks, 0.05),
    "geometric-500": moved_edges(_connected("random_geometric_graph", 500, 0.08), 0.05),
}
PATHS: dict[str, Draw] = {
    "cavemen-hops": moved_edges(_CAVEMEN, 0.03, hops=True),
    "cavemen-hops-noisier": moved_edges(_CAVEMEN, 0.1, hops=True),
    "cavemen-lengths": moved_lengths(_CAVEMEN, 0.03),
    "ring-hops": moved_edges(_RING, 0.03, hops=True),
    "ring-hops-noisier": moved_edges(_RING, 0.1, hops=True),
    "ring-lengths": moved_lengths(_RING, 0.03),
    "blocks-hops": moved_edges(_BLOCKS, 0.05, hops=True),
    "power-law-hops": moved_edges(_POWER_LAW, 0.05, hops=True),
    "power-law-lengths": moved_lengths(_POWER_LAW, 0.05),
    "geometric-lengths": moved_lengths(_GEOMETRIC, 0.03),
    "roads-lengths": moved_lengths(_roads, 0.02),
}
