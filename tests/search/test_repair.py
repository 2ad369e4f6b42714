"""Repairs of plans that send whole clusters to wrong ones."""

import numpy as np
import pytest
import torch
from torch.nn.functional import one_hot

from torchgw._problem.losses import find_loss
from torchgw._problem.problem import Problem
from torchgw._search.chains import Repair
from torchgw._search.world import World
from torchgw._sinkhorn.problem import DenseCost
from torchgw._starts.chain import near
from torchgw._starts.coarse import coarse_problem
from torchgw._tensors.operations import to_device
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


@pytest.mark.parametrize("kind", ["graph", "weights", "fused", "directed"])
def test_objectives_of_chains_are_those_of_their_plans(kind):
    whole = hidden(kind)
    world, problem, rng = World(whole), whole.problem, np.random.default_rng(0)
    chains = [world.take("", plan_of(exchanged(count, rng), problem)) for count in (0, 3)]
    world.descend(chains, world.refine, LEVEL)
    plans = world.rounded(chains)
    product = torch.outer(problem.source.weights, problem.target.weights)
    entropies = torch.special.xlogy(plans, plans / product).sum((1, 2))
    values = problem.value(plans)
    # plans of chains are in float32
    near = {"rtol": 1e-5, "atol": 1e-5 * whole.scale, "check_dtype": False}
    found = torch.tensor([(chain.value, chain.objective) for chain in chains])
    torch.testing.assert_close(found[:, 0], values, **near)
    torch.testing.assert_close(found[:, 1], values + LEVEL * whole.scale * entropies, **near)


def test_repairs_of_a_match_that_is_right_change_nothing():
    whole = hidden("graph")
    world = World(whole)
    chain = world.take("", plan_of(exchanged(0, np.random.default_rng(0)), whole.problem))
    world.descend([chain], world.refine, LEVEL)
    found = Repair(world, LEVEL).improved(chain)
    assert found.objective < chain.objective + 1e-6
    assert near(chain, found, 1e-3)


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
