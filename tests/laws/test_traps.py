"""Traps that other packages fell into, one test each (DESIGN of the project, section 5)."""

from __future__ import annotations

import ast
import random
import types
import warnings
from pathlib import Path

import numpy as np
import ot
import pytest
import reference
import scipy.sparse
import torch
from problems import (
    distance_matrices,
    isometric_copy,
    linear_problem,
    random_weights,
    solve_by_name,
)
from scipy.spatial.distance import cdist

import torchgw
from torchgw import (
    ConvergenceWarning,
    GraphWarning,
    InvalidInputError,
    InvalidTypeError,
    NumericalError,
)
from torchgw._boundary.graphs import as_graph
from torchgw._sinkhorn.annealing import Annealing
from torchgw._sinkhorn.choose import choose_backend, why_not
from torchgw._sinkhorn.compiled import CompiledBackend, CompiledProblem
from torchgw._sinkhorn.eager import EagerBackend
from torchgw._sinkhorn.loop import sinkhorn
from torchgw._sinkhorn.problem import DenseCost, LinearProblem
from torchgw._solve.loop import MovingAverage
from torchgw._tensors.operations import sample_categories
from torchgw._typing import Marginals, Potentials
from torchgw.distances import (
    CallableDistance,
    DijkstraDistance,
    FactoredDistance,
    PrecomputedDistance,
    geodesic_matrix,
    knn_graph,
)

CPU = torch.device("cpu")
D_X, D_Y = distance_matrices(20, 16)
GRADIENTS = ["dense", "factored", "sampled"]


def solve(gradient="dense", **options):
    """Solve a small problem that every gradient can."""
    x, y, _ = isometric_copy(24, noise=0.1)
    defaults = {"distances": "sqeuclidean", "epsilon": 0.05, "random_state": 0}
    return solve_by_name(x, y[:18], gradient=gradient, **{**defaults, **options})


# -- epsilon and scale ------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::torchgw.ConvergenceWarning")
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("max_iter", [1, 3, 30, 400])
def test_epsilon_is_reached_exactly_whatever_the_budget(gradient, max_iter):
    """An epsilon that decays with max_iter ends where the budget ends."""
    result = solve(gradient, max_iter=max_iter)
    assert result.n_iters <= max_iter
    assert result.epsilon == result.lazy_plan.epsilon == 0.05


def test_the_schedule_does_not_know_the_budget():
    short, long = (solve(max_iter=count) for count in (100, 3000))
    assert np.array_equal(short.plan, long.plan)
    steps = [Annealing(start=1.0, target=0.01)(iteration) for iteration in range(100)]
    assert steps[0] == 1.0
    assert steps[-1] == 0.01
    # a target above the start is a target still
    assert Annealing(start=1.0, target=5.0)(0) == 5.0


def test_distances_are_scaled_once_and_not_by_what_was_sampled():
    options = {"n_anchors": 32, "n_init": 1}
    results = [solve("sampled", random_state=seed, **options) for seed in range(3)]
    exact = solve("dense")
    for result in results:
        assert result.scale == exact.scale
        assert {entry.epsilon for entry in result.history} >= {0.05}
    # what is reported is the objective on that scale, for the plan that is returned
    x, y, _ = isometric_copy(24, noise=0.1)
    tables = [ot.dist(p, p) * s for p, s in zip((x, y[:18]), exact.scale, strict=True)]
    for result in results:
        expected = reference.gw_value(*tables, np.asarray(result.plan))
        error = result.log["value_standard_error"]
        assert abs(result.value - expected) <= 6 * error + 1e-12


