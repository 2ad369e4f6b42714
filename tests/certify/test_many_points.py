"""Cutting planes of points: what prices prove is below the least cost, near it, and verified."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

import torchgw
from torchgw._certify import streamed
from torchgw._certify.certificate import digest_of
from torchgw._certify.question import Points, Question
from torchgw._certify.streamed import Prices
from torchgw._certify.verify import _groups, _least_near
from torchgw._problem import limits
from torchgw._sinkhorn.duals import ProductCost, Transport

pytestmark = pytest.mark.filterwarnings("ignore::torchgw.TorchGWWarning")


def clouds(n, m, seed=0):
    """Two unrelated clouds in the plane, and weights of theirs."""
    rng = np.random.default_rng(seed)
    sides = rng.normal(size=(n, 2)) * [1, 0.5], rng.random((m, 2)) ** 2
    return *sides, rng.dirichlet(np.full(n, 5.0)), rng.dirichlet(np.full(m, 5.0))


def test_what_points_are_asked_is_what_tables_are_asked():
    X, Y, a, b = clouds(30, 40)
    points = Points(X, Y, a, b)
    tables = Question(cdist(X, X, "sqeuclidean"), cdist(Y, Y, "sqeuclidean"), a, b, 1.0, None)
    plan = Transport(a, b)(np.random.default_rng(1).normal(size=(30, 40)))[0]
    assert points.constant == pytest.approx(tables.constant)
    read = points.read(torch.from_numpy(plan))
    assert points.value(read) == pytest.approx(tables.value(plan))


def linear_problems(question):
    """Costs of random slopes, and the least that a plan costs: slope, cost, least."""
    (u, _), (v, _) = question.factors
    left, right, _ = question.linear
    for slope in np.random.default_rng(1).normal(size=(3, 2, 2)):
        cost = ProductCost(np.hstack([left, u @ slope]), np.hstack([right, v]))
        exact, _ = Transport(question.a, question.b)(cost.dense())
        yield slope, cost, float((cost.dense() * exact).sum())


def test_prices_prove_nearly_the_least_cost_and_no_more():
    X, Y, a, b = clouds(110, 120)
    question = Points(X, Y, a, b)
    prices = Prices(question, torch.device("cpu"))
    for slope, cost, least in linear_problems(question):
        plan, f, height = prices.reach(cost, -np.inf, np.inf)
        assert least - 1e-2 * question.constant < height <= least + 1e-9
        assert height == pytest.approx(Transport(a, b).bound(cost.dense(), f))
        # and a plan that costs a little more
        sharp = prices.sharp(cost)
        for moments, share in ((plan, 3e-2), (sharp, 3e-3)):
            costs = moments.t + float((slope * moments.z).sum())
            assert least - 1e-9 <= costs < least + share * question.constant


def test_finer_cells_are_taken_where_more_is_asked(monkeypatch):
    # of 8, 32 and, of five points each, 80 cells
    monkeypatch.setattr(streamed, "_CELLS", 8)
    monkeypatch.setattr(streamed, "_LEVELS", ((1.0, 1.0), (1.0, 1.0), (0.25, 0.0)))
    X, Y, a, b = clouds(400, 410)
    question = Points(X, Y, a, b)
    for _, cost, least in linear_problems(question):
        prices = Prices(question, torch.device("cpu"))
        heights = [prices.reach(cost, 0.0, asked)[2] for asked in (np.inf, 0.0)]
        # what is lost falls with the size of the cells
        assert least - heights[1] < (least - heights[0]) / 2
        assert heights[1] <= least + 1e-9


@pytest.mark.parametrize("kind", ["spiral", "ring"])
def test_prices_of_cells_settle_on_thin_shapes(kind, monkeypatch):
    """At the epsilon of 2,000 cells, from nothing: costs of theirs have prices far from flat."""
    rng = np.random.default_rng(0)
    sides = []
    for _ in range(2):
        turn = 2 * np.pi * rng.random(1000)
        length = turn if kind == "spiral" else 1 + 0.1 * rng.random(1000)
        sides.append(length[:, None] * np.column_stack([np.cos(turn), np.sin(turn)]))
    monkeypatch.setattr(streamed, "_EPSILON", 0.15)
    monkeypatch.setattr(streamed, "_CELLS", 2000)
    monkeypatch.setattr(streamed, "_LEVELS", ((1.0, 0.0),))
    found, newton = [], streamed._newton
    monkeypatch.setattr(
        streamed, "_newton", lambda *of: found.append((of, newton(*of))) or found[-1][1]
    )
    question = Points(*sides, np.full(1000, 1e-3), np.full(1000, 1e-3))
    (u, _), (v, _), (left, right, _) = *question.factors, question.linear
    for slope in rng.normal(size=(3, 2, 2)) * 4:
        prices = Prices(question, torch.device("cpu"))
        cost = ProductCost(np.hstack([left, u @ slope]), np.hstack([right, v]))
        (level,) = prices._levels
        left, right = prices._factors(cost)
        prices._of_cells(level, left, right, torch.zeros(1000, dtype=torch.float64))
        (cost, a, b, _, epsilon), (f, g) = found[-1]
        assert epsilon == level.epsilon
        missed = b - a @ (((f[:, None] + g - cost) / epsilon).exp() * b)
        assert float(missed.abs().sum()) < 2e-3


class Weights(NamedTuple):
    a: np.ndarray
    b: np.ndarray


@pytest.mark.parametrize("kind", ["smooth", "rough", "equal"])
def test_groups_that_are_left_out_hold_no_least_entry(kind):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(700, 2)), rng.normal(size=(500, 2))
    if kind == "equal":
        x[100:], y[:] = x[0], y[0]
    left = np.column_stack([(x**2).sum(1), x @ rng.normal(size=(2, 2))])
    right = np.column_stack([-(y**2).sum(1), y])
    f = rng.normal(size=700) * (kind == "rough") - (x**4).sum(1)
    weights = Weights(np.full(700, 1 / 700), rng.dirichlet(np.ones(500)) * (rng.random(500) < 0.9))
    found = _least_near(left, right, f, [_groups(x), _groups(y)], weights)
    least = (left @ right.T - f[:, None]).min(0)
    assert found == pytest.approx(weights.a @ f + weights.b @ least, rel=1e-13)


@pytest.fixture
def few(monkeypatch):
    """Let more than 100 points be too many for tables."""
    monkeypatch.setitem(limits.LIMITS, "cpu", limits.CPU._replace(read=100**2))


def test_many_points_have_a_proof_that_is_verified(few, tmp_path):
    X, Y, a, b = clouds(150, 160)
    result = torchgw.solve(X, Y, a=a, b=b, distances="sqeuclidean", random_state=0)
    # in no time it is known that squares are not negative
    rough = result.certify(0)
    assert 0 <= torchgw.verify(rough.proof, X, Y, a=a, b=b).lower_bound <= rough.best_value
    found = result.certify(60, gap=3e-2)
    assert found.plan is None
    assert found.lower_bound <= found.best_value <= found.value
    assert found.best_value - found.lower_bound <= 3e-2 * found.best_value
    again = torchgw.verify(found.proof, X, Y, a=a, b=b)
    assert again.lower_bound == pytest.approx(found.lower_bound, abs=again.rounding)
    result.save(tmp_path / "many.npz")
    proof = torchgw.load(tmp_path / "many.npz").certificate.proof
    torchgw.verify(proof, X, Y, a=a, b=b)
    with pytest.raises(torchgw.InvalidInputError, match="hold"):
        torchgw.verify(proof, X, Y)
    # whatever numbers it has: a claim above a plan does not follow
    rng = np.random.default_rng(0)
    for name, array in proof.arrays.items():
        for change in (1, -1, np.inf, np.nan):
            changed = array.copy()
            changed.flat[rng.integers(array.size)] += (
                change if array.dtype.kind == "f" or np.isfinite(change) else 7
            )
            forged = dataclasses.replace(
                proof, value=found.best_value * 1.001, arrays={**proof.arrays, name: changed}
            )
            for digest in (proof.digest, digest_of(forged)):
                with pytest.raises(torchgw.InvalidInputError), np.errstate(all="ignore"):
                    torchgw.verify(dataclasses.replace(forged, digest=digest), X, Y, a=a, b=b)


def test_what_many_points_have_no_proof_of_is_refused(few):
    X, Y, _, _ = clouds(110, 110)
    squared = torchgw.solve(X, Y, distances="sqeuclidean", n_init=1)
    with pytest.raises(torchgw.UnsupportedError, match="plans"):
        squared.certify(kind="one_to_one")
    other = torchgw.solve(X, Y, distances="euclidean", n_init=1)
    with pytest.raises(torchgw.UnsupportedError, match="products"):
        other.certify()


@pytest.fixture(scope="module")
def once():
    """A solve that tests read."""
    X, Y, a, b = clouds(110, 120)
    return torchgw.solve(X, Y, a=a, b=b, distances="sqeuclidean", n_init=1)


@pytest.mark.parametrize("wrong", [0.3, 1e87, np.nan])
@pytest.mark.parametrize("which", ["t", "z"])
def test_moments_that_no_plan_has_are_refused(which, wrong, once, few, monkeypatch):
    read = Points.read

    def broken(points, plan):
        moments = read(points, plan)
        if which == "t":
            return moments._replace(t=moments.t - wrong * points.constant)
        return moments._replace(z=moments.z * (1 + 2 * wrong))

    monkeypatch.setattr(Points, "read", broken)
    with pytest.raises(torchgw.NumericalError, match="proven"):
        once.certify(60, gap=3e-2)
