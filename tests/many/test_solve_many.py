"""Lists and stacks of problems, beside `solve`, POT and finite differences."""

from __future__ import annotations

import warnings
from functools import partial

import networkx
import numpy as np
import ot
import pytest
import reference
import torch
from problems import random_weights, solve_by_name, weighted_clouds
from scipy.spatial.distance import cdist

import torchgw

# of one start, whose bits and answers are those of the engine alone; searches have their own tests
solve_batch = partial(torchgw.solve_batch, n_init=1)
solve_many = partial(torchgw.solve_many, n_init=1)
RNG = np.random.default_rng(0)
SIZES, XS, YS, A, B = weighted_clouds(RNG)


def alone(k, **options):
    return solve_by_name(
        XS[k], YS[k], a=A[k], b=B[k], distances="euclidean", n_init=1, random_state=0, **options
    )


@pytest.mark.parametrize("epsilon", ["auto", 0.02])
def test_values_are_those_of_solve(epsilon):
    batch = solve_many(XS, YS, a=A, b=B, epsilon=epsilon, objective_tol=0)
    for k, (n, m) in enumerate(SIZES):
        one = alone(k, epsilon=epsilon, objective_tol=0)
        assert float(batch.epsilon[k]) == pytest.approx(one.epsilon, rel=1e-12)
        # epsilon falls more slowly here, which can end in a lower optimum
        assert float(batch.objective[k]) < one.report.objective * (1 + 1e-5)
        assert batch.result(k).value == pytest.approx(float(batch.value[k]), rel=1e-5)
        assert batch.plan(k).shape == (n, m)
        # an independent evaluation of the plan
        x, y = (cdist(side, side) / cdist(side, side).max() for side in (XS[k], YS[k]))
        value = reference.gw_value(x, y, np.asarray(batch.plan(k)))
        assert float(batch.value_quad[k]) == pytest.approx(value, rel=1e-9)
    assert batch.converged.all()
    assert float(batch.marginal_error.max()) < 5e-6
    assert (batch.value == batch.value_quad).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sinkhorn did not converge")
def test_objectives_are_no_worse_than_pots():
    """Twenty problems: POT from the same product plan, at the same epsilon."""
    rng = np.random.default_rng(1)
    tables = [cdist(points, points) for points in rng.normal(size=(40, 9, 2))]
    tables = [table / table.max() for table in tables]
    batch = solve_many(D_X=tables[:20], D_Y=tables[20:], epsilon=0.05)
    weight, worse = np.full(9, 1 / 9), 0
    for k, (x, y) in enumerate(zip(tables[:20], tables[20:], strict=True)):
        plan = ot.gromov.entropic_gromov_wasserstein(
            x, y, weight, weight, epsilon=0.05, max_iter=100, tol=1e-6, numItermax=3000
        )
        objective = reference.gw_value(x, y, plan) + 0.05 * (plan * np.log(plan * 81)).sum()
        worse += float(batch.objective[k]) > objective + 1e-6
    # there is more than one optimum, and annealing finds another one than starting at epsilon
    assert worse <= 2


