"""Costs that differ with the direction, through the whole of ``solve``."""

import itertools
import math

import numpy as np
import pytest
import scipy.sparse
import torch
from problems import check_slopes, dense_and_drawn, solve_by_name

import torchgw
from torchgw import GraphWarning, InvalidInputError, UnsupportedError
from torchgw._problem.losses import find_loss
from torchgw._problem.problem import Problem
from torchgw._solve.strategy import make_gradient
from torchgw._starts.coarse import coarsen, with_loss
from torchgw._typing import Marginals
from torchgw.distances import (
    DirectedDistance,
    PointDistance,
    PrecomputedDistance,
    ProductDistance,
    ScaledDistance,
)

LOSSES = {
    "square": lambda x, y: (x - y) ** 2,
    "kl": lambda x, y: x * np.log((x + 1e-18) / (y + 1e-18)) - x + y,
    "absolute": lambda x, y: np.abs(x - y),
}


def _tables(n=9, m=7, seed=0):
    rng = np.random.default_rng(seed)
    return rng.random((n, n)), rng.random((m, m))


def _weights(n=9, m=7, seed=1):
    rng = np.random.default_rng(seed)
    first, second = rng.random(n) + 0.1, rng.random(m) + 0.1
    return first / first.sum(), second / second.sum()


def _value(loss, A, B, plan):
    table = LOSSES[loss](A[:, None, :, None], B[None, :, None, :])
    return float(np.einsum("ijkl,ij,kl", table, plan, plan))


def _slope(loss, A, B, plan):
    """Differentiate the value by the plan, which has no symmetry to make use of."""
    table = LOSSES[loss](A[:, None, :, None], B[None, :, None, :])
    return np.einsum("ijkl,kl->ij", table, plan) + np.einsum("klij,kl->ij", table, plan)


def _problem(loss, sides):
    """A problem with costs in directions on some sides, its tables, and a plan that is sharp."""
    A, B = _tables()
    A, B = (A + A.T if sides == "target" else A), (B + B.T if sides == "source" else B)
    a, b = _weights()
    providers = [
        PrecomputedDistance(torch.from_numpy(table))
        if np.array_equal(table, table.T)
        else DirectedDistance(table)
        for table in (A, B)
    ]
    marginals = Marginals(torch.from_numpy(a), torch.from_numpy(b))
    # north-west corners in two random orders
    rng, plan = np.random.default_rng(3), np.zeros((9, 7))
    for _ in range(2):
        rows, columns = rng.permutation(9), rng.permutation(7)
        left, right = a[rows].cumsum(), b[columns].cumsum()
        ends = np.minimum(left[:, None], right) - np.maximum(
            (left - a[rows])[:, None], right - b[columns]
        )
        plan[np.ix_(rows, columns)] += ends.clip(0) / 2
    return Problem(*providers, marginals, 1.0, None, find_loss(loss)), A, B, plan


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("sides", ["both", "source", "target"])
def test_the_gradient_is_the_derivative_of_the_value(loss, sides):
    problem, A, B, plan = _problem(loss, sides)
    gradient = make_gradient("dense", problem, 1, 1.0)
    plan = plan * (1 + 0.1 * np.random.default_rng(3).random((9, 7)))
    linear = gradient.linearise(gradient.start()._replace(values=torch.from_numpy(plan)))
    found = linear.cost.dense().matrix.numpy()
    # without terms of rows or columns alone, which balanced plans do not see
    left = _slope(loss, A, B, plan) - found
    left = left - left.mean(0) - left.mean(1, keepdims=True) + left.mean()
    assert np.abs(left).max() < 1e-11


