"""Chains on all points: the optima that nothing else finds, what is said, what is left alone."""

from __future__ import annotations

import warnings
from dataclasses import replace

import networkx
import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

import torchgw
from benchmarks.solves.first_use import network_pair
from torchgw import SearchWarning
from torchgw._errors import PerformanceWarning
from torchgw._problem.problem import Problem
from torchgw._search.chains import climb
from torchgw._search.world import World
from torchgw._starts.alternatives import all_sent_apart
from torchgw._starts.chain import FIRST, Chain, agree, chain_products, enough
from torchgw._starts.coarse import coarse_problem, coarsen, is_graph
from torchgw._starts.graphs import (
    Graphs,
    _heat_kernels,
    _slopes,
    convex_path,
    heat_costs,
    least_value,
)
from torchgw._typing import Marginals
from torchgw.distances.precomputed import DirectedDistance, PrecomputedDistance


def problem_of(x, y, a=None, b=None):
    a, b = (
        np.full(len(table), 1 / len(table)) if weight is None else weight
        for table, weight in ((x, a), (y, b))
    )
    sides = (PrecomputedDistance(torch.as_tensor(np.array(table, float))) for table in (x, y))
    weights = Marginals(*(torch.as_tensor(weight) for weight in (a, b)))
    return Problem(*sides, weights, 1.0, None)


def random_graph(n, degree, seed):
    rng = np.random.default_rng(seed)
    upper = np.triu(rng.random((n, n)) < degree / n, 1)
    return (upper | upper.T).astype(float)


def words(n, noise, seed=0):
    """Return cosine distances of vectors that have no near neighbours, and of a noisy copy."""
    rng = np.random.default_rng(seed)
    first = rng.standard_normal((n, 40)) * 0.9 ** np.arange(40)
    second = first + noise * rng.standard_normal((n, 40))
    tables = [cdist(points, points, "cosine") for points in (first, second)]
    return [table / table.mean() for table in tables]


def unrelated_tables():
    rng = np.random.default_rng(0)
    tables = [rng.random((n, n)) for n in (70, 80)]
    return [(table + table.T) * (1 - np.eye(len(table))) for table in tables]


def test_chains_of_different_plans_do_not_agree():
    """Among very many optima some have nearly the same objective."""
    kicked = FIRST[1]
    plans = [torch.eye(5)[torch.randperm(5, generator=torch.Generator().manual_seed(k))] / 5
             for k in (0, 1, 2)]  # fmt: skip
    chains = [
        Chain(kicked, place, plan, plan[:1], objective=1 + 3e-4 * place)
        for place, plan in enumerate(plans)
    ]
    assert not agree(chains)
    assert not enough(chains)
    images = [replace(chain, objective=1 + 1e-5 * chain.number) for chain in chains]
    alike = [replace(chain, plan=plans[0]) for chain in chains]
    for same in (images, alike):
        assert agree(same)
        assert enough(same)


def test_nodes_with_the_same_neighbours_may_be_exchanged():
    """Two leaves of one node: matches that exchange them are the same optimum."""
    star = np.zeros((30, 30))
    star[0, 1:] = star[1:, 0] = 1
    star[1, 2] = star[2, 1] = 1
    problem = coarsen(problem_of(star, star), 30).problem
    order = problem.source.indices
    exchanged = order.clone()
    exchanged[order == 3], exchanged[order == 4] = 4, 3
    moved = order.clone()
    moved[order == 0], moved[order == 9] = 9, 0
    plans = torch.stack([(each[:, None] == problem.target.indices).double() / 30
                         for each in (order, exchanged, moved)])  # fmt: skip
    apart = all_sent_apart(problem, plans)
    assert float(apart[0, 1]) < 1e-12
    assert float(apart[0, 2]) > 0.05


def test_the_same_answer_twice():
    x, y = words(80, 0.05)
    values = [torchgw.solve(D_X=x, D_Y=y, random_state=seed).value for seed in (0, 1)]
    assert values[0] == values[1]


