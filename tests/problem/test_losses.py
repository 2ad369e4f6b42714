"""Other losses than the square one: POT's answers, a brute-force reference, every combination."""

from __future__ import annotations

import contextlib
import math
import warnings

import numpy as np
import ot
import pytest
import reference
import torch
from problems import LargestTensor, distance_matrices, isometric_copy, random_weights, solve_by_name

import torchgw
from torchgw import InvalidInputError, UnsupportedError
from torchgw._gradients.dense import DenseGradient, PlanMatrix
from torchgw._gradients.sampled import AnchorCoupling, SampledGradient
from torchgw._plans.transport import TransportPlan
from torchgw._problem.losses import LOSSES, MinimumCross
from torchgw._problem.problem import Problem
from torchgw._typing import Marginals, Potentials
from torchgw.distances import FactoredDistance, PointDistance, PrecomputedDistance

N, M = 14, 11
D_X, D_Y = distance_matrices(N, M)
A, B = random_weights(N), random_weights(M, 1)
GIVEN = {"D_X": D_X, "D_Y": D_Y, "a": A, "b": B}
LINEAR = np.random.default_rng(3).uniform(size=(N, M))
REFERENCES = {
    "square": lambda x, y: (x - y) ** 2,
    "kl": reference.kl_loss,
    "absolute": reference.absolute_loss,
}
OTHERS = ["kl", "absolute"]
TIGHT = {"tol": 1e-9, "inner_tol": 1e-11, "objective_tol": 0}


def value_of(loss, plan, d_x=D_X, d_y=D_Y):
    return float((reference.loss_cost(REFERENCES[loss], d_x, d_y, plan) * plan).sum())


def solve(**options):
    """Whether it converged, or starts agree, is not what is asked."""
    with warnings.catch_warnings():
        for kind in (torchgw.ConvergenceWarning, torchgw.SearchWarning):
            warnings.simplefilter("ignore", kind)
        return solve_by_name(**{**GIVEN, "random_state": 0, **options})


@pytest.mark.parametrize("name", LOSSES)
def test_the_parts_of_a_loss_are_the_loss(name):
    x = torch.tensor([0.0, 1e-6, 0.3, 1.0, 2.5], dtype=torch.float64)
    table = LOSSES[name](*torch.meshgrid(x, x, indexing="ij")).numpy()
    expected = REFERENCES[name](x.numpy()[:, None], x.numpy())
    np.testing.assert_allclose(table, expected, atol=1e-14)
    assert (table > -1e-14).all()
    assert np.abs(np.diag(table)).max() < 1e-14


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.1, 0.5])
def test_entropic_kl_equals_pot(epsilon):
    """From the product plan, as POT starts."""
    expected, log = ot.gromov.entropic_gromov_wasserstein(
        D_X, D_Y, A, B, loss_fun="kl_loss", epsilon=epsilon, log=True, tol=1e-11, max_iter=5000,
        numItermax=20_000,
    )  # fmt: skip
    result = solve(loss="kl", epsilon=epsilon, init=np.outer(A, B), **TIGHT)
    assert result.converged
    assert np.abs(np.asarray(result.plan) - expected).sum() < 1e-4
    assert result.value == pytest.approx(log["gw_dist"], rel=1e-6)
    # many starts find nothing worse
    found = solve(loss="kl", epsilon=epsilon)
    assert found.log["objective"] <= result.log["objective"] * (1 + 1e-6)


def test_polished_kl_is_no_worse_than_pot():
    expected, log = ot.gromov.gromov_wasserstein(D_X, D_Y, A, B, loss_fun="kl_loss", log=True)
    result = solve(loss="kl", polish=True, epsilon=0.05)
    assert result.converged
    assert result.value <= log["gw_dist"] + 1e-9
    assert value_of("kl", expected) == pytest.approx(log["gw_dist"], rel=1e-9)


@pytest.mark.parametrize("loss", OTHERS)
def test_polished_and_continued(loss):
    """Polishing lowers the value; a given plan is where a solve goes on."""
    entropic = solve(loss=loss, epsilon=0.05)
    polished = solve(loss=loss, epsilon=0.05, polish=True)
    assert polished.converged
    assert polished.value == pytest.approx(value_of(loss, np.asarray(polished.plan)), rel=1e-9)
    assert polished.value < entropic.value
    again = solve(loss=loss, epsilon=0.05, init=entropic)
    assert again.n_iters < entropic.n_iters
    assert again.value == pytest.approx(entropic.value, rel=1e-3)


