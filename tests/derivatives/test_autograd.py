"""Gradients against finite differences, and what they refuse."""

from __future__ import annotations

import gc
import warnings

import numpy as np
import pytest
import torch
from problems import LargestTensor, solve_by_name
from torch.autograd import gradcheck, gradgradcheck

import torchgw

EPSILON = {"sqeuclidean": 1.5, "euclidean": 0.6, "cosine": 0.4}
# Fixed points so accurate that finite differences of 1e-4 see the derivative and not the solver.
TIGHT = {"tol": 1e-9, "inner_tol": 1e-10, "max_iter": 400, "n_init": 1}
CHECK = {"eps": 1e-4, "atol": 1e-5, "rtol": 1e-4, "fast_mode": True}


def problem(n=7, m=6, device="cpu"):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)

    weights = [normal(size).abs() + 0.5 for size in (n, m)]
    a, b = (weight / weight.sum() for weight in weights)
    return {"X": normal(n, 2), "Y": normal(m, 3), "a": a, "b": b, "M": normal(n, m).abs()}


def require(tensors):
    return [tensor.clone().requires_grad_() for tensor in tensors]


def solver(metric, mode, names, fixed, read, **options):
    def run(*tensors):
        given = {**fixed, **dict(zip(names, tensors, strict=True))}
        for name in {"a", "b"} & set(given):
            given[name] = given[name] / given[name].sum()
        result = solve_by_name(
            distances=metric, epsilon=EPSILON[metric], differentiable=mode, **given, **TIGHT,
            **options,
        )  # fmt: skip
        return read(result)

    return run


def loss(result):
    return result.loss


def pushed(result):
    return result.lazy_plan.T @ torch.linspace(
        -1, 2, result.lazy_plan.shape[0], dtype=torch.float64
    )


@pytest.mark.parametrize("metric", list(EPSILON))
@pytest.mark.parametrize(("mode", "read"), [("value", loss), ("implicit", pushed)])
def test_points_weights_and_linear_cost(metric, mode, read):
    given = problem()
    run = solver(metric, mode, list(given), {}, read)
    assert gradcheck(run, require(given.values()), **CHECK)


@pytest.mark.parametrize(("mode", "read"), [("value", loss), ("implicit", pushed)])
def test_distance_matrices(mode, read):
    given = problem()
    tables = require([torch.cdist(given[name], given[name]) + 0.1 for name in ("X", "Y")])

    def run(source, target):
        # one entry alone would make a table asymmetric, which is refused
        result = solve_by_name(
            D_X=(source + source.T) / 2, D_Y=(target + target.T) / 2, epsilon=0.6,
            differentiable=mode, **TIGHT,
        )  # fmt: skip
        return read(result)

    assert gradcheck(run, tables, **CHECK)


@pytest.mark.parametrize("pair", [("euclidean", "sqeuclidean"), ("cosine", "euclidean")])
def test_sides_of_different_kind(pair):
    given = problem()

    def run(x, y):
        result = solve_by_name(
            x, y, distances=pair, epsilon=1.0, gradient="factored", differentiable="implicit",
            **TIGHT,
        )  # fmt: skip
        return result.loss + pushed(result).square().sum()

    assert gradcheck(run, require([given["X"], given["Y"]]), **CHECK)


def test_every_way_to_read_a_plan():
    given = problem()

    def run(x, m, values):
        plan = solve_by_name(
            x, given["Y"], M=m, distances="sqeuclidean", epsilon=1.5, differentiable="implicit",
            **TIGHT,
        ).lazy_plan  # fmt: skip
        return plan @ values, plan.to_dense(), plan.rows([3, 1]), plan.barycentric(values)

    assert gradcheck(run, require([given["X"], given["M"], given["Y"]]), **CHECK)


