"""Batches of unbalanced, semi-relaxed and partial problems, beside `solve` and themselves."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import reference
import torch
from problems import random_weights, solve_by_name
from scipy.spatial.distance import cdist

import torchgw
from torchgw._batch.sweep import Relaxed, _filled, _within_bounds

# of one start, whose bits and answers are those of the engine alone; searches have their own tests
pairwise = partial(torchgw.pairwise, n_init=1)
solve_many = partial(torchgw.solve_many, n_init=1)
INF = math.inf
RNG = np.random.default_rng(7)
SIZES = [(10, 14), (18, 9), (12, 12)]
XS = [RNG.normal(size=(n, 2)) for n, _ in SIZES]
YS = [RNG.normal(size=(m, 3)) for _, m in SIZES]
A = [random_weights(n, n) for n, _ in SIZES]
B = [random_weights(m, m) for _, m in SIZES]
A[1][4] = 0
A[1] /= A[1].sum()
COSTS = [RNG.uniform(size=size) for size in SIZES]
EXACT = {"epsilon": 0.05, "tol": 1e-7, "inner_tol": 1e-9}
# one value for each problem, the last strict
KINDS = {
    "unbalanced": {"unbalanced": [0.3, (0.05, 0.5), INF]},
    "semi-relaxed": {"unbalanced": [(INF, 0), (0.1, INF), (INF, INF)]},
    "partial": {"mass": [0.7, 0.95, 1.0]},
}


def alone(kind, k, **options):
    relaxed = {name: values[k] for name, values in KINDS[kind].items()}
    return solve_by_name(
        XS[k], YS[k], a=A[k], b=B[k], distances="euclidean", n_init=1, random_state=0, **relaxed,
        **options,
    )  # fmt: skip


def batch_of(kind, chosen=range(3), **options):
    listed = {"a": A, "b": B, **KINDS[kind], **options.pop("listed", {})}
    parts = {name: [values[k] for k in chosen] for name, values in listed.items()}
    return solve_many(
        [XS[k] for k in chosen], [YS[k] for k in chosen], **parts, **options
    )  # fmt: skip


def distances(points):
    table = cdist(points, points)
    return table / table.max()


def definition(kind, k, plan, epsilon):
    """The objective of a plan, as the definition says."""

    def divergence(masses, weights):
        used = masses > 0
        parts = masses[used] * np.log(masses[used] / weights[used])
        return float(parts.sum() - masses.sum() + weights.sum())

    value = reference.gw_value(distances(XS[k]), distances(YS[k]), plan)
    product = np.outer(A[k], B[k])
    if kind == "partial":
        used = plan > 0
        return value + epsilon * float((plan[used] * np.log(plan[used] / product[used])).sum())
    for weight, mass, given in zip(
        np.broadcast_to(KINDS[kind]["unbalanced"][k], 2),
        (plan.sum(1), plan.sum(0)),
        (A[k], B[k]),
        strict=True,
    ):
        if math.isfinite(weight):
            value += weight * divergence(
                np.outer(mass, mass).ravel(), np.outer(given, given).ravel()
            )
    pairs = np.multiply.outer(plan.ravel(), plan.ravel()).ravel()
    return value + epsilon / 2 * divergence(
        pairs, np.multiply.outer(product.ravel(), product.ravel()).ravel()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_solve(kind):
    batch = batch_of(kind, objective_tol=0, **EXACT)
    assert batch.converged.all()
    for k in range(3):
        one = alone(kind, k, **EXACT)
        plan = np.asarray(batch.plan(k))
        assert float(batch.objective[k]) == pytest.approx(one.report.objective, rel=1e-6)
        assert float(batch.value[k]) == pytest.approx(one.value, rel=1e-4)
        assert np.abs(plan - one.plan).sum() < 1e-4
        assert float(batch.epsilon[k]) == pytest.approx(one.epsilon)
        assert float(batch.value[k]) == pytest.approx(
            reference.gw_value(distances(XS[k]), distances(YS[k]), plan), rel=1e-9
        )
        assert plan.sum() == pytest.approx(one.log["mass"], rel=1e-5)
        assert float(batch.marginal_error[k]) < 1e-6
    # the first is as defined, and any other mass of its plan costs more
    plan = np.asarray(batch.plan(0))
    least = definition(kind, 0, plan, 0.05)
    assert float(batch.objective[0]) == pytest.approx(least, rel=1e-8)
    if kind == "unbalanced":
        assert min(definition(kind, 0, t * plan, 0.05) for t in (0.99, 1.01)) > least


@pytest.mark.parametrize("kind", KINDS)
def test_objectives_are_those_of_the_plans_wherever_a_solve_is_cut(kind):
    for outer, inner in ((1, 1), (2, 10), (8, 1), (8, 20)):
        with pytest.warns(torchgw.ConvergenceWarning):
            batch = batch_of(kind, epsilon=0.05, max_iter=outer, inner_max_iter=inner)
        for k in range(2):
            own = definition(kind, k, np.asarray(batch.plan(k)), 0.05)
            assert float(batch.objective[k]) == pytest.approx(own, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_do_not_change_the_bits(kind):
    batch = batch_of(kind, epsilon=0.1)
    again = batch_of(kind, [2, 0], epsilon=0.1)
    assert np.array_equal(again.objective, batch.objective[[2, 0]])
    for k in range(3):
        one = batch_of(kind, [k], epsilon=0.1, plans=False)
        assert float(one.objective[0]) == float(batch.objective[k])
        assert float(one.value[0]) == float(batch.value[k])
    strict = solve_many(XS[2:], YS[2:], a=A[2:], b=B[2:], epsilon=0.1)
    assert np.array_equal(strict.plan(0), batch.plan(2))


@pytest.mark.parametrize("kind", KINDS)
def test_linear_costs_and_more_starts(kind):
    options = {"alpha": 0.6, **EXACT}
    batch = batch_of(kind, listed={"M": COSTS}, **options)
    for k in range(3):
        one = alone(kind, k, M=COSTS[k], **options)
        assert float(batch.objective[k]) == pytest.approx(one.report.objective, rel=1e-6)
        assert float(batch.value_linear[k]) == pytest.approx(one.value_linear, rel=1e-4)
    auto = batch_of(kind, [0], listed={"M": COSTS}, alpha=0.6)
    one = alone(kind, 0, M=COSTS[0], alpha=0.6)
    if kind != "unbalanced":
        # where the mass is part of the answer, the unit of costs is that of a plan of mass one
        assert float(auto.epsilon[0]) == pytest.approx(one.epsilon, rel=1e-9)
    more = batch_of(kind, epsilon=0.005, n_init=4)
    assert (more.objective <= batch_of(kind, epsilon=0.005).objective).all()
    # the plan is where `solve` stays
    assert more.result(1).report.objective == pytest.approx(float(more.objective[1]), rel=1e-4)


def test_pairs_of_unequal_penalties_are_computed_both_ways():
    options = {"epsilon": 0.1, "unbalanced": (INF, 0)}
    matrix = pairwise(XS[:2], **options, progress=False)
    rows, columns = np.divmod(np.arange(4), 2)
    batch = solve_many([XS[i] for i in rows], [XS[j] for j in columns], **options)
    assert np.array_equal(matrix.ravel(), batch.value)
    assert matrix[0, 1] != matrix[1, 0]
    partial = pairwise(XS[:2], mass=0.8, epsilon=0.1, progress=False)
    assert np.array_equal(partial, partial.T)


def _filled_on_host(weight, full, mass):
    # the factors are one where there is no weight
    return _within_bounds(weight, full, mass)(weight).where(weight > 0, 0.0)


FILLED = pytest.mark.parametrize("filled", [_filled, _filled_on_host])


@FILLED
@pytest.mark.parametrize("scale", [1, 8, 300])
def test_points_are_filled_up_to_the_mass(scale, filled):
    """Their levels may be as far apart as costs over epsilon: hundreds, as logarithms.

    Beyond 300 all plans ended where they began, CONVERGED.
    """
    rng = np.random.default_rng(0)
    weight = torch.from_numpy(rng.dirichlet(np.ones(12), size=(5, 1)))
    weight[1, 0, 3] = 0
    weight[1] /= weight[1].sum()
    full = torch.from_numpy(rng.normal(scale=scale, size=(5, 1, 12)))
    full = full.where(weight > 0, INF)
    # ties
    weight[2], full[2] = 1 / 12, 0.0
    for share in (0.01, 0.5, 0.999):
        mass = torch.full((5,), share, dtype=torch.float64)
        shares = filled(weight, full, mass)
        torch.testing.assert_close((weight * shares).sum((1, 2)), mass, rtol=1e-12, atol=0)
        # one level for all: below it points are full, and above it their shares tell what it is
        level = (full + shares.log()).where((shares < 1) & (weight > 0), INF)
        for row, part, own in zip(level[:, 0], shares[:, 0], full[:, 0], strict=True):
            seen = row[row.isfinite() & (part > 1e-100)]
            if len(seen):
                assert float(seen.max() - seen.min()) < 1e-9
                assert (own[part == 1] <= seen.min() + 1e-9).all()


@FILLED
def test_points_that_are_full_with_nothing_left(filled):
    """The mass was that of 12 of 20 points, and rounding left the level zero: all plans ended."""
    free = torch.tensor(12 * [0.05] + 8 * [1e-25], dtype=torch.float64)
    free = free * torch.linspace(0.9, 1.1, 20, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    parts = torch.stack([free[torch.randperm(20, generator=generator)] for _ in range(50)])[:, None]
    weight = torch.full((50, 1, 20), 0.05, dtype=torch.float64)
    mass = torch.full((50,), 0.6, dtype=torch.float64)
    shares = filled(weight, (weight / parts).log(), mass)
    np.testing.assert_allclose((weight * shares).sum((1, 2)), 0.6, rtol=1e-12)


@pytest.mark.parametrize("starts", [1, 3])
def test_a_problem_whose_numbers_are_lost_is_told(starts, monkeypatch):
    """A KeyError came in place of the others' answers."""

    def settle(self, *terms):
        found = settled(self, *terms)
        lost = torch.where(self.mass > 0.9, math.nan, found.objective)
        return found._replace(objective=lost)

    settled = Relaxed.settle
    monkeypatch.setattr(Relaxed, "settle", settle)
    found = solve_many(XS[:2], YS[:2], mass=[0.7, 0.95], epsilon=0.2, n_init=starts)
    assert np.isfinite(found.objective[0])
    assert np.isnan(found.objective[1])
    assert found.plan(1).shape == SIZES[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mass": 0.5, "unbalanced": 1.0}, "Pass one of"),
        ({"mass": [0.5, 2, 1]}, "`mass` must be"),
        ({"mass": [0.5]}, "one for each of the 3"),
        ({"unbalanced": [0.5, 0.5]}, "each of the 3"),
        ({"unbalanced": 0}, "frees both"),
        ({"unbalanced": 0.5, "M": COSTS, "alpha": 0.0}, "one side strict"),
    ],
)
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(torchgw.TorchGWError, match=message):
        solve_many(XS, YS, **options)


