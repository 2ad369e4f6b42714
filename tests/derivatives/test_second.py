"""Products with the Hessian of the objective, against differences of its gradient."""

import math
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from problems import LargestTensor, solve_by_name

import torchgw
from torchgw._derivatives.implicit import by_conjugate_gradients

EXACT = {"tol": 1e-12, "inner_tol": 1e-13, "max_iter": 2000, "inner_max_iter": 20_000, "n_init": 1}
CASES = {
    "sqeuclidean": {"distances": "sqeuclidean", "epsilon": 1.5},
    "euclidean": {"distances": "euclidean", "epsilon": 0.6},
    "cosine": {"distances": "cosine", "epsilon": 0.4},
    "poincare": {"distances": "poincare", "epsilon": 0.6},
    "pair": {"distances": ("euclidean", "sqeuclidean"), "epsilon": 1.0},
    "turned": {"distances": ("cosine", "euclidean"), "epsilon": 0.6},
    "tables": {"epsilon": 1.0},
    "features": {"distances": "sqeuclidean", "epsilon": 1.5},
}


def inputs_of(case):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, y = normal(7, 2) / 5, normal(6, 3) / 8
    if case != "poincare":
        x, y = 5 * x, 8 * y
    weights = [normal(size).abs() + 0.5 for size in (7, 6)]
    a, b = (weight / weight.sum() for weight in weights)
    given = {"X": x, "Y": y, "a": a, "b": b, "M": normal(7, 6).abs()}
    if case == "tables":
        given |= {"D_X": torch.cdist(x, x), "D_Y": torch.cdist(y, y)}
        del given["X"], given["Y"]
    if case == "features":
        given |= {"F_X": normal(7, 2), "F_Y": normal(6, 2)}
        del given["M"]
    given["alpha"] = torch.tensor(0.6, dtype=torch.float64)
    given["epsilon"] = torch.tensor(CASES[case]["epsilon"], dtype=torch.float64)
    return given


def solved(case, given):
    leaves = {name: value.clone().requires_grad_() for name, value in given.items()}
    passed = dict(leaves)
    if "F_X" in passed:
        passed["features"] = passed.pop("F_X"), passed.pop("F_Y")
    result = solve_by_name(differentiable="value", **(CASES[case] | passed), **EXACT)
    return leaves, result


def direction_of(given):
    generator = torch.Generator().manual_seed(1)
    steps = {}
    for name, value in given.items():
        step = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        # weights keep their sum, tables their symmetry
        step = step - step.mean() if name in ("a", "b") else step
        steps[name] = (step + step.T).fill_diagonal_(0) if name in ("D_X", "D_Y") else step
    return steps


@pytest.mark.parametrize("case", CASES)
def test_products_are_derivatives_of_the_gradient(case):
    given = inputs_of(case)
    steps = direction_of(given)
    leaves, result = solved(case, given)
    found = result.hvp(steps)
    assert found.converged
    assert found.residual < 1e-9
    assert found.iterations > 0
    size, gradients = 2e-5, []
    for sign in (1, -1):
        moved = {name: given[name] + sign * size * steps[name] for name in given}
        tensors, other = solved(case, moved)
        gradients.append(torch.autograd.grad(other.loss, list(tensors.values())))
    for name, up, down in zip(given, *gradients, strict=True):
        expected = (up - down) / (2 * size)
        assert (found.products[name] - expected).norm() < 1e-5 * expected.norm(), name
    tensors = list(leaves.values())
    first = torch.autograd.grad(result.loss, tensors, create_graph=True)
    along = sum((part * steps[name]).sum() for part, name in zip(first, given, strict=True))
    second = torch.autograd.grad(along, tensors)
    for part, name in zip(second, given, strict=True):
        assert (part - found.products[name]).abs().max() <= 1e-9 * (1 + part.abs().max())


def test_the_hessian_is_symmetric_and_blocks_can_be_left_out():
    given = inputs_of("sqeuclidean")
    _, result = solved("sqeuclidean", given)
    one, two = (
        direction_of(given),
        {name: value.cos() for name, value in direction_of(given).items()},
    )
    there, back = result.hvp(one).products, result.hvp(two).products
    left = sum((there[name] * two[name]).sum() for name in given)
    right = sum((back[name] * one[name]).sum() for name in given)
    assert float(left) == pytest.approx(float(right), rel=1e-8)
    alone = result.hvp({"X": one["X"]}).products
    rest = result.hvp({name: step for name, step in one.items() if name != "X"}).products
    for name in given:
        gap = (alone[name] + rest[name] - there[name]).abs().max()
        assert gap < 1e-8 * (1 + there[name].abs().max())