def test_marginals_can_be_differentiated_at_any_time():
    """What is kept of a plan would be a graph that is used up, or no graph at all."""
    given = problem()
    (a,) = require([given["a"]])
    plan = solve_by_name(
        given["X"], given["Y"], a=a, distances="sqeuclidean", epsilon=1.5,
        differentiable="implicit", **TIGHT,
    ).lazy_plan  # fmt: skip
    with torch.no_grad():
        assert not plan.marginals()[0].requires_grad
    upstream = torch.linspace(-1, 2, 7, dtype=torch.float64)
    gradients = [torch.autograd.grad(plan.marginals()[0] @ upstream, a)[0] for _ in range(2)]
    # rows have the mass a, which the solve has normalised
    expected = upstream - upstream @ given["a"]
    for gradient in gradients:
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    "metric", ["sqeuclidean", pytest.param("euclidean", marks=pytest.mark.slow)]
)
def test_second_derivatives_of_the_loss(metric):
    given = problem()
    names = ["X", "Y", "a", "M"]
    run = solver(metric, "implicit", names, {"b": given["b"]}, loss)
    tolerance = {**CHECK, "atol": 1e-5, "rtol": 1e-3}
    assert gradgradcheck(run, require([given[name] for name in names]), **tolerance)


@pytest.mark.filterwarnings("ignore::torchgw.ConvergenceWarning")
def test_second_derivatives_that_are_not_defined_say_so():
    given = problem()
    (x,) = require([given["X"]])
    run = solver("sqeuclidean", "value", ["X"], {"Y": given["Y"]}, loss)
    (first,) = torch.autograd.grad(run(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    with pytest.raises(torchgw.UnsupportedError, match="third"):
        second.sum().backward()
    run = solver("sqeuclidean", "implicit", ["X"], {"Y": given["Y"]}, pushed)
    (first,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
    with pytest.raises(torchgw.UnsupportedError, match="once"):
        first.sum().backward()
    sampled = torchgw.solve(
        x, given["Y"], distances="sqeuclidean", gradient="sampled", epsilon=1.5,
        differentiable="value", random_state=0, max_iter=2, options=torchgw.Options(min_iter=1),
    )  # fmt: skip
    with pytest.raises(torchgw.UnsupportedError, match="sampled"):
        sampled.hvp(torch.ones_like(x))


def test_unrolled_iterations_agree_with_the_implicit_derivative():
    """Both are one linear system at the plan, which is known to 1e-7."""
    given = problem()
    gradients = []
    for mode in ("implicit", "unrolled"):
        tensors = require(given.values())
        run = solver("sqeuclidean", mode, list(given), {}, lambda result: result)
        result = run(*tensors)
        total = result.loss * 3 + pushed(result).square().sum()
        gradients.append(torch.autograd.grad(total, tensors))
    for implicit, unrolled in zip(*gradients, strict=True):
        assert implicit.norm() > 1e-3
        torch.testing.assert_close(implicit, unrolled, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("max_iter", [3, 500])
def test_an_unrolled_plan_has_the_numbers_of_its_result(max_iter):
    """Steps that are recorded stay where the solve has ended, settled or not."""
    rng = np.random.default_rng(1)
    X = torch.tensor(rng.normal(size=(12, 3)), requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = torchgw.solve(
            X, rng.normal(size=(15, 2)), distances="euclidean", epsilon=0.002, n_init=1,
            max_iter=max_iter, differentiable="unrolled", random_state=0,
        )  # fmt: skip
    columns = result.lazy_plan.T @ torch.ones(12, dtype=torch.float64)
    error = (columns.detach() - 1 / 15).abs().sum()
    assert float(error) == pytest.approx(result.marginal_error, abs=1e-12)
    assert float(result.loss.detach()) == pytest.approx(result.report.objective, rel=1e-12)
    assert torch.autograd.grad(columns[0], X)[0].isfinite().all()


def test_upstream_gradient_counts():
    given = problem()
    gradients = []
    for factor in (1.0, -2.5):
        (x,) = require([given["X"]])
        run = solver("sqeuclidean", "value", ["X"], {"Y": given["Y"]}, loss)
        (run(x) * factor).backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[0] * -2.5, gradients[1])


def test_descent_lowers_the_value():
    given = problem(20, 15)
    (x,) = require([given["X"]])
    values = []
    for _ in range(6):
        result = torchgw.solve(
            x, given["Y"], distances="sqeuclidean", epsilon=1.0, differentiable="value", n_init=1
        )
        values.append(result.loss.item())
        assert result.loss.item() == result.log["objective"]
        (gradient,) = torch.autograd.grad(result.loss, x)
        with torch.no_grad():
            x -= 0.2 * gradient
    assert all(after < before for before, after in zip(values, values[1:], strict=False))
    assert values[-1] < 0.98 * values[0]


@pytest.mark.parametrize(
    ("mode", "steps"),
    [
        ("value", 15),
        ("implicit", 15),
        pytest.param("value", 200, marks=pytest.mark.slow),
        pytest.param("implicit", 200, marks=pytest.mark.slow),
    ],
)
def test_training_keeps_nothing(mode, steps):
    """The number of tensors alive after a few steps is that after many."""
    given = problem()
    (x,) = require([given["X"]])
    optimiser = torch.optim.SGD([x], lr=1e-3)
    start, alive = None, []
    for step in range(steps):
        optimiser.zero_grad()
        result = torchgw.solve(
            x, given["Y"], distances="sqeuclidean", epsilon=1.5, init=start, differentiable=mode,
            tol=1e-3, n_init=1,
        )  # fmt: skip
        total = result.loss
        if mode == "implicit":
            total = total + pushed(result).square().sum()
        total.backward()
        optimiser.step()
        start = result
        if step in (5, steps - 1):
            gc.collect()
            alive.append(sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects()))
    assert alive[0] == alive[1]


def test_points_of_weight_zero_count_for_nothing():
    given = problem()
    gradients = []
    for extra in (0, 2):
        x = torch.cat([given["X"], torch.ones(extra, 2)]).double().requires_grad_()
        y = torch.cat([given["Y"], -torch.ones(extra, 3)]).double().requires_grad_()
        a, b = (torch.cat([given[name], torch.zeros(extra)]) for name in ("a", "b"))
        result = solve_by_name(
            x, y, a=a, b=b, distances="sqeuclidean", epsilon=1.5, differentiable="implicit",
            **TIGHT,
        )  # fmt: skip
        values = torch.linspace(-1, 1, 6, dtype=torch.float64)
        moved = result.lazy_plan @ torch.cat([values, torch.zeros(extra).double()])
        total = result.loss + moved[:7].square().sum()
        gradients.append(torch.autograd.grad(total, [x, y]))
    for short, long in zip(*gradients, strict=True):
        torch.testing.assert_close(short, long[: len(short)], rtol=1e-6, atol=1e-9)
        assert long[len(short) :].abs().max() < 1e-12


def test_weight_gradients_have_mean_zero():
    """They are potentials, which are defined up to a constant; weights are normalised."""
    given = problem()
    (a,) = require([given["a"]])
    result = torchgw.solve(
        given["X"], given["Y"], a=a, distances="sqeuclidean", epsilon=1.5, differentiable="value"
    )
    result.loss.backward()
    f = result.potential_a
    torch.testing.assert_close(a.grad, f - given["a"] @ f)
    assert abs(float(given["a"] @ a.grad)) < 1e-10


def test_sampled_gradient_estimates_the_exact_one():
    given = problem(20, 15)
    gradients = {}
    for name in ("dense", "sampled"):
        x, y = require([given["X"], given["Y"]])
        result = torchgw.solve(
            x, y, distances="euclidean", epsilon=2.0, gradient=name, differentiable="value",
            random_state=0, options=torchgw.Options(n_anchors=5_000),
        )  # fmt: skip
        gradients[name] = torch.autograd.grad(result.loss, [x, y])
    for exact, sampled in zip(gradients["dense"], gradients["sampled"], strict=True):
        # noise of the plan and of the estimate, seen for several seeds: 0.1 to 0.2
        assert (sampled - exact).norm() < 0.4 * exact.norm()


@pytest.mark.slow
def test_nothing_of_the_size_of_the_plan(monkeypatch, limited):
    monkeypatch.setattr("torchgw.distances.points._FEW_POINTS", 0)
    monkeypatch.setattr("torchgw._sinkhorn.problem._BLOCK_BYTES", {"cpu": 2**15})
    limited(kept_tables=0)
    monkeypatch.setattr("torchgw._derivatives.krylov._MOST", 60)
    given = problem(100, 80)
    x, y = require([given["X"], given["Y"]])
    with LargestTensor() as largest:
        result = torchgw.solve(
            x, y, distances="sqeuclidean", epsilon=2.0, differentiable="implicit", tol=1e-3,
            n_init=1, options=torchgw.Options(storage="streamed", precision="float64"),
        )  # fmt: skip
        total = result.loss + (result.lazy_plan @ y).square().sum()
        total.backward()
    assert x.grad.norm() > 0
    # the largest is the basis of GMRES: 60 vectors of m numbers and a coupling
    assert largest.size <= 61 * (80 + 4 * 5)


def test_a_constant_plan_is_differentiable_in_what_it_maps():
    given = problem()
    plan = torchgw.solve(given["X"], given["Y"], distances="sqeuclidean", n_init=1).lazy_plan
    (values,) = require([given["Y"]])
    assert gradcheck(lambda v: (plan @ v, plan.barycentric(v)), [values])
    assert gradgradcheck(lambda v: plan @ v.square(), [values])


def test_float32_inputs_get_float32_gradients():
    given = problem()
    double, single = require([given["X"]]), [given["X"].float().requires_grad_()]
    for tensors in (double, single):
        run = solver("euclidean", "value", ["X"], {"Y": given["Y"]}, loss)
        run(*tensors).backward()
    assert single[0].grad.dtype == torch.float32
    torch.testing.assert_close(single[0].grad.double(), double[0].grad, rtol=1e-4, atol=1e-5)


def test_without_the_option_results_are_plain():
    given = problem()
    x, y = require([given["X"], given["Y"]])
    result = torchgw.solve(x, y, distances="sqeuclidean", n_init=1)
    assert result.tracked is None
    with pytest.raises(torchgw.UnsupportedError, match="differentiable='value'"):
        result.loss.backward()
    assert isinstance(result.value, float)
    assert not (result.lazy_plan @ np.ones(6)).requires_grad
    with torch.no_grad():
        quiet = torchgw.solve(x, y, distances="sqeuclidean", epsilon=1.0, differentiable="value")
    assert not quiet.loss.requires_grad


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"epsilon": "auto"}, torchgw.InvalidInputError, "needs a number"),
        ({"differentiable": "yes"}, torchgw.InvalidInputError, "'unrolled' or None"),
        ({"regularization": "proximal"}, torchgw.UnsupportedError, "entropic"),
        ({"polish": True}, torchgw.UnsupportedError, "entropic"),
        ({"scale": "max"}, torchgw.UnsupportedError, "scale=None"),
        ({"distances": "precomputed", "n_neighbors": 4}, torchgw.UnsupportedError, "geodesics"),
        (
            {"distances": "euclidean", "gradient": "sampled", "differentiable": "implicit"},
            torchgw.UnsupportedError,
            "fixed point",
        ),
    ],
)
def test_what_has_no_gradient_is_refused(change, error, message):
    given = problem(20, 15)
    (x,) = require([given["X"]])
    options = {"distances": "sqeuclidean", "epsilon": 1.0, "differentiable": "value", **change}
    with pytest.raises(error, match=message):
        torchgw.solve(x, given["Y"], **options)