def test_fused_problems_and_weights_of_their_own():
    rng = np.random.default_rng(2)
    features = (
        [rng.normal(size=(len(x), 4)) for x in XS],
        [rng.normal(size=(len(y), 4)) for y in YS],
    )
    alphas = [0.3, 0.5, 0.9, 0.99]
    for metric in ("sqeuclidean", "cosine", "correlation", "euclidean"):
        batch = solve_many(
            XS, YS, a=A, b=B, features=features, feature_metric=metric, alpha=alphas,
            epsilon=[0.1, 0.05, 0.02, 0.1],
        )  # fmt: skip
        for k in (0, 1):
            one = alone(
                k, features=(features[0][k], features[1][k]), feature_metric=metric,
                alpha=alphas[k], epsilon=[0.1, 0.05][k],
            )  # fmt: skip
            assert float(batch.value[k]) == pytest.approx(one.value, rel=1e-5)
            assert float(batch.value_linear[k]) == pytest.approx(one.value_linear, rel=1e-4)
            assert float(batch.objective[k]) == pytest.approx(one.report.objective, rel=1e-6)
    costs = [cdist(f, g) for f, g in zip(*features, strict=True)]
    given = solve_many(XS, YS, a=A, b=B, M=costs, alpha=alphas, epsilon=[0.1, 0.05, 0.02, 0.1])
    torch.testing.assert_close(given.objective, batch.objective, rtol=1e-9, atol=0)


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.8])
def test_epsilons_of_fused_problems_are_those_of_solve(alpha):
    costs = [np.random.default_rng(k).uniform(size=(len(x), len(y)))
             for k, (x, y) in enumerate(zip(XS, YS, strict=True))]  # fmt: skip
    quick = {"alpha": alpha, "max_iter": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.ConvergenceWarning)
        batch = solve_many(XS, YS, a=A, b=B, M=costs, **quick)
        alone_ones = [alone(k, M=cost, **quick) for k, cost in enumerate(costs)]
    assert batch.epsilon.tolist() == pytest.approx([one.epsilon for one in alone_ones], rel=1e-12)


def test_stacks_are_lists_and_padding_is_not_read():
    stack = torch.full((4, 30, 30), torch.nan, dtype=torch.float64)
    other = torch.full((4, 18, 18), torch.nan, dtype=torch.float64)
    a, b = torch.full((4, 30), torch.nan), torch.full((4, 18), torch.nan)
    a, b = a.double(), b.double()
    for k, (n, m) in enumerate(SIZES):
        stack[k, :n, :n] = torch.from_numpy(cdist(XS[k], XS[k]) / cdist(XS[k], XS[k]).max())
        other[k, :m, :m] = torch.from_numpy(cdist(YS[k], YS[k]) / cdist(YS[k], YS[k]).max())
        a[k, :n], b[k, :m] = torch.from_numpy(A[k]), torch.from_numpy(B[k])
    rows, columns = zip(*SIZES, strict=True)
    stacked = solve_batch(
        stack, other, a=a, b=b, sizes_x=rows, sizes_y=torch.tensor(columns), epsilon=0.02
    )
    listed = solve_many(XS, YS, a=A, b=B, epsilon=0.02)
    np.testing.assert_allclose(stacked.value, listed.value, rtol=1e-6)
    assert stacked.shapes.tolist() == [list(size) for size in SIZES]
    # the same numbers give the same bits, however they come
    uniform = solve_batch(stack, other, sizes_x=rows, sizes_y=columns, epsilon=0.05)
    tables = [stack[k, :n, :n] for k, (n, _) in enumerate(SIZES)]
    others = [other[k, :m, :m] for k, (_, m) in enumerate(SIZES)]
    again = solve_many(D_X=tables, D_Y=others, epsilon=0.05)
    assert torch.equal(again.value, uniform.value)
    assert all(map(torch.equal, again.plans(), uniform.plans()))


def test_stacks_of_fused_problems_and_their_gradients():
    rng = np.random.default_rng(4)
    points = torch.from_numpy(rng.normal(size=(3, 18, 2)))
    x, y = torch.cdist(points, points), torch.cdist(points[:, :12], points[:, :12])
    cost = torch.from_numpy(rng.uniform(size=(3, 18, 12)))
    rows, columns = [18, 9, 17], [7, 12, 12]
    stacked = solve_batch(
        x, y, cost.requires_grad_(), sizes_x=rows, sizes_y=columns, alpha=0.4, epsilon=0.1,
        scale="max", differentiable=False,
    )  # fmt: skip
    for k, (n, m) in enumerate(zip(rows, columns, strict=True)):
        one = torchgw.solve(
            D_X=x[k, :n, :n], D_Y=y[k, :m, :m], M=cost[k, :n, :m].detach(), alpha=0.4, epsilon=0.1,
            scale="max", n_init=1, random_state=0,
        )  # fmt: skip
        assert float(stacked.objective[k]) == pytest.approx(one.report.objective, rel=1e-5)
    batch = solve_batch(
        x, y, cost, sizes_x=rows, sizes_y=columns, alpha=0.4, epsilon=0.1, differentiable=True
    )
    batch.loss.sum().backward()
    for k, (n, m) in enumerate(zip(rows, columns, strict=True)):
        # the derivative by M is the share of the plan, and nothing in the padding
        torch.testing.assert_close(cost.grad[k, :n, :m], 0.6 * batch.plan(k))
        assert float(cost.grad[k].sum()) == pytest.approx(0.6, rel=1e-5)