@pytest.mark.parametrize("case", ["sqeuclidean", "features", "tables"])
def test_an_input_alone_has_its_block(case):
    given = inputs_of(case)
    steps = direction_of(given)
    _, result = solved(case, given)
    for name, step in steps.items():
        alone = given | {name: given[name].clone().requires_grad_()}
        if "F_X" in alone:
            alone["features"] = alone.pop("F_X"), alone.pop("F_Y")
        other = solve_by_name(differentiable="value", **(CASES[case] | alone), **EXACT)
        expected = result.hvp({name: step}).products[name]
        found = other.hvp(step).products[name]
        assert (found - expected).norm() <= 1e-8 * expected.norm(), name


_FIRST = """
import sys, torch, torchgw
x = torch.randn(30, 3, dtype=torch.float64, requires_grad=True)
y = torch.randn(20, 3, dtype=torch.float64)
before = set(sys.modules)
result = torchgw.solve(
    x, y, distances="euclidean", epsilon=0.5, n_init=1, differentiable="value"
)
result.loss.backward()
result.hvp(torch.ones_like(x))
print(*{"sympy", "torch._dynamo"} & (set(sys.modules) - before))
"""


def test_first_derivatives_of_a_process_load_no_compiler():
    # they took 1.1 and 0.25 s
    done = subprocess.run(
        [sys.executable, "-c", _FIRST], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_moves_that_change_nothing_have_no_curvature():
    # translations and rotations leave all distances as they are, at a stationary gradient or not
    given = inputs_of("sqeuclidean")
    x = given["X"].clone().requires_grad_()
    result = solve_by_name(
        x, given["Y"], distances="sqeuclidean", epsilon=1.5, differentiable="value", **EXACT
    )
    assert result.hvp(torch.ones_like(x)).products["X"].abs().max() < 1e-10


def test_what_a_direction_must_be():
    given = inputs_of("sqeuclidean")
    _, result = solved("sqeuclidean", given)
    step = torch.ones(7, 2)
    for direction in (
        step, {"Z": torch.ones(1)}, {}, {"X": torch.ones(3, 2)}, None, {"X": None},
        {"X": step * torch.nan}, {"X": step * torch.inf}, {"X": 1e300 * step.double()},
        {"X": step.to(torch.complex64)},
    ):  # fmt: skip
        with pytest.raises(torchgw.InvalidInputError, match="direction"):
            result.hvp(direction)
    plain = torchgw.solve(given["X"], given["Y"], distances="sqeuclidean", epsilon=1.5)
    with pytest.raises(torchgw.UnsupportedError, match="differentiable='value'"):
        plain.hvp(torch.ones(7, 2))


def test_nothing_of_the_size_of_the_plan_is_kept_for_factored_problems(monkeypatch, limited):
    monkeypatch.setattr("torchgw.distances.points._FEW_POINTS", 0)
    monkeypatch.setattr("torchgw._sinkhorn.problem._BLOCK_BYTES", {"cpu": 2**15})
    limited(kept_tables=0)
    monkeypatch.setattr("torchgw._derivatives.krylov._MOST", 60)
    generator = torch.Generator().manual_seed(0)
    X, Y = (torch.randn(n, 2, generator=generator, dtype=torch.float64) for n in (100, 80))
    result = torchgw.solve(
        X.requires_grad_(), Y, distances="sqeuclidean", epsilon=5.0, differentiable="value",
        n_init=1, options=torchgw.Options(storage="streamed", precision="float64"),
    )  # fmt: skip
    with LargestTensor() as largest:
        found = result.hvp(torch.randn(X.shape, generator=generator, dtype=torch.float64))
    assert found.converged
    # the largest is the basis of GMRES: 60 vectors of m numbers and a coupling
    assert largest.size <= 61 * (80 + 4 * 4)


@pytest.mark.parametrize("case", ["sqeuclidean", "cosine", "features"])
def test_tables_moments_and_streamed_products_solve_the_same_system(case, monkeypatch, limited):
    given = inputs_of(case)
    _, result = solved(case, given)
    steps = direction_of(given)
    found = [result.hvp(steps)]
    module, left = "torchgw._derivatives.implicit", []
    for given_up in (lambda _: None, lambda found: replace(found, residual=1.0)):
        with monkeypatch.context() as saddle:

            def tried(equation, given_up=given_up):
                return given_up(by_conjugate_gradients(equation))

            saddle.setattr(f"{module}.by_conjugate_gradients", tried)
            left.append(result.hvp(steps).iterations)
    dear = partial(monkeypatch.setattr, f"{module}._FEW_OPERATIONS", -math.inf)
    for change in (dear, partial(limited, moments=0)):
        change()
        found.append(result.hvp(steps))
        assert found[-1].converged
        assert found[-1].iterations != found[-2].iterations
        for name, expected in found[-1].products.items():
            assert (found[0].products[name] - expected).norm() <= 1e-7 * expected.norm(), name
    # what conjugate gradients give up, moments take
    assert left == [found[1].iterations] * 2


def test_a_plan_that_cannot_move_raises_no_doubt(recwarn):
    torch.manual_seed(0)
    x = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)
    y, direction = x.detach()[torch.randperm(7)], torch.randn(7, 2, dtype=torch.float64)
    options = {"distances": "sqeuclidean", "differentiable": "value", "random_state": 0, **EXACT}
    found = {}
    for epsilon in (0.05, 0.08):
        result = solve_by_name(x, y, epsilon=epsilon, **options)
        product = result.hvp(direction)
        assert product.converged
        assert product.residual < 1e-6
        (found[epsilon],) = product.products.values()
    assert not [each for each in recwarn if "residual" in str(each.message)]
    # that of the match itself, whatever epsilon is
    assert (found[0.05] - found[0.08]).norm() <= 1e-6 * found[0.05].norm()


