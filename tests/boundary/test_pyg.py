"""Graphs of PyTorch Geometric itself; what only looks like them is in test_inputs.py."""

from __future__ import annotations

import networkx
import numpy as np
import pytest
import torch
from scipy.sparse.csgraph import shortest_path

import torchgw
from torchgw import GraphWarning, InvalidInputError, InvalidTypeError

pyg = pytest.importorskip("torch_geometric", reason="needs torch_geometric")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # of torch_geometric, about data that say nothing of their nodes
    pytest.mark.filterwarnings("ignore:Unable to accurately infer"),
]


def ladder(count=9):
    """A graph without symmetries, of lengths between 1 and 2."""
    graph = networkx.path_graph(count)
    graph.add_edges_from([(0, 3), (2, 6)])
    for place, (_, _, edge) in enumerate(graph.edges(data=True)):
        edge["weight"] = 1 + place / 10
    return graph


def data(graph, *, weighted=True, order=None, **fields):
    """Return the graph as PyTorch Geometric has it, its nodes in another order if asked for."""
    nodes = list(graph) if order is None else [list(graph)[place] for place in order]
    place = {node: index for index, node in enumerate(nodes)}
    pairs = [(u, v) for u, v in graph.edges] + [(v, u) for u, v in graph.edges]
    index = torch.tensor([[place[u], place[v]] for u, v in pairs]).T
    if weighted:
        fields["edge_weight"] = torch.tensor([graph.edges[pair]["weight"] for pair in pairs])
    return pyg.data.Data(edge_index=index, num_nodes=len(nodes), **fields)


def align(first, second):
    options = {"epsilon": 1e-3, "random_state": 0}
    return torchgw.solve(first, second, **options)


@pytest.mark.parametrize("weighted", [True, False])
def test_a_shuffled_copy_is_found(weighted):
    graph = ladder()
    order = np.random.default_rng(0).permutation(len(graph))
    result = align(data(graph, weighted=weighted), data(graph, weighted=weighted, order=order))
    assert result.value == pytest.approx(0, abs=1e-6)
    np.testing.assert_array_equal(order[result.lazy_plan.argmax()], np.arange(len(graph)))
    lengths = shortest_path(networkx.to_scipy_sparse_array(graph), unweighted=not weighted)
    # the scale is one over the largest distance: lengths were read, or steps counted
    assert result.scale[0] == pytest.approx(1 / lengths.max(), rel=1e-6)


def test_as_its_own_converter_writes_them():
    graph = ladder()
    result = align(pyg.utils.from_networkx(graph), graph)
    assert result.scale[0] == pytest.approx(result.scale[1], rel=1e-6)
    assert result.value == pytest.approx(0, abs=1e-6)


def test_an_isolated_node_is_far_from_all():
    graph = ladder()
    graph.add_node("alone")
    with pytest.warns(GraphWarning, match=r"2 components \(of 9, 1 vertices"):
        result = align(data(graph), data(graph, order=[9, *range(9)]))
    np.testing.assert_array_equal(result.lazy_plan.argmax(), [*range(1, 10), 0])


def test_features_of_edges_are_no_lengths():
    graph = ladder()
    edges = data(graph).edge_weight
    with pytest.raises(InvalidInputError, match=r"edge_attr.*edge_weight = data.edge_attr.view"):
        align(data(graph, weighted=False, edge_attr=edges[:, None]), graph)
    one_hot = torch.eye(2).repeat(len(edges) // 2, 1)
    steps = align(data(graph, weighted=False, edge_attr=one_hot), data(graph, weighted=False))
    assert steps.scale[0] == steps.scale[1]
    # lengths that are said to be lengths are read, whatever else there is
    both = align(data(graph, edge_attr=edges[:, None]), graph)
    assert both.scale[0] == pytest.approx(both.scale[1], rel=1e-6)


def test_batches_are_components():
    graph = data(ladder())
    batch = pyg.data.Batch.from_data_list([graph, graph])
    with pytest.warns(GraphWarning, match=r"2 components \(of 9, 9 vertices"):
        assert align(batch, batch).lazy_plan.shape == (18, 18)


def test_what_is_refused():
    graph = ladder()
    one_way = pyg.data.Data(edge_index=torch.tensor([[0, 1], [1, 2]]), num_nodes=3)
    with pytest.raises(InvalidInputError, match="must be symmetric"):
        align(one_way, one_way)
    with pytest.raises(InvalidTypeError, match=r"must be the edges.*data.x or data.pos"):
        align(pyg.data.Data(pos=torch.ones(3, 2)), graph)
    hetero = pyg.data.HeteroData()
    hetero["cell"].x = torch.ones(3, 2)
    with pytest.raises(InvalidTypeError, match=r"one kind of nodes.*to_homogeneous"):
        align(hetero, graph)
    elsewhere = data(graph).to("meta")
    with pytest.raises(InvalidInputError, match="'cpu' and 'cuda' devices; got 'meta'"):
        align(elsewhere, graph)
