"""What a search promises: nothing that it has seen is lower, and a planted match is not missed."""

from __future__ import annotations

import warnings

import networkx
import numpy as np
import pytest
import torch
from problems import quick, rewired, shuffled
from scipy.cluster.hierarchy import cophenet, linkage
from scipy.sparse import csr_array
from scipy.spatial.distance import cdist, squareform
from sklearn import datasets

import torchgw
from benchmarks.quality import random_matrices, strangers
from benchmarks.quality.problems import PROBLEMS
from benchmarks.solves.first_use import network_pair
from torchgw._search.population import follow_starts, improve, improve_again
from torchgw._starts.alternatives import Ends
from torchgw._typing import Marginals

# Objectives within a thousandth are of one optimum: a solve ends once an iteration lowers its
# objective by less than 1e-5 of it, and some tens more may follow.
SAME = 1e-3

RNG = np.random.default_rng


def quietly(**given):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.TorchGWWarning)
        return torchgw.solve(**{"random_state": 0, **given})


def ends_at(given, init):
    """Follow a plan to the epsilon asked for, and return its objective."""
    return quietly(**given, init=init).report.objective


def says_so(result):
    """Whether a result admits that there may be a better one."""
    return bool(result.doubt) or result.is_ambiguous or not result.converged


# -- problems whose answer nobody knows -----------------------------------------------------------


def clouds(seed, n, m, dimension, **options):
    rng = RNG(seed)
    first, second = (rng.normal(size=(count, dimension)) for count in (n, m))
    return {"D_X": cdist(first, first), "D_Y": cdist(second, second), **options}


def noise(seed, n, m, epsilon):
    rng = RNG(seed)
    tables = (np.triu(rng.random((count, count)), 1) for count in (n, m))
    d_x, d_y = (table + table.T for table in tables)
    return {"D_X": d_x, "D_Y": d_y, "epsilon": epsilon}


def networks(seed, n, share):
    rng = RNG(seed)
    tables = (np.triu(rng.random((n, n)) < share, 1) for _ in range(2))
    d_x, d_y = ((table | table.T).astype(float) for table in tables)
    return {"D_X": d_x, "D_Y": d_y}


def fused(seed, n, m):
    linear = RNG([1, seed]).random((n, m))
    return {**clouds(seed, n, m, 3), "M": linear, "alpha": 0.8}


def blobs(seed, n):
    """Two draws of the same twelve clusters."""
    rng = RNG(seed)
    centres = 1.5 * rng.normal(size=(12, 15))
    x, y = (centres[rng.integers(12, size=n)] + rng.normal(size=(n, 15)) for _ in range(2))
    return {"X": x, "Y": y, "distances": "euclidean"}


def cells(seed, n):
    """Two views of cells of seven kinds: all are far from the few, but like some of them."""
    rng = RNG(seed)
    kind = rng.integers(7, size=n)
    hidden = 1.5 * rng.normal(size=(7, 8))[kind] + rng.normal(size=(n, 8))
    x = hidden @ rng.normal(size=(8, 30)) + 1.4 * rng.normal(size=(n, 30))
    y = np.tanh(hidden @ rng.normal(size=(8, 40)) / 8**0.5) + 0.3 * rng.normal(size=(n, 40))
    return {"X": x, "Y": y, "distances": "euclidean"}


def merges(seed, n):
    """Heights at which clusters of digits merge, and those of the digits with noise."""
    rng, points = RNG(seed), datasets.load_digits().data
    points = points[rng.choice(len(points), n, replace=False)] / points.std()
    sides = points, points + 0.2 * rng.normal(size=points.shape)
    first, second = (squareform(cophenet(linkage(side, "average"))) for side in sides)
    return {"D_X": first, "D_Y": second}


