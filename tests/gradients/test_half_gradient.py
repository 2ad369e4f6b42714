"""Products of half-precision parts: the cost of the dense gradient to the rounding of float32."""

from __future__ import annotations

import pytest
import torch
from problems import distance_matrices, random_weights

from torchgw._gradients.dense import DenseGradient, HalfGradient, PlanMatrix, product, split
from torchgw._problem.problem import Problem
from torchgw._sinkhorn.problem import DenseCost
from torchgw._typing import Marginals
from torchgw.distances import PrecomputedDistance

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make(device, unit, alpha=1.0):
    d_x, d_y = (torch.from_numpy(table) for table in distance_matrices(70, 90))
    sides = [PrecomputedDistance(unit * d_x), PrecomputedDistance(d_y)]
    weights = Marginals(*(torch.from_numpy(random_weights(side.n, side.n)) for side in sides))
    generator = torch.Generator().manual_seed(0)
    linear = torch.rand(70, 90, dtype=torch.float64, generator=generator)
    plan = torch.rand(70, 90, dtype=torch.float64, generator=generator).pow(8)
    for _ in range(100):
        plan *= (weights.a / plan.sum(1))[:, None]
        plan *= weights.b / plan.sum(0)
    sides = [side.to(torch.device(device), torch.float64) for side in sides]
    weights = Marginals(*(weight.to(device) for weight in weights))
    cost = DenseCost(linear.to(device)) if alpha < 1 else None
    return Problem(*sides, weights, alpha, cost), plan.to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("unit", [1.0, 1e4, 1e-4])
@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_cost_is_that_of_the_dense_gradient(device, unit, alpha):
    problem, plan = make(device, unit, alpha)
    exact = DenseGradient(problem).linearise(PlanMatrix(plan)).cost.matrix
    half = HalfGradient(problem.to(torch.float32)).linearise(PlanMatrix(plan.float())).cost
    assert half.dtype == torch.float32
    # what a plan sees of a cost; float32 rounds its largest entries
    error = (half.matrix - exact).abs().max()
    assert error < 4e-7 * exact.abs().max()
    assert exact.std() > 1e-3 * exact.abs().max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rough", [False, True])
def test_a_plan_between_few_points_is_in_range(device, rough):
    """The first cost of a solve is that of coarse points, which hold all the mass."""
    problem, _ = make(device, 1.0)
    few = torch.zeros(70, 90, dtype=torch.float64, device=device)
    few[3, 5] = few[60, 80] = 0.5
    # 30 times the weights
    got = (
        HalfGradient(problem.to(torch.float32), rough=rough)
        .linearise(PlanMatrix(few.float()))
        .cost.matrix
    )
    assert got.isfinite().all()
    own = Problem(problem.source, problem.target, Marginals(few.sum(1), few.sum(0)), 1.0, None)
    exact = DenseGradient(own).linearise(PlanMatrix(few)).cost.matrix
    got = (
        HalfGradient(own.to(torch.float32), rough=rough)
        .linearise(PlanMatrix(few.float()))
        .cost.matrix
    )
    assert (got - exact).abs().max() < (2e-3 if rough else 4e-7) * exact.abs().max()


@pytest.mark.parametrize("device", DEVICES)
def test_columns_are_taken_to_have_their_weights(device):
    problem, plan = make(device, 1.0)
    a, b = problem.marginals
    gradient, half = DenseGradient(problem), HalfGradient(problem.to(torch.float32))
    missed = 0.01 * b * torch.linspace(-1, 1, len(b), dtype=b.dtype, device=device)
    wrong = plan + torch.outer(a, missed)

    def centred(matrix):
        matrix = matrix - (matrix @ b)[:, None]
        return matrix - a @ matrix

    expected = centred(gradient.linearise(PlanMatrix(plan)).cost.matrix)
    got = centred(half.linearise(PlanMatrix(wrong.float())).cost.matrix.double())
    raw = centred(gradient.linearise(PlanMatrix(wrong)).cost.matrix)
    assert (got - expected).abs().max() < 1e-6
    assert (raw - expected).abs().max() > 1e-4


@pytest.mark.parametrize("device", DEVICES)
def test_parts_have_twice_the_digits(device):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(50, 60, generator=generator).to(device) for _ in range(2))
    got = product(split(x, dim=1, other=False), split(y.T, dim=0, other=True))
    exact = x.double() @ y.T.double()
    one = product(x.half(), y.T.half())
    assert (got - exact).abs().max() < 4e-5
    assert (one - exact).abs().max() > 1e-3
