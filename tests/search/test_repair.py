"""Repairs of plans that send whole clusters to wrong ones."""

import networkx as nx
import numpy as np
import pytest
import torch
from problems import rewired, shuffled
from scipy.sparse import csr_array
from torch.nn.functional import one_hot

import torchgw
from torchgw._problem.losses import find_loss
from torchgw._problem.problem import Problem
from torchgw._search.all_points import repair_found
from torchgw._search.alternatives import Alternative
from torchgw._search.chain import near
from torchgw._search.coarse import coarse_problem
from torchgw._search.repair import Repair
from torchgw._search.world import World
from torchgw._sinkhorn.eager import EagerBackend
from torchgw._sinkhorn.problem import DenseCost
from torchgw._tensors.cuda_graphs import to_device
from torchgw._typing import Marginals
from torchgw.distances import DirectedDistance, PrecomputedDistance

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LEVEL = 0.02
CLUSTERS, SIZE = 12, 8


def cavemen(rng):
    """Cliques, of which most nodes have an edge to another one."""
    table = np.kron(np.eye(CLUSTERS), np.ones((SIZE, SIZE)))
    np.fill_diagonal(table, 0)
    for node, other in rng.permutation(len(table)).reshape(-1, 2):
        table[node, other] = table[other, node] = 1
    return table


def hidden(kind, seed=0):
    """A problem whose sides are the same, and nearly as close where clusters are exchanged."""
    rng = np.random.default_rng(seed)
    sides = [cavemen(rng)] * 2
    if kind == "distances":
        sides = [2 - side - 2 * np.eye(len(side)) for side in sides]
    if kind == "similarities":
        sides = [0.5 + side for side in sides]
    if kind == "directed":
        sides = [side * (1 + np.triu(np.ones_like(side))) for side in sides]
    n = len(sides[0])
    weights = rng.uniform(0.5, 1.5, n) if kind == "weights" else np.ones(n)
    a = torch.as_tensor(weights / weights.sum())
    tables = [torch.as_tensor(side) for side in sides]
    providers = [
        DirectedDistance(table) if kind == "directed" else PrecomputedDistance(table)
        for table in tables
    ]
    linear = DenseCost(torch.as_tensor(0.01 * rng.random((n, n)))) if kind == "fused" else None
    alpha = 0.9 if linear else 1.0
    problem = Problem(*providers, Marginals(a, a.clone()), alpha, linear, find_loss("square"))
    return coarse_problem(problem, n)


def exchanged(clusters, rng):
    """True partners, but for some clusters that were sent round in a circle."""
    partners = torch.arange(CLUSTERS * SIZE).view(CLUSTERS, SIZE)
    some = torch.as_tensor(rng.permutation(CLUSTERS)[:clusters])
    partners[some] = partners[some.roll(1)]
    return partners.flatten()


def plan_of(partners, problem):
    """The plan of partners, in the order of the problem's points."""
    source, target = problem.source, problem.target
    plan = one_hot(partners.to(source.weights.device)).double()
    return plan[source.indices][:, target.indices] * source.weights[:, None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "kind", ["graph", "distances", "similarities", "weights", "fused", "directed"]
)
def test_clusters_that_were_exchanged_are_put_right(kind, device):
    """Five of twelve are at the place of others, which no step alone would change back."""
    whole = hidden(kind, 1)
    whole = whole._replace(problem=to_device(whole.problem, torch.device(device)))
    world, rng = World(whole), np.random.default_rng(1)
    true, wrong = (
        world.take("", plan_of(partners, whole.problem))
        for partners in (exchanged(0, rng), exchanged(5, rng))
    )
    start = wrong.plan
    world.descend([true, wrong], world.refine, LEVEL)
    found = Repair(world, LEVEL).improved(world.take("", start))
    gap = wrong.objective - true.objective
    assert gap > 0.02 * abs(true.objective)
    assert found.objective < true.objective + 0.2 * gap
    assert found.epsilon == pytest.approx(LEVEL * whole.scale)


