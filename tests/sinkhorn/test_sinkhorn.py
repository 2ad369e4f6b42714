"""Every backend equals the reference half-step; the loop meets its marginals."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import reference
import torch
from problems import linear_problem, quick

from torchgw._sinkhorn import compiled, loop
from torchgw._sinkhorn.compiled import CompiledBackend
from torchgw._sinkhorn.contract import softmin_sweep
from torchgw._sinkhorn.eager import EagerBackend, EagerProblem, sparse_sweeper
from torchgw._sinkhorn.exact import by_scipy
from torchgw._sinkhorn.loop import SMALLEST_GAP, next_relaxation, sinkhorn
from torchgw._sinkhorn.problem import DenseCost, LinearProblem, added
from torchgw._sinkhorn.tiles.eager import TiledEagerProblem
from torchgw._sinkhorn.tiles.prepared import TiledBackend
from torchgw._sinkhorn.tiles.tiling import Tiling
from torchgw._typing import Marginals, Potentials

CPU = torch.device("cpu")
# float64: rounding of a few hundred terms; float32: rounding of exponents of size 10/epsilon
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


@pytest.fixture
def traced(monkeypatch):
    """Compiled functions are traced, and their guards hold, but no code is made: it takes 40 s."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    compiled._compiled.cache_clear()
    yield
    compiled._compiled.cache_clear()


@pytest.fixture(params=["eager", "traced", pytest.param("compile", marks=pytest.mark.slow)])
def backend(request):
    if request.param == "eager":
        return EagerBackend()
    if request.param == "traced":
        request.getfixturevalue("traced")
        return CompiledBackend()
    reason = CompiledBackend.why_not(CPU, torch.float64)
    if reason is not None:
        pytest.skip(reason)
    return CompiledBackend()