def test_a_search_follows_nothing_again_that_an_earlier_one_has_followed():
    whole = coarse_problem(problem_of(*unrelated_tables()), 100)
    target = 0.0025 * whole.scale
    few = climb(whole, target, 4, told=True, repair=False)
    more = climb(whole, target, 8, told=True, repair=False, begun=few.begun)
    names = [trial.start for trial in more.trials]
    assert len(set(names)) == len(names)
    assert {trial.start for trial in few.trials} <= set(names)
    # an end is kept as it is
    assert more.trials[0].objective <= few.trials[0].objective


def test_disagreement_is_said():
    """Tables with nothing in common have very many optima, none of which is found twice."""
    x, y = unrelated_tables()
    with pytest.warns(SearchWarning, match="did not agree"):
        result = torchgw.solve(D_X=x, D_Y=y, epsilon=1e-3)
    assert "did not agree" in result.doubt
    assert result.doubt in repr(result)
    best = [trial.objective for trial in result.trials if trial.status == "refined"]
    assert best == sorted(best)


def test_a_batch_of_kicks_is_linearised_as_single_ones():
    """At some rows of plans, whose marginals are then others."""
    world = World(coarsen(problem_of(*words(30, 0.1)), 30))
    plans = torch.rand(3, 30, 30, generator=torch.Generator().manual_seed(0)) / 900
    kept = torch.arange(30) < torch.tensor([5, 12, 30])[:, None]
    costs = world.costs_anywhere(plans * kept[:, :, None])
    for plan, rows, cost in zip(plans, kept, costs, strict=True):
        torch.testing.assert_close(cost, world.costs_at_rows(plan, rows.nonzero()[:, 0]))


@pytest.mark.parametrize(
    "options", [{"n_init": 1}, {"init": np.ones((9, 9)) / 81}, {"mass": 0.5}, {"loss": "absolute"}]
)
def test_a_thorough_search_that_would_be_none_is_refused(options):
    x, y = words(9, 0.1)
    with pytest.raises(torchgw.UnsupportedError, match="search='thorough'"):
        torchgw.solve(D_X=x, D_Y=y, search="thorough", **options)


def test_a_search_that_was_cut_short_is_said():
    graph, copy = (random_graph(30, 6, seed) for seed in (0, 1))
    with pytest.warns(SearchWarning, match="search='fast' follows no start"):
        result = torchgw.solve(D_X=graph, D_Y=copy, search="fast")
    assert not result.trials


def test_few_chains_are_not_called_too_many_points():
    x, y = unrelated_tables()
    with pytest.warns(SearchWarning, match="did not agree"):
        torchgw.solve(D_X=x, D_Y=y, epsilon=1e-3, n_init=2)


def test_sparse_products_are_the_dense_ones():
    rng = np.random.default_rng(0)
    graph, other = random_graph(120, 3, 0), random_graph(130, 3, 1)
    a, b = rng.random(120), rng.random(130)
    problem = problem_of(graph, other, a / a.sum(), b / b.sum())
    world = World(coarsen(problem, 130))
    assert world.sparse is not None
    plan = torch.as_tensor(rng.random((2, 120, 130)), dtype=torch.float32)
    plan /= plan.sum((1, 2), keepdim=True)
    sparse = world.costs(plan)
    world.sparse = None
    torch.testing.assert_close(sparse, world.costs(plan), atol=1e-6, rtol=1e-5)