def test_points_inside_a_provider_have_no_gradient_and_that_is_said():
    given = problem()
    (x,) = require([given["X"]])
    held = torchgw.distances.PointDistance(x, "sqeuclidean")
    with pytest.raises(torchgw.UnsupportedError, match="`X` is a PointDistance of points"):
        torchgw.solve(held, given["Y"], epsilon=1.0, differentiable="value")


def test_unrolled_refuses_what_it_cannot_hold():
    given = problem(1500, 1400)
    (x,) = require([given["X"]])
    options = {"distances": "sqeuclidean", "epsilon": 2.0, "differentiable": "unrolled"}
    with pytest.raises(torchgw.UnsupportedError, match="1500 x 1400"):
        torchgw.solve(x, given["Y"], **options)
    a = torch.tensor([0.0, 0.5, 0.5])
    with pytest.raises(torchgw.UnsupportedError, match="positive weights"):
        torchgw.solve(given["X"][:3], given["Y"][:4], a=a, **options)


@pytest.mark.parametrize("mode", ["implicit", "unrolled"])
@pytest.mark.parametrize("precision", ["float32", "mixed", "float64"])
def test_operations_of_plans_in_any_precision(mode, precision):
    """Of values in double precision, whatever that of the plan is."""
    given = problem(12, 9)
    (x,) = require([given["X"]])
    options = {"distances": "sqeuclidean", "epsilon": 1.0, "inner_tol": 1e-5, "n_init": 1}
    result = solve_by_name(
        x, given["Y"], differentiable=mode, precision=precision, random_state=0, **options
    )
    plan = result.lazy_plan
    dense = torch.as_tensor(plan.to_dense()).double()
    for got, expected in (
        (plan @ np.eye(9), dense),
        (plan.T @ np.eye(12), dense.T),
        (plan.rows([3, -1]), dense[[3, 11]]),
        (plan.barycentric(given["Y"]), dense @ given["Y"] / dense.sum(1, keepdim=True)),
    ):
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-6)
        (gradient,) = torch.autograd.grad(got.double().square().sum(), x, retain_graph=True)
        assert gradient.norm() > 0


