"""Several relations between the points of each side: the objective is the mean over them."""

import itertools
import math

import numpy as np
import pytest
import torch
from problems import check_slopes, dense_and_drawn

import torchgw
from torchgw import InvalidInputError, UnsupportedError
from torchgw._problem.losses import find_loss
from torchgw._problem.problem import Problem
from torchgw._solve.strategy import make_gradient
from torchgw._starts.coarse import coarsen, with_loss
from torchgw._typing import Marginals
from torchgw.distances import DirectedDistance

LOSSES = {
    "square": lambda x, y: (x - y) ** 2,
    "kl": lambda x, y: x * np.log((x + 1e-18) / (y + 1e-18)) - x + y,
    "absolute": lambda x, y: np.abs(x - y),
}


def _tables(n=9, m=7, count=3):
    rng = np.random.default_rng(0)
    first, second = rng.random((count, n, n)), rng.random((count, m, m))
    # the last relation has no directions
    first[-1], second[-1] = first[-1] + first[-1].T, second[-1] + second[-1].T
    return first, second


def _value(loss, first, second, plan):
    tables = [
        LOSSES[loss](x[:, None, :, None], y[None, :, None, :])
        for x, y in zip(first, second, strict=True)
    ]
    return float(np.mean([np.einsum("ijkl,ij,kl", table, plan, plan) for table in tables]))


def _slope(loss, first, second, plan):
    tables = [
        LOSSES[loss](x[:, None, :, None], y[None, :, None, :])
        for x, y in zip(first, second, strict=True)
    ]
    found = [
        np.einsum("ijkl,kl->ij", table, plan) + np.einsum("klij,kl->ij", table, plan)
        for table in tables
    ]
    return np.mean(found, axis=0)


def _problem(loss):
    """A problem, and a plan of its marginals that is no product."""
    first, second = _tables()
    rng = np.random.default_rng(1)
    plan = rng.random((9, 7)) ** 4
    plan /= plan.sum()
    marginals = Marginals(torch.from_numpy(plan.sum(1)), torch.from_numpy(plan.sum(0)))
    sides = DirectedDistance(first), DirectedDistance(second)
    return Problem(*sides, marginals, 1.0, None, find_loss(loss)), first, second, plan


@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_is_the_derivative_of_the_value(loss):
    problem, first, second, plan = _problem(loss)
    gradient = make_gradient("dense", problem, 1, 1.0)
    linear = gradient.linearise(gradient.start()._replace(values=torch.from_numpy(plan)))
    # without terms of rows or columns alone, which balanced plans do not see
    left = _slope(loss, first, second, plan) - linear.cost.dense().matrix.numpy()
    left = left - left.mean(0) - left.mean(1, keepdims=True) + left.mean()
    assert np.abs(left).max() < 1e-11


@pytest.mark.parametrize("loss", ["square", "kl"])
def test_a_copy_of_the_gradient_is_the_same(loss):
    """As graphs of launches on a GPU read it."""
    problem, _, _, plan = _problem(loss)
    gradient = make_gradient("dense", problem, 1, 1.0)
    copy = gradient.copy()
    start = gradient.start()._replace(values=torch.from_numpy(plan))
    first, second = (one.linearise(start).cost.dense().matrix for one in (gradient, copy))
    assert torch.allclose(first, second, rtol=1e-13)


@pytest.mark.parametrize("loss", ["square", "absolute"])
def test_sampled_costs_have_no_bias(loss):
    problem, _, _, plan = _problem(loss)
    exact, drawn = dense_and_drawn(problem, plan)
    # the standard error of 40,000 anchors in six parts; one relation left out would be a third off
    assert float((drawn - exact).norm()) < 0.2 * float(exact.norm())


