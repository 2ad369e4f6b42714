"""The three gradients are one gradient: exact ones agree, the sampled one is unbiased."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch
from problems import random_weights
from scipy.spatial.distance import cdist

from torchgw._anchors import Anchors, redraw, sample_categories
from torchgw._cost import DenseCost
from torchgw._eager_sinkhorn import EagerBackend
from torchgw._gradient import DenseGradient, FactoredGradient, Problem
from torchgw._plan import StoredPlan, TransportPlan
from torchgw._sampled_gradient import SampledGradient
from torchgw._sinkhorn import sinkhorn
from torchgw._typing import Marginals, Potentials
from torchgw.distances import PointDistance, PrecomputedDistance

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(24, 3)), RNG.normal(size=(19, 2))
D_X, D_Y = cdist(X, X, "sqeuclidean"), cdist(Y, Y, "sqeuclidean")
A, B = random_weights(24, 1), random_weights(19, 2)
MARGINALS = Marginals(torch.from_numpy(A), torch.from_numpy(B))
LINEAR = torch.from_numpy(RNG.normal(size=(24, 19)))


def points(values):
    return PointDistance(torch.from_numpy(values), "sqeuclidean")


def table(values):
    return PrecomputedDistance(torch.from_numpy(values))


def problem(source="points", target="points", alpha=1.0, linear=None) -> Problem:
    sides = {"points": (points(X), points(Y)), "table": (table(D_X), table(D_Y))}
    stored = None if linear is None else DenseCost(linear)
    return Problem(sides[source][0], sides[target][1], MARGINALS, alpha, stored)


def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="module")
def plan():
    """A coupling with the right marginals, far from the product."""
    cost = torch.from_numpy(RNG.normal(size=(24, 19)))
    start = Potentials(*map(torch.zeros_like, MARGINALS))
    solved = sinkhorn(
        DenseCost(cost), MARGINALS, start, 0.5, backend=EagerBackend(), max_iter=500, tol=1e-14
    )
    return TransportPlan(DenseCost(cost), solved.potentials, MARGINALS, 0.5)


def whole_cost(gradient, coupling):
    """C(P), with the terms that linearised costs leave out."""
    reduced = gradient.linearise(coupling).dense().matrix
    return (reduced + gradient.row[:, None] + gradient.column).numpy()


def exact_gradients(alpha=1.0, linear=None):
    return [
        DenseGradient(problem("table", "table", alpha, linear)),
        DenseGradient(problem(alpha=alpha, linear=linear)),
        FactoredGradient(problem(alpha=alpha, linear=linear)),
        FactoredGradient(problem("table", "points", alpha, linear)),
        FactoredGradient(problem("points", "table", alpha, linear)),
    ]


@pytest.mark.parametrize(("alpha", "linear"), [(1.0, None), (0.3, LINEAR)])
def test_exact_costs_equal_the_reference(plan, alpha, linear):
    matrix = plan.to_dense().numpy()
    expected = 2 * alpha * reference.gw_cost(D_X, D_Y, matrix)
    if linear is not None:
        expected = expected + (1 - alpha) * linear.numpy()
    for gradient in exact_gradients(alpha, linear):
        for source in (plan, StoredPlan(torch.from_numpy(matrix))):
            coupling = gradient.update(source, None, generator())
            cost = whole_cost(gradient, coupling)
            np.testing.assert_allclose(cost, expected, atol=1e-11 * np.abs(expected).max())


def test_exact_values_equal_the_reference(plan):
    expected = reference.gw_value(D_X, D_Y, plan.to_dense().numpy())
    masses = Marginals(*plan.marginals())
    for gradient in exact_gradients():
        value = gradient.evaluate(plan, masses, generator())
        assert value.standard_error == 0
        assert value.value == pytest.approx(expected, rel=1e-12)


def test_every_gradient_starts_at_the_product_plan():
    expected = 2 * reference.gw_cost(D_X, D_Y, np.outer(A, B))
    sampled = SampledGradient(problem("table", "table"), 16, 1.0)
    for gradient in [*exact_gradients(), sampled]:
        cost = whole_cost(gradient, gradient.start())
        np.testing.assert_allclose(cost, expected, atol=1e-11 * np.abs(expected).max())


def test_change_is_relative_and_zero_at_a_fixed_point(plan):
    for gradient in exact_gradients():
        coupling = gradient.update(plan, None, generator())
        assert float(gradient.change(coupling, coupling)) == 0
        assert 0.01 < float(gradient.change(coupling, gradient.start())) <= 2


def test_sampled_cost_is_unbiased(plan):
    """The mean over independent draws is the exact cost within five standard errors."""
    gradient = SampledGradient(problem("table", "table"), 50, 1.0)
    random = generator()
    draws = torch.stack(
        [
            torch.from_numpy(whole_cost(gradient, gradient.update(plan, None, random)))
            for _ in range(400)
        ]
    )
    expected = 2 * reference.gw_cost(D_X, D_Y, plan.to_dense().numpy())
    error = draws.std(0) / 400**0.5
    assert (error > 0).all()
    deviation = (draws.mean(0) - torch.from_numpy(expected)).abs() / error
    assert deviation.max() < 5
    # and the errors are of the size that they claim
    assert 0.5 < deviation.square().mean().sqrt() < 1.5


def test_sampled_value_is_unbiased_with_an_honest_error(plan):
    gradient = SampledGradient(problem("table", "table"), 40, 1.0)
    masses, random = Marginals(*plan.marginals()), generator()
    estimates = [gradient.evaluate(plan, masses, random) for _ in range(400)]
    values = np.array([estimate.value for estimate in estimates])
    expected = reference.gw_value(D_X, D_Y, plan.to_dense().numpy())
    claimed = np.sqrt(np.mean([estimate.standard_error**2 for estimate in estimates]))
    assert abs(values.mean() - expected) < 5 * values.std() / 20
    assert claimed == pytest.approx(values.std(), rel=0.2)


def test_one_anchor_has_no_standard_error(plan):
    gradient = SampledGradient(problem("table", "table"), 1, 1.0)
    value = gradient.evaluate(plan, Marginals(*plan.marginals()), generator())
    assert np.isfinite(value.value)
    assert np.isnan(value.standard_error)


def test_momentum_keeps_its_share_of_anchors(plan):
    gradient = SampledGradient(problem("table", "table"), 100, 0.3)
    random = generator()
    first = gradient.update(plan, None, random)
    marked = Anchors(first.source + 1000, first.target)
    second = gradient.update(plan, marked, random)
    assert int((second.source >= 1000).sum()) == 70
    everything = redraw(marked, first, random)
    assert int((everything.source >= 1000).sum()) == 0


@pytest.mark.parametrize("limit", [2**24, 3])
def test_categories_follow_their_weights(monkeypatch, limit):
    """Both ways to draw: torch.multinomial, and inverse sums past its limit."""
    monkeypatch.setattr("torchgw._anchors._MULTINOMIAL_LIMIT", limit)
    weights = torch.tensor([[0.0, 1.0, 3.0, 0.0], [2.0, 0.0, 0.0, 2.0]], dtype=torch.float64)
    drawn = sample_categories(weights, 20_000, generator())
    assert drawn.shape == (2, 20_000)
    for row, weight in zip(drawn, weights, strict=True):
        share = torch.bincount(row, minlength=4) / 20_000
        # five standard deviations of a share of 1/2
        assert (share - weight / weight.sum()).abs().max() < 5 * 0.5 / 20_000**0.5
        assert share[weight == 0].sum() == 0


def test_noise_of_a_sampled_cost_is_what_it_varies_by(plan):
    """Against the spread of many draws of the doubly centred cost."""
    gradient, random = SampledGradient(problem("table", "table"), 60, 1.0), generator()
    a, b = (torch.from_numpy(weight) for weight in (A, B))
    costs, noises = [], []
    for _ in range(200):
        anchors = gradient.update(plan, None, random)
        cost = gradient.linearise(anchors).dense().matrix
        cost = cost - a @ cost
        costs.append(cost - (cost @ b)[:, None])
        noises.append(gradient.noise(anchors))
    draws = torch.stack(costs)
    spread = float((a @ draws.var(0) @ b).sqrt())
    size = float((a @ draws.mean(0).square() @ b).sqrt())
    claimed = np.sqrt(np.mean([noise.standard_error**2 for noise in noises]))
    assert claimed == pytest.approx(spread, rel=0.1)
    assert np.sqrt(np.mean([noise.size**2 for noise in noises])) == pytest.approx(size, rel=0.1)