OPEN_ENDED = {
    "few points": lambda seed: clouds(seed, 9, 11, 3),
    "few points, sharp": lambda seed: clouds(seed, 9, 11, 3, epsilon=0.003),
    "clouds": lambda seed: clouds(seed, 22, 30, 9),
    "larger clouds": lambda seed: clouds(seed, 40, 50, 10),
    "many clouds": lambda seed: clouds(seed, 120, 110, 3),
    "noise": lambda seed: noise(seed, 12, 15, 0.02),
    "sharp noise": lambda seed: noise(seed, 11, 11, 1.3e-4),
    "larger noise": lambda seed: noise(seed, 40, 50, 1e-3),
    "sparse networks": lambda seed: networks(seed, 40, 0.1),
    "dense networks": lambda seed: networks(seed, 80, 0.4),
    "fused": lambda seed: fused(seed, 20, 25),
    "blobs": lambda seed: blobs(seed, 520),
    "cells": lambda seed: cells(seed, 520),
    "merges": lambda seed: merges(seed, 140),
}


def exchanged(given):
    """The same problem with its sides in the other order."""
    names = {"D_X": "D_Y", "D_Y": "D_X", "X": "Y", "Y": "X"}
    other = {names.get(name, name): part for name, part in given.items()}
    return {**other, "M": given["M"].T} if "M" in given else other


# how many seeds of each, of which the first one is fast where that is said
FOLLOWED = {
    "few points": (6, True),
    "clouds": (6, False),
    "larger clouds": (2, False),
    "larger noise": (2, False),
    "many clouds": (2, False),
    "noise": (6, False),
    "sharp noise": (6, True),
    "fused": (6, False),
    "dense networks": (3, False),
    "blobs": (2, False),
    "cells": (2, False),
}


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(name, seed, marks=() if quick and not seed else pytest.mark.slow)
        for name, (count, quick) in FOLLOWED.items()
        for seed in range(count)
    ],
)
def test_nothing_that_a_search_has_seen_ends_lower(name, seed):
    given = OPEN_ENDED[name](seed)
    found = quietly(**given)
    least = found.report.objective
    ends = [ends_at(given, one) for one in found.alternatives]
    # the first one is where the plan came from, and the others are no better
    assert ends[0] == pytest.approx(least, rel=SAME)
    assert least <= min(ends) * (1 + SAME)
    others = [
        quietly(**given, **one).report.objective for one in ({"n_init": 1}, {"search": "fast"})
    ]
    others.append(ends_at(given, quietly(**exchanged(given)).plan.T.copy()))
    product = np.outer(found.plan.sum(1), found.plan.sum(0))
    others.append(ends_at(given | {"epsilon": found.epsilon}, product))
    assert least <= min(others) * (1 + SAME) or says_so(found)


@pytest.mark.parametrize(
    "name", ["integers", *(pytest.param(one, marks=pytest.mark.slow) for one in ("single", "heat"))]
)
def test_a_batch_ends_no_higher_than_single_solves(name):
    """Without matchings by exchanges three of these were .2 to 8.5% above, and in no doubt."""
    drawn = [strangers.make(name, n, seed)[0] for n, seed in ((9, 0), (9, 1), (14, 0), (14, 2))]
    tables = {side: [np.asarray(one[side], float) for one in drawn] for side in ("D_X", "D_Y")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.TorchGWWarning)
        found = torchgw.solve_many(**tables, scale=None)
    said = (found.doubtful > 0) | (found.ambiguity > 0.9) | ~found.converged
    for place, (x, y) in enumerate(zip(*tables.values(), strict=True)):
        least = quietly(D_X=x, D_Y=y, scale=None).report.objective
        assert found.objective[place] <= least * (1 + SAME) or said[place]


