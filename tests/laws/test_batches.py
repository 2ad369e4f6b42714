"""What the search of a batch promises: answers as those of `solve`, or a doubt."""

from __future__ import annotations

import itertools
import math
import warnings

import networkx
import numpy as np
import pytest
import torch
from problems import random_weights
from scipy.spatial.distance import cdist

import torchgw
from torchgw._batch.packing import Packed
from torchgw._batch.sweep import Relaxed
from torchgw._many import search, solver
from torchgw._many.search import stack_of
from torchgw._many.solver import Numbers, warn_of_failures
from torchgw._many.spaces import Shelves, Space
from torchgw._problem.problem import MarginalRule
from torchgw._search import population
from torchgw._search.stack import descend
from torchgw._typing import Marginals

KINDS = ("points", "graph", "tree", "noise", "negative", "products")
# Marginals that plans of batches may have.
RULES = {
    "strict": {}, "partial": {"mass": 0.7}, "penalties": {"unbalanced": 0.5},
    "semi-relaxed": {"unbalanced": (np.inf, 0)}, "one penalty": {"unbalanced": (np.inf, 0.3)},
}  # fmt: skip
# Objectives within this share of each other are of one optimum: the last steps may fall by as much.
SAME = 1e-4


def table(kind, rng, n):
    """Make the distances, or other symmetric costs, of a small space."""
    if kind == "points":
        points = rng.normal(size=(n, int(rng.integers(1, 4))))
        return cdist(points, points)
    if kind == "products":
        points = rng.normal(size=(n, 3))
        return points @ points.T
    if kind in ("graph", "tree"):
        graph = networkx.random_labeled_tree(n, seed=int(rng.integers(2**31)))
        if kind == "graph":
            more = networkx.gnp_random_graph(n, 0.3, seed=int(rng.integers(2**31)))
            graph = networkx.compose(graph, more)
        return np.asarray(networkx.floyd_warshall_numpy(graph))
    upper = rng.random((n, n)) if kind == "noise" else rng.normal(size=(n, n))
    upper = np.triu(upper, 1)
    return upper + upper.T


def tiny(seed):
    """Two spaces of as many points, few enough to try all permutations."""
    rng = np.random.default_rng([57, seed])
    n = int(rng.integers(4, 8))
    return tuple(table(KINDS[seed % len(KINDS)], rng, n) for _ in "xy")


def mixed(seed, most=12):
    """Two spaces of some points, of which half have weights."""
    rng = np.random.default_rng([58, seed])
    sizes = rng.integers(5, most + 1, 2)
    tables = [table(KINDS[seed % len(KINDS)], rng, int(n)) for n in sizes]
    weights = [random_weights(int(n), seed) if seed % 2 else None for n in sizes]
    return dict(zip(("D_X", "D_Y", "a", "b"), (*tables, *weights), strict=True))


