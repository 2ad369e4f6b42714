"""Newton steps on small linear problems."""

import numpy as np
import pytest
import torch

import torchgw
from torchgw._problem.problem import MarginalRule
from torchgw._sinkhorn import loop
from torchgw._sinkhorn.eager import EagerBackend
from torchgw._sinkhorn.loop import Plateau, _longest, from_larger_epsilon, newton_step
from torchgw._sinkhorn.problem import STRICT, DenseCost, LinearProblem
from torchgw._typing import Marginals, Potentials


def slow_problem(n=40, m=50, epsilon=1e-3, tau=STRICT):
    rng = np.random.default_rng(0)
    x, y = (torch.as_tensor(rng.random((k, 2))) for k in (n, m))
    a = torch.as_tensor(rng.random(n))
    a[3] = 0
    b = torch.full((m,), 1.0, dtype=torch.float64)
    b[5] = 0
    cost = DenseCost(torch.cdist(x, y).square())
    marginals = Marginals(a / a.sum(), b / b.sum())
    return EagerBackend().prepare(LinearProblem(cost, marginals, epsilon, tau))


def with_and_without(prepared, monkeypatch, steps, **options):
    """Solve with Newton steps, and without those that a function says to pay."""
    found = loop.sinkhorn(prepared, None, **options)
    monkeypatch.setattr(loop, steps, lambda _: False)
    plain = loop.sinkhorn(prepared, None, **options)
    assert found.converged
    assert plain.converged
    return found, plain


@pytest.mark.parametrize(("epsilon", "tau"), [(0.01, STRICT), (1e-3, (0.999, 0.9995))])
def test_the_same_plan_in_fewer_iterations(monkeypatch, epsilon, tau):
    prepared = slow_problem(epsilon=epsilon, tau=tau)
    found, plain = with_and_without(prepared, monkeypatch, "is_small", max_iter=5_000, tol=1e-11)
    # 60 for 130, and 390 for 670
    assert found.n_iters < 0.75 * plain.n_iters
    plans = [prepared.dense(one.potentials) for one in (found, plain)]
    # both have their columns to 1e-11; the rest is what that leaves of slow directions
    torch.testing.assert_close(*plans, rtol=0, atol=1e-9)


@pytest.mark.parametrize("tau", [STRICT, (0.999, 0.99), (1.0, 0.95), (0.95, 1.0)])
def test_the_error_is_squared(tau):
    prepared = slow_problem(epsilon=0.01, tau=tau)
    problem, errors = prepared.problem, []
    state = loop.sinkhorn(prepared, None, max_iter=20, tol=0.0).potentials
    for _ in range(4):
        state = Potentials(prepared.softmin_rows(state.g), state.g)
        columns = prepared.dense(state).sum(0)
        # what a penalty asks of columns
        asked = problem.marginals.b * ((1 - 1 / tau[1]) / problem.epsilon * state.g).exp()
        errors.append(float((columns - asked).abs().sum()))
        state = newton_step(prepared, state)
    assert errors[0] > 1e-6
    # within the constant of quadratic convergence, or at rounding
    assert all(
        after < max(100 * before**2, 1e-14)
        for before, after in zip(errors, errors[1:], strict=False)
    )


def test_points_of_no_weight_stay():
    prepared = slow_problem(epsilon=0.01)
    state = loop.sinkhorn(prepared, None, max_iter=20, tol=0.0).potentials
    assert newton_step(prepared, state).g[5] == state.g[5]


def test_no_step_is_taken_far_from_the_solution():
    prepared = slow_problem(epsilon=1e-4)
    zero = torch.zeros(50, dtype=torch.float64)
    assert newton_step(prepared, Potentials(prepared.softmin(zero, axis=1), zero)) is None


def test_parts_that_share_nothing_do_not_hinder_a_step():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(100, 3))
    y = x + 0.05 * rng.normal(size=x.shape)
    # nearly a permutation: the mass between its parts is below rounding
    result = torchgw.solve(x, y, distances="euclidean", init=np.arange(100))
    # 10; 580 where steps that move such mass are too long to be taken
    assert result.report.settle_iterations <= 50


@pytest.mark.parametrize("change", ["float32", "free", "large"])
def test_other_problems_are_iterated(change):
    prepared = slow_problem()
    problem = prepared.problem
    assert loop.is_small(prepared)
    if change == "float32":
        problem = problem._replace(cost=problem.cost.to(torch.float32))
    elif change == "free":
        problem = problem._replace(tau=(0.9, 0.0))
    else:
        prepared = slow_problem(n=20, m=loop._MOST_POINTS + 1)
        problem = prepared.problem
    assert not loop.is_small(EagerBackend().prepare(problem))


def clusters(n=310, epsilon=0.004):
    """Three clusters on either side, of slightly other masses, so that a little goes between."""
    rng = np.random.default_rng(0)
    centres = np.array([[0.0, 0], [0.35, 0], [0, 0.35]])
    x, y = (centres[np.arange(n) % 3] + 0.06 * rng.normal(size=(n, 2)) for _ in range(2))
    a, b = (torch.as_tensor(1 + 0.02 * rng.random(n)) for _ in range(2))
    a[3], b[5] = 0, 0
    cost = DenseCost(torch.cdist(torch.as_tensor(x), torch.as_tensor(y)).square())
    marginals = Marginals(a / a.sum(), b / b.sum())
    return EagerBackend().prepare(LinearProblem(cost, marginals, epsilon))