@pytest.mark.parametrize("loss", ["square", "kl"])
def test_a_copy_of_the_gradient_reads_tables_of_its_own(loss):
    """As graphs of launches on a GPU do."""
    A, B = _tables()
    a, b = map(torch.from_numpy, _weights())
    sides = DirectedDistance(A), DirectedDistance(B)
    gradient = make_gradient(
        "dense", Problem(*sides, Marginals(a, b), 1.0, None, find_loss(loss)), 1, 1.0
    )
    copy = gradient.copy()
    assert [part.shape for part in copy.tables()] == [part.shape for part in gradient.tables()]
    start = gradient.start()
    plan = start._replace(values=start.values + torch.from_numpy(np.arange(63.0).reshape(9, 7)))
    first, second = (one.linearise(plan).cost.dense().matrix for one in (gradient, copy))
    assert torch.allclose(first, second, rtol=1e-13)
    own = {part.data_ptr() for part in gradient.tables()}
    assert not own & {part.data_ptr() for part in copy.tables()}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"regularization": "proximal", "max_iter": 30},
        {"M": np.random.default_rng(4).random((9, 7)), "alpha": 0.6},
        {"unbalanced": 1.0},
        {"unbalanced": (math.inf, 0.0)},
        {"mass": 0.7},
        {"precision": "mixed"},
    ],
    ids=["balanced", "proximal", "fused", "penalties", "semi-relaxed", "partial", "mixed"],
)
@pytest.mark.filterwarnings("ignore::torchgw.ConvergenceWarning")
def test_values_are_sums_over_pairs_of_pairs(loss, options):
    A, B = _tables()
    a, b = _weights()
    # one kind goes through a search as well
    call = {"a": a, "b": b, "epsilon": 0.05, "loss": loss, "n_init": 1 if options else None}
    result = solve_by_name(DirectedDistance(A), DirectedDistance(B), **call, **options)
    plan, alpha = np.asarray(result.plan, np.float64), options.get("alpha", 1.0)
    expected = alpha * _value(loss, A, B, plan)
    if "M" in options:
        expected += (1 - alpha) * float((options["M"] * plan).sum())
    assert result.value == pytest.approx(expected, rel=1e-5)


@pytest.mark.filterwarnings("ignore::torchgw.ConvergenceWarning")
@pytest.mark.parametrize(
    "options",
    [{}, {"unbalanced": (math.inf, 0.0)}, {"mass": 0.7}],
    ids=["balanced", "semi-relaxed", "partial"],
)
def test_polished_plans_are_stationary(options):
    pytest.importorskip("ot")
    A, B = _tables()
    a, b = _weights()
    call = {"a": a, "b": b, "epsilon": 0.05, "n_init": 1}
    result = torchgw.solve(DirectedDistance(A), DirectedDistance(B), polish=True, **call, **options)
    plan = np.asarray(result.plan)
    slope = _slope("square", A, B, plan)
    # no plan of the same kind has a lower linearised cost: tried are moves along random others
    rng = np.random.default_rng(5)
    for _ in range(200):
        i, k = rng.choice(9, 2, replace=False)
        j, lower = rng.choice(7, 2, replace=False)
        if options.get("unbalanced"):
            move = slope[i, lower] - slope[i, j]
            free = plan[i, j] > 1e-9
        else:
            move = slope[i, lower] + slope[k, j] - slope[i, j] - slope[k, lower]
            free = min(plan[i, j], plan[k, lower]) > 1e-9
        assert not free or move > -1e-7


def test_the_entropic_plan_is_that_of_pot():
    ot = pytest.importorskip("ot")
    A, B = _tables(20, 25)
    a, b = _weights(20, 25)
    expected = ot.gromov.entropic_gromov_wasserstein(
        A, B, a, b, epsilon=0.05, symmetric=False, tol=1e-11, max_iter=5000
    )
    result = torchgw.solve(
        DirectedDistance(A),
        DirectedDistance(B),
        a=a,
        b=b,
        epsilon=0.05,
        init=np.outer(a, b),
        tol=1e-9,
        options=torchgw.Options(objective_tol=0, inner_tol=1e-10),
    )
    assert np.abs(np.asarray(result.plan) - expected).sum() < 1e-8


