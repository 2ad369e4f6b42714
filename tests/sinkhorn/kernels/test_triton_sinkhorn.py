"""The Triton half-steps against their definition in float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernel_cases import (
    EPSILON,
    TOLERANCE,
    assert_close,
    factored,
    warm,
    weights,
    wide,
)

from torchgw._sinkhorn.kernels.operands import Blocks, operands, padded
from torchgw._sinkhorn.kernels.softmin import KernelSide, Rule, half_step_, log_sum_exp
from torchgw._sinkhorn.problem import Cost, DenseCost, FactoredCost, LinearProblem, softmin
from torchgw._triton_sinkhorn import TritonBackend
from torchgw._typing import Marginals, Potentials

# The interpreter computes lanes that are masked afterwards, as the GPU does, but NumPy warns.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*"),
    pytest.mark.usefixtures("poisoned"),
]


def side(potential: torch.Tensor, weight: torch.Tensor) -> KernelSide:
    """Return a side at the start of a sweep, all scalings one."""
    start = padded(potential, -float("inf"))
    return KernelSide(start, weight, torch.zeros_like(weight), padded(weight, 0.0))


@pytest.mark.parametrize(
    ("kind", "n", "m", "rank"),
    [
        ("factored", 1, 1, 1),
        ("factored", 1, 130, 3),
        ("factored", 63, 130, 17),
        ("factored", 130, 1, 3),
        ("factored", 40, 70, 65),
        ("dense", 1, 1, 1),
        ("dense", 63, 130, 3),
        ("dense", 1, 1100, 3),
        ("transposed", 63, 130, 3),
    ],
)
@pytest.mark.parametrize("axis", [0, 1])
def test_softmin(
    kind: str, n: int, m: int, rank: int, axis: int, device: torch.device, dtype: torch.dtype
) -> None:
    cost: Cost = factored(n, m, rank, device, dtype)
    marginals = weights(n, m, device, dtype)
    if kind != "factored":
        cost = cost.dense()
    if kind == "transposed":
        cost = DenseCost(cost.matrix.T.contiguous().T)
    log_weight = marginals.log_b if axis == 1 else marginals.log_a
    generator = torch.Generator().manual_seed(0)
    potential = torch.randn(len(log_weight), generator=generator).to(device, dtype)
    expected = softmin(cost.to(torch.float64), *wide(log_weight, potential), EPSILON, axis)
    prepared = TritonBackend().prepare(LinearProblem(cost, marginals, EPSILON))
    got = prepared.softmin(potential, axis)
    assert got.dtype == potential.dtype
    assert_close(got, expected, dtype)


@pytest.mark.parametrize("precision", ["fp16x3", "float32"])
def test_product_precision(precision: str, device: torch.device) -> None:
    cost = factored(40, 70, 16, device, torch.float32)
    # columns of very different size on the two sides, as landmark factors have them
    stretch = torch.logspace(-4, 4, 16, device=device)
    cost = cost._replace(left=cost.left * stretch, right=cost.right / stretch)
    marginals = weights(40, 70, device, torch.float32)
    zero = torch.zeros(70, device=device)
    expected = softmin(cost.to(torch.float64), *wide(marginals.log_b, zero), EPSILON, axis=1)
    prepared = TritonBackend(precision).prepare(LinearProblem(cost, marginals, EPSILON))
    got = prepared.softmin(zero, axis=1)
    assert_close(got, expected, torch.float32)


def test_epsilon_scales_the_problem(device: torch.device) -> None:
    # (cost, potential, epsilon) times 1e3 or 1e-3 gives potentials times the same
    cost = factored(20, 30, 3, device, torch.float32)
    marginals = weights(20, 30, device, torch.float32)
    potential = torch.linspace(-1, 1, 30, device=device)
    expected = softmin(cost.to(torch.float64), *wide(marginals.log_b, potential), EPSILON, 1)
    for factor in (1e-3, 1e3):
        scaled = FactoredCost(
            cost.left * factor, cost.right, cost.row * factor, cost.column * factor
        )
        prepared = TritonBackend().prepare(LinearProblem(scaled, marginals, EPSILON * factor))
        got = prepared.softmin(potential * factor, axis=1)
        assert_close(got / factor, expected, torch.float32)


def test_splits(device: torch.device, dtype: torch.dtype) -> None:
    cost = factored(21, 500, 3, device, dtype)
    marginals = weights(21, 500, device, dtype)
    parts = operands(cost, EPSILON)
    blocks = Blocks(32, 64, 4, 2)
    q = (-parts.column / EPSILON).to(dtype)
    whole = log_sum_exp(
        parts, padded(q + marginals.b.log2(), -float("inf")), blocks=blocks, splits=1
    )
    split = log_sum_exp(
        parts, padded(q + marginals.b.log2(), -float("inf")), blocks=blocks, splits=4
    )
    assert torch.allclose(whole, split, rtol=0, atol=20 * TOLERANCE[dtype])
    plain = Rule(torch.zeros_like(whole), whole.new_ones(2))
    scalings = []
    for splits in (1, 4):
        rows, columns = side(-whole, marginals.a), side(q, marginals.b)
        bad = torch.zeros(1, dtype=torch.int32, device=device)
        half_step_(parts, rows, columns, plain, bad, blocks=blocks, splits=splits)
        assert not bool(bad)
        scalings.append(rows.scaling)
        feed = marginals.a * torch.exp2(rows.scaling)
        assert torch.allclose(rows.feed[:21], feed, rtol=1e-5, atol=0)
    # the rows started at their softmin, so that their scalings are rounding
    assert float(torch.stack(scalings).abs().max()) <= 20 * TOLERANCE[dtype]


def test_why_not(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert TritonBackend.why_not(device, torch.float32) is None
    assert "float16" in str(TritonBackend.why_not(device, torch.float16))
    TritonBackend.why_not.cache_clear()
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "CUDA" in str(TritonBackend.why_not(torch.device("cpu"), torch.float32))
    TritonBackend.why_not.cache_clear()


@pytest.mark.gpu
def test_more_than_2_to_the_31_entries() -> None:
    n, m = 3 * 2**17, 8192
    device = torch.device("cuda")
    cost = factored(n, m, 2, device, torch.float32).dense()
    marginals = weights(n, m, device, torch.float32)
    prepared = TritonBackend().prepare(LinearProblem(cost, marginals, EPSILON))
    last = slice(n - 64, n)
    zero = torch.zeros(m, device=device)
    f = prepared.softmin(zero, axis=1)
    part = DenseCost(cost.matrix[last]).to(torch.float64)
    expected = softmin(part, *wide(marginals.log_b, zero), EPSILON, axis=1)
    assert_close(f[last], expected, torch.float32)
    g = prepared.softmin(f, axis=0)
    start = Potentials(f, g)
    sweep = prepared.sweep(start, 1)
    assert bool(sweep.check[0])
    expected = softmin(part, *wide(marginals.log_b, g), EPSILON, axis=1)
    assert_close(sweep.f[last], expected, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [16, 100])
def test_long_sums_have_no_bias(channels: int) -> None:
    # values of one sign: matrix units that truncate would lose 1e-4 over 60,000 columns
    device = torch.device("cuda")
    cost = factored(200, 60_000, 3, device, torch.float32)
    marginals = weights(200, 60_000, device, torch.float32)
    potentials = warm(cost, marginals)
    values = torch.ones(60_000, channels, device=device)
    problem = LinearProblem(cost, marginals, EPSILON)
    exact = LinearProblem(cost.to(torch.float64), Marginals(*wide(*marginals)), EPSILON)
    got = TritonBackend().prepare(problem).apply(potentials, values)
    expected = TritonBackend().prepare(exact).apply(Potentials(*wide(*potentials)), values.double())
    assert float(((got - expected).abs() / expected.clamp_min(1e-30)).max()) <= 1e-5
