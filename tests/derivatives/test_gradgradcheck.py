"""PyTorch's own checks of first and second derivatives, in every input of every exact gradient."""

import math

import pytest
import torch
from problems import solve_by_name
from torch.autograd import gradcheck, gradgradcheck

EXACT = {"tol": 1e-12, "inner_tol": 1e-13, "max_iter": 4000, "inner_max_iter": 20_000}
KINDS = {
    "balanced": {}, "fused": {}, "unbalanced": {"unbalanced": 1.0},
    "semi-relaxed": {"unbalanced": (math.inf, 0.5)}, "partial": {"mass": 0.7},
    "fused partial": {"mass": 0.6},
}  # fmt: skip


def normal(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("gradient", ["dense", "factored"])
@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_are_those_of_differences(kind, gradient):
    a, b = (normal(size, seed=size).abs() + 0.5 for size in (13, 11))
    given = {"X": normal(13, 2, seed=0), "Y": normal(11, 3, seed=1), "a": a, "b": b}
    if kind.startswith("fused"):
        given |= {"M": normal(13, 11, seed=2).abs(), "alpha": torch.tensor(0.6).double()}
    given["epsilon"] = torch.tensor(2.0).double()
    names, values = list(given), [item.requires_grad_() for item in given.values()]

    def loss(*values):
        inputs = dict(zip(names, values, strict=True))
        # the mass of relaxed weights is an input of its own
        inputs["a"], inputs["b"] = (inputs[name] / inputs[name].sum() for name in ("a", "b"))
        return solve_by_name(
            distances="sqeuclidean", gradient=gradient, n_init=1, differentiable="value",
            **KINDS[kind], **inputs, **EXACT,
        ).loss  # fmt: skip

    # along random directions of inputs and outputs, in place of entry by entry
    options = {"eps": 1e-5, "rtol": 1e-4, "atol": 1e-5, "fast_mode": True}
    assert gradcheck(loss, values, **options)
    assert gradgradcheck(loss, values, torch.ones((), dtype=torch.float64), **options)