def test_the_scale_of_potentials_is_that_of_the_cost():
    """Potentials kept as f / epsilon are wrong once epsilon changes."""
    problem = linear_problem(20, 15, 3)
    zero = Potentials(*map(torch.zeros_like, problem.marginals))
    options = {"max_iter": 5000, "tol": 1e-13}
    given = LinearProblem(problem.cost("dense"), problem.marginals, 1.0)
    large = LinearProblem(DenseCost(1000 * given.cost.matrix), problem.marginals, 1000.0)

    def solved(linear, start, **options):
        return sinkhorn(EagerBackend().prepare(linear), start, **options)

    coarse = solved(given, zero, **options).potentials
    scaled = solved(large, zero, **options)
    torch.testing.assert_close(scaled.potentials.f, 1000 * coarse.f, rtol=1e-8, atol=1e-8)
    # a start at another epsilon is near, in cost units only
    few = {**options, "max_iter": 10, "tol": 1e-300}
    near = given._replace(epsilon=0.9)
    ratios = Potentials(*(part / 1.0 * 0.3 for part in coarse))
    assert solved(near, coarse, **few).error < solved(near, ratios, **few).error


# -- what is reported -------------------------------------------------------------------------


def test_alpha_is_the_weight_of_the_quadratic_term_as_in_pot():
    """Some packages mean the reverse."""
    linear = np.random.default_rng(0).uniform(size=(20, 16))
    a, b = random_weights(20), random_weights(16)
    options = {"D_X": D_X, "D_Y": D_Y, "a": a, "b": b, "epsilon": 0.05, "init": np.outer(a, b)}
    tight = {"tol": 1e-10, "inner_tol": 1e-12, "max_iter": 3000}
    pure = solve_by_name(**options, **tight)
    also = solve_by_name(M=linear, alpha=1, **options, **tight)
    expected = ot.gromov.entropic_gromov_wasserstein(
        D_X, D_Y, a, b, "square_loss", epsilon=0.05, tol=1e-12, max_iter=3000
    )
    for result in (pure, also):
        np.testing.assert_allclose(np.asarray(result.plan), expected, atol=1e-7)
        assert result.value_linear == 0
    fused = solve_by_name(M=linear, alpha=0.9, **options, **tight)
    expected = ot.gromov.entropic_fused_gromov_wasserstein(
        linear, D_X, D_Y, a, b, "square_loss", epsilon=0.05, alpha=0.9, tol=1e-12, max_iter=3000
    )
    np.testing.assert_allclose(np.asarray(fused.plan), expected, atol=1e-7)
    only = solve_by_name(M=linear, alpha=0, **options, **tight)
    expected = ot.sinkhorn(a, b, linear, 0.05, numItermax=20_000, stopThr=1e-13)
    np.testing.assert_allclose(np.asarray(only.plan), expected, atol=1e-7)
    assert only.value_quad == 0


def test_names_mean_what_they_mean_in_pot():
    result = torchgw.solve(D_X=D_X, D_Y=D_Y, epsilon=0.05)
    theirs = ot.solve_gromov(D_X, D_Y, reg=0.05)
    for name in ("plan", "value", "value_linear", "value_quad", "marginal_a", "marginal_b"):
        ours, other = getattr(result, name), getattr(theirs, name)
        assert np.shape(ours) == np.shape(other), name
    assert result.potential_a.shape == (20,)
    assert result.potential_b.shape == (16,)
    assert result.value_quad + result.value_linear == result.value
    assert theirs.value_quad == pytest.approx(result.value_quad, rel=0.05)


def test_no_result_is_made_from_a_non_finite_solve():
    """converged=True beside an absurd value is worse than an error."""
    huge = CallableDistance(20, lambda index: 1e200 * torch.from_numpy(D_X)[:, index])
    for gradient in ("dense", "sampled"):
        with pytest.raises((NumericalError, torchgw.InvalidInputError), match="finite"):
            torchgw.solve(huge, D_Y=D_Y, gradient=gradient)


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_converged_means_that_marginals_are_met_and_the_value_is_finite(gradient):
    for epsilon in (1e-3, 0.05, 10.0):
        result = solve(gradient, epsilon=epsilon, inner_max_iter=20_000)
        assert result.converged
        assert result.marginal_error <= 1e-6
        assert np.isfinite([result.value, result.log["kl"], result.log["objective"]]).all()
    with pytest.warns(ConvergenceWarning):
        starved = solve(gradient, epsilon=1e-3, inner_max_iter=1, max_iter=80)
    assert not starved.converged
    assert starved.marginal_error > 1e-6


