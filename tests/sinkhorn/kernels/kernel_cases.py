"""Costs, weights and tolerances that the tests of kernels share."""

from __future__ import annotations

import torch

from torchgw._sinkhorn.problem import Cost, FactoredCost, softmin
from torchgw._typing import Marginals, Potentials

EPSILON = 0.37


# Error of a potential over epsilon. float32: exponents here stay under 60 in size, so that rounding
# (2^-24 each) of a handful of terms is under 2e-5. float64: the same times 2^-29.
TOLERANCE = {torch.float32: 5e-5, torch.float64: 1e-12}


def factored(n: int, m: int, rank: int, device: torch.device, dtype: torch.dtype) -> FactoredCost:
    generator = torch.Generator().manual_seed(n + 1000 * m + rank)
    parts = [torch.randn(size, generator=generator) for size in ((n, rank), (m, rank), (n,), (m,))]
    # an offset makes centring matter; products keep the size of one column whatever the rank
    left, right = (part / rank**0.25 + 0.5 for part in parts[:2])
    return FactoredCost(*(part.to(device, dtype) for part in (left, right, *parts[2:])))


def weights(n: int, m: int, device: torch.device, dtype: torch.dtype) -> Marginals:
    """Return weights with a zero on each side where there is room."""
    generator = torch.Generator().manual_seed(n + m)
    result = []
    for size in (n, m):
        weight = torch.rand(size, generator=generator) + 0.1
        if size > 2:
            weight[size // 2] = 0.0
        result.append((weight / weight.sum()).to(device, dtype))
    return Marginals(*result)


def wide(*parts: torch.Tensor) -> list[torch.Tensor]:
    return [part.double() for part in parts]


def warm(cost: Cost, marginals: Marginals) -> Potentials:
    """Return potentials after one half-step each, rounded to the dtype of the cost."""
    exact, weight = cost.to(torch.float64), Marginals(*wide(*marginals))
    g = torch.linspace(1.0, 2.0, len(weight.b), dtype=torch.float64, device=cost.device)
    f = softmin(exact, weight.log_b, g, EPSILON, axis=1)
    g = softmin(exact, weight.log_a, f, EPSILON, axis=0)
    return Potentials(f.to(cost.dtype), g.to(cost.dtype))


def assert_close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare potentials; the tolerance must tell them from zeros."""
    tolerance = TOLERANCE[dtype] * EPSILON
    assert float(expected.abs().max()) > 100 * tolerance
    assert float((got.double() - expected).abs().max()) <= tolerance