@pytest.mark.parametrize("polish", [False, True])
@pytest.mark.parametrize("seed", quick(1, range(3)))
@pytest.mark.parametrize("name", ["few points", "clouds", "noise", "fused"])
def test_a_solve_from_a_plan_ends_no_higher(name, seed, polish):
    """Plans on the way that miss their marginals led it away from where it began."""
    given = OPEN_ENDED[name](seed) | {"n_init": 1, "polish": polish}
    found = quietly(**given)
    again = quietly(**given | {"n_init": None}, init=found.plan)
    assert again.report.objective <= found.report.objective * (1 + SAME)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_thorough_search_ends_no_higher_than_the_default(seed):
    given, _ = tree(seed, 3, 3)
    default, thorough = (quietly(**given, search=how) for how in ("auto", "thorough"))
    assert thorough.value <= default.value * (1 + SAME)


def attractor(seed, n):
    """Lorenz's system, and the lags of one of its variables."""
    rng = RNG(seed)
    at, path = np.array([1.0, 1.0, 20.0]) + rng.normal(size=3), list[np.ndarray]()
    for _ in range(402 + 16 * (n + 3)):
        x, y, z = at
        at = at + 0.005 * np.array([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z])
        path.append(at)
    states = np.array(path[401::16])
    lags = np.stack([states[k : n + k, 0] for k in range(4)], 1)
    lags = (lags + 0.1 * rng.normal(size=lags.shape))[rng.permutation(n)]
    return {"X": states[:n], "Y": lags}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, [1502734133, 110, 2, 13]])
def test_a_thorough_search_follows_all_starts_of_the_default(seed):
    given = attractor(seed, 110)
    default, thorough = (quietly(**given, search=how) for how in ("auto", "thorough"))
    assert thorough.report.objective <= default.report.objective * (1 + SAME)


# -- problems with a planted match ----------------------------------------------------------------


def planted(first, second, **options):
    """Two tables, the second in another order, and the match."""
    second, truth = shuffled(second)
    return {"D_X": first, "D_Y": second, **options}, truth


def graph_of(n, degree, seed):
    upper = np.triu(RNG(seed).random((n, n)) < degree / n, 1)
    return (upper | upper.T).astype(float)


def random_graph(seed, n, degree, share, loops=0.0):
    graph = graph_of(n, degree, seed)
    copy = rewired(graph, share, seed)
    return planted(graph + loops * np.eye(n), copy + loops * np.eye(n))


def regular_graph(seed, n):
    """All nodes have three neighbours; a few edges are elsewhere in the copy."""
    graph = networkx.to_numpy_array(networkx.random_regular_graph(3, n, seed=seed))
    return planted(graph, rewired(graph, 0.05, seed))


def ring(seed, n, degree, share):
    """Arcs of these can be turned round."""
    graph = networkx.connected_watts_strogatz_graph(n, degree, 0.05, seed=seed)
    graph = networkx.to_numpy_array(graph)
    return planted(graph, rewired(graph, share, seed))