def test_a_symmetric_table_is_the_same_as_without_directions():
    A, B = (table + table.T for table in _tables())
    init = np.full((9, 7), 1 / 63)
    plans = [
        torchgw.solve(**call, init=init, epsilon=0.1).plan
        for call in (
            {"X": DirectedDistance(A), "Y": DirectedDistance(B)},
            {"D_X": A, "D_Y": B},
        )
    ]
    assert torch.allclose(torch.as_tensor(plans[0]), torch.as_tensor(plans[1]), atol=1e-12)


def test_directions_tell_what_the_mean_of_both_does_not():
    # a tournament: T + T' is the same for all pairs
    rng = np.random.default_rng(0)
    n = 40
    upper = np.triu(rng.random((n, n)) < 0.5, 1)
    A = (upper | (~upper.T & np.tri(n, k=-1, dtype=bool))).astype(float)
    assert np.array_equal(A + A.T, 1 - np.eye(n))
    order = rng.permutation(n)
    result = torchgw.solve(DirectedDistance(A), DirectedDistance(A[np.ix_(order, order)]))
    assert np.array_equal(order[np.asarray(result.plan.argmax(1))], np.arange(n))
    assert result.value == pytest.approx(0, abs=1e-3)
    matching = result.matching()
    assert matching.value == pytest.approx(0, abs=1e-12)
    assert result.distance_correlation == pytest.approx(1, abs=1e-2)


def test_the_value_of_a_matching_counts_both_directions():
    A, B = _tables(6, 6)
    result = torchgw.solve(DirectedDistance(A), DirectedDistance(B), epsilon=0.05, n_init=1)
    matching = result.matching()
    plan = np.zeros((6, 6))
    plan[matching.source, matching.target] = matching.weights
    assert matching.value == pytest.approx(_value("square", A, B, plan), rel=1e-12)


def test_paths_of_a_directed_graph():
    ring = scipy.sparse.csr_array(([1.0] * 5, (range(5), [1, 2, 3, 4, 0])), shape=(5, 5))
    provider = DirectedDistance.of_graph(ring)
    expected = [[(k - i) % 5 for k in range(5)] for i in range(5)]
    assert provider.table.tolist() == expected
    path = scipy.sparse.csr_array(([1.0, 2.0], ([0, 1], [1, 2])), shape=(3, 3))
    with pytest.warns(GraphWarning, match="no path in their direction.*: 3 of 9"):
        provider = DirectedDistance.of_graph(path)
    assert provider.table.tolist() == [[0, 1, 3], [4.5, 0, 2], [4.5, 4.5, 0]]


@pytest.mark.parametrize("scale", ["max", "mean"])
def test_a_scale_divides_costs_of_both_directions(scale):
    A, B = _tables()
    unit = [table.max() if scale == "max" else table.mean() for table in (A, B)]
    first, second = (
        torchgw.solve(*map(DirectedDistance, pair), scale=how, epsilon=0.1, n_init=1).value
        for pair, how in (((A, B), scale), ((A / unit[0], B / unit[1]), None))
    )
    assert first == pytest.approx(second, rel=1e-9)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("sides", ["both", "source", "target"])
def test_a_search_compares_values_of_both_directions(loss, sides):
    problem, A, B, plan = _problem(loss, sides)
    coarse = with_loss(coarsen(problem, 20), problem).problem
    index = np.ix_(coarse.source.indices, coarse.target.indices)
    found = float(coarse.value(torch.from_numpy(plan[index])[None]))
    # a minimum is cut into 16 levels; without the antisymmetric parts it is off by .016
    exact = {"rel": 1e-12} if loss != "absolute" else {"abs": 0.01}
    assert found == pytest.approx(_value(loss, A, B, plan), **exact)