def test_the_scale_of_the_last_step_is_finite_at_alpha_one():
    """An error weighted by alpha / (1 - alpha) divides by zero there."""
    result = solve()
    for entry in result.history:
        assert np.isfinite([entry.dual, entry.marginal_error, entry.change]).all()


# -- kernels ----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError, MemoryError])
@pytest.mark.parametrize(("backend", "primitive"), [("eager", "sweeper"), ("auto", "apply")])
def test_an_error_inside_a_backend_reaches_the_user(monkeypatch, error, backend, primitive):
    """A caught RuntimeError turns a bug or a full memory into a silent slow path."""

    def fail(*args, **kwargs):
        raise error("the kernel is broken")

    unit = torch.ones(2, dtype=torch.float64)
    problem = LinearProblem(DenseCost(torch.outer(unit, unit)), Marginals(unit / 2, unit / 2), 1.0)
    kind = type(choose_backend(backend, CPU, torch.float64).prepare(problem))
    monkeypatch.setattr(kind, primitive, fail)
    with pytest.raises(error, match="the kernel is broken"):
        solve("factored", backend=backend)


@pytest.mark.parametrize(
    "room", ["_sinkhorn", "_plans", "_gradients", "_starts", "_search", "_solve", "."]
)
def test_nothing_catches_errors_around_a_kernel(room):
    package = Path(torchgw.__file__).parent
    # reading how much memory is free may find no such file
    allowed = {"ImportError", "FileNotFoundError"}
    paths = [*(package / room).rglob("*.py")] if room != "." else [package / "_triton_sinkhorn.py"]
    assert paths
    for path in paths:
        tree = ast.parse(path.read_text())
        # a probe on 8 x 8 numbers may fail for any reason, which it returns
        probes = [node for node in ast.walk(tree) if getattr(node, "name", "") == "why_not"]
        probed = {id(node) for probe in probes for node in ast.walk(probe)}
        handlers = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.ExceptHandler) and id(node) not in probed
        ]
        caught = {ast.unparse(node.type) if node.type else "everything" for node in handlers}
        assert caught <= allowed, path.name


@pytest.mark.slow
def test_the_compiled_path_is_called_when_asked_for(monkeypatch):
    """A compiled path that is documented and never called."""
    if (reason := CompiledBackend.why_not(CPU, torch.float64)) is not None:
        pytest.skip(reason)
    calls = []
    softmin = CompiledProblem.softmin

    def count(self, *args, **kwargs):
        calls.append(1)
        return softmin(self, *args, **kwargs)

    monkeypatch.setattr(CompiledProblem, "softmin", count)
    options = {"D_X": D_X, "D_Y": D_Y, "epsilon": 0.5}
    compiled = solve_by_name(backend="compile", **options)
    assert compiled.backend == "compile"
    assert len(calls) > compiled.n_iters
    torch.testing.assert_close(compiled.plan, solve_by_name(**options).plan, atol=1e-8, rtol=0)


def test_a_backend_that_cannot_run_raises(monkeypatch):
    kernels = pytest.importorskip("torchgw._triton_sinkhorn", reason="triton is not installed")
    # the tests' interpreter would run the kernels on a CPU
    monkeypatch.setattr(kernels, "interpreted", lambda: False)
    kernels.TritonBackend.why_not.cache_clear()
    assert why_not("triton", CPU, torch.float64) is not None
    with pytest.raises(
        torchgw.BackendUnavailableError, match=r"`backend='triton'` cannot run here: .*auto"
    ):
        solve(backend="triton")
    kernels.TritonBackend.why_not.cache_clear()


def test_offsets_are_64_bit():
    """A flat index over pairs of 70,000 points passes 2^31."""
    n = 70_000
    edges = torch.tensor([[0, n - 1, n - 2, n - 1], [n - 1, 0, n - 1, n - 2]], dtype=torch.int32)
    graph = as_graph("X", types.SimpleNamespace(edge_index=edges, num_nodes=n)).tocoo()
    pairs = sorted(zip(graph.row.tolist(), graph.col.tolist(), strict=True))
    assert pairs == sorted(map(tuple, edges.T.tolist()))