def tree(seed, branches, height):
    """Subtrees are alike, and a fifteenth of the edges is missing in the copy."""
    whole = networkx.balanced_tree(branches, height)
    graph, edges = networkx.to_numpy_array(whole), list(whole.edges)
    for number in RNG(seed).choice(len(edges), len(edges) // 15, replace=False):
        whole.remove_edge(*edges[number])
    return planted(graph, networkx.to_numpy_array(whole))


def preferential(seed, n, extra, *, by_degree, **options):
    graph, copy, order = network_pair(n, 3, extra, seed)
    given = {"D_X": graph, "D_Y": copy, **options}
    if by_degree:
        given |= {"a": graph.sum(0) / graph.sum(), "b": copy.sum(0) / copy.sum()}
        plan = np.zeros((n, n))
        plan[order, np.arange(n)] = given["b"]
        return given, plan
    return given, order.argsort()


def hops(seed, graph, share):
    graph = networkx.to_numpy_array(graph)
    np.fill_diagonal(graph, 0)
    copy, truth = shuffled(rewired(graph, share, seed), seed)
    return {"X": csr_array(graph), "Y": csr_array(copy)}, truth


def words(seed, n, amount):
    """Cosine distances of vectors that have no near neighbours, and of a noisy copy."""
    rng = RNG(seed)
    first = rng.standard_normal((n, 40)) * 0.9 ** np.arange(40)
    second = first + amount * rng.standard_normal((n, 40))
    tables = [cdist(points, points, "cosine") for points in (first, second)]
    return planted(*[table / table.mean() for table in tables])


def turned(seed, n, dimension, amount):
    """A round cloud and a noisy copy."""
    rng = RNG(seed)
    first = rng.normal(size=(n, dimension))
    second = first + amount * rng.normal(size=first.shape)
    return planted(cdist(first, first), cdist(second, second))


def instance(seed, name):
    made = PROBLEMS[name].instance(seed)
    return made.inputs, made.answer


PLANTED = {
    "random graphs": lambda seed: random_graph(seed, 100, 6, 0.05),
    "graphs of which a fifth is elsewhere": lambda seed: random_graph(seed, 120, 6, 0.2),
    "sparse graphs": lambda seed: random_graph(seed, 200, 4, 0.2),
    "graphs with loops": lambda seed: random_graph(seed, 90, 6, 0.05, loops=1.0),
    "regular graphs": lambda seed: regular_graph(seed, 60),
    "rings": lambda seed: ring(seed, 200, 8, 0.04),
    "binary trees": lambda seed: tree(seed, 2, 5),
    "wide trees": lambda seed: tree(seed, 4, 3),
    "preferential graphs": lambda seed: preferential(seed, 200, 0.03, by_degree=False),
    "preferential graphs by degree": lambda seed: preferential(seed, 120, 0.1, by_degree=True),
    "sharp plans by degree": lambda seed: preferential(
        seed, 120, 0.1, by_degree=True, regularization="proximal"
    ),
    "hops in rings": lambda seed: hops(
        seed, networkx.connected_watts_strogatz_graph(200, 6, 0.1, seed=seed), 0.03
    ),
    "hops between cliques": lambda seed: hops(
        seed, networkx.relaxed_caveman_graph(20, 10, 0.1, seed=seed), 0.03
    ),
    "words": lambda seed: words(seed, 80, 0.35),
    "clouds in five dimensions": lambda seed: turned(seed, 140, 5, 0.05),
    "distances in trees": lambda seed: instance(seed, "tree"),
    "blobs of other shares": lambda seed: instance(seed, "densities"),
}


# How many of five seeds are found at least: one fewer than are found with any instruction set, as
# rounding may move a plan to another optimum. None is missed in silence, but for those that are.
LEAST = dict.fromkeys(PLANTED, 4) | {
    "sparse graphs": 2,
    "regular graphs": 2,
    "binary trees": 3,
    "hops between cliques": 3,
    "words": 3,
}
SILENT = {"hops between cliques": 1}
QUICK = {"preferential graphs", "clouds in five dimensions"}


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in PLANTED]
)
def test_planted_matches_are_found_or_there_is_doubt(name):
    """A match is found if no plan that the true one leads to is lower."""
    found = silent = 0
    for seed in range(5):
        given, truth = PLANTED[name](seed)
        result = quietly(**given)
        right = result.report.objective <= ends_at(given, truth) * (1 + SAME)
        found += right
        silent += not right and not says_so(result)
    assert found >= LEAST[name]
    assert silent <= SILENT.get(name, 0)


@pytest.mark.slow
def test_noise_ends_at_the_best_of_many_descents():
    """Small tables without any structure, whose best of 64 random descents is known."""
    found = 0
    for size in ((8, 11), (10, 10), (12, 15)):
        for seed in range(4):
            made = random_matrices.independent(RNG([55, seed]), *size, 0.02)
            result = quietly(D_X=made.d_x, D_Y=made.d_y, epsilon=0.02)
            # optima of these are a thousandth apart
            found += made.judge(np.asarray(result.plan)) <= 1 + SAME / 10
    assert found >= 10