def test_weights_of_relaxed_marginals_have_no_derivatives():
    weights = [torch.from_numpy(weight).requires_grad_() for weight in A]
    with pytest.raises(torchgw.UnsupportedError, match="strict marginals"):
        solve_many(XS, YS, a=weights, mass=0.5, epsilon=0.1, differentiable=True)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_differences_of_relaxed_objectives(kind):
    rng = np.random.default_rng(4)
    inputs = {
        "Xs": [torch.from_numpy(table).requires_grad_() for table in XS],
        "D_Y": [torch.from_numpy(cdist(table, table)).requires_grad_() for table in YS],
        "M": [torch.from_numpy(cost).requires_grad_() for cost in COSTS],
    }

    def solved(**changed):
        return solve_many(
            **{**inputs, **changed}, a=A, b=B, **KINDS[kind], alpha=0.7,
            epsilon=0.5, tol=1e-9, inner_tol=1e-11, differentiable=True,
        )  # fmt: skip

    solved().loss.sum().backward()
    for name, tensors in inputs.items():
        directions = [torch.from_numpy(rng.normal(size=tensor.shape)) for tensor in tensors]
        if name == "D_Y":
            directions = [(part + part.T).fill_diagonal_(0) for part in directions]
        pairs = list(zip(tensors, directions, strict=True))
        ahead, behind = (
            solved(**{name: [at.detach() + step * part for at, part in pairs]}).objective
            for step in (1e-4, -1e-4)
        )
        slopes = torch.stack([(at.grad * part).sum() for at, part in pairs])
        # of differences, the third derivative times 1e-8; of plans, their tolerance
        torch.testing.assert_close(slopes, (ahead - behind) / 2e-4, rtol=1e-4, atol=1e-6)


