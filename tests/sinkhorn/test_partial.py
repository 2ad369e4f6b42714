"""Linear partial problems whose epsilon is so small that points change partners one by one."""

import numpy as np
import pytest
import scipy
import torch

from torchgw._sinkhorn.eager import EagerBackend
from torchgw._sinkhorn.loop import FURTHEST
from torchgw._sinkhorn.partial import device_level, host_level, newton_on_bounds, partial_sinkhorn
from torchgw._sinkhorn.problem import DenseCost, LinearProblem
from torchgw._typing import Marginals


def _sharp(n: int, m: int, seed: int, epsilon: float) -> LinearProblem:
    rng = np.random.default_rng(seed)
    cost = DenseCost(torch.from_numpy(rng.random((n, m))))
    a, b = torch.from_numpy(rng.random(n) + 0.1), torch.full((m,), 1 / m, dtype=torch.float64)
    return LinearProblem(cost, Marginals(a / a.sum(), b), epsilon)


def _least_cost(problem: LinearProblem, mass: float) -> float:
    """Solve without entropy."""
    n, m = problem.cost.shape
    rows = scipy.sparse.kron(scipy.sparse.eye_array(n), np.ones((1, m)))
    columns = scipy.sparse.kron(np.ones((1, n)), scipy.sparse.eye_array(m))
    found = scipy.optimize.linprog(
        problem.cost.dense().matrix.numpy().ravel(),
        A_ub=scipy.sparse.vstack([rows, columns]).tocsr(),
        b_ub=np.concatenate([part.numpy() for part in problem.marginals]),
        A_eq=np.ones((1, n * m)),
        b_eq=[mass],
    )
    return found.fun


@pytest.mark.parametrize("mass", [0.6, 0.9])
@pytest.mark.parametrize("epsilon", [1e-4, 1e-6])
@pytest.mark.parametrize(("n", "m"), [(25, 30), (40, 12), (70, 80)])
def test_sharp_problems_are_solved_from_larger_epsilons(n, m, epsilon, mass):
    """At one epsilon 11 of these 12 do not end so soon: errors stay at up to .4."""
    problem = _sharp(n, m, 3, epsilon)
    prepared = EagerBackend().prepare(problem)
    found = partial_sinkhorn(prepared, None, mass=mass, max_iter=2000, tol=1e-7)
    assert found.converged
    plan = prepared.dense(found.potentials)
    a, b = problem.marginals
    assert (plan.sum(1) - a).max() <= 1e-7
    assert (plan.sum(0) - b).max() <= 1e-7
    assert float(plan.sum()) == pytest.approx(mass, abs=1e-7)
    # entropy is worth at most epsilon log(n m)
    least = _least_cost(problem, mass)
    assert -1e-7 <= float((plan * problem.cost.dense().matrix).sum()) - least <= 10 * epsilon


def test_too_few_iterations_to_come_back_leave_what_there_was():
    problem = EagerBackend().prepare(_sharp(25, 30, 3, 1e-6))
    limited = {"mass": 0.6, "max_iter": 480, "tol": 1e-7}
    found = partial_sinkhorn(problem, None, **limited)
    stayed = partial_sinkhorn(problem, None, **limited, from_above=False)
    assert not found.converged
    assert found.error < 1.1 * stayed.error


@pytest.mark.parametrize("find", [host_level, device_level])
@pytest.mark.parametrize("epsilon", [1e-6, 1.0, 30.0])
def test_at_its_level_a_side_has_the_mass(find, epsilon):
    """All of it, where rounding asks for more than there is; points of no weight have no say."""
    for seed in range(40):
        rng = np.random.default_rng([3, seed])
        n = int(rng.integers(1, 30))
        softmin = rng.normal(size=n).round(int(rng.integers(1, 9)))
        weight = rng.random(n) * (rng.random(n) < 0.8)
        weight[rng.integers(n)] = 1.0
        for share in (1e-9, rng.random(), 1 - 1e-12, 1 + 4e-16):
            mass = share * weight.sum()
            given = softmin, weight
            if find is device_level:
                given = map(torch.from_numpy, given)
            with np.errstate(all="ignore"):
                height = float(find(*given, mass, epsilon))
            assert height <= softmin[weight > 0].max()
            filled = weight * np.exp(np.minimum(0, (height - softmin) / epsilon))
            # a level in float64 is known to its rounding over epsilon
            assert filled.sum() == pytest.approx(mass, rel=1e-12 + 1e-15 / epsilon)


@pytest.mark.parametrize("tol", [1e-3, 1e-8])
def test_newtons_method_on_bounds_ends_solved_or_far_away(tol):
    ends = set()
    for seed in range(30):
        rng = np.random.default_rng([5, seed])
        n, m = rng.integers(3, 12, size=2)
        a, b = rng.random(n) + 0.1, rng.random(m) + 0.1
        a, b, mass = a / a.sum(), b / b.sum(), rng.uniform(0.2, 0.9)
        cost, g = rng.random((n, m)) * 10 ** rng.uniform(0, 3), np.zeros(m)
        rows = -np.log(np.exp(-cost) @ b)
        with np.errstate(divide="ignore"):
            height = host_level(rows, a, mass, 1.0)
        f = np.minimum(0, rows - height) + height
        plan = a[:, None] * b * np.exp(f[:, None] - cost)
        found = newton_on_bounds(plan, (f, g), (a, b), mass, tol)
        moved = abs(found.columns).max()
        assert found.far == (moved > FURTHEST)
        ends.add(found.far)
        if found.far:
            continue
        now = plan * np.exp(found.rows[:, None] + found.columns)
        assert now.sum() == pytest.approx(mass, abs=1e-12)
        assert (now.sum(1) <= a + 1e-12).all()
        potentials = g + found.columns
        assert (potentials <= 0).all()
        # columns below their bounds have no price, the others meet them
        error = np.where(potentials < 0, abs(now.sum(0) - b), (now.sum(0) - b).clip(0))
        # what rounding of the dual value leaves has nothing to gain
        assert found.solved or tol < 1e-6
        assert error.sum() <= (tol / 2 if found.solved else 3e-8)
    assert ends == {True, False}