@pytest.mark.filterwarnings("ignore::torchgw.SearchWarning")
@pytest.mark.parametrize("options", [{}, {"n_init": 24}, {"unbalanced": (math.inf, 0.0)}])
def test_optima_of_a_search_have_the_values_of_their_plans(options):
    A, B = _tables(11, 9)
    result = solve_by_name(DirectedDistance(A), DirectedDistance(B), epsilon=1e-3, **options)
    assert result.alternatives
    for one in result.alternatives:
        plan = np.zeros((11, 9))
        plan[np.ix_(one.source, one.target)] = one.plan
        # that of a relaxed problem has the entropy, at most log 99 times epsilon
        assert one.value == pytest.approx(
            _value("square", A, B, plan), rel=1e-6, abs=5e-3 if "unbalanced" in options else 0
        )
    assert result.value < result.alternatives[0].value + 1e-2


@pytest.mark.parametrize("loss", ["square", "absolute"])
@pytest.mark.parametrize("sides", ["both", "source", "target"])
def test_sampled_costs_have_no_bias(loss, sides):
    problem, _, _, plan = _problem(loss, sides)
    exact, drawn = dense_and_drawn(problem, plan)
    # the standard error of 40,000 anchors is 2% of the cost that each adds; one way alone, or
    # both the same way, would be off by half of it
    assert float((drawn - exact).norm()) < 0.15 * float(exact.norm())


@pytest.mark.parametrize("sides", ["both", "source", "target"])
def test_values_of_sampled_solves_are_those_of_exact_ones(sides):
    problem, A, B, _ = _problem("square", sides)
    call = {"X": problem.source, "Y": problem.target, "epsilon": 0.1, "random_state": 0}
    call |= {"n_init": 1}
    a, b = problem.marginals
    drawn = solve_by_name(**call, a=a, b=b, gradient="sampled", n_anchors=64)
    assert drawn.value == pytest.approx(_value("square", A, B, np.asarray(drawn.plan)), rel=1e-5)
    few = solve_by_name(**call, a=a, b=b, gradient="sampled", n_anchors=8)
    expected = _value("square", A, B, np.asarray(few.plan))
    assert few.value == pytest.approx(expected, abs=5 * few.report.value_standard_error)


def test_points_beside_directed_costs_have_factors():
    A, Y = np.random.default_rng(2).random((12, 12)), np.random.default_rng(3).random((9, 2))
    init = np.full((12, 9), 1 / 108)
    values = [
        torchgw.solve(
            DirectedDistance(A), Y, distances="sqeuclidean", epsilon=0.1, gradient=name, init=init
        ).value
        for name in ("dense", "factored")
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-5)


def test_directed_costs_are_named_where_factors_are_missing():
    A, B = np.random.default_rng(2).random((2, 12, 12))
    with pytest.raises(UnsupportedError, match="the directed costs of `X` and `Y` have none"):
        torchgw.solve(DirectedDistance(A), DirectedDistance(B), gradient="factored")
    with pytest.raises(UnsupportedError, match="the directed costs of `Y` have none"):
        torchgw.solve(D_X=A + A.T, Y=DirectedDistance(B), gradient="factored")


@pytest.mark.filterwarnings("ignore::torchgw.ConvergenceWarning")
@pytest.mark.parametrize("sides", ["both", "source", "target"])
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("value", {}),
        ("implicit", {}),
        ("unrolled", {"epsilon": 0.3}),
        ("implicit", {"unbalanced": (math.inf, 0.5)}),
        ("implicit", {"mass": 0.7}),
    ],
    ids=["value", "implicit", "unrolled", "semi-relaxed", "partial"],
)
def test_derivatives_are_central_differences(mode, options, sides):
    rng = np.random.default_rng(11)
    given = [torch.from_numpy(rng.random(shape)) for shape in ((6, 6), (5, 5), (6, 5), 6, 5)]
    defaults = {
        "alpha": 0.8, "epsilon": 0.08, "tol": 1e-12, "objective_tol": 0, "inner_tol": 1e-14,
        "inner_max_iter": 20_000, "max_iter": 3_000, "n_init": 1,
    }  # fmt: skip

    def solved(inputs, mode, init):
        A, B, M, a, b = inputs
        call = {"X": DirectedDistance(A)} if sides != "target" else {"D_X": (A + A.T) / 2}
        call |= {"Y": DirectedDistance(B)} if sides != "source" else {"D_Y": (B + B.T) / 2}
        a, b = (a + 0.3) / (a + 0.3).sum(), (b + 0.3) / (b + 0.3).sum()
        return solve_by_name(
            **call, M=M, a=a, b=b, differentiable=mode, init=init, **(defaults | options)
        )

    check_slopes(solved, given, mode, rng)