def test_sparse_products_of_many_rows_are_the_dense_ones():
    """More rows than go together, entries of other sizes than one, nodes without neighbours."""
    rng = np.random.default_rng(0)
    table = np.where(rng.random((300, 300)) < 0.02, rng.random((300, 300)), 0)
    table = table + table.T
    table[[0, 131, 299]] = table[:, [0, 131, 299]] = 0
    graphs = Graphs(coarsen(problem_of(table, table), 300).problem)
    dense = torch.as_tensor(table).float()
    plan = torch.as_tensor(rng.random((300, 300))).float()
    parts = [part for _, part in graphs.lefts(plan)]
    assert len(parts) > 1
    torch.testing.assert_close(torch.cat(parts), dense @ plan)
    torch.testing.assert_close(graphs.left(plan), dense @ plan)
    torch.testing.assert_close(graphs.right(plan), plan @ dense)


def test_modes_compute_what_can_move_a_plan():
    """All of them at a tiny epsilon; at a large one less than matters there."""
    (x, _), (y, _) = words(200, 0.1, seed=3), words(180, 0.1, seed=4)
    world = World(coarsen(problem_of(x, y), 200))
    noise = torch.randn(2, 200, 180, generator=torch.Generator().manual_seed(0))
    plan = torch.outer(*world.marginals) * (1 + 0.1 * noise).clamp_min(0.1)
    exact = world.costs(plan)
    for share, tolerance in ((1e-6, 1e-5), (0.1, 0.02)):
        found = world.modes(world.base, plan, share)
        assert float((found - exact).abs().max()) < tolerance * max(share, 0.01) * world.scale
    kept = [int((growth > 0.25 * 0.1).sum()) for growth in world.modes.growth]
    assert max(kept) < 40
    # these have no modes that could be left out
    table = np.random.default_rng(0).random((200, 200))
    table = table + table.T
    other = World(coarsen(problem_of(table, table), 200))
    assert other.modes(other.base, torch.outer(*other.marginals)[None], 1e-4) is None


def test_costs_are_those_of_the_objective():
    """Of a fused problem with unequal weights: half the derivative along a plan, and the value."""
    rng = np.random.default_rng(0)
    x, y = words(30, 0.1)
    a, b = rng.random(30), rng.random(30)
    whole = coarsen(problem_of(x, y, a / a.sum(), b / b.sum()), 30)
    coarse = whole.problem
    world = World(whole)
    plan = torch.outer(coarse.source.weights, coarse.target.weights)
    moved = torch.zeros_like(plan)
    moved[0, 0] = moved[1, 1] = 1e-4
    moved[0, 1] = moved[1, 0] = -1e-4
    ends = coarse.value(torch.stack([plan + moved, plan - moved]))
    slope = (world.costs(plan[None].float())[0].double() * moved).sum()
    assert float(slope) == pytest.approx(float(ends[0] - ends[1]) / 2, rel=1e-3, abs=1e-12)


def test_heat_tells_partners_in_a_copy():
    """Costs have a mean of one, and next to none for the node that has the same place."""
    table = random_graph(30, 3, 0)
    order = np.random.default_rng(0).permutation(30)
    costs = heat_costs(coarse_problem(problem_of(table, table[np.ix_(order, order)]), 30).problem)
    assert float(costs.mean()) == pytest.approx(1)
    assert float(costs.amin(1).max()) < 1e-9


def test_dense_tables_are_no_graphs():
    assert is_graph(
        coarsen(problem_of(*[random_graph(60, 5, seed) for seed in (0, 1)]), 60).problem
    )
    assert not is_graph(coarsen(problem_of(*words(60, 0.1)), 60).problem)


def test_directed_graphs_have_two_tables_and_are_searched_as_such():
    ways = [np.triu(random_graph(60, 5, seed)) for seed in (0, 1)]
    problem = problem_of(*(way + way.T for way in ways))
    sides = (DirectedDistance(torch.as_tensor(way)) for way in ways)
    problem = replace(problem, **dict(zip(("source", "target"), sides, strict=True)))
    small = coarse_problem(problem, 60).problem
    assert len(small.x) == 2
    assert not is_graph(small)


