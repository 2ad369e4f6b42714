"""The loop of conditional gradient, and linear problems by the marginals that hold."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from problems import random_weights
from scipy.optimize import linprog

from torchgw._problem.problem import MarginalRule
from torchgw._sinkhorn.exact import LARGE, by_scipy
from torchgw._solve.polish import (
    _vertices,
    best_length,
    descend,
    oracle,
    plan_of,
    scale_to_marginals,
    take_steps,
)
from torchgw._typing import Marginals

P, Q = random_weights(7), random_weights(5, 1)
RULES = {
    "strict": None,
    "free": MarginalRule((math.inf, 0.0)),
    "bounds": MarginalRule(mass=0.6),
    "bounds that are met": MarginalRule(mass=1.0),
}


def rows_and_columns(n, m):
    return np.kron(np.eye(n), np.ones(m)), np.kron(np.ones(n), np.eye(m))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("sign", [1, -1])
def test_oracles_find_plans_of_least_cost(name, sign):
    """Compared with a linear program over the polytope of the rule."""
    cost, rule = sign * np.random.default_rng(0).random((7, 5)), RULES[name]
    rows, columns = rows_and_columns(7, 5)
    if rule is None:
        held = {"A_eq": np.vstack([rows, columns]), "b_eq": np.append(P, Q)}
    elif rule.mass is None:
        held = {"A_eq": rows, "b_eq": P}
    else:
        held = {"A_ub": np.vstack([rows, columns]), "b_ub": np.append(P, Q)}
        held |= {"A_eq": np.ones((1, 35)), "b_eq": [rule.mass]}
    expected = linprog(cost.ravel(), **held).fun
    solve = oracle(P, Q, rule)
    for _ in range(2):
        plan = solve(cost).plan
        assert np.vdot(plan, cost) == pytest.approx(expected, abs=1e-12)
        assert plan.min() >= 0
        masses = held.get("A_eq") @ plan.ravel()
        np.testing.assert_allclose(masses, held["b_eq"], atol=1e-12)
        if "A_ub" in held:
            assert (held["A_ub"] @ plan.ravel() <= held["b_ub"] + 1e-12).all()


@pytest.mark.parametrize(("unit", "mass"), [(1e-12, 1.0), (1.0, 1e-6), (1e12, 1e6)])
def test_linear_problems_of_any_weights_and_units_are_solved_to_rounding(unit, mass):
    """The prices prove the plan, which meets weights of twelve decades."""
    for seed in range(24):
        rng = np.random.default_rng([7, seed])
        n, m = rng.integers(1, 25, size=2)
        p, q = (10 ** rng.uniform(-12 * (seed % 3 > 0), 0, size) for size in (n, m))
        p, q = mass * p / p.sum(), mass * q / q.sum()
        points = rng.normal(size=(n, 1)), rng.normal(size=m)
        cost = unit * (abs(points[0] - points[1]) if seed % 2 else rng.random((n, m)) - 0.5)
        plan, u, v = by_scipy(p, q, cost)
        assert plan.min() >= 0
        np.testing.assert_allclose(plan.sum(1), p, atol=1e-12 * mass, rtol=0)
        np.testing.assert_allclose(plan.sum(0), q, atol=1e-12 * mass, rtol=0)
        assert (cost - u[:, None] - v).min() >= -1e-12 * unit
        assert np.vdot(cost, plan) - p @ u - q @ v <= 1e-11 * mass * unit


def test_large_problems_on_part_of_their_entries_are_exact():
    ot = pytest.importorskip("ot")
    rng = np.random.default_rng(0)
    p, q = random_weights(LARGE + 9), random_weights(LARGE, 1)
    cost, solve = rng.random((len(p), len(q))), oracle(p, q, None)
    for _ in range(3):
        found = solve(cost)
        value = ot.emd2(p, q, cost)
        assert np.vdot(found.plan, cost) == pytest.approx(value, rel=1e-9)
        u, v = found.potentials()
        assert p @ u + q @ v == pytest.approx(value, rel=1e-9)
        assert (cost - u[:, None] - v).min() >= -1e-9
        # other prices, as from one linearisation to the next
        cost = cost + 0.3 * rng.random(cost.shape)


@pytest.mark.parametrize("bend", [2.0, 0.3, 0.0, -0.5])
@pytest.mark.parametrize("slope", [-1.0, 0.0, 0.4])
def test_lengths_are_the_best(bend, slope):
    lengths = np.linspace(0, 1, 1001)
    best = best_length(bend, slope)
    assert 0 <= best <= 1
    assert bend * best**2 + slope * best <= (bend * lengths**2 + slope * lengths).min() + 1e-12


class Simplex:
    """Minimise |x - aim|^2 over the simplex, by steps to its corners."""

    def __init__(self, aim, ends_after=10_000):
        self.aim, self.point, self.left = aim, np.eye(len(aim))[0], ends_after

    def begin(self):
        return float(((self.point - self.aim) ** 2).sum())

    def look(self):
        self.left -= 1
        if self.left < 0:
            return None
        slope = 2 * (self.point - self.aim)
        self.ahead = np.eye(len(self.aim))[slope.argmin()] - self.point
        return float((self.ahead**2).sum()), float(slope @ self.ahead)

    def go(self, length):
        self.point = self.point + length * self.ahead


def test_steps_descend_to_the_optimum_and_say_what_it_is_worth(capsys):
    aim = np.array([0.2, 0.5, 0.3])
    path = Simplex(aim)
    found = take_steps(path, max_iter=3000, tol_rel=0.0, tol_abs=1e-12, verbose=True)
    assert found.converged
    assert (np.diff(found.losses) <= 1e-15).all()
    # the method ends at a rate of one over the number of steps
    assert found.value == pytest.approx(((path.point - aim) ** 2).sum(), abs=1e-12)
    assert found.value < 1e-4
    # steps are counted from one, each with the objective that it has led to
    said = [line.split("|") for line in capsys.readouterr().err.splitlines()]
    assert [int(count) for count, *_ in said] == list(range(1, len(found.losses)))
    assert [float(value) for _, value, _ in said] == pytest.approx(found.losses[1:], rel=1e-5)


def test_a_path_may_end_steps_and_one_step_is_taken_at_least():
    aim = np.array([0.2, 0.5, 0.3])
    assert len(take_steps(Simplex(aim, 4), max_iter=100).losses) == 5
    assert len(take_steps(Simplex(aim), max_iter=0, tol_rel=1e-9).losses) == 2
    assert not take_steps(Simplex(aim), max_iter=3, tol_rel=1e-9).converged
    assert take_steps(Simplex(np.eye(3)[0]), max_iter=3, tol_rel=1e-9).converged


@pytest.mark.parametrize("name", ["strict", "free", "bounds"])
@pytest.mark.parametrize("sign", [1, -1])
def test_polishing_comes_to_an_end_at_the_least_of_a_face(name, sign):
    """Of tables of rank one, whose faces are flat; what all plans cost alike does not matter."""
    rng, rule = np.random.default_rng(3), RULES[name]
    marginals = Marginals(torch.from_numpy(P), torch.from_numpy(Q))
    start = torch.outer(*marginals)
    for rank in (1, 3):
        x, y = (torch.from_numpy(rng.normal(size=(n, rank))) for n in (7, 5))
        x, y = sign * x @ x.T, y @ y.T
        linear = torch.from_numpy(rng.random((7, 5)))

        def cost_at(plan, x=x, y=y, linear=linear):
            squares = (x.square() @ plan.sum(1))[:, None] + y.square() @ plan.sum(0)
            return 2 * (squares - 2 * x @ plan @ y) + linear - plan.square().sum()

        def value(plan, x=x, y=y, linear=linear):
            squares = plan.sum(1) @ x.square() @ plan.sum(1) + plan.sum(0) @ y.square() @ plan.sum(
                0
            )
            return float(squares + ((linear - 2 * x @ plan @ y) * plan).sum())

        plan, polished = descend(start, marginals, rule, cost_at)
        assert polished.stationary
        assert float(plan.min()) > -1e-15
        assert value(plan) < value(start)
        # no way to a vertex goes down
        vertex = torch.from_numpy(oracle(P, Q, rule)(cost_at(plan).numpy()).plan)
        for share in (1e-3, 1e-2, 0.1):
            there = torch.lerp(plan, vertex / vertex.sum(), share)
            assert value(there) >= value(plan) - 1e-8


@pytest.mark.parametrize("free", [0, 1])
def test_vertices_of_one_free_side_are_of_least_cost(free):
    """Whatever the cost is, each point of the strict side goes where it costs least."""
    marginals = Marginals(*map(torch.from_numpy, (P, Q)))
    rule = MarginalRule((0.0, math.inf) if free == 0 else (math.inf, 0.0))
    vertex, rng = _vertices(marginals, rule), np.random.default_rng(0)
    for _ in range(10):
        cost = torch.from_numpy(rng.normal(size=(7, 5)))
        plan = vertex(cost, -math.inf)
        torch.testing.assert_close(plan.sum(free), marginals[1 - free], rtol=1e-14, atol=0)
        least = float(cost.amin(free) @ marginals[1 - free])
        assert float((cost * plan).sum()) == pytest.approx(least, rel=1e-12)


def test_plans_are_read_as_what_they_are_and_scaled_to_their_marginals():
    rng = np.random.default_rng(0)
    a, b = (torch.from_numpy(random_weights(size, 2)) for size in (7, 5))
    a[2], b[4] = 0, 0
    marginals = Marginals(a / a.sum(), b / b.sum())
    for share in (0.0, 0.4):
        held = torch.from_numpy((rng.random((7, 5)) >= share) + 0.0) + torch.eye(7, 5)
        matrix = held.double() * marginals.a[:, None] * marginals.b
        plan = plan_of(matrix, marginals).to_dense()
        torch.testing.assert_close(plan, matrix, rtol=1e-12, atol=1e-200)
        scaled = scale_to_marginals(matrix, marginals)
        assert scaled is not None
        assert torch.equal(scaled > 0, matrix > 0)
        for axis, weight in enumerate(marginals):
            torch.testing.assert_close(scaled.sum(1 - axis), weight, rtol=0, atol=1e-12)