@pytest.mark.slow
def test_torch_compile_leaves_a_solve_alone():
    """Traced, it would be recorded in hundreds of graphs, for minutes."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def step(x):
        y = x[:8, :2] + 1
        options = {"distances": "sqeuclidean", "epsilon": 1.0, "n_init": 1, "max_iter": 2}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return 3 * solve_by_name(2 * x, y, **options, differentiable="value").loss

    inputs = [torch.arange(30.0).double().sin().reshape(10, 3).requires_grad_() for _ in range(2)]
    for function, x in zip((torch.compile(step, backend=backend), step), inputs, strict=True):
        function(x).backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-12, atol=0)
    assert 1 <= len(graphs) <= 6


def test_an_unrolled_plan_has_three_derivatives():
    """Each is the change of the one before; a fourth would not be that of the fixed point."""
    given = problem(6, 5)
    generator = torch.Generator().manual_seed(0)
    steps = {
        name: 0.1 * torch.randn(part.shape, generator=generator, dtype=part.dtype)
        for name, part in given.items()
    }

    def rates(at, order):
        step = torch.tensor(at, dtype=torch.float64, requires_grad=True)
        moved = {name: part + step * steps[name] for name, part in given.items()}
        moved |= {
            name: moved[name].abs() / moved[name].abs().sum() for name in {"a", "b"} & {*moved}
        }
        result = solve_by_name(
            **moved, distances="sqeuclidean", differentiable="unrolled", epsilon=1.5, **TIGHT
        )
        for total in (result.loss, pushed(result).square().sum()):
            found = [total]
            for _ in range(order):
                found += torch.autograd.grad(found[-1], step, create_graph=True)
            yield torch.stack(found[1:]).detach() if order < 4 else None

    width = 1e-4
    both = (rates(sign * width, 3) for sign in (1, -1))
    for here, ahead, behind in zip(rates(0.0, 3), *both, strict=True):
        differences = (ahead - behind)[:2] / (2 * width)
        # the error of differences is a fifth derivative times the square of their width
        torch.testing.assert_close(here[1:], differences, rtol=1e-5, atol=1e-5)
        assert here.abs().min() > 1e-3
    with pytest.raises(torchgw.UnsupportedError, match="up to order 3"):
        next(rates(0.0, 4))


@pytest.mark.parametrize(("epsilon", "said"), [(1.0002, True), (1.5, False)])
def test_a_nearly_singular_fixed_point_is_said(epsilon, said):
    """Two points: below epsilon 1 the product plan is left, and a change of it hardly dies out.

    Unrolled derivatives are refused there.
    """
    table = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    given = {"D_Y": table, "epsilon": epsilon, "init": np.full((2, 2), 0.25)}
    D_X = table.clone().requires_grad_()  # noqa: N806
    result = torchgw.solve(D_X=D_X, differentiable="implicit", **given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.autograd.grad((result.plan * torch.eye(2)).sum(), D_X)
    assert any("nearly singular" in str(each.message) for each in caught) == said
    result = torchgw.solve(D_X=D_X, differentiable="unrolled", **given)
    total = (result.plan * torch.eye(2)).sum()
    if said:
        with pytest.raises(torchgw.NumericalError, match="nearly singular.*Raise `epsilon`"):
            torch.autograd.grad(total, D_X)
    else:
        assert torch.autograd.grad(total, D_X)[0].isfinite().all()


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("options", [{}, {"gradient": "sampled", "n_anchors": 512}], ids=str)
def test_alpha_has_a_gradient(alpha, options):
    rng = np.random.default_rng(0)
    X, Y, M = rng.normal(size=(12, 2)), rng.normal(size=(10, 3)), rng.random((12, 10))

    def loss(value, **more):
        return solve_by_name(
            X, Y, M=M, alpha=value, distances="sqeuclidean", epsilon=1.0, n_init=1, scale=None,
            tol=1e-8, objective_tol=0, inner_tol=1e-10, random_state=0, **options, **more,
        )  # fmt: skip

    weight = torch.tensor(alpha, requires_grad=True)
    result = loss(weight, differentiable="value")
    (slope,) = torch.autograd.grad(result.loss, weight)
    plan = np.asarray(result.plan, np.float64)
    first, second = (((side[:, None] - side[None]) ** 2).sum(-1) for side in (X, Y))
    squares = (first[:, None, :, None] - second[None, :, None, :]) ** 2
    expected = np.einsum("ijkl,ij,kl", squares, plan, plan) - (M * plan).sum()
    assert float(slope) == pytest.approx(expected, rel=1e-4)
    if alpha == 0.4 and not options:
        step = 1e-4
        ends = [loss(alpha + sign * step).log["objective"] for sign in (1, -1)]
        assert float(slope) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-4)


@pytest.mark.parametrize(("mode", "read"), [("value", loss), ("implicit", pushed)])
def test_numbers(mode, read):
    given = problem()

    def run(alpha, epsilon):
        return read(solve_by_name(
            **given, alpha=alpha, epsilon=epsilon, distances="sqeuclidean", differentiable=mode,
            **TIGHT,
        ))  # fmt: skip

    numbers = require(torch.tensor([0.6, 1.5], dtype=torch.float64))
    assert gradcheck(run, numbers, **CHECK)
    # the same linear system
    expected = run_gradient(run, numbers)
    mode = "unrolled"
    for one, other in zip(run_gradient(run, numbers), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def run_gradient(run, inputs):
    return torch.autograd.grad(run(*inputs).square().sum(), inputs)


def test_numbers_without_derivatives_are_refused():
    X, M = torch.randn(6, 2), torch.rand(6, 6)
    given = {"X": X, "Y": X, "M": M, "distances": "sqeuclidean", "alpha": 0.5, "epsilon": 1.0}
    for name in ("alpha", "epsilon"):
        weight = torch.tensor(0.5, requires_grad=True)
        with pytest.raises(torchgw.UnsupportedError, match=f"`{name}` has gradients"):
            torchgw.solve(**given | {name: weight})