def test_what_is_clear_is_not_doubted():
    """Few points are far from the others here, and one match is far better than all others."""
    rng = np.random.default_rng(0)
    points, order = rng.normal(size=(140, 10)), rng.permutation(140)
    result = torchgw.solve(points, points[order] + 0.02 * rng.normal(size=points.shape))
    assert (order[result.lazy_plan.argmax()] == np.arange(140)).all()
    assert result.ambiguity < 0.1
    assert not result.doubt


def test_search_is_checked():
    with pytest.raises(torchgw.InvalidInputError, match="search"):
        torchgw.solve(np.zeros((5, 2)), np.zeros((5, 2)), search="long")


def test_no_plan_is_better_than_one_that_keeps_all_edges():
    graph, copy, order = network_pair(60, 3, 0.1, seed=0)
    small = coarsen(problem_of(graph, copy), 60).problem
    best = torch.zeros(60, 60, dtype=torch.float64)
    best[torch.as_tensor(order), torch.arange(60)] = 1 / 60
    assert float(small.value(best[None])) == pytest.approx(least_value(small), rel=1e-12)
    product = torch.full((1, 60, 60), 1 / 3600, dtype=torch.float64)
    assert least_value(small) < float(small.value(product))
    assert least_value(coarsen(problem_of(-graph, copy), 60).problem) == -np.inf


def test_a_network_is_matched_with_one_that_has_more_edges():
    graph, copy, order = network_pair(380, 3, 0.03, seed=1)
    result = torchgw.solve(D_X=graph, D_Y=copy, regularization="proximal", random_state=0)
    assert (order[result.lazy_plan.argmax()] == np.arange(380)).mean() > 0.99
    assert not result.doubt


def test_graphs_whose_nodes_are_all_alike_are_searched():
    """Every plan is as good for the convex problem; its step was zero, by which costs were divided.

    NumPy warned of it, and a start was lost.
    """
    pairs = [networkx.Graph((2 * i, 2 * i + 1) for i in range(count)) for count in (12, 10)]
    tables = [1.0 * networkx.to_numpy_array(graph) for graph in pairs]
    problem = coarsen(problem_of(*tables), 24).problem
    product = torch.outer(*(part.float() for part in problem.weights))

    def project(cost, epsilon, iterations):
        raise AssertionError(f"a step of {epsilon}")

    assert torch.equal(convex_path(problem, project), product)


def test_convex_objective_of_a_copy_is_zero_at_the_match_alone():
    """With unequal weights too: the match is not its minimum if they are left out."""
    graph, copy, order = network_pair(60, 3, 0.0, seed=0)
    a, b = graph.sum(0) / graph.sum(), copy.sum(0) / copy.sum()
    small = coarsen(problem_of(graph, copy, a, b), 60).problem
    weights = Marginals(small.source.weights.float(), small.target.weights.float())
    match = torch.zeros(60, 60)
    match[torch.as_tensor(order), torch.arange(60)] = weights.b
    torch.testing.assert_close(match.sum(1), weights.a)

    def objective(plan):
        return float((_slopes(Graphs(small), weights, plan).at(1.0) * plan).sum()) / 2

    scale = float((_slopes(Graphs(small), weights, match).crossed * match).sum())
    # float32 sums of terms that cancel
    assert abs(objective(match)) < 1e-5 * abs(scale)
    assert objective(torch.outer(*weights)) > 1e-2 * abs(scale)


@pytest.mark.parametrize(("count", "few"), [(200, True), (20, False)])
def test_heat_is_an_exponential(monkeypatch, count, few):
    """Of the normalised adjacency matrix; of graphs of few edges without its eigenvectors."""
    graph = networkx.disjoint_union(networkx.cycle_graph(count), networkx.star_graph(3))
    graph.add_node("alone")
    table = torch.from_numpy(networkx.to_numpy_array(graph)) * 0.5
    if few:
        monkeypatch.setattr(torch.linalg, "eigh", None)
    root = table.sum(1).sqrt().clamp_min(1e-300)
    normalised = torch.where(table > 0, table / root[:, None] / root, 0.0)
    generator = normalised - torch.eye(len(table), dtype=torch.float64)
    for time, kernel in zip((1, 2, 4, 8), _heat_kernels(table), strict=True):
        torch.testing.assert_close(
            kernel, torch.linalg.matrix_exp(time * generator), rtol=0, atol=1e-13
        )


