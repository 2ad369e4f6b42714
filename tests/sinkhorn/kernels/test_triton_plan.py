"""What the Triton kernels read off a plan, against the dense plan in float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernel_cases import EPSILON, factored, warm, weights, wide

from torchgw._plans.transport import TransportPlan
from torchgw._sinkhorn.kernels import read_off
from torchgw._sinkhorn.kernels.operands import KernelPlan, operands
from torchgw._sinkhorn.problem import Cost, DenseCost, LinearProblem
from torchgw._triton_sinkhorn import TritonBackend
from torchgw._typing import Marginals, Potentials

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")

# Relative error of an entry of the plan: that of the exponent, see test_triton_sinkhorn. Products
# are compared with sums of absolute values.
TOLERANCE = {torch.float32: 5e-5, torch.float64: 1e-12}


def kernel_plan(cost: Cost, marginals: Marginals, potentials: Potentials) -> KernelPlan:
    return KernelPlan(operands(cost, EPSILON), marginals, potentials, EPSILON)


def problem(
    n: int, m: int, kind: str, device: torch.device, dtype: torch.dtype
) -> tuple[Cost, Marginals, Potentials, torch.Tensor]:
    """Return a cost, weights, potentials, and the plan as a matrix in float64."""
    cost: Cost = factored(n, m, 3, device, dtype)
    if kind == "dense":
        cost = cost.dense()
    elif kind == "transposed":
        cost = DenseCost(cost.dense().matrix.T.contiguous().T)
    marginals = weights(n, m, device, dtype)
    potentials = warm(cost, marginals)
    plan = cost.to(torch.float64).exponent(*wide(*potentials), EPSILON).exp_()
    a, b = wide(*marginals)
    return cost, marginals, potentials, plan * a[:, None] * b


@pytest.mark.parametrize("kind", ["factored", "dense", "transposed"])
@pytest.mark.parametrize(("n", "m", "channels"), [(1, 1, 2), (33, 130, 1), (33, 130, 70)])
def test_apply(
    n: int, m: int, channels: int, kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    cost, marginals, potentials, plan = problem(n, m, kind, device, dtype)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(m, channels, generator=generator).to(device, dtype)
    expected, size = plan @ values.double(), plan @ values.double().abs()
    got = TritonBackend().prepare(LinearProblem(cost, marginals, EPSILON)).apply(potentials, values)
    assert got.dtype == dtype
    assert bool(((got - expected).abs() <= TOLERANCE[dtype] * size).all())
    assert float(expected.abs().max()) > 0


@pytest.mark.parametrize("kind", ["dense", "transposed"])
def test_apply_to_whole_vectors(
    kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix whose sizes are multiples of 16 has a variant of the kernel, which says the same."""
    cost, marginals, potentials, _ = problem(48, 160, kind, device, torch.float32)
    values = torch.randn(160, 3, generator=torch.Generator().manual_seed(0)).to(device)
    plan = kernel_plan(cost, marginals, potentials)
    assert not plan.cost.constants()["ALIGNED"]
    expected = read_off.apply(plan, values)
    monkeypatch.setattr("torchgw._sinkhorn.kernels.operands._ALIGNED_ENTRIES", 0)
    assert plan.cost.constants()["ALIGNED"]
    torch.testing.assert_close(read_off.apply(plan, values), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("kind", ["factored", "dense", "transposed"])
@pytest.mark.parametrize(("n", "m"), [(1, 1), (33, 300)])
def test_dense(n: int, m: int, kind: str, dtype: torch.dtype, device: torch.device) -> None:
    cost, marginals, potentials, plan = problem(n, m, kind, device, dtype)
    got = TritonBackend().prepare(LinearProblem(cost, marginals, EPSILON)).dense(potentials)
    assert got.dtype == dtype
    assert bool(((got - plan).abs() <= TOLERANCE[dtype] * plan).all())
    assert float(plan.max()) > 0


def test_apply_in_splits(device: torch.device) -> None:
    cost, marginals, potentials, plan = problem(20, 300, "factored", device, torch.float32)
    values = torch.ones(300, 3, device=device)
    for splits in (1, 3):
        got = read_off.apply(kernel_plan(cost, marginals, potentials), values, splits=splits)
        expected = plan.sum(1, keepdim=True)
        assert bool(((got - expected).abs() <= TOLERANCE[torch.float32] * expected).all())


def test_marginals_of_both_sides(device: torch.device) -> None:
    cost, marginals, potentials, plan = problem(17, 40, "factored", device, torch.float64)
    ones = torch.ones(17, 1, dtype=torch.float64, device=device)
    turned = TritonBackend().prepare(LinearProblem(cost, marginals, EPSILON)).T
    columns = turned.apply(Potentials(*potentials[::-1]), ones)
    # g is the softmin of f, so that the columns are exact, a weight of zero included
    assert torch.allclose(columns[:, 0], marginals.b, rtol=1e-12, atol=1e-15)
    assert torch.allclose(columns[:, 0], plan.sum(0), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kind", ["factored", "dense", "transposed"])
def test_topk(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    cost, marginals, potentials, plan = problem(33, 200, kind, device, dtype)
    values, columns = read_off.topk(kernel_plan(cost, marginals, potentials), 4)
    # conditional rows, as a row of weight zero has its best partners too
    conditional = cost.to(torch.float64).exponent(*wide(*potentials), EPSILON).exp_()
    expected = (conditional * marginals.b.double()).topk(4, dim=1)
    assert torch.equal(columns, expected.indices)
    exact = plan.gather(1, columns)
    assert bool(((values - exact).abs() <= TOLERANCE[dtype] * exact).all())


def test_topk_of_ties_and_zeros(device: torch.device) -> None:
    cost = DenseCost(torch.zeros(2, 5, device=device))
    b = torch.tensor([0.0, 0.25, 0.5, 0.25, 0.0], device=device)
    potentials = Potentials(torch.zeros(2, device=device), torch.zeros(5, device=device))
    marginals = Marginals(torch.full((2,), 0.5, device=device), b)
    plan = KernelPlan(operands(cost, 1.0), marginals, potentials, 1.0)
    values, columns = read_off.topk(plan, 5)
    assert columns.tolist() == [[2, 1, 3, 0, 4]] * 2
    assert torch.allclose(values, 0.5 * b[columns], rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", [pytest.param("factored", marks=pytest.mark.slow), "dense"])
def test_sample(kind: str, device: torch.device) -> None:
    cost, marginals, potentials, plan = problem(3, 8, kind, device, torch.float32)
    given, count = kernel_plan(cost, marginals, potentials), 1500
    rows = torch.arange(2, device=device).repeat_interleave(count)

    def draw(seed: int) -> torch.Tensor:
        return read_off.sample(given, rows, torch.tensor(seed, device=device))

    columns = draw(7)
    assert torch.equal(columns, draw(7))
    assert not torch.equal(columns, draw(8))
    for row in range(2):
        drawn = torch.bincount(columns[rows == row], minlength=8).double()
        expected = count * plan[row] / plan[row].sum() if row != 1 else None
        if expected is None:
            # the weight of row 1 is zero; its conditional plan is still defined
            conditional = cost.rows(slice(1, 2)).to(torch.float64)
            exponent = conditional.exponent(
                potentials.f[1:2].double(), potentials.g.double(), EPSILON
            )
            expected = (exponent.exp() * marginals.b.double())[0]
            expected = count * expected / expected.sum()
        # five standard deviations of a binomial count, and one draw for the rare ones
        assert bool(((drawn - expected).abs() <= 5 * expected.sqrt() + 1).all())
        assert drawn[4] == 0


def test_plan_reads_by_the_backend(device: torch.device) -> None:
    cost, marginals, potentials, plan = problem(33, 200, "factored", device, torch.float32)
    lazy = TransportPlan(cost, potentials, marginals, EPSILON, TritonBackend())
    used = marginals.a > 0
    assert torch.equal(lazy.argmax()[used], plan[used].argmax(1))
    # more than a few are sorted, with the same outcome
    for k in (3, 20):
        values, columns = lazy.topk(k)
        expected = plan.topk(k, dim=1)
        assert torch.equal(columns[used], expected.indices[used])
        exact = expected.values
        assert bool(((values - exact).abs() <= TOLERANCE[torch.float32] * exact)[used].all())

    def draw(seed: int) -> list[list[int]]:
        generator = torch.Generator(device).manual_seed(seed)
        drawn = [lazy.sample(50, generator) for _ in range(2)]
        return [part.target.tolist() for part in drawn]

    first = draw(1)
    assert first == draw(1)
    assert first != draw(2)
    assert first[0] != first[1]