# -- randomness -------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("distances", ["landmark", "sqeuclidean"])
def test_global_generators_are_neither_read_nor_moved(gradient, distances):
    plans = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - the global generator is the point
        random.seed(seed)
        before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
        plans.append(solve(gradient, distances=distances).plan)
        assert torch.equal(before[0], torch.get_rng_state())
        np.testing.assert_array_equal(before[1], np.random.get_state()[1])  # noqa: NPY002
        assert before[2] == random.getstate()
    assert np.array_equal(*plans)


def test_without_a_seed_the_global_generators_are_left_alone_too():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    seeds = {solve("sampled", random_state=None, n_init=1).random_state for _ in range(2)}
    assert torch.equal(before, torch.get_rng_state())
    assert len(seeds) == 2


def test_more_categories_than_multinomial_takes():
    """torch.multinomial refuses more than 2^24."""
    weights = torch.zeros(2**24 + 5, dtype=torch.float64)
    weights[[3, -1]] = torch.tensor([1.0, 3.0], dtype=torch.float64)
    drawn = sample_categories(weights, 4000, torch.Generator().manual_seed(0))
    share = float((drawn == len(weights) - 1).double().mean())
    assert set(drawn.tolist()) == {3, len(weights) - 1}
    # five standard deviations of a share of 3/4
    assert abs(share - 0.75) < 5 * (0.75 * 0.25 / 4000) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_categories_of_weight_zero_are_never_drawn(dtype):
    weights = torch.zeros(1000, dtype=dtype)
    weights[500] = 1e-30
    drawn = sample_categories(weights, 10_000, torch.Generator().manual_seed(0))
    assert (drawn == 500).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_categories_of_infinite_weight_are_drawn(dtype):
    """So are those of a plan in float32 whose exponents are rounding."""
    weights = torch.ones(3, 1000, dtype=dtype)
    weights[:, [3, 7]] = torch.inf
    drawn = sample_categories(weights, 200, torch.Generator().manual_seed(0))
    assert set(drawn.flatten().tolist()) == {3, 7}


# -- weights, matrices and graphs -------------------------------------------------------------


@pytest.mark.parametrize("gradient", ["dense", "sampled"])
@pytest.mark.parametrize("weight", [0.0, 1e-300, 1e-60, 1e-30])
def test_weights_that_float32_cannot_hold(gradient, weight):
    """A guard of 1e-300 inside a logarithm vanishes in float32."""
    a, b = random_weights(20), random_weights(16)
    a[[0, 7]], b[3] = weight, weight
    a, b = a / a.sum(), b / b.sum()
    result = torchgw.solve(
        D_X=D_X,
        D_Y=D_Y,
        a=a,
        b=b,
        gradient=gradient,
        epsilon=0.1,
        random_state=0,
        options=torchgw.Options(precision="float32"),
    )
    plan = np.asarray(result.plan, np.float64)
    assert np.isfinite(plan).all()
    assert np.abs(plan.sum(1) - a).sum() < 1e-4
    assert np.abs(plan.sum(0) - b).sum() < 1e-4
    # so little mass is below every tolerance; its size is what counts
    assert plan[[0, 7]].sum() <= 10 * weight
    assert result.converged
    assert np.isfinite(result.value)
    exact = torchgw.solve(
        D_X=D_X,
        D_Y=D_Y,
        a=a,
        b=b,
        gradient="dense",
        epsilon=0.1,
        options=torchgw.Options(precision="float64"),
    )
    if gradient == "dense":
        np.testing.assert_allclose(plan, np.asarray(exact.plan), atol=1e-5)


def test_integer_matrices_are_not_integer_arithmetic():
    """Integer costs divided by epsilon, or multiplied by a plan, give a zero plan."""
    tables = [np.round(10 * table).astype(int) for table in (D_X, D_Y)]
    whole = torchgw.solve(D_X=tables[0], D_Y=tables[1], epsilon=5.0)
    real = torchgw.solve(D_X=tables[0].astype(float), D_Y=tables[1].astype(float), epsilon=5.0)
    assert np.array_equal(whole.plan, real.plan)
    assert float(whole.plan.sum()) == pytest.approx(1)
    assert float(np.abs(whole.plan - 1 / 320).sum()) > 0.01


