"""Batches of small linear problems: against one problem at a time, and Triton against PyTorch."""

from __future__ import annotations

import pytest
import reference
import torch

from torchgw._sinkhorn.eager import solve_batch
from torchgw._sinkhorn.kernels.operands import interpreted
from torchgw._typing import Marginals

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not interpreted(), reason="not interpreted")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
EPSILON = [0.3, 0.05, 1.0]


def problems(s, t, device="cpu"):
    generator = torch.Generator().manual_seed(s + t)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator).to(device)

    a, b = (weight / weight.sum() for weight in (uniform(s) + 0.1, uniform(t) + 0.1))
    epsilon = torch.tensor(EPSILON, dtype=torch.float64, device=device)
    return uniform(3, s, t), Marginals(a.double(), b.double()), 0.1 * uniform(3, 1, t), epsilon


@pytest.mark.parametrize("relaxation", [1.0, 1.5])
def test_reaches_the_plan_of_each_problem(relaxation):
    costs, marginals, g, epsilon = problems(7, 9)
    done = solve_batch(costs.double(), marginals, g, epsilon, 400, relaxation)
    for cost, plan, potential, unit in zip(costs, done.plans, done.g, EPSILON, strict=True):
        table, a, b = (part.double().numpy() for part in (cost, *marginals))
        f, h, _ = reference.sinkhorn(table, a, b, unit, 400)
        expected = reference.plan(table, a, b, f, h, unit)
        torch.testing.assert_close(plan, torch.as_tensor(expected), rtol=1e-6, atol=1e-9)
        # the potential makes the plan: its softmin gives rows of mass a
        weight = marginals.b * ((potential[0] - cost.double()) / unit).exp()
        rows = marginals.a[:, None] * weight / weight.sum(1, keepdim=True)
        torch.testing.assert_close(rows, plan, rtol=1e-6, atol=1e-9)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("s", "t"), [(1, 1), (5, 40), (96, 96), (130, 33), (200, 256)])
def test_triton_equals_pytorch(s, t, device):
    from torchgw._sinkhorn.kernels.batch import solve_by_programs as by_triton

    costs, marginals, g, epsilon = problems(s, t, device)
    expected = solve_batch(costs, marginals, g, epsilon, 4, 1.5)
    got = by_triton(costs, marginals, g, epsilon, 4, 1.5)
    # float32 sums of up to 256 terms in another order, and exponents of up to 70
    torch.testing.assert_close(got.plans, expected.plans, rtol=2e-4, atol=1e-8)
    torch.testing.assert_close(got.g, expected.g, rtol=2e-4, atol=1e-5)
    assert float(expected.plans.sum()) == pytest.approx(3, rel=1e-4)


@pytest.mark.gpu
def test_recorded_operations_equal_called_ones(monkeypatch):
    from torchgw._sinkhorn.kernels import batch

    monkeypatch.setattr(batch, "_MOST_POINTS", 10)
    monkeypatch.setattr(batch, "_RECORDED_ENTRIES", 3 * 40 * 50)
    solver, results = batch.RecordingSolver(), []
    # of each kind a call, one that records, and replays; the last has too many entries
    for s, t, iterations in [*4 * [(40, 50, 3)], *3 * [(20, 12, 3), (20, 12, 7)], (41, 50, 3)]:
        costs, marginals, g, epsilon = problems(s, t, "cuda")
        costs = costs + 0.1 * len(results) * torch.rand_like(costs)
        expected = solve_batch(costs, marginals, g, epsilon, iterations, 1.5)
        results.append((solver(costs, marginals, g, epsilon, iterations, 1.5), expected))
    # none is overwritten by a later one
    for got, expected in results:
        torch.testing.assert_close(got.plans, expected.plans, rtol=1e-4, atol=1e-8)
        torch.testing.assert_close(got.g, expected.g, rtol=1e-4, atol=1e-6)
    assert len(solver._graphs) == 3
