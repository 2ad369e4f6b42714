"""Messages along edges: what two graphs have in common is found, whatever their order."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

import torchgw
from torchgw._problem import limits
from torchgw._problem.losses import SQUARE
from torchgw._problem.problem import Problem
from torchgw._search import all_points, beliefs, chains
from torchgw._search.beliefs import Graph, believed_plan, believed_plans, match_graphs, rematched
from torchgw._search.world import World
from torchgw._solve import begin
from torchgw._starts.alternatives import Alternative, Search
from torchgw._starts.coarse import coarse_problem
from torchgw._starts.graphs import Edges, graphs_of, least_value
from torchgw._typing import Marginals
from torchgw.distances import DirectedDistance
from torchgw.distances.precomputed import PrecomputedDistance


def sparse_graph(n, rng, degree=3.0):
    table = np.triu(rng.random((n, n)) < degree / n, 1)
    return np.asarray(table | table.T, dtype=np.float64)


def copy_of(table, rng, lost):
    """Give a shuffled whole, and the table with a share of its edges lost."""
    order = rng.permutation(len(table))
    gone = np.triu(rng.random(table.shape) < lost, 1)
    return table * ~(gone | gone.T), table[np.ix_(order, order)]


def uniform(n, m):
    return Marginals(torch.full((n,), 1 / n), torch.full((m,), 1 / m))


def graphs(*tables):
    return [Graph.of(torch.from_numpy(table), 1.0) for table in tables]


def share_kept(x, y, plan):
    partners = linear_sum_assignment(plan, maximize=True)[1]
    return (x * y[np.ix_(partners, partners)]).sum() / x.sum()


@pytest.mark.parametrize("lost", [0.0, 0.1])
def test_most_edges_of_a_sparse_graph_are_kept(lost):
    # the truth keeps all; degrees and their linearisation alone keep a fifth
    kept = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        x, y = copy_of(sparse_graph(150, rng), rng, lost)
        kept.append(share_kept(x, y, believed_plan(*graphs(x, y), uniform(150, 150))))
    assert np.mean(kept) > 0.9


def test_paths_are_not_folded_upon_themselves(monkeypatch):
    # trees of paths, in which a walk to and fro keeps as many edges as a path does
    def trees(rng):
        table = np.zeros((150, 150))
        for node in range(1, 150):
            parent = rng.integers(max(0, node - 3), node)
            table[node, parent] = table[parent, node] = 1.0
        return copy_of(table, rng, 0.2)

    def mean_kept():
        every = (trees(np.random.default_rng(seed)) for seed in range(4))
        return np.mean(
            [share_kept(x, y, believed_plan(*graphs(x, y), uniform(150, 150))) for x, y in every]
        )

    kept = mean_kept()
    monkeypatch.setitem(limits.LIMITS, "cpu", limits.CPU._replace(walks=0.0))
    assert kept > mean_kept() + 0.05


def test_directions_of_edges_are_told():
    # a directed tree in which a tenth of the edges are lost: the truth keeps all others
    def kept(layered):
        found = []
        for seed in range(4):
            rng = np.random.default_rng(seed)
            tree = np.zeros((150, 150))
            for node in range(1, 150):
                tree[rng.integers(node), node] = 1.0
            order = rng.permutation(150)
            x, y = tree * (rng.random(tree.shape) > 0.1), tree[np.ix_(order, order)]
            known = [Edges.of(torch.from_numpy(side), directed=True) for side in (x, y)]
            tables = [torch.from_numpy(side + side.T) for side in (x, y)]
            sides = Graph.both(known if layered else None, tables)
            found.append(share_kept(x, y, believed_plan(*sides, uniform(150, 150))))
        return np.mean(found)

    assert kept(layered=True) > max(0.95, kept(layered=False) + 0.02)


@pytest.mark.parametrize("turning", [False, True])
def test_graphs_beside_each_other_are_matched_as_alone(turning, monkeypatch):
    monkeypatch.setattr(beliefs, "_NOISE", 0.0)
    # beliefs that rest would end earlier alone
    monkeypatch.setattr(beliefs, "_STILL", 0.0)
    if turning:
        monkeypatch.setitem(limits.LIMITS, "cpu", limits.CPU._replace(walks=0.0))
    every = []
    for seed, degree in enumerate((2.0, 3.0, 0.0, 2.5)):
        rng = np.random.default_rng(seed)
        every.append(copy_of(sparse_graph(90, rng, degree), rng, 0.1))
    alone = torch.stack([believed_plans(*graphs(*pair), uniform(90, 90))[0] for pair in every])
    edges = (
        [Edges.of(torch.from_numpy(table)) for table in side] for side in zip(*every, strict=True)
    )
    sides = [Graph.together(side, torch.device("cpu")) for side in edges]
    together = believed_plans(*sides, uniform(90, 90))
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0.0)


@pytest.mark.gpu
def test_rounds_that_a_gpu_replays_lead_where_rounds_do_that_it_launches(monkeypatch):
    rng = np.random.default_rng(4)
    pairs = [copy_of(sparse_graph(90, rng), rng, 0.1) for _ in range(4)]
    edges = [[Edges.of(torch.from_numpy(one)) for one in side] for side in zip(*pairs, strict=True)]
    sides = [Graph.together(side, torch.device("cuda")) for side in edges]
    weights = Marginals(*(part.cuda() for part in uniform(90, 90)))
    replayed = [believed_plans(*sides, weights).cpu() for _ in range(2)]
    monkeypatch.setattr(beliefs, "CAPTURED_BYTES", 0)
    launched = believed_plans(*sides, weights).cpu()
    for found in replayed:
        for (x, y), one, other in zip(pairs, found, launched, strict=True):
            assert share_kept(x, y, one) == pytest.approx(share_kept(x, y, other), abs=0.02)
            assert share_kept(x, y, one) > 0.9


def test_a_part_of_a_graph_is_found_in_it():
    rng = np.random.default_rng(3)
    whole = sparse_graph(120, rng)
    some = np.sort(rng.permutation(120)[:100])
    x = whole[np.ix_(some, some)]
    plan = believed_plan(*graphs(x, whole), uniform(100, 120)).numpy()
    # the last Sinkhorn iteration meets the marginal of the target
    assert np.allclose(plan.sum(0), 1 / 120, rtol=1e-3)
    assert share_kept(x, whole, plan) > 0.6


def test_sides_may_be_exchanged():
    rng = np.random.default_rng(0)
    x, y = copy_of(sparse_graph(60, rng), rng, 0.1)
    there, back = (believed_plan(*graphs(*pair), uniform(60, 60)) for pair in ((x, y), (y, x)))
    assert torch.equal(there, back.T)


def test_nodes_without_weight_and_graphs_without_edges_have_plans():
    rng = np.random.default_rng(1)
    x, y = copy_of(sparse_graph(40, rng), rng, 0.0)
    a, b = torch.rand(2, 40, generator=torch.Generator().manual_seed(0))
    a[3] = b[5] = 0
    plan = believed_plan(*graphs(x, y), Marginals(a / a.sum(), b / b.sum()))
    assert plan.isfinite().all()
    assert float(plan[3].sum()) == 0
    assert float(plan[:, 5].sum()) < 1e-6  # float32
    nothing = believed_plan(*graphs(0 * x, 0 * y), uniform(40, 40))
    assert torch.allclose(nothing.sum(0), torch.tensor(1 / 40), rtol=1e-3)


def problem_of(x, y, **kw):
    a, b = (torch.full((len(side),), 1 / len(side), dtype=torch.float64) for side in (x, y))
    kind = kw.pop("kind", PrecomputedDistance)
    sides = (kind(torch.from_numpy(side)) for side in (x, y))
    return Problem(*sides, Marginals(a, b), kw.pop("alpha", 1.0), None, SQUARE)


@pytest.mark.parametrize("kind", [PrecomputedDistance, DirectedDistance])
def test_the_value_is_that_of_the_plan(kind):
    rng = np.random.default_rng(2)
    x = sparse_graph(80, rng) * 3
    if kind is DirectedDistance:
        # one direction of each edge, by chance
        forth = np.triu(rng.random(x.shape) < 0.5, 1)
        x *= forth | np.tril(~forth.T, -1)
    x, y = copy_of(x, rng, 0.1)
    found = match_graphs(problem_of(x, y, kind=kind))
    plan = found.plan.double().numpy()
    squares = (x**2).mean() + (y**2).mean()
    # sums in float32
    assert found.value == pytest.approx(squares - 2 * (x @ plan @ y.T * plan).sum(), rel=1e-4)
    assert found.shape == plan.shape == (80, 80)
    assert share_kept(x / 3, y / 3, plan) > 0.9


def test_other_tables_are_no_graphs():
    rng = np.random.default_rng(2)
    x = sparse_graph(40, rng)
    assert match_graphs(problem_of(x, x)) is not None
    assert match_graphs(problem_of(-x, x)) is None
    assert match_graphs(problem_of(x, np.ones((40, 40)))) is None


@pytest.mark.parametrize("directed", [False, True])
def test_graphs_too_large_for_chains_are_matched(directed, monkeypatch):
    monkeypatch.setitem(limits.LIMITS, "cpu", limits.CPU._replace(chain_products=0.0))
    rng = np.random.default_rng(5)
    whole = sparse_graph(150, rng)
    x, y = copy_of(np.triu(whole) if directed else whole, rng, 0.1)
    # several relations are directed costs too
    tables = ([x], [y]) if directed else (x, y)
    with pytest.warns(UserWarning, match="messages along edges"):
        result = torchgw.solve(D_X=tables[0], D_Y=tables[1], random_state=0)
    assert result.alternatives[0].label == "beliefs"
    kept = result.matching().target
    assert (x * y[np.ix_(kept, kept)]).sum() > 0.9 * x.sum()


def test_directed_graphs_exchange_partners_along_their_edges():
    shares = []
    for seed in range(2):
        rng = np.random.default_rng(seed)
        x, y = copy_of(np.triu(sparse_graph(120, rng, degree=3.5)), rng, 0.1)
        with warnings.catch_warnings():
            # what may be doubted is none of this
            warnings.simplefilter("ignore")
            result = torchgw.solve(D_X=[x], D_Y=[y], random_state=seed)
        assert "exchanges along edges" in {trial.start for trial in result.trials}
        kept = result.matching().target
        shares.append((x * y[np.ix_(kept, kept)]).sum() / x.sum())
    assert np.mean(shares) > 0.98


@pytest.mark.parametrize("told", [True, False])
def test_a_match_that_misleads_is_compared_with_what_few_points_tell(told, monkeypatch):
    # a match of too large graphs takes the place of other starts only where it ends lower
    monkeypatch.setitem(limits.LIMITS, "cpu", limits.CPU._replace(chain_products=0.0))
    rng = np.random.default_rng(7)
    x, y = copy_of(sparse_graph(150, rng), rng, 0.1)
    turned = torch.eye(150, dtype=torch.float64).roll(1, 0) / 150
    rows = torch.arange(150)
    wrong = Alternative(1.0, "beliefs", turned, rows, rows, (150, 150), epsilon=0.0)
    monkeypatch.setattr(all_points, "match_graphs", lambda problem: None)
    with pytest.warns(UserWarning, match="single start"):
        without = torchgw.solve(D_X=x, D_Y=y, random_state=0)
    monkeypatch.setattr(all_points, "match_graphs", lambda problem: wrong)
    if not told:
        monkeypatch.setattr(begin, "find_optima", lambda *given, **more: Search((), float("nan")))
        without = torchgw.solve(D_X=x, D_Y=y, n_init=1, random_state=0)
    with pytest.warns(UserWarning, match="may be a better one"):
        result = torchgw.solve(D_X=x, D_Y=y, random_state=0)
    assert result.value <= without.value * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(2))
def test_a_matching_of_all_edges_ends_the_search(seed):
    # leaves of a node can be exchanged, and a plan that shares them out keeps fewer edges than a
    # matching, which no plan beats: a doubt would be a warning, and an error here
    rng = np.random.default_rng(seed)
    x, y = copy_of(sparse_graph(130, rng, degree=2.2), rng, 0.05)
    result = torchgw.solve(D_X=x, D_Y=y, random_state=0)
    kept = result.matching().target
    assert (x * y[np.ix_(kept, kept)]).sum() == x.sum()
    assert {trial.start for trial in result.trials} <= {"beliefs", "exchanges along edges"}


def test_plans_that_keep_all_edges_of_all_relations_have_the_least_value():
    rng = np.random.default_rng(0)
    whole = np.stack([np.triu(sparse_graph(90, rng)) for _ in range(2)])
    x = whole * (rng.random(whole.shape) > 0.1)
    weights = Marginals(*(part.double() for part in uniform(90, 90)))
    problem = Problem(DirectedDistance(x), DirectedDistance(whole), weights, 1.0, None)
    coarse = coarse_problem(problem, 90).problem
    least = least_value(coarse, graphs_of(problem.sides))
    value = float(coarse.value(torch.eye(90, dtype=torch.float64)[None] / 90)[0])
    assert value == pytest.approx(least, rel=1e-9)
    turned = torch.eye(90, dtype=torch.float64).roll(1, 0)[None] / 90
    assert float(coarse.value(turned)[0]) > 1.1 * least


def test_a_matching_along_edges_is_no_worse_than_the_assignment_of_a_chain():
    rng = np.random.default_rng(3)
    x, y = copy_of(sparse_graph(100, rng), rng, 0.1)
    problem = problem_of(x, y)
    whole = coarse_problem(problem, 100)
    world = World(whole)
    low = 1e-3
    chain = world.take("beliefs", believed_plan(*graphs(x, y), uniform(100, 100)))
    world.settle([chain], low)
    partners = linear_sum_assignment(chain.plan.numpy(), maximize=True)[1]
    plan = world.rounded([chain])
    matched = chains._matchings(rematched(*graphs_of(problem.sides), plan[0])[None], plan)
    before = (x * y[np.ix_(partners, partners)]).sum()
    after = matched[0].argmax(1).numpy()
    assert (x * y[np.ix_(after, after)]).sum() >= before
    least = least_value(whole.problem)
    assert least_value(whole.problem, graphs_of(problem.sides)) == pytest.approx(least)
    unbeaten = float(whole.problem.value(matched)[0]) <= least + 1e-12
    assert unbeaten == ((x * y[np.ix_(after, after)]).sum() == x.sum())
