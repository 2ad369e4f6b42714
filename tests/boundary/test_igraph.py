"""Graphs of igraph, directed graphs, and attributes of nodes by name."""

from types import SimpleNamespace

import networkx as nx
import numpy as np
import pytest
import scipy.sparse
import torch

import torchgw
from torchgw import InvalidInputError
from torchgw._boundary.graphs import as_graph
from torchgw.distances import DirectedDistance


class Sequence(dict):
    """Attributes of nodes or edges, as igraph has them."""

    def attributes(self):
        return list(self)


class Graph:
    """What is read of an igraph graph, for where it is not installed."""

    def __init__(self, n, edges, directed=False, nodes=None, **attributes):
        self.n, self.edges, self.directed = n, edges, directed
        self.es, self.vs = Sequence(attributes), Sequence(nodes or {})

    def is_directed(self):
        return self.directed

    def has_multiple(self):
        return len({tuple(sorted(edge)) for edge in self.edges}) < len(self.edges)

    def vcount(self):
        return self.n

    def ecount(self):
        return len(self.edges)

    def get_edgelist(self):
        return self.edges


def in_igraph(graph, nodes=None):
    names = {node: place for place, node in enumerate(graph)}
    edges = [(names[u], names[v]) for u, v in graph.edges]
    weights = [data.get("weight", 1.0) for *_, data in graph.edges(data=True)]
    try:
        import igraph
    except ImportError:
        return Graph(len(names), edges, nodes=nodes, weight=weights)
    made = igraph.Graph(n=len(names), edges=edges, edge_attrs={"weight": weights})
    for key, values in (nodes or {}).items():
        made.vs[key] = values
    return made


def test_igraph_is_as_networkx():
    graph = nx.les_miserables_graph()
    expected = as_graph("X", graph).toarray()
    np.testing.assert_array_equal(as_graph("X", in_igraph(graph)).toarray(), expected)
    result = torchgw.solve(in_igraph(graph), graph, random_state=0)
    assert result.value < 1e-4 * result.lazy_plan.shape[0]
    looped = Graph(3, [(0, 0), (0, 1), (1, 2)])
    assert as_graph("X", looped).toarray().tolist() == [[1, 1, 0], [1, 0, 1], [0, 1, 0]]


@pytest.mark.parametrize(
    ("graph", "advice"),
    [
        (Graph(3, [(0, 1), (1, 0)]), "parallel ones"),
        (Graph(2, [(0, 1)], weight=["far"]), "numbers as edge attribute 'weight'"),
        (scipy.sparse.csr_array(np.triu(np.ones((4, 4)), 1)), "symmetric|directed"),
    ],
)
def test_directed_and_odd_graphs_are_refused(graph, advice):
    with pytest.raises((InvalidInputError, torchgw.InvalidTypeError), match=advice):
        torchgw.solve(graph, nx.path_graph(4))


def test_directed_graphs_of_every_kind_have_the_paths_of_their_matrix():
    digraph = nx.DiGraph([(0, 1), (1, 2), (2, 0), (2, 3), (3, 0)])
    nx.set_edge_attributes(digraph, {edge: 1.0 + sum(edge) for edge in digraph.edges}, "weight")
    expected = DirectedDistance.of_graph(nx.to_scipy_sparse_array(digraph, dtype=float)).table
    assert not torch.equal(expected, expected.T)
    edges = list(digraph.edges)
    lengths = [digraph.edges[edge]["weight"] for edge in edges]
    data = SimpleNamespace(
        edge_index=torch.tensor(edges).T, edge_weight=torch.tensor(lengths), num_nodes=4
    )
    in_igraph_too = Graph(4, edges, directed=True, weight=lengths)
    for graph in (digraph, in_igraph_too, data):
        assert torch.equal(DirectedDistance.of_graph(graph).table, expected)
    # in units of the longest path, as those of graphs without directions are
    scaled = DirectedDistance(expected / expected.max())
    for graph in (digraph, in_igraph_too):
        assert torchgw.solve(graph, scaled, epsilon=0.01).value == pytest.approx(0, abs=1e-8)
    calls = [
        (lambda: torchgw.solve_many([digraph], [digraph]), r"to_undirected\(\); .*of_graph"),
        (lambda: torchgw.solve_many([in_igraph_too], [digraph]), r"as_undirected\(\); .*of_graph"),
        (lambda: torchgw.barycenter([digraph], 3), "DirectedDistance"),
    ]
    for call, advice in calls:
        with pytest.raises((InvalidInputError, torchgw.UnsupportedError), match=advice):
            call()


@pytest.mark.parametrize("kind", ["networkx", "igraph"])
@pytest.mark.parametrize("values", ["words", "numbers"])
def test_attributes_of_nodes_break_symmetry(kind, values):
    """A cycle has no beginning, until its nodes have attributes."""
    n, shift = 20, 7
    colour = [f"c{i % 4}" if i < 9 else "none" for i in range(n)]
    if values == "numbers":
        colour = [float(i) for i in range(n)]
    moved = [colour[(i + shift) % n] for i in range(n)]
    sides = []
    for listed in (colour, moved):
        graph = nx.cycle_graph(n)
        if kind == "igraph":
            graph = in_igraph(graph, {"colour": listed})
        else:
            nx.set_node_attributes(graph, dict(enumerate(listed)), "colour")
        sides.append(graph)
    result = torchgw.solve(*sides, features="colour", random_state=0)
    assert result.alpha == 0.5
    expected = (np.arange(n) - shift) % n
    np.testing.assert_array_equal(result.lazy_plan.argmax(), expected)
    with pytest.raises(
        InvalidInputError, match="'degree'.*got 'size', and nodes of `X` have 'colour'"
    ):
        torchgw.solve(*sides, features="size")
    if kind == "networkx":
        del sides[0].nodes[3]["colour"]
        with pytest.raises(InvalidInputError, match="1 of the 20 nodes of `X` have no attribute"):
            torchgw.solve(*sides, features="colour")