def test_products_with_the_hessian_are_differences_of_gradients():
    A, B = (torch.from_numpy(table) for table in _tables(6, 5))
    options = {"epsilon": 0.1, "tol": 1e-12, "objective_tol": 0, "inner_tol": 1e-14}
    options |= {"inner_max_iter": 20_000, "max_iter": 3_000, "n_init": 1, "init": None}

    def solved(table):
        tracked = table.clone().requires_grad_(), B.clone().requires_grad_()
        result = solve_by_name(*map(DirectedDistance, tracked), differentiable="value", **options)
        return result, torch.autograd.grad(result.loss, tracked, retain_graph=True)

    result, _ = solved(A)
    options["init"] = torch.as_tensor(result.plan).detach()
    direction = torch.from_numpy(np.random.default_rng(3).normal(size=(6, 6)))
    found = result.hvp({"D_X": direction}).products
    ahead, behind = (solved(A + step * direction)[1] for step in (1e-5, -1e-5))
    for name, one, other in zip(("D_X", "D_Y"), ahead, behind, strict=True):
        torch.testing.assert_close(found[name], (one - other) / 2e-5, rtol=1e-5, atol=1e-8)


def test_no_other_call_drops_the_directions():
    A, B = _tables()
    first, second = DirectedDistance(A), DirectedDistance(B)
    calls = [
        lambda: torchgw.solve_low_rank(first, second, rank=2),
        lambda: torchgw.solve_many([first], [second]),
        lambda: torchgw.barycenter([first, second], 4),
        lambda: ScaledDistance(first, 2.0),
        lambda: ProductDistance([first, PointDistance(torch.zeros(9, 1))]),
        lambda: torchgw.solve(first, second, n_init=1).transform(
            D_new=A[:2], values=np.zeros((7, 1))
        ),
    ]
    for call in calls:
        with pytest.raises(UnsupportedError, match="DirectedDistance"):
            call()


def test_asymmetric_tables_say_how_directions_are_given():
    A, B = _tables()
    with pytest.raises(InvalidInputError, match=r"DirectedDistance\(D_X\)"):
        torchgw.solve(D_X=A, D_Y=B + B.T)
    graph = scipy.sparse.csr_array(np.triu(A))
    with pytest.raises(InvalidInputError, match="DirectedDistance.of_graph"):
        torchgw.solve(graph, graph)


@pytest.mark.parametrize("table", [np.zeros((2, 3)), np.full((2, 2), np.nan), np.zeros((0, 0))])
def test_bad_tables_are_refused(table):
    with pytest.raises(InvalidInputError, match="`table`"):
        DirectedDistance(table)


def test_a_file_keeps_the_directions(tmp_path):
    A, B = _tables()
    result = torchgw.solve(DirectedDistance(A), DirectedDistance(B), epsilon=0.1, n_init=1)
    result.save(tmp_path / "result.npz", dense=True)
    again = torchgw.load(tmp_path / "result.npz")
    assert again.distance_correlation == pytest.approx(result.distance_correlation, rel=1e-11)
    assert again.value == result.value


def test_any_order_of_the_points_gives_the_same_value():
    A, B = _tables(5, 4)
    values, options = [], {"epsilon": 0.1, "n_init": 1}
    for order in itertools.islice(itertools.permutations(range(5)), 0, 120, 40):
        index = np.array(order)
        shuffled = DirectedDistance(A[np.ix_(index, index)])
        values.append(torchgw.solve(shuffled, DirectedDistance(B), **options).value)
    assert values == pytest.approx([values[0]] * len(values), rel=1e-6)