@pytest.mark.parametrize("loss", LOSSES)
def test_a_search_compares_values_of_all_relations(loss):
    problem, first, second, plan = _problem(loss)
    coarse = with_loss(coarsen(problem, 20), problem).problem
    index = np.ix_(coarse.source.indices, coarse.target.indices)
    found = float(coarse.value(torch.from_numpy(plan[index])[None]))
    # a minimum is cut into levels
    exact = {"rel": 1e-12} if loss != "absolute" else {"abs": 0.01}
    assert found == pytest.approx(_value(loss, first, second, plan), **exact)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "options",
    [
        {"max_iter": 60},
        {"regularization": "proximal", "max_iter": 30},
        {"M": np.random.default_rng(4).random((9, 7)), "alpha": 0.6},
        {"unbalanced": 1.0},
        {"unbalanced": (math.inf, 0.0)},
        {"mass": 0.7},
        {"gradient": "sampled", "options": torchgw.Options(n_anchors=64)},
        {"pairs": [[0, 1], [2, 2]]},
        {"groups": (np.arange(9) % 2, np.arange(7) % 2)},
    ],
    ids=[
        "balanced", "proximal", "fused", "penalties", "semi-relaxed", "partial", "sampled",
        "pairs", "groups",
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::torchgw.ConvergenceWarning")
def test_values_are_means_over_relations(loss, options):
    first, second = _tables()
    if "pairs" in options or "groups" in options:
        first, second = first[:, :7, :7], second
        options = {**options, "groups": (np.arange(7) % 2,) * 2} if "groups" in options else options
    # few iterations: the value is that of the plan, wherever it is
    call = {"D_X": first, "D_Y": tuple(second), "epsilon": 0.05, "loss": loss, "random_state": 0}
    result = torchgw.solve(**({"n_init": 1, "max_iter": 20} | call | options))
    plan, alpha = np.asarray(result.plan, np.float64), options.get("alpha", 1.0)
    expected = alpha * _value(loss, first, second, plan)
    if "M" in options:
        expected += (1 - alpha) * float((options["M"] * plan).sum())
    assert result.value == pytest.approx(expected, rel=1e-5)
    if loss != "absolute" or len(first[0]) == 7:
        matching = result.matching()
        plan = np.zeros_like(plan)
        plan[matching.source, matching.target] = matching.weights
        expected = alpha * _value(loss, first, second, plan)
        if "M" in options:
            expected += (1 - alpha) * float((options["M"] * plan).sum())
        assert matching.value == pytest.approx(expected, rel=1e-9)


@pytest.mark.filterwarnings("ignore::torchgw.SearchWarning")
def test_matchings_of_few_points_are_the_best():
    first, second = _tables(6, 6)
    result = torchgw.solve(D_X=first, D_Y=second, random_state=0)
    orders = map(list, itertools.permutations(range(6)))
    costs = [
        np.mean((first - second[:, order][:, :, order]) ** 2) for order in orders
    ]  # fmt: skip
    assert result.matching().value == pytest.approx(min(costs), rel=1e-9)


def test_a_relation_that_is_given_twice_counts_as_once():
    first, second = _tables()
    call = {"epsilon": 0.05, "n_init": 1}
    once = torchgw.solve(DirectedDistance(first[0]), DirectedDistance(second[0]), **call)
    twice = torchgw.solve(D_X=first[[0, 0]], D_Y=second[[0, 0]], **call)
    assert np.allclose(once.plan, twice.plan, atol=1e-9)
    assert twice.value == pytest.approx(once.value, rel=1e-9)
    assert twice.distance_correlation == pytest.approx(once.distance_correlation, rel=1e-9)


def test_a_relation_without_weight_does_not_count():
    first, second = _tables(count=2)
    weights = np.array([2.0, 0.0])[:, None, None] ** 0.5
    call = {"epsilon": 0.05, "n_init": 1}
    once = torchgw.solve(DirectedDistance(first[0]), DirectedDistance(second[0]), **call)
    both = torchgw.solve(D_X=first * weights, D_Y=second * weights, **call)
    assert np.allclose(once.plan, both.plan, atol=1e-9)


def test_relations_tell_together_what_none_tells_alone():
    # points of a grid whose first relation tells the column and whose second tells the row
    column, row = np.divmod(np.arange(30), 5)
    distances = np.stack([abs(side[:, None] - side) ** 1.5 for side in (column, row)])
    distances[:, 0] += 0.1 * np.arange(30)
    order = np.random.default_rng(0).permutation(30)
    moved = distances[:, order][:, :, order]
    right = []
    for some in ([0], [1], [0, 1]):
        result = torchgw.solve(D_X=distances[some], D_Y=moved[some], random_state=0)
        right.append(float((order[result.matching().target] == np.arange(30)).mean()))
    assert right[2] == 1


@pytest.mark.parametrize("mode", ["value", "implicit", "unrolled"])
def test_derivatives_are_central_differences(mode):
    rng = np.random.default_rng(11)
    given = [torch.from_numpy(rng.random(shape)) for shape in ((2, 6, 6), (2, 5, 5))]
    precise = torchgw.Options(objective_tol=0, inner_tol=1e-14, inner_max_iter=20_000)

    def solved(inputs, mode, init):
        first, second = inputs
        return torchgw.solve(
            D_X=first, D_Y=second, epsilon=0.2, tol=1e-12, max_iter=3_000, n_init=1, init=init,
            differentiable=mode, options=precise,
        )  # fmt: skip

    check_slopes(solved, given, mode, rng)


def test_a_file_keeps_the_relations(tmp_path):
    first, second = _tables()
    result = torchgw.solve(D_X=first, D_Y=second, epsilon=0.1, n_init=1)
    result.save(tmp_path / "result.npz", dense=True)
    again = torchgw.load(tmp_path / "result.npz")
    assert again.distance_correlation == pytest.approx(result.distance_correlation, rel=1e-11)
    assert again.matching().value == pytest.approx(result.matching().value, rel=1e-11)


def test_points_of_a_relation_are_taken_from_all_tables():
    first, _ = _tables()
    index = torch.tensor([4, 0, 7])
    every = DirectedDistance(first)
    few = every.subset(index)
    assert torch.equal(few.table, every.table[:, index][:, :, index])
    assert torch.allclose(few.matrix(), every.matrix()[index][:, index])


def test_what_does_not_go_with_relations_is_refused_by_name():
    first, second = _tables()
    sides = DirectedDistance(first), DirectedDistance(second)
    calls = {
        "as many relations": lambda: torchgw.solve(D_X=first, D_Y=second[:2]),
        "X has 3 and Y 1": lambda: torchgw.solve(D_X=first, D_Y=second[2]),
        "one shape for all": lambda: torchgw.solve(D_X=(first[0], first[0, :2, :2]), D_Y=second),
        "`D_X` must have shape .n, n.": lambda: torchgw.solve(D_X=first[:, :3], D_Y=second),
    }
    for message, call in calls.items():
        with pytest.raises(InvalidInputError, match=message):
            call()
    calls = {
        "one relation": lambda: torchgw.solve(D_X=first, D_Y=second, certify=True),
        "have none": lambda: torchgw.solve(D_X=first, D_Y=second, gradient="factored"),
        "Confidence": lambda: torchgw.solve(D_X=first, D_Y=second, n_init=1).confidence(3),
        "DirectedDistance": lambda: torchgw.solve_many([sides[0]], [sides[1]]),
        "would lose": lambda: torchgw.solve_low_rank(*sides, rank=2),
    }
    for message, call in calls.items():
        with pytest.raises(UnsupportedError, match=message):
            call()


@pytest.mark.filterwarnings("ignore::torchgw.SearchWarning")
def test_sparse_relations_have_starts_of_graphs():
    """Near a x b all chains may come to one wrong optimum, without a doubt."""
    rng = np.random.default_rng(0)
    first = (rng.random((2, 110, 110)) < 0.03) * 1.0
    order = rng.permutation(110)
    second = (first * (rng.random(first.shape) > 0.2))[:, order][:, :, order]
    result = torchgw.solve(D_X=first, D_Y=second, random_state=0)
    assert {"beliefs", "heat", "convex start"} <= {trial.start for trial in result.trials}
    inverse = order.argsort()
    truth = ((first - second[:, inverse][:, :, inverse]) ** 2).mean()
    assert result.doubt or result.matching().value <= truth * (1 + 1e-9)