def listed(problems, **options):
    """Solve problems in one batch, with the units as they are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.TorchGWWarning)
        parts = {name: [one[name] for one in problems] for name in problems[0]}
        return torchgw.solve_many(**parts, **{"scale": None, **options})


def in_doubt(batch):
    """Tell which answers of a batch admit that there may be a better one."""
    return (batch.doubtful > 0) | (batch.ambiguity > 0.9) | ~batch.converged


def best_permutation(x, y, epsilon):
    """Return the lowest objective of all matchings, which no optimum is above."""
    n = len(x)
    orders = np.array(list(itertools.permutations(range(n))))
    moved = y[orders[:, :, None], orders[:, None, :]]
    # the entropy of a matching beside the product plan is log n
    return ((x - moved) ** 2).mean((1, 2)).min() + epsilon * np.log(n)


@pytest.mark.parametrize("count", [24, pytest.param(162, marks=pytest.mark.slow)])
def test_few_miss_the_best_permutation_and_say_so(count):
    problems = [tiny(seed) for seed in range(count)]
    batch = listed([{"D_X": x, "D_Y": y} for x, y in problems])
    best = [
        best_permutation(x, y, epsilon)
        for (x, y), epsilon in zip(problems, batch.epsilon, strict=True)
    ]
    missed = batch.objective > np.array(best) * (1 + SAME)
    # room over the 1 of 160 like these that was missed, and said, when this was written [L1311]
    assert missed.mean() <= 0.05
    assert (missed & ~in_doubt(batch)).mean() <= 0.02


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_a_batch_is_no_higher_than_single_solves_or_says_so(rule):
    problems, options = [mixed(seed, 10) for seed in range(24)], RULES[rule]
    batch = listed(problems, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.TorchGWWarning)
        single = np.array([
            torchgw.solve(**one, scale=None, random_state=0, **options).report.objective
            for one in problems
        ])  # fmt: skip
    # of free mass the least objective may be next to nothing
    squares = np.array([np.square(one["D_X"]).mean() for one in problems])
    higher = batch.objective > single + SAME * np.abs(single) + 1e-6 * squares
    assert higher.mean() <= 0.17
    assert (higher & ~in_doubt(batch)).mean() <= 0.05


@pytest.mark.parametrize("rule", [*RULES, "proximal", "fused"])
def test_a_batch_has_the_epsilon_of_single_solves(rule):
    """Also where one side is far smaller than the other, which relaxed plans do not mind."""
    options = RULES.get(rule, {"regularization": "proximal"} if rule == "proximal" else {})
    rng, problems = np.random.default_rng(0), [mixed(seed, 9) for seed in range(6)]
    for power, one in enumerate(problems):
        one["D_Y"] = one["D_Y"] * 10.0 ** (2 - power)
        if rule == "fused":
            one["M"] = rng.random((len(one["D_X"]), len(one["D_Y"])))
    batch = listed(problems, n_init=1, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.TorchGWWarning)
        alone = [
            torchgw.solve(**one, scale=None, n_init=1, max_iter=2, **options).epsilon
            for one in problems
        ]
    np.testing.assert_allclose(batch.epsilon, alone, rtol=1e-9)


@pytest.mark.parametrize("rule", RULES)
def test_a_search_is_never_above_a_single_start(rule):
    problems = [mixed(seed, 9) for seed in range(18 if rule == "strict" else 6)]
    found, plain = (listed(problems, **options, **RULES[rule]) for options in ({}, {"n_init": 1}))
    sound = plain.marginal_error <= 5e-6
    assert sound.mean() > 0.8
    assert (found.objective <= plain.objective * (1 + SAME) + 1e-9)[sound].all()
    assert (found.objective < plain.objective * (1 - 1e-3)).any()


@pytest.mark.parametrize("rule", RULES)
def test_what_a_search_has_found_is_an_answer(rule, monkeypatch):
    """A solve that begins at an optimum may leave it: what it was given counts then."""
    found, search = [], solver.search

    def seen(*arguments):
        found.append(search(*arguments))
        return found[-1]

    monkeypatch.setattr(solver, "search", seen)
    for seed in range(8):
        batch = listed([mixed(seed, 9)], **RULES[rule])
        lowest = float(found[-1].members.objectives[0, 0])
        assert batch.objective[0] <= lowest + SAME * abs(lowest)
        assert batch.marginal_error[0] <= 5e-6


@pytest.mark.parametrize("rule", RULES)
def test_no_exchange_of_two_rows_or_columns_leads_lower(rule, monkeypatch):
    found, search = [], solver.search

    def seen(stack, *rest):
        found.append((stack, search(stack, *rest)))
        return found[-1][1]

    monkeypatch.setattr(solver, "search", seen)
    listed([mixed(seed, 9) for seed in range(8)], **RULES[rule])
    lower = []
    for stack, searched in found:
        best = searched.members
        which, plans = population._exchanged(best.plans[:, 0])
        ends = stack.follow(which, plans, population._BLURRED)
        least = best.objectives[which, 0]
        lower += (ends.objectives < least - SAME * least.abs()).tolist()
    # a search ends after some exchanges, whatever there is
    assert np.mean(lower) <= 0.01


def test_what_is_exchanged():
    """All pairs of rows and of columns with mass, and the plan itself; evenly of many."""
    plans = torch.rand(3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plans[1, 3], plans[1, :, 4], plans[2] = 0, 0, 0
    which, moved = population._exchanged(plans)
    assert torch.bincount(which).tolist() == [17, 10, 1]
    assert (moved.flatten(1).sort(1).values == plans[which].flatten(1).sort(1).values).all()
    assert len(moved[which == 0].flatten(1).unique(dim=0)) == 17
    which, moved = population._exchanged(torch.rand(2, 30, 40, device="cpu"))
    assert torch.bincount(which).tolist() == 2 * [population._EXCHANGES]
    assert len(moved[which == 1].flatten(1).unique(dim=0)) == population._EXCHANGES


@pytest.mark.exact
@pytest.mark.parametrize(
    "options",
    [
        {}, {"mass": 0.7}, {"regularization": "proximal"}, {"polish": True},
        {"unbalanced": (0, math.inf)},
    ],
)  # fmt: skip
def test_a_problem_has_the_same_bits_in_any_batch(options):
    problems, rng = [mixed(seed, 8) for seed in (0, 3, 7)], np.random.default_rng(1)
    # sides of two sizes are exchanged, so that the smaller one comes first
    for sizes in ((9, 2), (2, 9)):
        sides = [table("points", rng, n) for n in sizes]
        problems.append(dict(zip(("D_X", "D_Y"), sides, strict=True), a=None, b=None))
    whole, turned = listed(problems, **options), listed(problems[::-1], **options)
    for k in range(len(problems)):
        alone = listed(problems[k : k + 1], **options)
        for other, place in ((whole, k), (turned, len(problems) - 1 - k)):
            assert np.array_equal(alone.plan(0), other.plan(place))
            for name in ("objective", "ambiguity", "doubtful", "status", "n_iter"):
                mine, its = getattr(alone, name)[0], getattr(other, name)[place]
                assert mine == its or (np.isnan(mine) and np.isnan(its))


def test_doubts_are_said_and_counted():
    problems = [mixed(seed, 6) for seed in (3, 4, 10)]
    plain = listed(problems, n_init=1)
    assert np.isnan(plain.ambiguity).all()
    assert not any(plain.doubts)
    found = listed(problems)
    assert [bool(doubt) for doubt in found.doubts] == (found.doubtful > 0).tolist()
    assert ((found.ambiguity >= 0) & (found.ambiguity <= 1)).all()
    numbers = Numbers.empty(3, torch.device("cpu"))
    numbers.doubtful[1:] = 1
    for what in ("problems", "pairs"):
        with pytest.warns(torchgw.SearchWarning, match=f"of some {what}: 2 of 3"):
            warn_of_failures(numbers, what)


def test_perfect_matches_are_as_good_as_each_other(monkeypatch):
    """Values that are rounding of zero are equal: a star with k leaves has k! perfect matches."""
    compare, generator = search._ambiguity, torch.Generator().manual_seed(0)

    def off_by_rounding(stack, members):
        noise = torch.rand(members.values.shape, generator=generator, dtype=torch.float64) * 1e-14
        noise[:, 0] *= 1e-4
        nothing = members.values.abs() < 1e-12
        return compare(stack, members._replace(values=members.values.where(~nothing, noise)))

    monkeypatch.setattr(search, "_ambiguity", off_by_rounding)
    stars = []
    for leaves in range(2, 8):
        star = np.full((leaves + 1, leaves + 1), 2.0)
        star[0], star[:, 0] = 1.0, 1.0
        np.fill_diagonal(star, 0.0)
        noise = np.random.default_rng(leaves).normal(size=star.shape)
        stars.append({"D_X": star, "D_Y": star * (1 + 1e-12 * (noise + noise.T))})
    found = listed(stars)
    assert found.ambiguity == pytest.approx(1)


def larger(seed):
    """Two spaces of more points than all of whose plans are searched."""
    rng = np.random.default_rng([59, seed])
    kind = KINDS[seed % len(KINDS)]
    sizes = rng.integers(34, 60, 2)
    return dict(zip(("D_X", "D_Y"), (table(kind, rng, int(n)) for n in sizes), strict=True))


@pytest.mark.parametrize("rule", [*RULES, "proximal", "polished", "fused"])
def test_larger_problems_are_no_higher_than_from_a_single_start(rule):
    """They also begin where few points tell; what of starts did not agree is in doubt."""
    options = {"proximal": {"regularization": "proximal"}, "polished": {"polish": True}}
    options = RULES.get(rule, options.get(rule, {}))
    problems = [larger(seed) for seed in range(4 if rule == "strict" else 2)]
    if rule == "fused":
        rng = np.random.default_rng(0)
        for one in problems:
            one["M"] = rng.random((len(one["D_X"]), len(one["D_Y"])))
    found, plain = (listed(problems, **options, **more) for more in ({}, {"n_init": 1}))
    assert not plain.doubtful.any()
    assert set(found.doubtful.tolist()) <= {0, 1}
    assert np.isnan(found.ambiguity).all() == (rule in RULES and rule != "strict")
    # polishing has its own way from each
    room = 1e-2 if rule == "polished" else SAME
    assert (found.objective <= plain.objective + room * np.abs(plain.objective)).all()
    fast = listed(problems[:1], **options, search="fast")
    np.testing.assert_array_equal(fast.plan(0), plain.plan(0))


@pytest.mark.exact
@pytest.mark.parametrize("rule", ["strict", "partial", "semi-relaxed", "fused"])
def test_larger_problems_have_the_same_bits_in_any_batch(rule):
    problems, rng = [larger(seed) for seed in (0, 1)], np.random.default_rng(3)
    # sides of other sizes are exchanged; a smaller problem is searched in another way
    problems += [{"D_X": one["D_Y"], "D_Y": one["D_X"]} for one in problems[:1]]
    problems.append({name: table("points", rng, 9) for name in ("D_X", "D_Y")})
    if rule == "fused":
        for one in problems:
            one["M"] = rng.random((len(one["D_X"]), len(one["D_Y"])))
    whole = listed(problems, **RULES.get(rule, {}))
    for k in range(3):
        alone = listed(problems[k : k + 1], **RULES.get(rule, {}))
        np.testing.assert_array_equal(alone.plan(0), whole.plan(k))
        for name in ("objective", "ambiguity", "doubtful", "status", "n_iter"):
            np.testing.assert_array_equal(getattr(alone, name)[0], getattr(whole, name)[k])


@pytest.mark.slow
def test_few_larger_problems_are_above_single_solves():
    """Of points, trees and products; those above say so."""
    # of random graphs and noise most are above, lower than from single starts
    kinds = [KINDS.index(kind) for kind in ("points", "tree", "products")]
    problems = [larger(seed) for seed in range(24) if seed % len(KINDS) in kinds]
    batch = listed(problems)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.TorchGWWarning)
        single = np.array([
            torchgw.solve(**one, scale=None, random_state=0).report.objective for one in problems
        ])  # fmt: skip
    higher = batch.objective > single * (1 + 1e-3)
    # 3 of 12 when this was written, 11 from single starts [L1932]
    assert higher.mean() <= 0.45
    assert not (higher & ~in_doubt(batch)).any()


def test_problems_too_large_for_the_engine_are_solved_as_by_solve():
    rng = np.random.default_rng(6)
    x, y = table("points", rng, 520), table("points", rng, 20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.SearchWarning)
        one = torchgw.solve(D_X=x, D_Y=y, scale=None, random_state=0)
    found = listed([{"D_X": x, "D_Y": y}])
    assert found.objective[0] == pytest.approx(one.report.objective, rel=1e-5)
    assert bool(found.doubtful[0]) == bool(one.doubt)


def test_a_thorough_batch_is_a_list_of_solves():
    """Problems of any size end where `solve` does, alone or among others."""
    rng = np.random.default_rng(11)
    tables = [table("points", rng, n) for n in (7, 36)]
    # copies, so that rounding does not decide which of equal optima is found
    given = {"D_X": tables, "D_Y": [one[::-1, ::-1] for one in tables], "search": "thorough"}
    found = torchgw.solve_many(**given, scale=None)
    assert not found.doubtful.any()
    for x, y, objective in zip(given["D_X"], given["D_Y"], found.objective, strict=True):
        one = torchgw.solve(D_X=x, D_Y=y, scale=None, random_state=0)
        assert objective == pytest.approx(one.report.objective, rel=1e-5)
    given |= {"D_X": given["D_X"][1:], "D_Y": given["D_Y"][1:]}
    alone = torchgw.solve_many(**given, scale=None)
    np.testing.assert_array_equal(alone.plan(0), found.plan(1))
    matrix = torchgw.pairwise(**given, scale=None, output="objective", progress=False)
    np.testing.assert_array_equal(matrix[0], found.objective[1:])
    with pytest.raises(torchgw.InvalidInputError, match="leave `n_init` out"):
        torchgw.solve_many(**given, n_init=2)
    fast, first = (
        torchgw.solve_many(**{**given, **one})
        for one in ({"search": "fast"}, {"search": "auto", "n_init": 1})
    )
    np.testing.assert_array_equal(fast.plan(0), first.plan(0))


def test_copies_are_in_no_doubt():
    rng = np.random.default_rng(3)
    tables = [table("points", rng, n) for n in (7, 12, 20)]
    orders = [rng.permutation(len(one)) for one in tables]
    copies = [one[order][:, order] for one, order in zip(tables, orders, strict=True)]
    batch = listed([{"D_X": x, "D_Y": y} for x, y in zip(tables, copies, strict=True)], polish=True)
    assert not batch.doubtful.any()
    # a match that keeps all distances costs nothing, up to rounding
    assert batch.value.max() < 1e-12


def test_negative_entries_are_taken_as_by_solve():
    rng = np.random.default_rng(5)
    stack = np.stack([table("negative", rng, 6) for _ in range(4)])
    given = listed([{"D_X": x, "D_Y": y} for x, y in zip(stack[:2], stack[2:], strict=True)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.SearchWarning)
        stacked = torchgw.solve_batch(stack[:2], stack[2:])
    np.testing.assert_allclose(stacked.objective, given.objective, rtol=1e-9)
    for call in (torchgw.solve_batch, torchgw.solve_many):
        names = ("D_X", "D_Y")
        with pytest.raises(torchgw.InvalidInputError, match=r"`D_X(\[0\])?` must be non-negative"):
            call(**dict(zip(names, (stack[:2], stack[2:]), strict=True)), scale="max")


@pytest.mark.parametrize("rho", [None, (np.inf, 0.0), (0.5, 0.5), 0.7])
def test_descent_never_raises_an_objective(rho):
    rng = np.random.default_rng(8)
    spaces = [
        Space(torch.from_numpy(table("negative", rng, 9)), torch.from_numpy(random_weights(9, k)))
        for k in range(6)
    ]
    shelves = Shelves(spaces, searched=True)
    (stack,), first = shelves.stacks.values(), torch.arange(3)
    one = torch.ones(3, dtype=torch.float64)
    relaxed = None
    if rho is not None:
        share = isinstance(rho, float)
        given = torch.tensor(3 * [rho], dtype=torch.float64)
        relaxed = Relaxed(*((None, given) if share else (given, None)))
    packed = Packed(stack, stack, first, first + 3, one, 0.05 * one, one, relaxed=relaxed)
    problems = stack_of(packed)
    size = stack.tables.shape[1]
    plans = torch.from_numpy(rng.random((3, size, size)))
    plans[:, 9:], plans[:, :, 9:] = 0, 0
    before, (after, falling) = problems.judged(first, plans), descend(problems, first, plans)
    assert (after.objectives < before.objectives).all()
    again, _ = descend(problems, first, after.plans)
    assert (again.objectives <= after.objectives + 1e-12).all()
    close = torch.isclose(again.objectives, after.objectives, rtol=1e-4)
    assert (close | falling).all()
    rule = MarginalRule(*((rho,) if isinstance(rho, tuple) else ()))
    if isinstance(rho, float):
        rule = MarginalRule(mass=rho)
        assert torch.allclose(after.plans.sum((1, 2)), rho * one)
    for k, plan in enumerate(after.plans):
        weights = Marginals(stack.weights[k], stack.weights[k + 3])
        assert rule.violation(Marginals(plan.sum(1), plan.sum(0)), weights) < 1e-12