def test_repairs_of_a_match_that_is_right_change_nothing():
    whole = hidden("graph")
    world = World(whole)
    chain = world.take("", plan_of(exchanged(0, np.random.default_rng(0)), whole.problem))
    world.descend([chain], world.refine, LEVEL)
    found = Repair(world, LEVEL).improved(chain)
    assert found.objective < chain.objective + 1e-6
    assert near(chain, found, 1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_rings_of_neighbours_are_matched(seed):
    """Most chains turn some arcs of these round: they end at 1.4 to 4 times the value."""
    rng = np.random.default_rng(seed)
    graph = nx.connected_watts_strogatz_graph(200, 8, 0.05, seed=seed)
    x = nx.to_numpy_array(graph)
    edges = list(graph.edges)
    for place in rng.choice(len(edges), 32, replace=False):
        graph.remove_edge(*edges[place])
    graph.add_edges_from(list(nx.non_edges(graph))[seed :: len(graph) ** 2 // 70][:32])
    order = rng.permutation(len(graph))
    y = nx.to_numpy_array(graph)[order][:, order]
    result = torchgw.solve(D_X=x, D_Y=y)
    right = np.asarray(result.plan).argmax(1) == order.argsort()
    assert right.mean() > 0.95
    assert result.trials[0].start == "repair"


def test_the_plan_of_a_solve_is_repaired():
    """Or left alone if that is no better, or if plans at the target are blurred."""
    whole = hidden("graph")
    table = whole.problem.source.table[whole.problem.source.indices.argsort()]
    table = table[:, whole.problem.source.indices.argsort()]
    n = len(table)
    a = torch.full((n,), 1 / n, dtype=torch.float64)
    sides = PrecomputedDistance(table), PrecomputedDistance(table)
    problem = Problem(*sides, Marginals(a, a.clone()), 1.0, None, find_loss("square"))
    points, rng = torch.arange(n), np.random.default_rng(1)
    wrong, right = (
        Alternative(0.0, "", one_hot(partners).double() / n, points, points, (n, n))
        for partners in (exchanged(5, rng), exchanged(0, rng))
    )
    epsilon = 0.0025 * whole.scale
    backend = EagerBackend()
    found = repair_found(problem, wrong, epsilon, "auto", backend)
    assert found is not None
    assert found.value == pytest.approx(0, abs=1e-4)
    order = found.source.argsort(), found.target.argsort()
    clusters = found.plan[order[0]][:, order[1]].argmax(1) // SIZE
    assert torch.equal(clusters, points // SIZE)
    assert repair_found(problem, right, epsilon, "auto", backend) is None
    assert repair_found(problem, wrong, LEVEL * whole.scale, "auto", backend) is None


def test_solves_from_two_starts_that_differ_need_no_repair_once_edges_are_matched():
    """Hops in a graph of cliques: 12% of the nodes were right, at twice the objective."""
    graph = nx.to_numpy_array(nx.relaxed_caveman_graph(40, 15, 0.1, seed=2))
    np.fill_diagonal(graph, 0)
    copy, truth = shuffled(rewired(graph, 0.03, 2), 2)
    result = torchgw.solve(csr_array(graph), csr_array(copy), random_state=2)
    right = np.asarray(result.plan).argmax(1) == truth
    assert right.mean() > 0.85
    edges, *others = (trial.start for trial in result.trials)
    assert edges == "edges"
    assert "product" in others
    assert "repair" not in others


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["graph", "distances", "directed"])
def test_plans_have_linear_costs_of_their_own(kind, device):
    whole = hidden(kind)
    whole = whole._replace(problem=to_device(whole.problem, torch.device(device)))
    world, generator = World(whole), torch.Generator().manual_seed(0)
    plans = torch.rand((3, *world.base.shape), generator=generator).to(device)
    plans = plans / plans.sum((1, 2), keepdim=True)
    linear = torch.rand(plans.shape, generator=generator).to(device)
    together = world.beside(linear).costs(plans)
    for plan, own, costs in zip(plans, linear, together, strict=True):
        torch.testing.assert_close(costs, world.costs(plan[None])[0] + own)