def test_kinds_of_spaces():
    graphs = [networkx.path_graph(8), networkx.cycle_graph(9)]
    batch = solve_many(graphs, graphs[::-1], epsilon=0.05)
    hops = [networkx.floyd_warshall_numpy(graph) for graph in graphs]
    hops = [table / table.max() for table in hops]
    given = solve_many(D_X=hops, D_Y=hops[::-1], epsilon=0.05)
    np.testing.assert_allclose(batch.value, given.value, rtol=1e-9)
    parts = [torch.from_numpy(x) for x in XS]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    listed = solve_many(XS, XS, epsilon=0.05)
    from_tensors = solve_many(nested, nested, epsilon=0.05)
    assert isinstance(from_tensors.value, torch.Tensor)
    assert {type(part) for part in (listed.value, *listed.plans())} == {np.ndarray}
    assert np.array_equal(from_tensors.value, listed.value)
    empty = solve_many([], [])
    assert (len(empty), empty.plans()) == (0, [])


def test_more_starts_are_never_worse():
    one = solve_many(XS, YS, epsilon=0.005)
    many = solve_many(XS, YS, epsilon=0.005, n_init=5)
    assert (many.objective <= one.objective).all()
    assert (many.objective < one.objective - 1e-5).any()
    for k in range(len(XS)):
        x, y = (cdist(side, side) / cdist(side, side).max() for side in (XS[k], YS[k]))
        assert float(many.value[k]) == pytest.approx(
            reference.gw_value(x, y, np.asarray(many.plan(k)))
        )


def test_large_problems_go_to_solve():
    big = RNG.normal(size=(520, 2))
    batch = solve_many([XS[0], big], [YS[0], XS[1]], epsilon=0.05)
    assert batch.plan(1).shape == (520, 21)
    assert batch.converged.all()
    one = torchgw.solve(big, XS[1], distances="euclidean", epsilon=0.05, n_init=1, random_state=0)
    assert float(batch.value[1]) == pytest.approx(one.value, rel=1e-4)
    x, y = (cdist(side, side) / cdist(side, side).max() for side in (big, XS[1]))
    # its numbers are kept in float64
    value = reference.gw_value(x, y, np.asarray(batch.plan(1)))
    assert float(batch.value[1]) == pytest.approx(value, rel=1e-9)


def test_results_and_files(tmp_path):
    batch = solve_many(XS, YS, a=A, b=B, epsilon=0.02, objective_tol=0)
    one = batch.result(1)
    assert isinstance(one, torchgw.GWResult)
    assert one.value == pytest.approx(float(batch.value[1]), rel=1e-5)
    assert len(batch.matching(-1).source) == 18
    batch.save(tmp_path / "batch.npz")
    again = torchgw.load(tmp_path / "batch.npz")
    assert isinstance(again, torchgw.BatchResult)
    assert np.array_equal(again.value, batch.value)
    assert all(map(np.array_equal, again.plans(), batch.plans()))
    assert again.statuses == batch.statuses
    assert "4 of 4 converged" in repr(again)
    with pytest.raises(torchgw.UnsupportedError, match="from a file"):
        again.result(0)
    with pytest.raises(torchgw.InvalidInputError, match="`i` must be"):
        batch.plan(4)
    bare = solve_many(XS, YS, a=A, b=B, epsilon=0.02, objective_tol=0, plans=False)
    assert np.array_equal(bare.value, batch.value)
    with pytest.raises(torchgw.UnsupportedError, match="plans=True"):
        bare.plan(0)