@pytest.mark.parametrize("seed", quick(1, range(2, 8)))
def test_the_kl_loss_ends_no_higher_than_the_square_loss_of_its_tables(seed):
    """Of strict marginals they differ by a constant."""
    rng = RNG(seed)
    draws = (rng.normal(size=(size, 3)) * [2, 1, 0.5] for size in (24, 20))
    x, y = (cdist(points, points) + 0.1 for points in draws)
    given = {"D_X": x, "D_Y": y, "loss": "kl"}
    found = quietly(**given)
    tables = [table - table.mean() for table in (x, np.log(y) / 2)]
    size = np.sqrt(tables[1].std() / tables[0].std())
    other = quietly(D_X=tables[0] * size, D_Y=tables[1] / size, epsilon=found.epsilon)
    end = ends_at(given | {"epsilon": found.epsilon}, np.asarray(other.plan))
    assert says_so(found) or found.report.objective <= end * (1 + SAME)


@pytest.mark.parametrize("kind", ["kl", "directed"])
def test_relaxed_problems_without_a_stack_are_no_higher_than_random_starts_or_say_so(kind):
    g = RNG([14, kind == "kl", 3])
    x = g.normal(size=(14, 3))
    order = g.permutation(14)[:11]
    y = x[order] + 0.1 * g.normal(size=(11, 3))
    tables = cdist(x, x), cdist(y, y)
    tables = [table / tables[0].max() for table in tables]
    if kind == "kl":
        given = {"D_X": np.exp(-tables[0]) + 0.05, "D_Y": np.exp(-tables[1]) + 0.05, "loss": "kl"}
    else:
        noise = 0.3 * g.random((14, 14))
        sides = tables[0] + noise, tables[1] + noise[order][:, order]
        given = dict(zip("XY", map(torchgw.distances.DirectedDistance, sides), strict=True))
    given["unbalanced"] = (np.inf, 0.0)
    found = quietly(**given)
    ends = []
    for _ in range(4):
        start = g.random((14, 11)) ** 8
        start /= 14 * start.sum(1, keepdims=True)
        ends.append(ends_at(given | {"epsilon": found.epsilon}, start))
    assert says_so(found) or found.report.objective <= min(ends) * (1 + SAME)


@pytest.mark.parametrize(
    "options", [{"mass": 0.7}, {"unbalanced": 1.0}, {"unbalanced": (np.inf, 0.0)}]
)
def test_listed_objectives_of_relaxed_problems_have_all_of_the_linear_cost(options):
    g = RNG(0)
    x, y = g.normal(size=(14, 2)), g.normal(size=(17, 2))
    cost = 3 + g.random((14, 17))
    found = quietly(X=x, Y=y, M=cost, alpha=0.5, epsilon=0.05, **options)
    assert found.alternatives[0].value == pytest.approx(found.report.objective, rel=SAME)


@pytest.mark.parametrize(
    "seed", [pytest.param(3), *(pytest.param(k, marks=pytest.mark.slow) for k in (0, 8))]
)
def test_words_with_frequencies_are_no_higher_than_random_starts_or_say_so(seed):
    """Starts agreed on an optimum from which two words of unequal weights had to be exchanged."""
    given, _ = strangers.make("frequent_words", 14, seed)
    found = quietly(**given)
    g = RNG(seed)
    starts = [strangers.random_plan(g, given["a"], given["b"]) for _ in range(6)]
    ends = [ends_at(given | {"epsilon": found.epsilon}, start) for start in starts]
    assert says_so(found) or found.report.objective <= min(ends) * (1 + SAME)


class Landscape:
    """Plans lead to the start that they look like most; those of each problem are matchings."""

    def __init__(self, starts):
        self.starts = starts

    def follow(self, which, plans, first=0.0):
        there = self.starts.plans[which]
        near = (there * plans[:, None]).sum((2, 3)).argmax(1)
        return Ends(*(part[which, near] for part in self.starts))

    def rows(self, which):
        return torch.full_like(which, self.starts.plans.shape[2])