COMBINATIONS = {
    "entropic": {},
    "M": {"M": LINEAR, "alpha": 0.4},
    "features": {"features": (np.linspace(0, 1, N)[:, None], np.linspace(1, 0, M)[:, None])},
    "alpha 0": {"M": LINEAR, "alpha": 0},
    "unbalanced": {"unbalanced": 0.4},
    "semi-relaxed": {"unbalanced": (math.inf, 0.1)},
    "partial": {"mass": 0.4},
    "partial, M": {"mass": 0.4, "M": LINEAR},
    "proximal": {"regularization": "proximal", "max_iter": 60},
    "mixed": {"precision": "mixed"},
    "float32": {"precision": "float32", "tol": 1e-3, "inner_tol": 1e-3},
    "single start": {"n_init": 1},
    "streamed": {"storage": "streamed"},
}


@pytest.mark.parametrize("name", COMBINATIONS)
@pytest.mark.parametrize("gradient", ["dense", pytest.param("sampled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss", OTHERS)
def test_combinations(loss, gradient, name):
    """The value is that of the plan, by the definition, and the plan is a fixed point."""
    options = {"epsilon": 0.1, **TIGHT, **COMBINATIONS[name]}
    if gradient == "sampled":
        options |= {"n_anchors": 400, "max_iter": 60}
    result = solve(loss=loss, gradient=gradient, **options)
    assert result.log["loss"] == loss
    plan, alpha = np.asarray(result.plan, np.float64), result.alpha
    rounding = 1e-3 if name == "float32" else 1e-8
    expected = alpha * value_of(loss, plan)
    error = 6 * result.log["value_standard_error"] + rounding * abs(expected)
    assert result.value_quad == pytest.approx(expected, abs=error + 1e-12)
    assert result.status is not torchgw.Status.IMPLAUSIBLE
    if gradient == "dense" and not {"unbalanced", "mass", "regularization"} & set(options):
        assert result.converged
        linear = options.get("M", 0.0)
        if name == "features":
            linear = (options["features"][0] - options["features"][1][:, 0]) ** 2
        cost = 2 * alpha * reference.loss_cost(REFERENCES[loss], D_X, D_Y, plan)
        cost = cost + (1 - alpha) * linear
        start = np.asarray(result.potential_b)
        f, g, _ = reference.sinkhorn(cost, A, B, 0.1, 1000, g=start)
        fixed = reference.plan(cost, A, B, f, g, 0.1)
        assert np.abs(plan - fixed).sum() < (2e-3 if name == "float32" else 1e-6)
        # the potentials are those of the whole cost
        left = np.asarray(result.potential_a[:, None] + result.potential_b) - cost
        error = np.abs(left - 0.1 * np.log(plan / np.outer(A, B)))[plan > 1e-15].max()
        assert error < (5e-2 if name == "float32" else 1e-6)


@pytest.mark.parametrize("loss", OTHERS)
def test_relaxed_plans_are_stationary(loss):
    """A semi-relaxed plan solves the linear problem at its own cost."""
    plan = np.asarray(solve(loss=loss, unbalanced=(math.inf, 0), epsilon=0.1, **TIGHT).plan)
    cost = 2 * reference.loss_cost(REFERENCES[loss], D_X, D_Y, plan)
    kernel = B * np.exp((cost.min(1)[:, None] - cost) / 0.1)
    assert np.abs(plan - A[:, None] * kernel / kernel.sum(1)[:, None]).sum() < 1e-3
    assert np.abs(plan.sum(0) - B).sum() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("loss", OTHERS)
def test_sampled_cost_is_right_in_the_mean(loss):
    """With so many anchors that they see every distance."""
    marginals = Marginals(torch.from_numpy(A), torch.from_numpy(B))
    sides = (PrecomputedDistance(torch.from_numpy(table)) for table in (D_X, D_Y))
    problem = Problem(*sides, marginals, 0.7, None, LOSSES[loss])
    plan = solve(loss=loss, epsilon=0.1).lazy_plan
    expected = DenseGradient(problem).linearise(PlanMatrix(plan.stored())).cost.dense().matrix
    generator = torch.Generator().manual_seed(0)
    sampled = SampledGradient(problem, 100_000, 1.0)
    cost = sampled.linearise(AnchorCoupling(*plan.sample(100_000, generator))).cost.dense().matrix
    centred = []
    for table in (cost, expected):
        table = table - (marginals.a @ table)
        centred.append(table - (table @ marginals.b)[:, None])
    noise = sampled.noise(plan.sample(100_000, generator))
    error = float((centred[0] - centred[1]).square().mean().sqrt())
    size = float(centred[1].square().mean().sqrt())
    # 64 levels in place of all for the minimum
    coarse = 0.04 if loss == "absolute" else 0.0
    # root mean squares by weight and not
    assert error < 2 * noise.standard_error + coarse * size
    assert noise.standard_error < 0.03 * size
    product = sampled.linearise(sampled.start()).cost.dense().matrix
    exact = (
        DenseGradient(problem).linearise(PlanMatrix(torch.outer(*marginals))).cost.dense().matrix
    )
    for table in (product, exact):
        table -= table.mean(0)
        table -= table.mean(1, keepdim=True)
    allowed = coarse * float(exact.square().mean().sqrt()) + 1e-12
    assert float((product - exact).square().mean().sqrt()) < allowed


def test_anchors_do_not_see_self_distances_of_many_points():
    """Where each point is an anchor once at most, its distance to itself would pin it there."""
    x, y, answer = isometric_copy(300, noise=0.02)
    result = solve(
        loss="kl", X=x, Y=y, D_X=None, D_Y=None, a=None, b=None, distances="euclidean",
        gradient="sampled", n_anchors=400,
    )  # fmt: skip
    assert (np.asarray(result.lazy_plan.argmax()) == answer).mean() > 0.95


def test_factors_of_the_source_are_used():
    rng = np.random.default_rng(0)
    X, Y = rng.normal(size=(30, 2)), rng.normal(size=(24, 3))
    given = {"distances": ("sqeuclidean", "euclidean"), "loss": "kl", "epsilon": 0.2, **TIGHT}
    factored = solve_by_name(X, Y, gradient="factored", **given)
    dense = solve_by_name(X, Y, gradient="dense", **given)
    assert factored.gradient == "factored"
    assert np.abs(factored.plan - dense.plan).sum() < 1e-6
    assert factored.value == pytest.approx(dense.value, rel=1e-7)


@pytest.mark.parametrize("loss", OTHERS)
def test_a_copy_is_found(loss):
    x, y, answer = isometric_copy(40, noise=0.01)
    result = torchgw.solve(x, y, distances="euclidean", loss=loss)
    assert result.converged
    assert (np.asarray(result.lazy_plan.argmax()) == answer).all()
    assert result.log["loss"] == loss
    # coarse points stand for clusters
    x, y, answer = isometric_copy(110, noise=0.01)
    result = torchgw.solve(x, y, distances="euclidean", loss=loss, gradient="dense")
    assert (np.asarray(result.lazy_plan.argmax()) == answer).mean() > 0.97


def test_kl_is_not_symmetric():
    there = solve(loss="kl", epsilon=0.1)
    back = torchgw.solve(D_X=D_Y, D_Y=D_X, a=B, b=A, loss="kl", epsilon=0.1)
    assert abs(there.value - back.value) > 1e-3


@pytest.mark.parametrize("loss", OTHERS)
@pytest.mark.parametrize("gradient", ["dense", "sampled"])
def test_transform_and_files(loss, gradient, tmp_path):
    rng = np.random.default_rng(0)
    X, Y = rng.normal(size=(30, 2)), rng.normal(size=(24, 3))
    result = solve(
        X=X, Y=Y, D_X=None, D_Y=None, a=None, b=None, distances="euclidean", loss=loss,
        gradient=gradient, epsilon=0.1, n_anchors=40,
    )  # fmt: skip
    result.save(tmp_path / "result.npz", dense=True)
    for each in (result, torchgw.load(tmp_path / "result.npz")):
        np.testing.assert_allclose(each.transform(X), result.lazy_plan.barycentric(Y), atol=1e-8)
        np.testing.assert_allclose(
            each.inverse_transform(Y), result.lazy_plan.T.barycentric(X), atol=1e-8
        )


@pytest.mark.parametrize("loss", OTHERS)
def test_the_automatic_epsilon_does_not_depend_on_the_order_of_points(loss):
    g = np.random.default_rng(0)
    topics, order = g.dirichlet(np.full(4, 0.6), size=100), g.permutation(100)
    counts = g.poisson(40 * topics @ topics.T) + 0.5
    counts = counts + counts.T
    pairs = [(counts, counts**2), (counts[order][:, order], counts**2)]
    first, second = (
        solve(D_X=x, D_Y=y, a=None, b=None, loss=loss, n_init=1, max_iter=1).epsilon
        for x, y in pairs
    )
    assert second == pytest.approx(first, rel=1e-9)


def test_the_automatic_epsilon_of_similarities_is_from_their_own_diagonal():
    # 4 std(D_X) std(log(D_Y) / 2), as for distances, with ones on the diagonal
    tables = [np.exp(-table) for table in (D_X, D_Y)]
    found = solve(D_X=tables[0], D_Y=tables[1], a=None, b=None, loss="kl", n_init=1, max_iter=1)
    expected = 0.0025 * 4 * tables[0].std() * (np.log(tables[1]) / 2).std()
    assert found.epsilon == pytest.approx(expected, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("loss", OTHERS)
def test_odd_distances(loss):
    """Duplicates, a single point, all the same, slightly negative: finite, and what it says."""
    doubled = np.kron(D_X[:5, :5], np.ones((2, 2)))
    same = 1 - np.eye(6)
    tables = (doubled, D_Y), (np.zeros((1, 1)), D_Y), (same, same), (np.zeros((4, 4)), D_Y)
    for d_x, d_y in tables:
        for gradient in ("dense", "sampled"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", torchgw.ConvergenceWarning)
                # six points that all look alike may stay at the product plan
                warnings.simplefilter("ignore", torchgw.SearchWarning)
                result = torchgw.solve(
                    D_X=d_x, D_Y=d_y, loss=loss, gradient=gradient, max_iter=40, random_state=0,
                    options=torchgw.Options(n_anchors=64 if gradient == "sampled" else None),
                )  # fmt: skip
            plan = np.asarray(result.plan, np.float64)
            assert np.isfinite(plan).all()
            assert result.value == pytest.approx(
                value_of(loss, plan, d_x, d_y), abs=6 * result.log["value_standard_error"] + 1e-6
            )
    factor = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64)
    tiny = FactoredDistance(factor, torch.tensor([-1e-9], dtype=torch.float64))
    assert math.isfinite(torchgw.solve(tiny, tiny, loss=loss, gradient="dense", epsilon=0.1).value)


def test_the_order_of_the_distance_is_that_of_the_loss():
    assert math.isnan(solve(loss="kl", epsilon=0.1).gw_distance)
    first = solve(loss="absolute", epsilon=0.1)
    assert first.gw_distance == pytest.approx(
        value_of("absolute", np.asarray(first.plan)), rel=1e-9
    )


@pytest.mark.parametrize("shape", [(9, 7), (5, 12), (1, 4)])
def test_minimum_by_sorted_sums_is_the_minimum(shape):
    generator = torch.Generator().manual_seed(0)
    n, m = shape
    # ties, within a side and between the sides
    source, target = (
        torch.rand(size, other, generator=generator, dtype=torch.float64).mul(8).round().div(8)
        for size, other in ((n + 2, n), (m, m + 1))
    )
    plan = torch.randn(n, m + 1, generator=generator, dtype=torch.float64)
    smaller = torch.minimum(source[:, None, :, None], target[None, :, None, :])
    expected = torch.einsum("ijkl,kl->ij", smaller, plan)
    torch.testing.assert_close(MinimumCross(source, target)(plan), expected, atol=1e-12, rtol=0)


def test_absolute_is_exact_where_that_is_quick():
    small = solve(loss="absolute", max_iter=1)
    assert small.gradient == "dense"
    x = np.random.default_rng(0).normal(size=(300, 2))
    given = {"distances": "euclidean", "loss": "absolute", "n_init": 1, "random_state": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.ConvergenceWarning)
        # one iteration of a copy does not find it
        warnings.simplefilter("ignore", torchgw.SearchWarning)
        large = torchgw.solve(x, x, max_iter=1, **given)
    assert large.gradient == "sampled"
    x = np.random.default_rng(0).normal(size=(1100, 2))
    with pytest.raises(UnsupportedError, match="gradient='sampled'"):
        torchgw.solve(x, x, gradient="dense", **given)


@pytest.mark.slow
def test_sampled_absolute_needs_no_matrix():
    """Factors of the cost, whatever the loss: nothing of size n x m once it is set up."""
    n = 1200
    points = np.random.default_rng(0).normal(size=(n, 2))
    weights = torch.full((n,), 1 / n, dtype=torch.float64)
    side = PointDistance(torch.from_numpy(points))
    marginals = Marginals(weights, weights)
    generator = torch.Generator().manual_seed(0)
    problem = Problem(side, side, marginals, 1.0, None, LOSSES["absolute"])
    gradient = SampledGradient(problem, 128, 0.9)
    with LargestTensor() as largest:
        cost = gradient.linearise(gradient.start()).cost
        plan = TransportPlan(cost, Potentials(0 * weights, 0 * weights), marginals, 10.0)
        cost = gradient.linearise(gradient.update(plan, None, generator)).cost
        gradient.evaluate(plan, Marginals(*plan.marginals()), generator)
    assert cost.rank == 128 + 64
    assert largest.size < n**2


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"loss": "KL"}, InvalidInputError, "'kl'"),
        ({"loss": None}, InvalidInputError, "'square'"),
        ({"loss": ["kl"]}, InvalidInputError, "'square'"),
        ({"loss": "kl", "gradient": "factored"}, UnsupportedError, "logarithms"),
        ({"loss": "absolute", "gradient": "factored"}, UnsupportedError, "made of products"),
        ({"loss": "kl", "epsilon": 1.0, "differentiable": "value"}, UnsupportedError, "square"),
    ],
)
def test_refusals(options, kind, message):
    with pytest.raises(kind, match=message):
        torchgw.solve(**GIVEN, **options)