def test_failures_are_told_once():
    with pytest.warns(
        torchgw.ConvergenceWarning, match=r"Some problems did not converge: 4 of 4 \(0, 1, 2, 3\)"
    ):
        batch = solve_many(XS, YS, epsilon=1e-3, max_iter=2)
    assert batch.statuses == [torchgw.Status.OUTER_LIMIT] * 4


def test_gradients_are_those_of_differences():
    rng = np.random.default_rng(3)
    x = torch.from_numpy(rng.normal(size=(7, 2))).requires_grad_()
    y = torch.from_numpy(cdist(YS[0][:8], YS[0][:8])).requires_grad_()
    cost = torch.from_numpy(rng.uniform(size=(7, 8))).requires_grad_()
    a = torch.from_numpy(random_weights(7)).requires_grad_()
    inputs, step = {"x": x, "y": y, "cost": cost, "a": a}, 1e-4

    def objective(**changed):
        used = {**inputs, **changed}
        return solve_many(
            [used["x"]], D_Y=[used["y"]], M=[used["cost"]], a=[used["a"]], alpha=0.7, epsilon=0.3,
            tol=1e-8, objective_tol=0, inner_tol=1e-11, differentiable=True,
        )  # fmt: skip

    batch = objective()
    assert float(batch.loss.detach()) == pytest.approx(float(batch.objective), rel=1e-15)
    batch.loss.sum().backward()
    for name, tensor in inputs.items():
        direction = torch.from_numpy(rng.normal(size=tensor.shape))
        if name == "y":
            direction = direction + direction.T
            direction.fill_diagonal_(0)
        if name == "a":
            direction = direction - direction.mean()
            direction = 0.02 * direction
        ahead, behind = (
            float(objective(**{name: (tensor + sign * step * direction).detach()}).objective)
            for sign in (1, -1)
        )
        slope = float((tensor.grad * direction).sum())
        assert slope == pytest.approx((ahead - behind) / (2 * step), rel=2e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": -1}, "`epsilon` must be"),
        ({"epsilon": [0.1]}, "one for each of the 4"),
        ({"alpha": 0.5}, "none was given"),
        ({"M": [np.zeros((2, 2))] * 4}, r"`M\[0\]` must have shape"),
        ({"a": A[:2]}, "`a` must have one array for each of the 4"),
        ({"n_init": 0}, "`n_init`"),
        ({"tol": 0}, "`tol`"),
        ({"features": (XS, YS)}, "same columns"),
        ({"differentiable": True}, "epsilon as numbers"),
        ({"distances": "fast"}, "`distances` must be"),
        ({"eps": 0.1}, "epsilon"),
    ],
)
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(torchgw.TorchGWError, match=message):
        solve_many(XS, YS, **options)


def test_sides_have_to_fit():
    with pytest.raises(torchgw.InvalidInputError, match="as many spaces"):
        solve_many(XS, YS[:2])
    with pytest.raises(torchgw.InvalidInputError, match="exactly one of `Ys`"):
        solve_many(XS)
    with pytest.raises(torchgw.InvalidTypeError, match="list of spaces"):
        solve_many(XS[0], YS[0])
    with pytest.raises(torchgw.InvalidInputError, match="stack of square"):
        solve_batch(XS[0], YS[0])
    with pytest.raises(torchgw.InvalidInputError, match="one size; got several.*solve_many"):
        solve_batch([np.zeros((3, 3)), np.zeros((4, 4))], torch.zeros(2, 4, 4))
    with pytest.raises(torchgw.InvalidInputError, match="n at least 1"):
        solve_batch(torch.zeros(2, 0, 0), torch.zeros(2, 4, 4))
    with pytest.raises(torchgw.InvalidInputError, match="`sizes_x`"):
        solve_batch(torch.zeros(2, 4, 4), torch.zeros(2, 4, 4), sizes_x=[4, 5])
    with pytest.raises(torchgw.InvalidInputError, match=r"Xs\[1\]"):
        solve_many([XS[0], np.full((3, 2), np.nan)], YS[:2])