@pytest.mark.parametrize("rounds", [0, 4])
def test_groups_of_starts_agree_if_each_has_found_the_lowest(rounds):
    """The lowest of all is the first then; groups that were put together have not agreed."""
    generator = torch.Generator().manual_seed(rounds)
    count, starts, n = 60, 6, 7
    orders = torch.rand(count, starts, n, generator=generator).argsort(2)
    plans = torch.nn.functional.one_hot(orders, n).double() / n
    objectives = torch.randint(1, 5, (count, starts), generator=generator).double()
    given = Ends(plans, objectives, objectives)
    found = improve(Landscape(given), given, rounds)
    lowest = objectives.amin(1)
    assert torch.equal(found.members.objectives[:, 0], lowest)
    alike = objectives[:, ::2].amin(1) == objectives[:, 1::2].amin(1)
    assert 10 < int(alike.sum()) < count - 10
    # kicks and mixtures may lead a group to what the other has found, which is to agree as well
    assert bool(found.agreed[alike].all())
    assert torch.equal(found.agreed, alike) or rounds
    assert torch.equal(found.met, (objectives == lowest[:, None]).sum(1))


class Falling(Landscape):
    """Ends that are yet to fall, each by a share of its own."""

    def __init__(self, starts, falls):
        super().__init__(starts)
        self.falls = falls

    def padded(self, plans):
        return plans

    def descend(self, which, plans):
        ends = self.follow(which, plans)
        fall = self.falls[(self.starts.plans[0] == ends.plans[:, None]).all((2, 3)).int().argmax(1)]
        return ends._replace(objectives=ends.objectives * (1 - fall))


def test_what_falls_below_the_lowest_is_followed_and_nothing_had_agreed_on_it():
    starts, n = 6, 7
    orders = torch.rand(starts, n, generator=torch.Generator().manual_seed(0)).argsort(1)
    plans = torch.nn.functional.one_hot(orders, n).double() / n
    even = torch.full((n,), 1 / n, dtype=torch.float64)
    objectives = torch.tensor([1.0, 1.01, 1.01, 1.01, 1.015, 1.3], dtype=torch.float64)
    given = Ends(plans[None], objectives[None], objectives[None])
    named = [(str(place), plan) for place, plan in enumerate(plans)]
    for low in range(starts):
        falls = torch.full((starts,), 0.001, dtype=torch.float64)
        falls[low] = 0.02
        found = follow_starts(Falling(given, falls), named, Marginals(even, even), 0)
        # what is far above is left where it is
        near = low if low < 5 else 0
        assert found.names[0] == str(near)
        assert found.objectives == sorted(found.objectives)
        assert not (found.certain and near)


def test_starts_that_disagree_are_improved_again_and_end_no_higher():
    """Other draws lead lower at times; what they agree on is sure if the first have found it."""
    generator = torch.Generator().manual_seed(0)
    optima, known, n, rounds = 20, 6, 7, 2
    lower, settled = 0, 0
    for _ in range(60):
        orders = torch.rand(1, optima, n, generator=generator).argsort(2)
        plans = torch.nn.functional.one_hot(orders, n).double() / n
        objectives = torch.randint(1, 20, (1, optima), generator=generator).double()
        hills = Landscape(Ends(plans, objectives, objectives))
        given = Ends(*(part[:, :known] for part in hills.starts))
        first, again = improve(hills, given, rounds), improve_again(hills, given, rounds)
        before, after = (found.members.objectives[0, 0] for found in (first, again))
        assert after <= before
        if first.agreed:
            assert again.agreed
            assert after == before
        elif again.agreed:
            assert after == before
            settled += 1
        lower += int(after < before)
    assert lower > 0
    assert settled > 0