def test_landmarks_have_no_logarithms():
    x, y, _ = isometric_copy(80)
    with pytest.raises(UnsupportedError, match="dijkstra"):
        torchgw.solve(x, y, distances="landmark", loss="kl")
    result = torchgw.solve(
        x, y, distances=("landmark", "precomputed"), loss="kl", epsilon=0.1, random_state=0
    )
    assert result.gradient in ("dense", "factored")


@pytest.mark.parametrize("loss", OTHERS)
def test_columns_on_demand(loss):
    """Costly columns: means from some of them, and a sampled cost."""
    x, y, _ = isometric_copy(100, noise=0.01)
    # entries near zero decide a kl loss, and 256 anchors show too few of them: .036 for .0004
    few = pytest.warns(torchgw.ConvergenceWarning, match="shows too little")
    with few if loss == "kl" else contextlib.nullcontext():
        result = torchgw.solve(
            x, y, distances="dijkstra", n_neighbors=6, loss=loss, epsilon=5e-3, random_state=0,
            options=torchgw.Options(n_anchors=256),
        )  # fmt: skip
    assert result.gradient == "sampled"
    assert result.status.converged == (loss != "kl")
    dense = torchgw.solve(
        x, y, distances="precomputed", n_neighbors=6, loss=loss, epsilon=5e-3, gradient="dense"
    )
    tables = map(dense.extension.known.distances, (0, 1))
    d_x, d_y = (side.columns(torch.arange(100)).double() for side in tables)
    plan, total = torch.as_tensor(result.plan).double(), 0.0
    for i in range(100):
        block = LOSSES[loss](
            *torch.broadcast_tensors(d_x[i, :, None, None], d_y[None]),
        )  # fmt: skip
        total += float(torch.einsum("kjl,kl,j->", block, plan, plan[i]))
    assert result.value == pytest.approx(total, abs=6 * result.log["value_standard_error"] + 1e-6)
    # most of the points, from 256 anchors
    assert np.mean(result.lazy_plan.argmax() == dense.lazy_plan.argmax()) > 0.5


@pytest.mark.gpu
# relaxed problems have a search, which may be in doubt
@pytest.mark.filterwarnings("ignore::torchgw.SearchWarning")
@pytest.mark.parametrize("loss", OTHERS)
@pytest.mark.parametrize("gradient", ["dense", "sampled"])
@pytest.mark.parametrize("options", [{}, {"unbalanced": 0.4}, {"polish": True}], ids=str)
def test_losses_on_a_gpu(loss, gradient, options):
    if gradient == "sampled" and "polish" in options:
        pytest.skip("polishing needs an exact gradient")
    given = {"loss": loss, "gradient": gradient, "epsilon": 0.1, "n_anchors": 2000, **options}
    here, there = (solve(**given, device=device) for device in ("cpu", "cuda"))
    # sampled plans differ by their own noise, which an error of the value says nothing of
    for result in (here, there):
        exact = value_of(loss, result.plan)
        error = 6 * result.log["value_standard_error"]
        assert result.value == pytest.approx(exact, rel=1e-4, abs=error + 1e-9)
    if gradient == "dense":
        assert there.value == pytest.approx(here.value, rel=1e-4)
        assert np.abs(there.plan - here.plan).sum() < 1e-2
