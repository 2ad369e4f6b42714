"""Costs that differ with the direction, through the whole of ``solve``."""

import itertools
import math

import numpy as np
import pytest
import scipy.sparse
import torch

import torchgw
from torchgw import GraphWarning, InvalidInputError, UnsupportedError
from torchgw._gradients.choose import make_gradient
from torchgw._problem.losses import find_loss
from torchgw._problem.problem import Problem
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


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("sides", ["both", "source", "target"])
def test_the_gradient_is_the_derivative_of_the_value(loss, sides):
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
    problem = Problem(*providers, marginals, 1.0, None, find_loss(loss))
    gradient = make_gradient("dense", problem, 1, 1.0)
    plan = np.outer(a, b) * (1 + 0.1 * np.random.default_rng(3).random((9, 7)))
    linear = gradient.linearise(gradient.start()._replace(values=torch.from_numpy(plan)))
    found = linear.cost.dense().matrix.numpy()
    # without terms of rows or columns alone, which balanced plans do not see
    left = _slope(loss, A, B, plan) - found
    left = left - left.mean(0) - left.mean(1, keepdims=True) + left.mean()
    assert np.abs(left).max() < 1e-12


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
    result = torchgw.solve(
        DirectedDistance(A), DirectedDistance(B), a=a, b=b, epsilon=0.05, loss=loss, **options
    )
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
    result = torchgw.solve(
        DirectedDistance(A), DirectedDistance(B), a=a, b=b, epsilon=0.05, polish=True, **options
    )
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
        DirectedDistance(A), DirectedDistance(B), a=a, b=b, epsilon=0.05, init=np.outer(a, b),
        tol=1e-9, objective_tol=0, inner_tol=1e-10,
    )  # fmt: skip
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
    result = torchgw.solve(DirectedDistance(A), DirectedDistance(B), epsilon=0.05)
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
    with pytest.warns(GraphWarning, match="3 of 9 pairs"):
        provider = DirectedDistance.of_graph(path)
    assert provider.table.tolist() == [[0, 1, 3], [4.5, 0, 2], [4.5, 4.5, 0]]


@pytest.mark.parametrize("scale", ["max", "mean"])
def test_a_scale_divides_costs_of_both_directions(scale):
    A, B = _tables()
    unit = [table.max() if scale == "max" else table.mean() for table in (A, B)]
    first, second = (
        torchgw.solve(*map(DirectedDistance, pair), scale=how, epsilon=0.1).value
        for pair, how in (((A, B), scale), ((A / unit[0], B / unit[1]), None))
    )
    assert first == pytest.approx(second, rel=1e-9)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gradient": "sampled"}, "gradient='auto' or 'dense'"),
        ({"gradient": "factored"}, "gradient='auto' or 'dense'"),
        ({"n_init": 4}, "Leave `n_init`"),
        ({"search": "thorough"}, "Leave `n_init`"),
        ({"differentiable": "value", "epsilon": 0.1}, "symmetric distances only"),
    ],
)
def test_what_needs_symmetry_is_refused_before_the_work(options, said, monkeypatch):
    A, B = _tables()
    monkeypatch.delattr("torchgw._api.build_providers")
    with pytest.raises(UnsupportedError, match=said):
        torchgw.solve(DirectedDistance(A), DirectedDistance(B), **options)


def test_no_other_call_drops_the_directions():
    A, B = _tables()
    first, second = DirectedDistance(A), DirectedDistance(B)
    calls = [
        lambda: torchgw.solve_low_rank(first, second, rank=2),
        lambda: torchgw.solve_many([first], [second]),
        lambda: torchgw.barycenter([first, second], 4),
        lambda: ScaledDistance(first, 2.0),
        lambda: ProductDistance([first, PointDistance(torch.zeros(9, 1))]),
        lambda: torchgw.solve(first, second).transform(D_new=A[:2], values=np.zeros((7, 1))),
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
    result = torchgw.solve(DirectedDistance(A), DirectedDistance(B), epsilon=0.1)
    result.save(tmp_path / "result.npz", dense=True)
    again = torchgw.load(tmp_path / "result.npz")
    assert again.distance_correlation == result.distance_correlation
    assert again.value == result.value


def test_any_order_of_the_points_gives_the_same_value():
    A, B = _tables(5, 4)
    values = []
    for order in itertools.islice(itertools.permutations(range(5)), 0, 120, 40):
        index = np.array(order)
        shuffled = DirectedDistance(A[np.ix_(index, index)])
        values.append(torchgw.solve(shuffled, DirectedDistance(B), epsilon=0.1).value)
    assert values == pytest.approx([values[0]] * len(values), rel=1e-6)
