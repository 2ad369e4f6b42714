"""The three gradients are one gradient: exact ones agree, the sampled one is unbiased."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import reference
import torch
from problems import random_weights
from scipy.spatial.distance import cdist

from torchgw._gradients.dense import DenseGradient
from torchgw._gradients.factored import FactoredGradient
from torchgw._gradients.sampled import AnchorCoupling, SampledGradient, places
from torchgw._plans.contract import Anchors
from torchgw._plans.given import PairPlan, StoredPlan
from torchgw._plans.transport import TransportPlan
from torchgw._problem import losses
from torchgw._problem.losses import LOSSES, ProductCross
from torchgw._problem.problem import Problem
from torchgw._sinkhorn.eager import EagerBackend
from torchgw._sinkhorn.loop import sinkhorn
from torchgw._sinkhorn.problem import DenseCost, LinearProblem
from torchgw._tensors.operations import categories_at, sample_categories
from torchgw._typing import Marginals, Potentials
from torchgw.distances import DirectedDistance, PointDistance, PrecomputedDistance

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(24, 3)), RNG.normal(size=(19, 2))
D_X, D_Y = cdist(X, X, "sqeuclidean"), cdist(Y, Y, "sqeuclidean")
A, B = random_weights(24, 1), random_weights(19, 2)
MARGINALS = Marginals(torch.from_numpy(A), torch.from_numpy(B))
LINEAR = torch.from_numpy(RNG.normal(size=(24, 19)))


def points(values):
    return PointDistance(torch.from_numpy(values), "sqeuclidean")


def table(values):
    return PrecomputedDistance(torch.from_numpy(values))


def problem(source="points", target="points", alpha=1.0, linear=None) -> Problem:
    sides = {"points": (points(X), points(Y)), "table": (table(D_X), table(D_Y))}
    stored = None if linear is None else DenseCost(linear)
    return Problem(sides[source][0], sides[target][1], MARGINALS, alpha, stored)


def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="module")
def plan():
    """A coupling with the right marginals, far from the product."""
    cost = torch.from_numpy(np.random.default_rng(1).normal(size=(24, 19)))
    start = Potentials(*map(torch.zeros_like, MARGINALS))
    solved = sinkhorn(
        EagerBackend().prepare(LinearProblem(DenseCost(cost), MARGINALS, 0.5)),
        start,
        max_iter=500,
        tol=1e-14,
    )
    return TransportPlan(DenseCost(cost), solved.potentials, MARGINALS, 0.5)


def whole_cost(gradient, coupling):
    """C(P), with the terms that linearised costs leave out."""
    reduced = gradient.linearise(coupling).cost.dense().matrix
    return (reduced + gradient.row[:, None] + gradient.column).numpy()


def exact_gradients(alpha=1.0, linear=None):
    return [
        DenseGradient(problem("table", "table", alpha, linear)),
        DenseGradient(problem(alpha=alpha, linear=linear)),
        FactoredGradient(problem(alpha=alpha, linear=linear)),
        FactoredGradient(problem("table", "points", alpha, linear)),
        FactoredGradient(problem("points", "table", alpha, linear)),
    ]


@pytest.mark.parametrize(("alpha", "linear"), [(1.0, None), (0.3, LINEAR)])
def test_exact_costs_equal_the_reference(plan, alpha, linear):
    matrix = plan.to_dense().numpy()
    expected = 2 * alpha * reference.gw_cost(D_X, D_Y, matrix)
    if linear is not None:
        expected = expected + (1 - alpha) * linear.numpy()
    for gradient in exact_gradients(alpha, linear):
        for source in (plan, StoredPlan(torch.from_numpy(matrix))):
            coupling = gradient.update(source, None, generator())
            cost = whole_cost(gradient, coupling)
            np.testing.assert_allclose(cost, expected, atol=1e-11 * np.abs(expected).max())


@pytest.mark.parametrize("sparse", [(True, True), (True, False), (False, True)])
def test_products_with_adjacency_matrices_take_their_edges_alone(sparse):
    sizes = 90, 80
    # weighted rings: two entries of each row are not zero
    rings = [np.diag(np.full(n, 1.0 / n)) @ np.roll(np.eye(n), 1, axis=1) for n in sizes]
    tables = [
        torch.from_numpy(ring + ring.T if few else np.exp(ring + ring.T))
        for ring, few in zip(rings, sparse, strict=True)
    ]
    plan = torch.from_numpy(RNG.random(sizes))
    product = ProductCross(*tables)
    assert [part is not None for part in (product._left, product._right)] == list(sparse)
    result = product(plan)
    assert result.is_contiguous()
    torch.testing.assert_close(result, tables[0] @ plan @ tables[1], rtol=1e-12, atol=0)


def test_products_of_vertices_with_adjacency_matrices_read_no_other_entries(monkeypatch):
    tables = []
    for n in (90, 80):
        ring = np.diag(RNG.random(n)) @ np.roll(np.eye(n), 1, axis=1)
        # directed costs have tables that are not symmetric
        tables.append(torch.from_numpy(ring + 0.5 * np.roll(ring, 2, axis=1)))
    product = ProductCross(*tables)
    few, many = torch.zeros(90, 80, dtype=torch.float64), torch.ones(90, 80, dtype=torch.float64)
    few[torch.arange(90), torch.arange(90) % 80] = torch.from_numpy(RNG.random(90))
    whole = product(many)
    monkeypatch.setattr(torch.sparse, "mm", None)
    torch.testing.assert_close(product(few), tables[0] @ few @ tables[1], rtol=1e-12, atol=1e-15)
    # which all others need
    with pytest.raises(TypeError):
        product(many)
    torch.testing.assert_close(whole, tables[0] @ many @ tables[1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_with_sharp_plans_leave_out_what_rounds_off(dtype, monkeypatch):
    monkeypatch.setattr(losses, "_LOOKED_AT", 0)
    source, target = (torch.from_numpy(RNG.random((n, n))).to(dtype) for n in (90, 80))
    eps = torch.finfo(dtype).eps
    plan = 1e-3 * eps * torch.from_numpy(RNG.random((90, 80))).to(dtype)
    plan[torch.arange(80), torch.arange(80)] += torch.from_numpy(RNG.normal(size=80)).to(dtype)
    assert losses._sharp(plan)._nnz() == 80
    assert losses._sharp(plan + 0.01) is None
    exact = source.double() @ plan.double() @ target.double()
    # tables that differ with the direction, as those of directed costs
    # and lie by columns, which take twenty times as long to read
    read, multiply = [], torch.sparse.mm
    monkeypatch.setattr(
        torch.sparse, "mm", lambda few, t: read.append(t.is_contiguous()) or multiply(few, t)
    )
    found = ProductCross(source, target.T.contiguous().T)(plan)
    assert read == [True]
    assert float((found.double() - exact).abs().max() / exact.abs().max()) < 10 * eps


@pytest.mark.parametrize("turned", [False, True], ids=["more rows", "more columns"])
@pytest.mark.parametrize("kind", ["square", "kl", "absolute", "directed", "sampled"])
def test_costs_between_some_points_are_those_of_all(plan, kind, turned):
    """Of known pairs, at whose rows and columns alone the last cost is needed."""
    sides = [DirectedDistance(np.abs(D - 0.3 * D.T**2 + D[:1])) for D in (D_X, D_Y)]
    sides = sides if kind == "directed" else [table(D_X), table(D_Y)]
    weights, linear, way = MARGINALS, LINEAR, plan
    if turned:
        sides, weights = sides[::-1], Marginals(*MARGINALS[::-1])
        linear, way = LINEAR.T.contiguous(), plan.T
    loss = LOSSES[kind] if kind in LOSSES else LOSSES["square"]
    asked = Problem(*sides, weights, 0.6, DenseCost(linear), loss)
    made = SampledGradient(asked, 9, 0.5) if kind == "sampled" else DenseGradient(asked)
    coupling = made.update(way, None, generator())
    whole = made.linearise(coupling).cost.dense().matrix
    few, others = torch.tensor([3, 0]), torch.arange(4, 12)
    for rows, columns in ((few, slice(None)), (others, few), (slice(None), others), (few, few)):
        part = made.block(coupling, rows, columns).dense().matrix
        assert part.numpy() == pytest.approx(whole[rows][:, columns].numpy(), abs=1e-12)


def test_a_block_with_few_columns_takes_no_product_of_all(monkeypatch):
    """Multiplications of products of tables, counted by their shapes."""
    done, product = [], torch.Tensor.__matmul__

    def counted(left, right):
        done.append(left.shape[0] * left.shape[1] * right.shape[1])
        return product(left, right)

    cross = ProductCross(torch.from_numpy(D_X), torch.from_numpy(D_Y))
    joint, few = torch.from_numpy(A[:, None] * B), torch.tensor([1])
    monkeypatch.setattr(torch.Tensor, "__matmul__", counted)
    for rows, columns in ((few, slice(None)), (slice(None), few)):
        done.clear()
        cross.block(rows, columns)(joint)
        assert sum(done) <= 24 * 19 + max(24**2, 19**2)


def test_exact_values_equal_the_reference(plan):
    expected = reference.gw_value(D_X, D_Y, plan.to_dense().numpy())
    masses = Marginals(*plan.marginals())
    for gradient in exact_gradients():
        value = gradient.evaluate(plan, masses, generator())
        assert value.standard_error == 0
        assert value.value == pytest.approx(expected, rel=1e-12)


def test_every_gradient_starts_at_the_product_plan():
    expected = 2 * reference.gw_cost(D_X, D_Y, np.outer(A, B))
    sampled = SampledGradient(problem("table", "table"), 16, 1.0)
    for gradient in [*exact_gradients(), sampled]:
        cost = whole_cost(gradient, gradient.start())
        np.testing.assert_allclose(cost, expected, atol=1e-11 * np.abs(expected).max())


def test_change_is_relative_and_zero_at_a_fixed_point(plan):
    for gradient in exact_gradients():
        coupling = gradient.update(plan, None, generator())
        assert float(coupling.change(coupling)) == 0
        assert 0.01 < float(coupling.change(gradient.start())) <= 2


def test_sampled_cost_is_unbiased(plan):
    """The mean over independent draws is the exact cost within five standard errors."""
    gradient = SampledGradient(problem("table", "table"), 50, 1.0)
    random = generator()
    draws = torch.stack(
        [
            torch.from_numpy(whole_cost(gradient, gradient.update(plan, None, random)))
            for _ in range(400)
        ]
    )
    expected = 2 * reference.gw_cost(D_X, D_Y, plan.to_dense().numpy())
    error = draws.std(0) / 400**0.5
    assert (error > 0).all()
    deviation = (draws.mean(0) - torch.from_numpy(expected)).abs() / error
    assert deviation.max() < 5
    # and the errors are of the size that they claim
    assert 0.5 < deviation.square().mean().sqrt() < 1.5


def test_sampled_value_of_few_points_is_exact(plan):
    gradient = SampledGradient(problem("table", "table"), max(plan.shape), 1.0)
    found = gradient.evaluate(plan, Marginals(*plan.marginals()), generator())
    expected = reference.gw_value(D_X, D_Y, plan.to_dense().numpy())
    assert found.standard_error == 0
    assert found.value == pytest.approx(expected, rel=1e-12)


def test_sampled_value_is_unbiased_with_an_honest_error(plan):
    gradient = SampledGradient(problem("table", "table"), 20, 1.0)
    masses, random = Marginals(*plan.marginals()), generator()
    estimates = [gradient.evaluate(plan, masses, random) for _ in range(400)]
    values = np.array([estimate.value for estimate in estimates])
    expected = reference.gw_value(D_X, D_Y, plan.to_dense().numpy())
    claimed = np.sqrt(np.mean([estimate.standard_error**2 for estimate in estimates]))
    assert abs(values.mean() - expected) < 5 * values.std() / 20
    assert claimed == pytest.approx(values.std(), rel=0.2)


def test_one_anchor_has_no_standard_error(plan):
    gradient = SampledGradient(problem("table", "table"), 1, 1.0)
    value = gradient.evaluate(plan, Marginals(*plan.marginals()), generator())
    assert np.isfinite(value.value)
    assert np.isnan(value.standard_error)


def test_a_share_of_the_anchors_is_redrawn(plan):
    """The others are redrawn where they are, so that every stratum keeps its two anchors."""
    gradient = SampledGradient(problem("table", "table"), 100, 0.3)
    random = generator()
    first = gradient.update(plan, None, random)
    marked = AnchorCoupling(first.source + 1000, first.target)
    second = gradient.update(plan, marked, random)
    kept = second.source >= 1000
    assert int(kept.sum()) == 70
    assert torch.equal(second.source[kept], marked.source[kept])
    # at equal steps
    assert (~kept).nonzero()[:, 0].diff().max() <= 4


def curve_gradient(n, n_anchors, weights=None):
    """Points on a line, shuffled, and the plan that matches them with a blur of a few points."""
    rng = np.random.default_rng(3)
    shuffle = torch.from_numpy(rng.permutation(n))
    place = torch.linspace(0, 1, n, dtype=torch.float64)[shuffle]
    distances = (place[:, None] - place).abs()
    a = torch.full((n,), 1 / n, dtype=torch.float64) if weights is None else weights
    table = PrecomputedDistance(distances)
    gradient = SampledGradient(Problem(table, table, Marginals(a, a), 1.0, None), n_anchors, 1.0)
    matrix = torch.exp(-((distances * n / 2) ** 2)) * a
    return gradient, StoredPlan(matrix * (a / matrix.sum(1))[:, None])


def sampled_costs(gradient, draw, count):
    """Doubly centred costs at some draws of anchors, (count, n, n)."""
    a, b = gradient.problem.marginals
    costs = torch.stack(
        [gradient.linearise(AnchorCoupling(*draw())).cost.dense().matrix for _ in range(count)]
    )
    costs = costs - (a @ costs)[:, None]
    return costs - (costs @ b)[..., None]


def test_strata_lower_the_variance_on_a_curve():
    gradient, plan = curve_gradient(200, 50)
    random = generator()

    def independent():
        source = sample_categories(plan.matrix.sum(1), 50, random)
        return Anchors(source, sample_categories(plan.matrix[source], 1, random)[:, 0])

    before = sampled_costs(gradient, independent, 100).var(0).mean()
    after = sampled_costs(gradient, lambda: gradient.update(plan, None, random), 100).var(0).mean()
    # 96 times on this curve
    assert after < before / 30


def test_noise_of_strata_is_what_the_cost_varies_by():
    gradient, plan = curve_gradient(200, 51)
    random = generator()
    anchors = [gradient.update(plan, None, random) for _ in range(200)]
    draws = iter(anchors)
    spread = sampled_costs(gradient, lambda: next(draws), 200).var(0).mean().sqrt()
    claimed = np.sqrt(np.mean([gradient.noise(drawn).standard_error ** 2 for drawn in anchors]))
    # a variance over 200 draws of few degrees of freedom
    assert claimed == pytest.approx(float(spread), rel=0.15)


@pytest.mark.parametrize("kind", ["lazy", "stored", "pairs"])
@pytest.mark.parametrize("count", [7, 40])
def test_places_are_a_sample_of_the_plan(plan, kind, count):
    """The mean over many draws is the plan, whatever the order and however many at once."""
    matrix = plan.to_dense()
    n, m = matrix.shape
    pairs = Anchors(torch.arange(n).repeat_interleave(m), torch.arange(m).repeat(n))
    chosen = {
        "lazy": plan,
        "stored": StoredPlan(matrix),
        "pairs": PairPlan(pairs, matrix.flatten(), (n, m)),
    }[kind]
    order = torch.from_numpy(np.random.default_rng(0).permutation(n))
    random, counts, draws = generator(), torch.zeros(n * m), 4000 // count
    for _ in range(draws):
        where = places(torch.arange(count), count, random)
        drawn = chosen.sample_at(where, order, random)
        counts += torch.bincount(drawn.source * m + drawn.target, minlength=n * m)
    total = draws * count
    share, expected = counts / total, matrix.flatten()
    # six standard deviations of independent draws, the most that those of strata can have
    assert ((share - expected).abs() < 6 * (expected / total).sqrt() + 1 / total).all()
    # the same seed, the same draws
    one, two = (chosen.sample_at(where, order, generator()) for _ in range(2))
    assert torch.equal(one.source, two.source)
    assert torch.equal(one.target, two.target)


def test_strata_hold_two_places_each():
    random = generator()
    for count in (1, 2, 7, 10):
        where = torch.stack([places(torch.arange(count), count, random) for _ in range(2000)])
        stratum = (where * count).long() // 2
        assert torch.equal(stratum, (torch.arange(count) // 2).expand(2000, -1))
        inside = (where * count - 2 * stratum) / (count - 2 * stratum).clamp(max=2)
        # uniform in the stratum, by five standard deviations
        assert (inside.mean(0) - 0.5).abs().max() < 5 / (12 * 2000) ** 0.5
        assert count == 1 or torch.corrcoef(inside.T).triu(1).abs().max() < 5 / 2000**0.5


def test_places_never_meet_a_weight_of_zero():
    weights = torch.tensor([0.0, 1.0, 0.0, 0.0, 3.0, 0.0], dtype=torch.float64)
    ends = torch.tensor([0.0, 0.25, 1 - 2**-53, 1.0 - 2**-30], dtype=torch.float64)
    assert categories_at(weights, ends).tolist() == [1, 4, 4, 4]
    # an index beyond them would end a process on a GPU
    nothing = torch.full_like(weights, torch.nan)
    assert categories_at(nothing, ends).max() < len(weights)
    part = weights / weights.sum()
    gradient, plan = curve_gradient(60, 31, torch.cat([part.repeat(9), part]) / 10)
    used = gradient.problem.marginals.a > 0
    random, anchors = generator(), None
    for _ in range(50):
        anchors = gradient.update(plan, anchors, random)
        assert used[anchors.source].all()
        assert used[anchors.target].all()
        mean = gradient.start().mean(anchors, 0.5, random)
        assert used[mean.source].all()
        assert used[mean.target].all()


def test_a_cost_in_parts_is_unbiased(plan):
    """Each part has slots of its own, yet sees all strata."""
    made = replace(problem("table", "table"), loss=LOSSES["absolute"])
    gradient, random = SampledGradient(made, 20, 1.0), generator()
    draws = torch.stack(
        [
            gradient.linearise(gradient.update(plan, None, random)).cost.dense().matrix
            for _ in range(600)
        ]
    )
    loss, tables = gradient.problem.loss, (torch.from_numpy(D_X), torch.from_numpy(D_Y))
    parts = torch.arange(loss.parts)
    near, far = (
        loss.part(side, table[..., None], parts) for side, table in enumerate(tables)
    )  # fmt: skip
    expected = -4 * torch.einsum("ikr,kl,ljr->ij", near, plan.to_dense(), far) / loss.parts
    difference = draws - expected
    # up to terms of rows and columns
    a, b = MARGINALS
    difference = difference - (a @ difference)[:, None]
    difference = difference - (difference @ b)[..., None]
    deviation = difference.mean(0).abs() / (difference.std(0) / 600**0.5)
    assert deviation.max() < 5
    assert 0.5 < deviation.square().mean().sqrt() < 1.5


@pytest.mark.parametrize("limit", [2**24, 3])
def test_categories_follow_their_weights(monkeypatch, limit):
    """Both ways to draw: torch.multinomial, and inverse sums past its limit."""
    monkeypatch.setattr("torchgw._tensors.operations._MULTINOMIAL_LIMIT", limit)
    weights = torch.tensor([[0.0, 1.0, 3.0, 0.0], [2.0, 0.0, 0.0, 2.0]], dtype=torch.float64)
    drawn = sample_categories(weights, 20_000, generator())
    assert drawn.shape == (2, 20_000)
    for row, weight in zip(drawn, weights, strict=True):
        share = torch.bincount(row, minlength=4) / 20_000
        # five standard deviations of a share of 1/2
        assert (share - weight / weight.sum()).abs().max() < 5 * 0.5 / 20_000**0.5
        assert share[weight == 0].sum() == 0


def test_noise_of_a_sampled_cost_is_what_it_varies_by(plan):
    """Against the spread of many draws of the doubly centred cost."""
    gradient, random = SampledGradient(problem("table", "table"), 60, 1.0), generator()
    a, b = (torch.from_numpy(weight) for weight in (A, B))
    costs, noises = [], []
    for _ in range(200):
        anchors = gradient.update(plan, None, random)
        cost = gradient.linearise(anchors).cost.dense().matrix
        cost = cost - a @ cost
        costs.append(cost - (cost @ b)[:, None])
        noises.append(gradient.noise(anchors))
    draws = torch.stack(costs)
    spread = float((a @ draws.var(0) @ b).sqrt())
    size = float((a @ draws.mean(0).square() @ b).sqrt())
    claimed = np.sqrt(np.mean([noise.standard_error**2 for noise in noises]))
    assert claimed == pytest.approx(spread, rel=0.1)
    assert np.sqrt(np.mean([noise.size**2 for noise in noises])) == pytest.approx(size, rel=0.1)