def test_plans_that_nothing_is_worth_moving_by_are_told():
    with pytest.warns(torchgw.ConvergenceWarning):
        batch = solve_many(
            XS[:1], YS[:1], M=[COSTS[0] + 5], alpha=0.5, unbalanced=0.01, epsilon=0.05
        )
    assert batch.statuses == [torchgw.Status.INNER_LIMIT]
    assert float(batch.marginal_error[0]) == INF


def test_a_mass_of_none_is_strict_as_a_penalty_of_none():
    some, one = (
        solve_many(XS[:2], YS[:2], epsilon=0.1, mass=mass).value
        for mass in ([0.7, None], [0.7, 1.0])
    )
    assert np.array_equal(some, one)
    penalties = solve_many(XS[:2], YS[:2], epsilon=0.1, unbalanced=[1.0, None]).value
    assert penalties[1] == pytest.approx(some[1], rel=1e-6)


def test_a_penalty_beyond_all_tolerances_is_a_strict_marginal_here_too():
    rng = np.random.default_rng(0)
    tables = [cdist(points, points) for points in (rng.normal(size=(n, 2)) for n in (12, 14))]
    given = {"D_X": [tables[0]] * 2, "D_Y": [tables[1]] * 2, "epsilon": 0.05}
    found = solve_many(**given, unbalanced=[1e13, (0.5, 1e13)])
    strict = solve_many(**given, unbalanced=[None, (0.5, np.inf)])
    assert found.objective == pytest.approx(strict.objective, rel=1e-6)