def test_sharp_plans_in_fewer_iterations(monkeypatch):
    prepared = clusters(epsilon=5e-4)
    assert loop.may_be_sharp(prepared)
    monkeypatch.setattr(loop, "SPARSE", 0.6)
    options = {"max_iter": 20_000, "tol": 1e-9}
    found, plain = with_and_without(prepared, monkeypatch, "may_be_sharp", **options)
    # 120 for 2,120
    assert found.n_iters < 0.2 * plain.n_iters
    plans = [prepared.dense(one.potentials) for one in (found, plain)]
    torch.testing.assert_close(*plans, rtol=0, atol=1e-8)


def test_wide_plans_have_no_few_entries():
    prepared = clusters(epsilon=1.0)
    zero = torch.zeros_like(prepared.problem.marginals.b)
    assert loop.newton_on_entries(prepared, prepared.half_steps(zero), 1e-9) is None
    assert not loop.may_be_sharp(slow_problem())


def test_steps_on_entries_raise_the_dual_value_and_meet_columns(monkeypatch):
    monkeypatch.setattr(loop, "SPARSE", 1.0)
    prepared = clusters()
    state = prepared.half_steps(torch.zeros_like(prepared.problem.marginals.b))
    a, b = prepared.problem.marginals
    for _ in range(4):
        state = prepared.half_steps(state.g)
    before = Potentials(prepared.softmin_rows(state.g), state.g)
    after = loop.newton_on_entries(prepared, before, 1e-8)
    assert a @ after.f + b @ after.g > a @ before.f + b @ before.g
    missing = [(prepared.dense(each).sum(0) - b).abs().sum() for each in (before, after)]
    assert missing[1] < 1e-3 * missing[0]


@pytest.mark.parametrize("rho", [(0.4, 0.7), (np.inf, 0.3)])
def test_penalties_are_the_same_while_epsilon_rises_and_falls(rho):
    prepared, rule = slow_problem(8, 9, epsilon=0.02), MarginalRule(rho)
    problem, tried = prepared.problem._replace(tau=rule.tau(0.02)), []

    def solve(at, start, *, max_iter, tol):
        tried.append(at.problem)
        return loop.SinkhornResult(start, 0.0, 1, converged=len(tried) > 2)

    start = Potentials(*map(torch.zeros_like, problem.marginals))
    given = prepared.backend.prepare(problem)
    found, used = loop.from_larger_epsilon(given, start, 100, solve, 4.0)
    assert found is start
    assert used == len(tried)
    # up until one is solved at once, and down again
    assert [one.epsilon / 0.02 for one in tried] == pytest.approx([4, 16, 64, 16, 4])
    for one in tried:
        assert one.tau == pytest.approx(rule.tau(one.epsilon))


@pytest.mark.parametrize("scale", [1e-6, 1e-2, 10.0])
def test_an_error_that_stays_is_told_in_time_and_one_that_falls_is_not(scale):
    tol = 1e-3 * scale
    for rate, stays in ((0.9, False), (0.97, False), (0.99, True), (1.0, True), (1.01, True)):
        plateau, before, told = Plateau(tol, wanted=True), 2 * scale, []
        for count in range(30):
            error = scale * rate**count
            told.append(plateau.reached(before, error, 10, 10_000))
            before = error
        # once, after a hundred iterations of the same error
        assert sum(told) == stays
        assert not any(told[:10])
        assert not stays or told.index(True) == 10


def test_larger_epsilons_take_no_more_iterations_than_are_left():
    class Prepared:
        backend = EagerBackend()
        problem = slow_problem(6, 7).problem

    rng, start = np.random.default_rng(0), Potentials(*map(torch.zeros_like, Prepared.problem[1]))
    for most in (5, 40, 300, 1000):
        asked = []

        def solve(prepared, start, *, max_iter, tol, asked=asked, most=most):
            """Use part of a budget, solved now and then; epsilons are powers of ten."""
            assert 0 < max_iter <= most - sum(asked)
            level = np.log10(prepared.problem.epsilon / Prepared.problem.epsilon)
            assert level == pytest.approx(round(level), abs=1e-9)
            asked.append(int(rng.integers(1, max_iter + 1)))
            return loop.SinkhornResult(start, 1e-5, asked[-1], bool(rng.random() < 0.3))

        for _ in range(10):
            asked.clear()
            assert from_larger_epsilon(Prepared, start, most, solve, 10.0)[1] == sum(asked) <= most


@pytest.mark.parametrize("length", [1e-3, 0.1, 10.0])
def test_no_step_of_twice_or_half_the_length_rises_higher(length):
    """The dual value is concave along a step: from a short one and from one far too long."""
    rng = np.random.default_rng(1)
    plan = rng.random((5, 6))
    a, b = plan.sum(1) / plan.sum(), rng.random(6)
    b /= b.sum()
    plan /= plan.sum()
    step = b - plan.sum(0)
    step *= length / np.abs(step).max()

    def value(step):
        return b @ step - a @ np.log(plan @ np.exp(step) / a)

    found, mass, rises = _longest(plan / a[:, None], a, b, step)
    assert rises
    np.testing.assert_allclose(mass, plan @ np.exp(found) / a)
    assert value(found) > 0
    assert value(found) >= max(value(2 * found), value(found / 2))