@pytest.mark.slow
@pytest.mark.parametrize(("n", "edges", "extra"), [(500, 4, 0.05), (500, 3, 0.0), (1_000, 3, 0.02)])
def test_preferential_graphs_are_matched(n, edges, extra):
    """Ten seeds each by the documented recipe; 2, 0.6 and 4% of the nodes were right."""
    found = 0
    for seed in range(10):
        graph, copy, order = network_pair(n, edges, extra, seed)
        result = torchgw.solve(D_X=graph, D_Y=copy, regularization="proximal", random_state=0)
        found += (order[result.lazy_plan.argmax()] == np.arange(n)).mean() >= 0.99
    # all ten are; one may be lost to rounding
    assert found >= 9


@pytest.mark.filterwarnings("ignore::torchgw.SearchWarning")
def test_a_search_that_takes_long_says_so(monkeypatch):
    """Dense networks of 500 nodes that have nothing in common take 13 CPU seconds by default."""
    graphs = [random_graph(14, 6, seed) for seed in range(2)]
    given = {"D_X": graphs[0], "D_Y": graphs[1], "random_state": 0, "max_iter": 3}

    def warned(**options):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torchgw.solve(**given, **options)
        return [str(one.message) for one in said if one.category is PerformanceWarning]

    assert not warned()
    # the first ones take no time, those that follow do
    monkeypatch.setattr(
        "torchgw._search.world.World.seconds",
        lambda world, numbers, low: 10.0 * numbers.start,
    )
    (message,) = warned()
    assert "more follow" in message
    assert "search='fast'" in message
    monkeypatch.setattr("torchgw._search.world.World.seconds", lambda *_: 7.0)
    monkeypatch.setattr("torchgw._search.world.slowness", lambda: 1.0)
    (message,) = warned()
    assert "about 7 s on this CPU" in message
    assert not warned(search="fast")


def dense_networks(n, seed):
    rng = np.random.default_rng(seed)
    tables = [np.triu(rng.random((n, n)) < 0.4, 1) for _ in range(2)]
    return [(table | table.T).astype(float) for table in tables]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchgw.TorchGWWarning")
@pytest.mark.parametrize("seed", range(3))
def test_chains_settle_on_unrelated_dense_networks(seed):
    """Whole steps went round between two plans."""
    first, second = dense_networks(80, seed)
    assert torchgw.solve(D_X=first, D_Y=second).converged


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::torchgw.SearchWarning")
@pytest.mark.parametrize("shape", [(24, 24), (60, 70), (100, 90), (300, 280)])
def test_recorded_chains_find_what_others_find(shape):
    """Thrice on a GPU, as chains are recorded and replayed, beside the CPU."""
    rng = np.random.default_rng(0)
    sides = [torch.as_tensor(rng.normal(size=(count, 3))) for count in shape]
    host = torchgw.solve(*sides, random_state=0)
    objectives = [
        torchgw.solve(*(side.cuda() for side in sides), random_state=0).report.objective
        for _ in range(3)
    ]
    assert objectives[0] == pytest.approx(objectives[1], rel=1e-3)
    assert objectives[1] == objectives[2]
    assert objectives[2] <= host.report.objective * 1.01 or host.is_ambiguous


def test_chains_take_as_much_either_way_round_and_eight_times_for_twice_the_points():
    for n, m in ((10, 10), (30, 200), (500, 7)):
        assert chain_products(n, m) == chain_products(m, n) > n * m
        assert chain_products(2 * n, 2 * m) == 8 * chain_products(n, m)