def test_neighbour_graphs_are_symmetric():
    points = torch.from_numpy(np.random.default_rng(0).normal(size=(60, 2)) ** 3)
    graph = knn_graph(points, 3)
    assert (graph != graph.T).nnz == 0
    lengths = geodesic_matrix(knn_graph(points, 12))
    torch.testing.assert_close(lengths, lengths.T, rtol=1e-12, atol=0)


@pytest.mark.parametrize("distances", ["precomputed", "dijkstra", "landmark"])
def test_a_vertex_without_edges_has_finite_distances(distances):
    """All of its distances are infinite, so its row of the plan would be NaN."""
    graph = scipy.sparse.lil_array((20, 20))
    for i in range(18):
        graph[i, i + 1] = graph[i + 1, i] = 1.0
    with pytest.warns(GraphWarning, match="2 components"):
        result = torchgw.solve(graph, D_Y=D_Y, distances=distances, epsilon=0.05, random_state=0)
    plan = np.asarray(result.plan)
    assert np.isfinite(plan).all()
    np.testing.assert_allclose(plan.sum(1), 1 / 20, atol=1e-7)
    assert np.isfinite(result.value)


@pytest.mark.parametrize("cache_size", [0, 1, 5])
def test_a_cache_keeps_the_rows_of_the_request_it_serves(cache_size):
    points = torch.from_numpy(np.random.default_rng(0).normal(size=(40, 2)))
    graph = knn_graph(points, 10)
    exact = geodesic_matrix(graph)
    provider = DijkstraDistance(graph, cache_size=cache_size)
    for index in (torch.arange(40), torch.arange(39, -1, -1), torch.tensor([3, 7, 3, 20, 7])):
        torch.testing.assert_close(provider.columns(index), exact[:, index])
    sides = [DijkstraDistance(graph, cache_size=size) for size in (cache_size, 2000)]
    plans = [
        torchgw.solve(
            side, D_Y=D_Y, epsilon=1.0, random_state=0, options=torchgw.Options(n_anchors=64)
        ).plan
        for side in sides
    ]
    assert np.array_equal(*plans)


# -- stopping and differentiation -------------------------------------------------------------


def test_an_average_that_stays_stops_when_patience_is_over():
    average = MovingAverage(patience=3)
    assert [average.update(1.0) for _ in range(4)] == [False, False, False, True]


def test_noise_is_no_progress():
    """Records of a noisy average come by chance and would put off the end; a fall is seen in it."""
    noise = torch.randn(100, 200, generator=torch.Generator().manual_seed(0)).tolist()

    def stops(values):
        average = MovingAverage(patience=20)
        return next((i for i, value in enumerate(values) if average.update(value)), 200)

    flat = np.array([stops(2.0 + value for value in values) for values in noise])
    # 25.5 here, and 34 if every record counts
    assert flat.mean() < 28
    falling = [
        stops(2.0 - 0.5 * step + value for step, value in enumerate(values)) for values in noise
    ]
    assert min(falling) == 200
    assert stops(1.0 - 0.01 * step for step in range(200)) == 200