@pytest.mark.parametrize("k", [1, 8])
def test_partial_problems_whose_full_points_exchange_hardly_any_mass_converge(k):
    """The second ended at 2,000 Sinkhorn iterations, again and again."""
    rng = np.random.default_rng(0)
    xs, ys = ([cdist(x, x) for x in rng.normal(size=(20, 16, 2))] for _ in range(2))
    single = solve_many(D_X=xs[k : k + 1], D_Y=ys[k : k + 1], mass=0.7)
    some = slice(k - 1, k + 1)
    among = solve_many(D_X=xs[some], D_Y=ys[some], mass=0.7)
    place = k - some.start
    assert single.converged.all()
    assert among.converged.all()
    assert single.marginal_error.max() < 1e-6
    assert np.array_equal(single.plans()[0], among.plans()[place])
    # a single solve, which has bounds of its own to keep, stays there
    init = single.plans()[0] / single.plans()[0].sum()
    stays = torchgw.solve(D_X=xs[k], D_Y=ys[k], mass=0.7, init=init)
    assert single.objective[0] == pytest.approx(stays.report.objective, rel=1e-5)


def test_partial_plans_that_go_to_and_fro_settle():
    """Three plans came in turn, whose linear problems were not solved well enough."""
    rng = np.random.default_rng(950463696)
    # the draws before those of the problem
    rng.integers(5), rng.integers(2, 4), [rng.choice(k) for k in (3, 3, 5)]
    for _ in range(19):
        x, y = (
            rng.normal(size=(4, 3))[np.arange(24) % 4] + 0.3 * rng.normal(size=(24, 3))
            for _ in range(2)
        )
    found = solve_many([x], [y], mass=0.6)
    assert found.converged.all()
    assert found.n_iter[0] < 200
