"""Hops between nodes of graphs: matched by edges where few of these are kept."""

import networkx as nx
import numpy as np
import pytest
import torch
from problems import rewired, shuffled
from scipy.sparse import csr_array
from scipy.sparse.csgraph import shortest_path

import torchgw
from torchgw._problem.problem import Problem
from torchgw._search.edges import _edges, match_edges
from torchgw._sinkhorn.eager import EagerBackend
from torchgw._typing import Marginals
from torchgw.distances import DirectedDistance, PrecomputedDistance

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def ring(n, seed):
    return nx.to_numpy_array(nx.connected_watts_strogatz_graph(n, 6, 0.1, seed=seed))


class Partners:
    """A plan that is asked for nothing but where each point goes."""

    def __init__(self, partners):
        self.partners = partners

    def argmax(self, axis):
        assert axis == 1
        return self.partners


def hops_problem(graph, copy, device="cpu"):
    tables = [
        torch.as_tensor(shortest_path(table, unweighted=True), device=device)
        for table in (graph, copy)
    ]
    a, b = (torch.full_like(table[0], 1 / len(table)) for table in tables)
    return Problem(*map(PrecomputedDistance, tables), Marginals(a, b), 1.0, None)


@pytest.mark.parametrize("device", DEVICES)
def test_rings_whose_hops_few_nodes_tell_are_matched(device):
    """They ended CONVERGED and without a word at 1.8 times the objective, .5% right."""
    graph = ring(400, 0)
    copy, truth = shuffled(rewired(graph, 0.03))
    result = torchgw.solve(csr_array(graph), csr_array(copy), device=device)
    assert (result.plan.argmax(1) == truth).mean() > 0.9
    assert result.alternatives[0].label == result.trials[0].start == "edges"
    assert len(result.alternatives) > 1


@pytest.mark.parametrize("device", DEVICES)
def test_edges_are_matched_where_a_plan_keeps_few_or_is_doubted(device):
    graph = ring(120, 0)
    copy, truth = shuffled(rewired(graph, 0.02))
    problem, backend = hops_problem(graph, copy, device), EagerBackend()
    wrong = np.random.default_rng(0).permutation(120)
    found = match_edges(problem, Partners(wrong), False, backend)
    assert found.label == "edges"
    partners = np.empty(120, int)
    partners[found.source.cpu()] = found.target.cpu()[found.plan.argmax(1).cpu()]
    assert (partners == truth).mean() > 0.9
    assert match_edges(problem, Partners(truth), False, backend) is None
    # the match of edges keeps no more of them than the truth
    assert match_edges(problem, Partners(partners), True, backend) is None


def test_edges_are_those_of_hops_alone():
    graph = ring(60, 0)
    hops = shortest_path(graph, unweighted=True)
    found = _edges(PrecomputedDistance(torch.as_tensor(0.37 * hops)))
    np.testing.assert_array_equal(found, graph > 0)
    points = np.random.default_rng(0).normal(size=(60, 3))
    apart = np.linalg.norm(points[:, None] - points, axis=2)
    for other in (apart, graph, 1 - np.eye(60), np.zeros((60, 60))):
        assert _edges(PrecomputedDistance(torch.as_tensor(other))) is None
    assert _edges(DirectedDistance(torch.as_tensor(hops + np.triu(hops)))) is None


@pytest.mark.parametrize("options", [{"search": "fast"}, {"n_init": 4}, {"n_init": 1}])
def test_edges_are_not_matched_where_the_search_is_given(options, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("edges were matched")

    monkeypatch.setattr("torchgw._solve.passes.match_edges", refuse)
    graph = ring(60, 0)
    sides = csr_array(graph), csr_array(shuffled(rewired(graph, 0.1))[0])
    with pytest.raises(AssertionError, match="edges were matched"):
        torchgw.solve(*sides)
    assert torchgw.solve(*sides, **options).status.converged