@pytest.mark.parametrize("gradient", ["dense", "sampled"])
def test_inputs_that_require_gradients_leave_no_graph_behind(gradient):
    """A graph that grows over the outer iterations fills the memory."""
    saved = []

    def pack(tensor):
        saved.append(tensor.shape)
        return tensor

    d_x, d_y = (torch.from_numpy(table.copy()).requires_grad_() for table in (D_X, D_Y))
    a = torch.full((20,), 1 / 20, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = torchgw.solve(
            D_X=d_x, D_Y=d_y, a=a, gradient=gradient, epsilon=0.05, random_state=0
        )
    assert saved == []
    for tensor in (result.plan, *result.potentials, *result.marginals, result.lazy_plan.cost[0]):
        assert not tensor.requires_grad
    assert d_x.requires_grad
    assert d_x.grad is None


@pytest.mark.parametrize("storage", ["stored", "streamed"])
def test_autocast_does_not_reach_in(storage):
    """As around a training step: it would round the float32 products that epsilon divides."""
    options = {"distances": "sqeuclidean", "precision": "float32", "storage": storage}
    options |= {"epsilon": 0.05, "n_init": 1, "random_state": 0}
    X, Y, _ = isometric_copy(n=30)

    def numbers(autocast):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = solve_by_name(X, Y, **options)
            plan = result.lazy_plan
            drawn = plan.sample(20, torch.Generator().manual_seed(0))
            parts = [
                torch.as_tensor(plan @ Y),
                plan.rows([3]),
                plan.stored(),
                *plan.topk(2),
                *drawn,
            ]
            return [torch.tensor(result.value), torch.as_tensor(result.transform(X[:3])), *parts]

    for got, expected in zip(numbers(True), numbers(False), strict=True):
        assert np.array_equal(got, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"distances": "dijkstra", "loss": "kl"},
        {"distances": "precomputed", "loss": "absolute"},
        {"distances": "landmark", "unbalanced": 1.0},
        {"distances": "sqeuclidean", "storage": "streamed", "mass": 0.5},
        {"distances": "euclidean", "epsilon": 0.1, "differentiable": "implicit"},
        {"X": CallableDistance(24, lambda index: np.ones((24, len(index))))},
    ],
    ids=lambda options: ", ".join(options),
)
def test_the_default_device_is_left_alone(options, tmp_path):
    """It may be a GPU where everything given is on the host; nothing comes back from "meta"."""
    X, Y, _ = isometric_copy(24)
    given = {"X": X, "Y": torch.from_numpy(Y).requires_grad_("differentiable" in options)}
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.ConvergenceWarning)
        result = solve_by_name(**{**given, **options, "max_iter": 3, "random_state": 0})
        result.save(tmp_path / "result.npz")
        for plan in (result.lazy_plan, torchgw.load(tmp_path / "result.npz").lazy_plan):
            for found in (plan @ Y, plan.marginals()[0], *plan.topk(2), plan.rows([3])):
                assert found.device.type == "cpu"
        if result.tracked is not None:
            (result.loss + (result.lazy_plan @ Y).sum()).backward()


def test_nothing_is_set_on_tensors():
    d_x, d_y = torch.from_numpy(D_X), torch.from_numpy(D_Y)
    a = torch.full((20,), 1 / 20, dtype=torch.float64)
    result = torchgw.solve(D_X=d_x, D_Y=d_y, a=a, epsilon=0.05)
    for tensor in (d_x, d_y, a, *result.potentials, *result.marginals, result.plan):
        assert vars(tensor) == {}