def test_points_matched_one_to_one_do_not_slow_the_system():
    generator = torch.Generator().manual_seed(0)
    scale = torch.arange(1, 21).double() ** -0.5
    x = torch.randn(200, 20, generator=generator, dtype=torch.float64) * scale
    y = x + 0.3 * scale * torch.randn(200, 20, generator=generator, dtype=torch.float64)
    epsilon = 0.02 * float(torch.cdist(x, x).square().mean()) ** 2
    result = torchgw.solve(
        x.requires_grad_(), y, distances="sqeuclidean", epsilon=epsilon, n_init=1,
        gradient="factored", differentiable="value", options=torchgw.Options(storage="streamed"),
    )  # fmt: skip
    # with columns scaled by their weights 1,001 products left 8e-6
    found = result.hvp(torch.ones_like(x).cumsum(0))
    assert found.residual < 1e-9
    assert found.iterations < 150


def test_rotations_turn_the_gradient():
    # the loss is the same at X and at X R, so that the Hessian along X S is the gradient times S
    given = inputs_of("sqeuclidean")
    x = given["X"].clone().requires_grad_()
    result = solve_by_name(
        x, given["Y"], distances="sqeuclidean", epsilon=1.5, differentiable="value", **EXACT
    )
    (gradient,) = torch.autograd.grad(result.loss, x)
    turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    found = result.hvp(x.detach() @ turn).products["X"]
    torch.testing.assert_close(found, gradient @ turn, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("stop", [12, 16])
@pytest.mark.filterwarnings("ignore::torchgw.ConvergenceWarning")
def test_a_plan_that_has_not_settled_errs_as_far_as_it_is_from_the_fixed_point(stop):
    given = inputs_of("sqeuclidean")
    step = direction_of(given)["X"]
    plans, products = [], []
    for options in ({}, {"max_iter": stop}):
        result = solve_by_name(
            given["X"].clone().requires_grad_(), given["Y"], distances="sqeuclidean", epsilon=1.5,
            differentiable="value", **(EXACT | options),
        )  # fmt: skip
        found = result.hvp(step)
        assert found.converged
        plans.append(result.plan.detach())
        products.append(found.products["X"])
    assert result.status.name == "OUTER_LIMIT"
    away = (plans[1] - plans[0]).norm() / plans[0].norm()
    error = (products[1] - products[0]).norm() / products[0].norm()
    assert 1e-9 < away < 0.02
    assert away / 20 < error < 20 * away


def test_a_system_that_is_not_solved_is_said(monkeypatch):
    monkeypatch.setattr("torchgw._derivatives.implicit.MOST_PRODUCTS", 2)
    given = inputs_of("sqeuclidean")
    _, result = solved("sqeuclidean", given)
    with pytest.warns(torchgw.ConvergenceWarning, match="residual"):
        found = result.hvp(direction_of(given))
    assert not found.converged
    assert found.residual > 1e-4
