"""Derivatives of solves with relaxed marginals, against differences."""

import math

import pytest
import torch
from problems import solve_by_name

import torchgw

EXACT = {"tol": 1e-12, "inner_tol": 1e-13, "max_iter": 4000, "inner_max_iter": 20_000, "n_init": 1}
CASES = {
    "unbalanced": {"unbalanced": 1.0}, "weights of any sum": {"unbalanced": (0.5, 2.0)},
    "one side strict": {"unbalanced": (1.0, math.inf)},
    "semi-relaxed": {"unbalanced": (math.inf, 0.0), "distances": "euclidean", "epsilon": 0.6},
    "fused semi-relaxed": {"unbalanced": (math.inf, 0.5)}, "fused unbalanced": {"unbalanced": 1.0},
    "linear unbalanced": {"unbalanced": (0.5, 2.0)},
    "linear semi-relaxed": {"unbalanced": (math.inf, 0.5)}, "partial": {"mass": 0.7},
    "fused partial": {"mass": 0.6},
}  # fmt: skip


def normal(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def inputs_of(case):
    a, b = (normal(size, seed=size).abs() + 0.5 for size in (7, 6))
    given = {
        "X": normal(7, 2, seed=0), "Y": normal(6, 3, seed=1), "a": a / a.sum(), "b": b / b.sum(),
    }  # fmt: skip
    if case == "weights of any sum":
        given["a"] = 1.3 * given["a"]
    if case.startswith(("fused", "linear")):
        given |= {"M": normal(7, 6, seed=2).abs(), "alpha": torch.tensor(0.6).double()}
    if case.startswith("linear"):
        # the objective has no quadratic term, and penalties are linear in the mass
        del given["X"], given["Y"], given["alpha"]
    return given | {"epsilon": torch.tensor(CASES[case].get("epsilon", 1.5)).double()}


def steps_of(case, given):
    steps = {name: normal(*item.shape, seed=3) for name, item in given.items()}
    for name in ("a", "b"):
        # only weights of any sum may change theirs
        any_sum = case.endswith("unbalanced") or case == "weights of any sum"
        mean = 0.0 if any_sum else steps[name].mean()
        steps[name] = 0.1 * (steps[name] - mean)
    return steps


def solved(case, given, mode="implicit"):
    leaves = {name: item.clone().requires_grad_() for name, item in given.items()}
    options = CASES[case] | leaves | EXACT
    if case.startswith("linear"):
        options["alpha"] = 0.0
    else:
        options = {"distances": "sqeuclidean"} | options
    return leaves, solve_by_name(differentiable=mode, **options)


@pytest.mark.parametrize("case", CASES)
def test_loss_plan_and_gradient_against_differences(case):
    given = inputs_of(case)
    steps = steps_of(case, given)
    leaves, result = solved(case, given)
    weights = torch.linspace(-1, 2, 42, dtype=torch.float64).reshape(7, 6)
    size, losses, plans, gradients = 2e-5, [], [], []
    for sign in (1, -1):
        moved = {name: given[name] + sign * size * steps[name] for name in given}
        tensors, other = solved(case, moved)
        losses.append(float(other.loss.detach()))
        plans.append(float((other.plan * weights).sum().detach()))
        gradients.append(torch.autograd.grad(other.loss, list(tensors.values())))

    def slope(value):
        parts = torch.autograd.grad(value, list(leaves.values()), retain_graph=True)
        return float(
            sum((part * steps[name]).sum() for name, part in zip(leaves, parts, strict=True))
        )

    # differences of 2e-5 leave 1e-10 of the losses, which are of the order of one
    assert slope(result.loss) == pytest.approx((losses[0] - losses[1]) / (2 * size), rel=1e-5)
    moved = (plans[0] - plans[1]) / (2 * size)
    assert slope((result.plan * weights).sum()) == pytest.approx(moved, rel=1e-5, abs=1e-6)
    found = result.hvp(steps)
    assert found.converged
    assert found.residual < 1e-9
    for name, up, down in zip(given, *gradients, strict=True):
        expected = (up - down) / (2 * size)
        assert (found.products[name] - expected).norm() < 1e-5 * expected.norm() + 1e-6, name


def test_gradients_of_either_mode_are_the_same_and_the_hessian_is_symmetric():
    given = inputs_of("fused partial")
    one, two = (steps_of("fused partial", {name: item + seed for name, item in given.items()})
                for seed in (0, 1))  # fmt: skip
    two = {name: item.cos() for name, item in two.items()}
    leaves, result = solved("fused partial", given)
    there, back = result.hvp(one).products, result.hvp(two).products
    left = sum((there[name] * two[name]).sum() for name in given)
    right = sum((back[name] * one[name]).sum() for name in given)
    assert float(left) == pytest.approx(float(right), rel=1e-8)
    others, value = solved("fused partial", given, "value")
    pairs = zip(
        torch.autograd.grad(result.loss, list(leaves.values())),
        torch.autograd.grad(value.loss, list(others.values())),
        strict=True,
    )
    for first, second in pairs:
        torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-14)


def test_what_is_refused():
    x, y = normal(8, 2, seed=0).requires_grad_(), normal(8, 2, seed=1)
    options = {"distances": "sqeuclidean", "epsilon": 1.5, "mass": 0.5}
    with pytest.raises(torchgw.UnsupportedError, match="strict"):
        torchgw.solve(x, y, differentiable="unrolled", **options)
    with pytest.raises(torchgw.UnsupportedError, match="exact gradient"):
        torchgw.solve(x, y, differentiable="value", gradient="sampled", **options)
    alpha = torch.tensor(0.0, requires_grad=True)
    with pytest.raises(torchgw.UnsupportedError, match="alpha > 0"):
        torchgw.solve(
            x, y, M=torch.ones(8, 8), alpha=alpha, distances="sqeuclidean", epsilon=1.5,
            unbalanced=1.0, differentiable="value",
        )  # fmt: skip
    a = torch.ones(8) / 7
    a[0] = 0
    with pytest.raises(torchgw.UnsupportedError, match="positive weights"):
        torchgw.solve(x, y, a=a, differentiable="value", **options)


@pytest.mark.parametrize(
    "options", [{"unbalanced": 1.0, "differentiable": "value"}, {"differentiable": "unrolled"}]
)
def test_large_plans_are_refused_before_the_solve(limited, options):
    limited(differentiated=50)
    x, y = normal(8, 2, seed=0).requires_grad_(), normal(8, 2, seed=1)
    iterations = []
    with pytest.raises(torchgw.UnsupportedError, match="50 pairs"):
        solve_by_name(
            x, y, distances="sqeuclidean", epsilon=1.5, callback=iterations.append, **options
        )
    assert not iterations