@pytest.mark.parametrize("kind", ["dense", "factored"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("n", "m", "rank", "zeros"),
    [(13, 17, 3, False), (1, 9, 1, False), (9, 1, 2, False), (30, 8, 4, True)],
)
@pytest.mark.parametrize("epsilon", [0.1, 2.0])
def test_softmin_equals_reference(backend, kind, dtype, n, m, rank, zeros, epsilon):
    problem = linear_problem(n, m, rank, zero_weights=zeros)
    cost = problem.cost(kind, dtype)
    given = LinearProblem(cost, problem.marginals, epsilon)
    (a, b), (f, g) = problem.marginals, problem.potentials
    for axis, weight, potential in ((1, b, g), (0, a, f)):
        got = backend.prepare(given).softmin(potential, axis)
        expected = reference.softmin(
            problem.dense.matrix.numpy(), weight.numpy(), potential.numpy(), epsilon, axis
        )
        assert got.dtype == torch.float64
        np.testing.assert_allclose(got.numpy(), expected, atol=TOLERANCE[dtype] * 10)


@pytest.mark.parametrize("kind", ["dense", "factored"])
@pytest.mark.parametrize("relaxation", [1.0, 1.4])
@pytest.mark.parametrize("zeros", [False, True])
def test_sweep_equals_its_softmins(kind, relaxation, zeros):
    problem = linear_problem(20, 26, 3, zero_weights=zeros)
    prepared = EagerBackend().prepare(LinearProblem(problem.cost(kind), problem.marginals, 1.0))
    start = Potentials(prepared.softmin_rows(problem.potentials.g), problem.potentials.g)
    expected = softmin_sweep(prepared, start, 4, relaxation)
    got = prepared.sweep(start, 4, relaxation)
    assert bool(got.check[0])
    a, b = problem.marginals
    # a point of zero weight takes no part in a sweep: its potential is found at the end
    for mine, other, weight in (
        (got.f, expected.f, a),
        (got.g, expected.g, b),
        (got.g_next, expected.g_next, b),
        (got.state.f, expected.state.f, a),
        (got.state.g, expected.state.g, b),
    ):
        used = weight > 0
        torch.testing.assert_close(mine[used], other[used], atol=1e-11, rtol=0)


@pytest.mark.parametrize("kind", ["dense", "factored"])
@pytest.mark.parametrize("zeros", [False, True])
def test_sweep_over_the_entries_that_matter(kind, zeros, monkeypatch):
    problem, epsilon = linear_problem(40, 50, 3, zero_weights=zeros), 0.005
    prepared = EagerBackend().prepare(LinearProblem(problem.cost(kind), problem.marginals, epsilon))
    at = sinkhorn(prepared, None, max_iter=300, tol=1e-3).potentials
    assert sparse_sweeper(prepared.problem, at) is None
    monkeypatch.setattr("torchgw._sinkhorn.eager._SPARSE_ENTRIES", (0, 2_000))
    sweeper = sparse_sweeper(prepared.problem, at)
    entries = sweeper.kernel.rows.args[0]
    assert 0 < entries.nnz < 0.1 * 40 * 50
    got, expected = sweeper(at, 6, 1.3), softmin_sweep(prepared, at, 6, 1.3)
    assert bool(got.check[0])
    used = [weight > 0 for weight in problem.marginals]
    for mine, other, where in zip(got[:3], expected[:3], (*used, used[1]), strict=True):
        # what is left out, 16 roundings of a sum, in each of 14 half-steps
        torch.testing.assert_close(mine[where], other[where], atol=1e-13, rtol=1e-13)
    # entries that were left out begin to matter
    far = at._replace(g=at.g + 200 * epsilon * torch.randn(50, dtype=torch.float64))
    assert not bool(sweeper(far, 1, 1.0).check[0])
    # plans that are not sharp have too many
    wide = EagerBackend().prepare(LinearProblem(problem.cost(kind), problem.marginals, 5.0))
    assert sparse_sweeper(wide.problem, wide.half_steps(problem.potentials.g)) is None


@pytest.mark.parametrize("tiled", [False, True])
def test_sweeps_that_have_left_their_entries_go_over_all(tiled, monkeypatch):
    problem, epsilon = linear_problem(300, 320, 3), 0.005
    monkeypatch.setattr("torchgw._sinkhorn.eager._SPARSE_ENTRIES", (0, 100_000))
    monkeypatch.setattr(Tiling, "pays", lambda self, cost: False)
    tiling = Tiling((300, 320), 32, storable=True)
    backend = TiledBackend(EagerBackend(), TiledEagerProblem, tiling) if tiled else EagerBackend()
    cost = problem.cost("factored" if tiled else "dense")
    linear = LinearProblem(cost, problem.marginals, epsilon)
    at = sinkhorn(backend.prepare(linear), None, max_iter=300, tol=1e-3).potentials
    prepared = backend.prepare(linear)
    few, every = (prepared.sweeper(at).kernel for _ in range(2))
    assert few.slack is not None
    assert every.slack is None
    vector = torch.rand(320, dtype=torch.float64)
    torch.testing.assert_close(few.rows(vector), every.rows(vector), atol=1e-9, rtol=1e-9)
    # these have left no entries
    assert prepared.sweeper(at).kernel.slack is not None


@pytest.mark.parametrize("first", ["dense", "factored"])
@pytest.mark.parametrize("second", ["dense", "factored"])
def test_costs_of_either_kind_add_up(first, second):
    one, two = linear_problem(20, 26, 3), linear_problem(20, 26, 2)
    found = added(one.cost(first), two.cost(second), -0.3)
    assert isinstance(found, DenseCost) == ("dense" in (first, second))
    expected = one.dense.matrix - 0.3 * two.dense.matrix
    np.testing.assert_allclose(found.dense().matrix, expected, atol=1e-12)


def test_a_centred_cost_is_the_same_cost():
    cost = linear_problem(20, 26, 3).cost("factored")
    moved = cost._replace(left=cost.left + 2, right=cost.right - 3)
    centred = moved.centred()
    for factor in (centred.left, centred.right):
        np.testing.assert_allclose(factor.mean(0), 0, atol=1e-14)
    np.testing.assert_allclose(centred.dense().matrix, moved.dense().matrix, atol=1e-12)


@pytest.mark.parametrize("kind", ["dense", "factored"])
def test_plain_sweep_is_reference_sinkhorn(kind):
    problem = linear_problem(20, 26, 3)
    a, b = (w.numpy() for w in problem.marginals)
    f, g, g_next = reference.sinkhorn(
        problem.dense.matrix.numpy(), a, b, 0.7, 5, g=problem.potentials.g.numpy()
    )
    cost = problem.cost(kind)
    start = Potentials(torch.from_numpy(f), problem.potentials.g)
    got = EagerBackend().prepare(LinearProblem(cost, problem.marginals, 0.7)).sweep(start, 5, 1.0)
    for mine, other in zip(got[:3], (f, g, g_next), strict=True):
        np.testing.assert_allclose(mine.numpy(), other, atol=1e-11)


@pytest.mark.parametrize("kind", ["dense", "factored"])
@pytest.mark.parametrize("epsilon", [0.05, 1.0])
def test_marginals_and_reported_error(backend, kind, epsilon):
    problem = linear_problem(30, 20, 2, zero_weights=True)
    cost = problem.cost(kind)
    result = sinkhorn(
        backend.prepare(LinearProblem(cost, problem.marginals, epsilon)),
        Potentials(*map(torch.zeros_like, problem.marginals)), max_iter=5000, tol=1e-10,
    )  # fmt: skip
    assert result.converged
    a, b = (w.numpy() for w in problem.marginals)
    plan = reference.plan(
        problem.dense.matrix.numpy(), a, b, *(p.numpy() for p in result.potentials), epsilon
    )
    # rows are exact after a row update; columns are what the loop says they are
    np.testing.assert_allclose(plan.sum(1), a, atol=1e-13)
    assert abs(np.abs(plan.sum(0) - b).sum() - result.error) < 1e-13


@pytest.mark.parametrize("kind", ["dense", "factored"])
def test_two_points_whose_weights_float32_does_not_hold_have_no_mass(backend, kind):
    """An exponential between them overflows: infinity times next to nothing was no number."""
    problem = linear_problem(13, 17, 3)
    marginals = Marginals(*(weight.clone() for weight in problem.marginals))
    for weight in marginals:
        weight[4] = 1e-60
        weight /= weight.sum()
    cost = problem.cost(kind, torch.float32)
    prepared = backend.prepare(LinearProblem(cost, marginals, 1.0))
    found = sinkhorn(
        prepared, Potentials(*map(torch.zeros_like, marginals)), max_iter=2000, tol=1e-5
    )
    assert found.converged
    far = Potentials(*(part.clone() for part in found.potentials))
    for potential in far:
        potential[4] += 80
    plan = prepared.dense(far)
    assert plan.isfinite().all()
    assert plan[4, 4] == 0
    assert prepared.apply(far, torch.ones(17, 1)).isfinite().all()


def test_over_relaxation_pays_at_small_epsilon(monkeypatch):
    # by itself
    monkeypatch.setattr(loop, "_PATIENCE", 10**9)
    monkeypatch.setattr(loop, "NEWTON_BELOW", 0.0)
    x = torch.linspace(0, 1, 60, dtype=torch.float64)[:, None]
    cost = linear_problem(60, 60, 1).factored._replace(
        left=2 * x, right=x**2, row=x[:, 0] ** 2, column=x[:, 0] ** 4
    )
    uniform = Marginals(*(torch.full((60,), 1 / 60, dtype=torch.float64),) * 2)
    start = Potentials(*map(torch.zeros_like, uniform))

    class Plain(EagerProblem):
        def sweep(self, start, count, relaxation=1.0):
            return super().sweep(start, count, 1.0)

    options = {"max_iter": 20_000, "tol": 1e-9}
    problem = LinearProblem(cost.dense(), uniform, 1e-3)
    plain = sinkhorn(Plain(problem, EagerBackend()), start, **options)
    relaxed = sinkhorn(EagerBackend().prepare(problem), start, **options)
    assert plain.converged
    assert relaxed.converged
    assert relaxed.n_iters < plain.n_iters / 3
    # same fixed point, up to the constant that moves between f and g
    shift = (relaxed.potentials.f - plain.potentials.f).mean()
    torch.testing.assert_close(relaxed.potentials.f - shift, plain.potentials.f, atol=1e-6, rtol=0)


@pytest.mark.parametrize("epsilon", [5e-3, 1e-3])
def test_a_plan_that_has_to_change_partners_gets_there(backend, epsilon):
    """The error stays 1/3 for some hundred iterations, which is no rounding."""
    cost = DenseCost(torch.tensor([[0.0, 0.5, 0.5], [0.5, 0.0, 0.0]], dtype=torch.float64))
    marginals = Marginals(*(torch.full((k,), 1 / k, dtype=torch.float64) for k in cost.shape))
    problem = LinearProblem(cost, marginals, epsilon)
    assert sinkhorn(backend.prepare(problem), None, max_iter=2000, tol=1e-8).converged
    # what rounding leaves is still noticed
    easy = backend.prepare(problem._replace(epsilon=0.1))
    assert sinkhorn(easy, None, max_iter=2000, tol=0.0).n_iters < 1000


def test_a_single_column_that_has_to_change_partners_gets_there(backend):
    """Its mass of 1/41 is the error for a long time: 21 columns of 41 are nearer to one point."""
    near = torch.arange(41) < 21
    cost = DenseCost(torch.stack([~near, near]).double() + 0.01 * torch.arange(41))
    marginals = Marginals(*(torch.full((k,), 1 / k, dtype=torch.float64) for k in cost.shape))
    for epsilon in (2e-3, 1e-4):
        # one step at a time takes 1,570 and 55,590 iterations
        problem = backend.prepare(LinearProblem(cost, marginals, epsilon))
        assert sinkhorn(problem, None, max_iter=1000, tol=1e-8).converged


def test_potentials_of_nothing_come_sooner_from_larger_epsilons():
    """At a plan's own epsilon they took 1,130 iterations, which larger ones leave a fifth of.

    A kernel is soon left behind there; sweeps without one take no fewer.
    """
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(60, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    marginals = Marginals(*(torch.full((60,), 1 / 60, dtype=torch.float64) for _ in range(2)))
    problem = EagerBackend().prepare(LinearProblem(DenseCost(-x @ y.T), marginals, 2e-3))
    at_once = sinkhorn(problem, None, max_iter=4000, tol=3e-3)
    falling = sinkhorn(problem, None, max_iter=4000, tol=3e-3, falling=True)
    assert falling.converged
    assert falling.n_iters < at_once.n_iters / 2
    # no more than are left
    assert sinkhorn(problem, None, max_iter=20, tol=1e-9, falling=True).n_iters <= 20


def test_a_larger_epsilon_that_leads_away_is_left(backend, monkeypatch):
    """Too few iterations may be left to come back; of 1,004 points an error was twice as large.

    Smaller problems begin at exact prices.
    """
    near = torch.arange(301) < 151
    cost = DenseCost(torch.stack([~near, near]).double() + 0.001 * torch.arange(301))
    marginals = Marginals(*(torch.full((k,), 1 / k, dtype=torch.float64) for k in cost.shape))
    problem = backend.prepare(LinearProblem(cost, marginals, 1e-4))

    def away(prepared, start, most, solve, factor):
        return Potentials(start.f, start.g + near), most

    monkeypatch.setattr("torchgw._sinkhorn.loop.from_larger_epsilon", away)
    left = sinkhorn(problem, None, max_iter=1000, tol=1e-8)
    stayed = sinkhorn(problem, None, max_iter=1000, tol=1e-8, from_above=False)
    assert not left.converged
    assert left.error < 1.1 * stayed.error


@pytest.mark.parametrize("seed", quick(2, range(6)))
def test_small_problems_are_solved_at_any_epsilon(backend, seed):
    """Iterations alone may leave a tenth of the mass at a wrong place for thousands of them."""
    rng = np.random.default_rng(seed)
    n, m = rng.integers(5, 40, 2)
    weights = [rng.random(k) * (rng.random(k) < 0.8) + 1e-3 for k in (n, m)]
    marginals = Marginals(*(torch.as_tensor(part / part.sum()) for part in weights))
    cost = DenseCost(torch.as_tensor(rng.normal(size=(n, m))))
    for epsilon in (1e-3, 1e-5, 1e-7):
        problem = backend.prepare(LinearProblem(cost, marginals, epsilon))
        found = sinkhorn(problem, None, max_iter=2000, tol=1e-7)
        assert found.converged
        plan = problem.dense(found.potentials)
        least = by_scipy(*(part.numpy() for part in marginals), cost.matrix.numpy())
        value = float((plan * cost.matrix).sum())
        lowest = float((torch.as_tensor(least.plan) * cost.matrix).sum())
        # entropy adds at most epsilon log(n m); marginals are met to a tolerance
        assert value - lowest < epsilon * np.log(n * m) + 1e-5


def test_next_relaxation_follows_young():
    # plain iterations at rate 0.99: the best factor is 2 / (1 + sqrt(0.01))
    assert next_relaxation(1.0, 0.99**10, 10) == pytest.approx(2 / 1.1)
    # under the best factor the rate is factor - 1: the factor stays there
    assert next_relaxation(1.5, 0.5**10 * 1.0001, 10) == pytest.approx(1.5, rel=1e-2)
    assert next_relaxation(1.7, 1.2, 10) == 1.0
    assert next_relaxation(1.7, 0.0, 10) == 1.7
    # whatever is seen, over-relaxation contracts; what it cannot explain leads to less of it
    for factor in np.linspace(1, 1.98, 50):
        for rate in np.linspace(0.01, 0.999, 50):
            found = next_relaxation(factor, rate**10, 10)
            assert 1 <= found <= 2 / (1 + SMALLEST_GAP**0.5)
            assert found <= factor or rate > factor - 1


def test_underflow_of_a_sweep_is_redone_safely():
    # potentials far from the solution: the column sums of the first sweep underflow in float32
    problem = linear_problem(10, 12, 2)
    cost = problem.cost("dense", torch.float32)
    far = Potentials(problem.potentials.f, problem.potentials.g + torch.arange(12.0) * 100)
    zero = Potentials(*map(torch.zeros_like, problem.marginals))
    sweep = EagerBackend().prepare(LinearProblem(cost, problem.marginals, 0.05)).sweep(far, 1, 1.0)
    assert not bool(sweep.check[0])
    for start in (far, zero):
        result = sinkhorn(
            EagerBackend().prepare(LinearProblem(cost, problem.marginals, 0.05)), start,
            max_iter=3000, tol=1e-5,
        )  # fmt: skip
        assert result.converged


@pytest.mark.usefixtures("traced")
def test_compiled_backend_does_not_recompile_for_new_shapes():
    import torch._dynamo.utils as utils

    backend = CompiledBackend()

    def run(n, m, rank, epsilon):
        problem = linear_problem(n, m, rank)
        for kind in ("dense", "factored"):
            given = LinearProblem(problem.cost(kind), problem.marginals, epsilon)
            backend.prepare(given).softmin(problem.potentials.g, axis=1)

    run(8, 9, 3, 1.0)
    run(11, 7, 2, 0.5)
    before = utils.counters["stats"]["unique_graphs"]
    for size in range(12, 26):
        run(size, size + 3, 2 + size % 5, 1.0 / size)
    assert utils.counters["stats"]["unique_graphs"] == before
