"""Transforms of torch.func around a solve."""

import pytest
import torch
from problems import solve_by_name
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap

import torchgw

# PyTorch's own, when it loads its forward derivatives
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

SETTINGS = {
    "distances": "sqeuclidean", "epsilon": 1.5, "tol": 1e-11, "inner_tol": 1e-12, "n_init": 1,
    "max_iter": 2000,
}  # fmt: skip


def cloud(n, d, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator, dtype=torch.float64)


Y = cloud(5, 3, 1)


def loss(x, **more):
    return solve_by_name(x, Y, **{"differentiable": "value"} | SETTINGS | more).loss


def test_first_derivatives_are_those_of_autograd():
    x = cloud(6, 2, 0)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    step = cloud(6, 2, 2)
    value, pull = vjp(loss, x)
    _, along = jvp(loss, (x,), (step,))
    # the same operations twice
    for found in (grad(loss)(x), pull(torch.ones_like(value))[0], jacrev(loss)(x)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(along, (expected * step).sum(), rtol=1e-12, atol=1e-14)
    assert float(value) == float(loss(leaf).detach())


def test_the_hessian_is_made_of_products():
    x = cloud(4, 2, 0)
    leaf = x.clone().requires_grad_()
    result = solve_by_name(leaf, Y, differentiable="value", **SETTINGS)
    found = hessian(loss)(x).reshape(8, 8)
    for place, step in enumerate(torch.eye(8, dtype=torch.float64)):
        expected = result.hvp(step.reshape(4, 2)).products["X"].flatten()
        torch.testing.assert_close(found[:, place], expected, rtol=1e-10, atol=1e-12)
    forward_over_reverse = jvp(grad(loss), (x,), (torch.ones_like(x),))[1]
    # translations have no curvature
    assert forward_over_reverse.abs().max() < 1e-8
    assert found.abs().max() > 0.1


def test_several_inputs_and_what_is_not_an_input():
    x, weight = cloud(6, 2, 0), torch.tensor(0.6, dtype=torch.float64)
    M = cloud(6, 5, 3).abs()

    def fused(x, alpha, epsilon, shift):
        return loss(x, M=M, alpha=alpha, epsilon=epsilon) + shift

    inputs = x, weight, torch.tensor(1.5, dtype=torch.float64), torch.zeros(())
    found = grad(fused, argnums=(0, 1, 2, 3))(*inputs)
    leaves = [part.clone().requires_grad_() for part in inputs]
    expected = torch.autograd.grad(fused(*leaves), leaves)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_a_plan_can_be_pulled_back():
    x, values = cloud(6, 2, 0), cloud(5, 2, 4)

    def moved(x):
        return solve_by_name(x, Y, differentiable="implicit", **SETTINGS).lazy_plan @ values

    upstream = cloud(6, 2, 5)
    (found,) = vjp(moved, x)[1](upstream)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(moved(leaf), leaf, upstream)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    whole = (jacrev(moved)(x) * upstream[..., None, None]).sum((0, 1))
    torch.testing.assert_close(whole, expected, rtol=1e-9, atol=1e-12)
    with pytest.raises(torchgw.UnsupportedError, match="reverse"):
        jvp(moved, (x,), (x,))


def test_what_transforms_cannot_do():
    with pytest.raises(torchgw.UnsupportedError, match="solve_many"):
        vmap(loss)(cloud(12, 2, 0).reshape(2, 6, 2))
    with pytest.raises(torchgw.UnsupportedError, match="implicit"):
        grad(lambda x: solve_by_name(x, Y, differentiable="unrolled", **SETTINGS).loss)(
            cloud(6, 2, 0)
        )
    with pytest.raises(torchgw.UnsupportedError, match="third"):
        grad(lambda x: grad(lambda z: grad(loss)(z).square().sum())(x).sum())(cloud(4, 2, 0))
