"""Graphs of clusters, rings and branches, of 190 to 600 nodes, and copies with some edges moved.

Whole clusters, arcs and branches can be sent to wrong places, where they keep their own edges.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.quality.instances import Instance
from benchmarks.quality.unseen import moved_edges, random_graph

__all__ = ["COMMUNITIES"]

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