def test_zero_weights_on_both_sides_at_small_epsilon():
    """Exponentials between two unused points overflow, and infinity times zero is NaN."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 3)), rng.normal(size=(10, 2))
    a, b = np.zeros(12), np.zeros(10)
    a[3], b[[0, 4]] = 1, 0.5
    for gradient in ("dense", "sampled"):
        result = torchgw.solve(
            x, y, a=a, b=b, distances="euclidean", gradient=gradient, random_state=0
        )
        assert np.isfinite(result.value)
        np.testing.assert_allclose(result.plan.sum(1), a, atol=1e-9)
        np.testing.assert_allclose(result.plan.sum(0), b, atol=1e-6)
        # unused points still have partners
        assert np.isfinite(result.lazy_plan.barycentric(y)).all()


@pytest.mark.parametrize("precision", ["float32", "mixed", "float64"])
@pytest.mark.parametrize("factor", [1e3, 1e6, 1e8])
def test_matrices_in_different_units(precision, factor):
    """The squares of the larger distances would swamp the cross term, and converged stays True."""
    rng = np.random.default_rng(0)
    d_x, d_y = (cdist(points, points) for points in (rng.normal(size=(12, 3)),) * 2)
    plain = torchgw.solve(
        D_X=d_x, D_Y=d_y, epsilon=0.1, options=torchgw.Options(precision=precision)
    )
    scaled = torchgw.solve(
        D_X=d_x * factor,
        D_Y=d_y,
        epsilon=0.1 * factor,
        options=torchgw.Options(precision=precision),
    )
    assert scaled.converged
    assert scaled.marginal_error < 1e-4
    # a balanced plan depends on the product of the two scales only
    np.testing.assert_allclose(np.asarray(scaled.plan), np.asarray(plain.plan), atol=1e-4)


def test_a_plan_that_is_no_plan_is_refused():
    table = np.full((6, 5), 1 / 30)
    d_x, d_y = np.ones((6, 6)) - np.eye(6), np.ones((5, 5)) - np.eye(5)
    for bad in (table * 0, -table, table * 3):
        with pytest.raises(InvalidInputError, match=r"`init`.*sum to 1"):
            torchgw.solve(D_X=d_x, D_Y=d_y, init=bad)


def test_a_given_provider_that_requires_gradients_still_solves():
    rng = np.random.default_rng(0)
    points = rng.normal(size=(12, 3))
    table = torch.from_numpy(cdist(points, points)).requires_grad_()
    provider = PrecomputedDistance(table)
    result = torchgw.solve(provider, D_Y=cdist(points, points), epsilon=0.05)
    assert not result.plan.requires_grad


@pytest.mark.parametrize("count", [2, 3, 6])
def test_a_saddle_point_is_left(count):
    """Equidistant points: the product plan is stationary and the worst of all."""
    distance = np.ones((count, count)) - np.eye(count)
    result = torchgw.solve(D_X=distance, D_Y=distance)
    assert result.converged
    assert result.value < 0.01


def test_a_numpy_true_stops_too_and_a_callback_must_be_callable():
    distance = np.ones((4, 4)) - np.eye(4)
    with pytest.warns(torchgw.ConvergenceWarning, match="callback"):
        result = torchgw.solve(
            D_X=distance, D_Y=distance, options=torchgw.Options(callback=lambda entry: np.True_)
        )
    assert result.n_iters == 1
    with pytest.raises(InvalidTypeError, match="callable"):
        torchgw.solve(D_X=distance, D_Y=distance, options=torchgw.Options(callback=3))


def test_options_without_effect_are_refused():
    points = np.random.default_rng(0).normal(size=(12, 3))
    with pytest.raises(InvalidInputError, match="n_landmarks"):
        torchgw.solve(points, points, distances="euclidean", options=torchgw.Options(n_landmarks=4))
    with pytest.raises(InvalidInputError, match="n_neighbors"):
        torchgw.solve(points, points, distances="euclidean", n_neighbors=4)
    assert (
        torchgw.solve(
            points, points, n_neighbors=4, options=torchgw.Options(n_landmarks=8)
        ).gradient
        == "factored"
    )


def _coarse(monkeypatch, limited):
    limited(subsample=1)
    monkeypatch.setattr("torchgw._solve.pipeline._COARSE_POINTS", 12)


@pytest.mark.parametrize("coarse", [False, True])
def test_a_spent_budget_is_never_converged(monkeypatch, limited, coarse):
    """Each stage of a solve has its own convergence; only the last one's is the solve's."""
    if coarse:
        _coarse(monkeypatch, limited)
    options = {"gradient": "factored", "precision": "mixed"}
    whole = solve(**options)
    assert whole.converged
    if coarse:
        assert whole.history[0].shape == (12, 12)
    for budget in range(1, whole.n_iters):
        with pytest.warns(ConvergenceWarning):
            assert not solve(max_iter=budget, **options).converged


def test_a_stop_during_the_coarse_start_stops_the_solve(monkeypatch, limited):
    _coarse(monkeypatch, limited)
    with pytest.warns(ConvergenceWarning, match="callback"):
        result = solve(gradient="factored", callback=lambda entry: entry.iteration == 0)
    assert result.n_iters == 1


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_factors_of_zero_settle(precision):
    """A change relative to nothing: a guard of 1e-300 would be zero in float32."""
    zero = FactoredDistance(torch.zeros(6, 2), torch.ones(2))
    result = torchgw.solve(zero, zero, epsilon=0.1, options=torchgw.Options(precision=precision))
    assert result.converged
    assert result.value == 0
