"""Skipped tiles: bounds hold, and what is left gives sums right to the stated share."""

from __future__ import annotations

import math
import pickle
import warnings
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from problems import solve_by_name

import torchgw
from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw._sinkhorn.contract import softmin_sweep
from torchgw._sinkhorn.eager import EagerBackend, StoredSweeper, _StreamedKernel
from torchgw._sinkhorn.loop import sinkhorn
from torchgw._sinkhorn.problem import FactoredCost, LinearProblem, softmin
from torchgw._sinkhorn.tiles.eager import TiledEagerProblem
from torchgw._sinkhorn.tiles.prepared import TiledBackend, block_scaling
from torchgw._sinkhorn.tiles.tiling import (
    SLACK,
    TileLists,
    Tiling,
    block_orders,
    potential_bound,
    skipped_share,
    tile_bounds,
    tile_problem,
)
from torchgw._solve import forecast
from torchgw._tensors.block_order import block_order
from torchgw._typing import Marginals, Potentials
from torchgw.datasets import spiral, swiss_roll

DELTA = skipped_share(torch.float64)
BACKENDS = [pytest.param(("eager", "cpu"), id="eager")]
if find_spec("triton"):
    from torchgw._sinkhorn.kernels.operands import interpreted
    from torchgw._sinkhorn.tiles.triton import TiledTritonProblem
    from torchgw._triton_sinkhorn import TritonBackend

    no_interpreter = pytest.mark.skipif(not interpreted(), reason="not interpreted")
    BACKENDS += [
        pytest.param(("triton", "cpu"), marks=no_interpreter, id="interpreted"),
        pytest.param(("triton", "cuda"), marks=pytest.mark.gpu, id="triton"),
        pytest.param(("eager", "cuda"), marks=pytest.mark.gpu, id="eager-cuda"),
    ]
# The interpreter computes lanes that are masked afterwards, as the GPU does, but NumPy warns.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
# Rounding of a potential over epsilon in float64: exponents stay below 1e4.
ROUNDING = 1e-11
# n, m, width: one block, fewer points than a block, whole blocks, ragged ends.
SIZES = [(1, 1, 8), (5, 7, 8), (32, 48, 8), (61, 130, 8), (130, 61, 16)]


@pytest.fixture(params=BACKENDS)
def make(request: pytest.FixtureRequest):
    """Return how to make the backend of a tiling, its device, and the least width of a block."""
    name, device = request.param
    if name == "eager":
        return Maker(EagerBackend(), TiledEagerProblem, torch.device(device), 1)
    return Maker(TritonBackend(), TiledTritonProblem, torch.device(device), 16)


class Maker(NamedTuple):
    whole: Any
    kind: type
    device: torch.device
    least: int

    def __call__(self, shape: tuple[int, int], width: int) -> Any:
        return TiledBackend(self.whole, self.kind, Tiling(shape, max(width, self.least)))

    def to(self, problem):
        """Return a cost, weights and potentials on the device."""
        return [type(part)(*(x.to(self.device) for x in part)) for part in problem]


def tiled_eager(shape: tuple[int, int], width: int, **options: bool) -> TiledBackend:
    return TiledBackend(EagerBackend(), TiledEagerProblem, Tiling(shape, width, **options))


def curve_cost(n: int, m: int, epsilon: float = 1e-3, thickness: float = 0.01):
    """Squared distances of two noisy arcs, points in no order, some of them twice, some weightless.

    Returns the cost, weights and warm potentials, float64.
    """
    generator = torch.Generator().manual_seed(n + 1000 * m)
    sides = []
    for size in (n, m):
        t = torch.rand(size, generator=generator, dtype=torch.float64)
        t[size // 3] = t[0]
        noise = thickness * torch.rand(size, 3, generator=generator, dtype=torch.float64)
        sides.append(torch.stack([t, t.square(), 0 * t], 1) + noise)
    x, y = sides
    cost = FactoredCost(2 * x, y, x.square().sum(1), y.square().sum(1))
    weights = []
    for size in (n, m):
        weight = torch.rand(size, generator=generator, dtype=torch.float64) + 0.2
        if size > 2:
            weight[size // 2] = 0
        weights.append(weight / weight.sum())
    marginals = Marginals(*weights)
    g = torch.zeros(m, dtype=torch.float64)
    for _ in range(30 if epsilon > 5e-3 else 150):
        f = softmin(cost, marginals.log_b, g, epsilon, axis=1)
        g = softmin(cost, marginals.log_a, f, epsilon, axis=0)
    return cost, marginals, Potentials(f, g)


def exact_plan(cost, marginals, potentials, epsilon):
    f, g = potentials
    density = torch.exp((f[:, None] + g - cost.dense().matrix) / epsilon)
    return density * marginals.a[:, None] * marginals.b


@pytest.mark.parametrize(("n", "width"), [(1, 8), (7, 8), (8, 8), (9, 8), (100, 8), (257, 16)])
def test_order_is_a_permutation_in_compact_blocks(n: int, width: int) -> None:
    t = torch.rand(n, generator=torch.Generator().manual_seed(n))
    order = block_order(torch.stack([t, 0.1 * t, torch.zeros(n)], 1), width)
    assert torch.equal(order.point.sort().values, torch.arange(n))
    assert torch.equal(order.join(order.split(t)), t)
    # on a line, blocks are intervals that do not overlap
    blocks = t[order.point].split(width)
    ends = sorted((float(block.min()), float(block.max())) for block in blocks)
    assert len(blocks) == order.blocks
    assert all(first[1] <= second[0] for first, second in zip(ends, ends[1:], strict=False))


def test_order_of_coinciding_points() -> None:
    order = block_order(torch.zeros(50, 3), 8)
    assert torch.equal(order.point.sort().values, torch.arange(50))


@pytest.mark.parametrize(("n", "m", "width"), SIZES)
@pytest.mark.parametrize("kind", ["curve", "random"])
@pytest.mark.parametrize("epsilon", [1e3, 1e-2, 1e-5])
def test_bounds_hold(n: int, m: int, width: int, kind: str, epsilon: float) -> None:
    """No exponent is above the bound of its tile, no potential above its own."""
    cost, marginals, potentials = curve_cost(n, m, epsilon)
    if kind == "random":
        generator = torch.Generator().manual_seed(0)
        cost = cost._replace(
            left=torch.randn(n, 3, generator=generator, dtype=torch.float64),
            right=torch.randn(m, 3, generator=generator, dtype=torch.float64) + 0.5,
        )
    problem = tile_problem(cost, marginals, epsilon, block_orders(cost, (width, width)))
    rows, columns = problem.rows, problem.columns
    u, v = problem.exponents(potentials)
    exponent = torch.einsum("iar,jbr->ijab", rows.factors, columns.factors)
    exponent = exponent + u[:, None, :, None] + v[None, :, None, :]
    largest = exponent.amax((2, 3))
    # the bound carries a margin for its own rounding
    assert (tile_bounds(rows, columns, u, v) >= largest).all()
    needed = softmin(cost, marginals.log_b, potentials.g, epsilon, axis=1)
    above = rows.order.join(potential_bound(rows, columns, v)) - (needed - cost.row) / epsilon
    size = float(exponent[torch.isfinite(exponent)].abs().max())
    assert float(above.min()) >= -1e-12 * max(size, 1.0)


@pytest.mark.parametrize(("n", "m", "width"), SIZES)
@pytest.mark.parametrize("epsilon", [1e3, 1e-2, 1e-5])
@pytest.mark.parametrize("axis", [0, 1])
def test_softmin(n: int, m: int, width: int, epsilon: float, axis: int, make: Maker) -> None:
    """From arbitrary potentials, not only from warm ones."""
    cost, marginals, _ = make.to(curve_cost(n, m))
    size, weight = (n, marginals.log_a) if axis == 0 else (m, marginals.log_b)
    potential = torch.linspace(0, 1, size, dtype=torch.float64, device=make.device)
    prepared = make((n, m), width).prepare(LinearProblem(cost, marginals, epsilon))
    got = prepared.softmin(potential, axis)
    expected = softmin(cost, weight, potential, epsilon, axis)
    # rounding of exponents of up to 1 / epsilon
    rounding = ROUNDING * max(1.0, 1e-2 / epsilon)
    assert float((got - expected).abs().max()) / epsilon <= DELTA + rounding


@pytest.mark.parametrize(("n", "m", "width"), SIZES)
@pytest.mark.parametrize("epsilon", [1e3, 1e-2, 1e-3])
def test_sweeps_end_in_half_steps(n: int, m: int, width: int, epsilon: float, make: Maker) -> None:
    """Whatever happens between, f is the softmin of g, and g_next that of f."""
    cost, marginals, start = make.to(curve_cost(n, m, epsilon))
    backend = make((n, m), width)
    sweep = backend.prepare(LinearProblem(cost, marginals, epsilon)).sweep(start, 2, 1.0)
    assert sweep.check[0] == 1
    used_a, used_b = marginals.a > 0, marginals.b > 0
    f = softmin(cost, marginals.log_b, sweep.g, epsilon, axis=1)
    g_next = softmin(cost, marginals.log_a, sweep.f, epsilon, axis=0)
    for got, expected, used in ((sweep.f, f, used_a), (sweep.g_next, g_next, used_b)):
        error = (got - expected)[used].abs().max() / epsilon
        assert float(error) <= 2 * DELTA + ROUNDING * max(1.0, 1e-2 / epsilon)
    # a point without mass takes no part
    torch.testing.assert_close(sweep.f[~used_a], start.f[~used_a])


def test_two_levels_converge_faster_than_one() -> None:
    cost, marginals, _ = curve_cost(160, 130)
    problem = LinearProblem(cost, marginals, 2e-3)
    results = [
        sinkhorn(backend.prepare(problem), None, max_iter=400, tol=1e-9)
        for backend in (EagerBackend(), tiled_eager((160, 130), 4))
    ]
    assert all(result.converged for result in results)
    assert results[1].n_iters < results[0].n_iters / 2
    plans = [exact_plan(cost, marginals, result.potentials, 2e-3) for result in results]
    assert float((plans[0] - plans[1]).abs().sum()) < 1e-6


@pytest.mark.slow
def test_a_second_level_that_does_not_help_is_given_up(
    monkeypatch: pytest.MonkeyPatch, make: Maker
) -> None:
    """Scalings that make things worse cost iterations, not the answer."""
    turns = iter(range(10**6))

    def worse(masses, row_mass, column_mass):
        k = torch.arange(len(row_mass), dtype=torch.float64, device=row_mass.device)
        return torch.cos(k + next(turns)), 1

    monkeypatch.setattr("torchgw._sinkhorn.tiles.prepared.block_scaling", worse)
    cost, marginals, _ = make.to(curve_cost(40, 30))
    prepared = make((40, 30), 16).prepare(LinearProblem(cost, marginals, 2e-2))
    assert sinkhorn(prepared, None, max_iter=200, tol=1e-8).converged


def test_two_levels_are_left_where_they_bring_less_for_their_price(make: Maker) -> None:
    cost, marginals, start = make.to(curve_cost(60, 70))
    backend = make((60, 70), 16)
    tiling = backend.tiling
    prepared = backend.prepare(LinearProblem(cost, marginals, 1e-3))
    two, one = tiling.tallies
    before = one.price
    assert prepared.two_level
    two.add(100.0, 3.0)  # much dearer than iterations over all tiles
    assert not prepared.two_level
    sweep = prepared.sweep(start, 1)
    assert tiling.made == 0  # no list of tiles is made
    assert one.price == before + 1
    f = softmin(cost, marginals.log_b, start.g, 1e-3, axis=1)
    assert float((sweep.f - f)[marginals.a > 0].abs().max()) / 1e-3 < 1e-9
    one.gain = 0.0  # they have brought less than two levels for their price
    assert tiling.two_levels_pay()
    prepared.end_sweeps()
    prepared.sweep(start, 1)
    assert two.price > 100
    assert tiling.made > 0


def test_single_passes_choose_tiles_where_that_takes_less_than_it_saves() -> None:
    """A GPU goes over ten billion entries once in the time in which it chooses their tiles."""
    sizes = {size: Tiling((size, size), 128) for size in (100_000, 1_000_000)}
    on = {
        name: SimpleNamespace(device=torch.device(name), dtype=torch.float32)
        for name in ("cpu", "cuda")
    }
    pays = {(size, name): sizes[size].pays(cost) for size in sizes for name, cost in on.items()}
    assert pays == {(100_000, "cpu"): True, (100_000, "cuda"): False,
                    (1_000_000, "cpu"): True, (1_000_000, "cuda"): True}  # fmt: skip
    precise = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float64)
    assert sizes[100_000].pays(precise)
    sizes[1_000_000]._memory.shares.append(0.6)
    assert not any(sizes[1_000_000].pays(cost) for cost in (*on.values(), precise))


def test_potentials_that_moved_too_far_are_not_trusted(make: Maker) -> None:
    """Tiles chosen far from the potentials that a sweep is given do not bound anything."""
    cost, marginals, start = make.to(curve_cost(120, 120))
    backend = make((120, 120), 8)
    prepared = backend.prepare(LinearProblem(cost, marginals, 1e-3))
    sweeper = prepared.sweeper(start)
    noise = torch.randn(120, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moved = Potentials(start.f, start.g + 0.01 * noise.to(make.device))
    sweep = sweeper(moved, 1, 1.0)
    # they are chosen anew before the half-step, or the half-step is declared unusable
    assert backend.tiling.report().lists >= 2
    f = softmin(cost, marginals.log_b, moved.g, 1e-3, axis=1)
    assert float((sweep.f - f)[marginals.a > 0].abs().max()) / 1e-3 < 1e-9 or sweep.check[0] == 0


def test_rows_that_rise_in_their_first_half_step_get_their_tiles(make: Maker) -> None:
    epsilon = 1e-4
    cost, marginals, start = make.to(curve_cost(230, 161, epsilon, thickness=0.0))
    backend = make((230, 161), 16)
    low = start.f.clone()
    low[::9] -= 8 * epsilon
    prepared = backend.prepare(LinearProblem(cost, marginals, epsilon))
    sweep = prepared.sweep(Potentials(low, start.g), 1)
    assert backend.tiling.report().lists == 2
    assert sweep.check[0] == 1
    f = softmin(cost, marginals.log_b, start.g, epsilon, axis=1)
    assert float((sweep.f - f)[marginals.a > 0].abs().max()) / epsilon < 1e-9
    # which the tiles chosen first do not hold
    assert float((f - low).max()) > SLACK * epsilon


@pytest.mark.parametrize(("n", "m", "width"), SIZES)
@pytest.mark.parametrize("transposed", [False, True])
def test_plan_products(n: int, m: int, width: int, transposed: bool, make: Maker) -> None:
    epsilon = 1e-3
    cost, marginals, potentials = make.to(curve_cost(n, m, epsilon))
    backend = make((n, m), width)
    plan = torchgw.TransportPlan(cost, potentials, marginals, epsilon, backend)
    expected = exact_plan(cost, marginals, potentials, epsilon)
    plan, expected = (plan.T, expected.T) if transposed else (plan, expected)
    values = torch.linspace(-1, 1, 3 * plan.shape[1], dtype=torch.float64).view(-1, 3)
    values = values.to(make.device)
    assert float(expected.sum()) == pytest.approx(1, abs=0.3)
    got = plan @ values
    # a skipped entry is at most DELTA a_i b_j
    assert float((got - expected @ values).abs().max()) <= DELTA + 1e-12
    k = min(3, plan.shape[1])
    top = plan.topk(k)
    exact = expected.topk(k).values
    torch.testing.assert_close(top[0], exact, rtol=1e-9, atol=1e-300)
    torch.testing.assert_close(expected.gather(1, top[1]), exact, rtol=1e-9, atol=1e-300)


def test_topk_beyond_the_kept_tiles(make: Maker) -> None:
    """More entries than the kept tiles hold: the others are looked for in the whole row."""
    cost, marginals, potentials = make.to(curve_cost(100, 120, 1e-5))
    backend = make((100, 120), 8)
    plan = torchgw.TransportPlan(cost, potentials, marginals, 1e-5, backend)
    whole = torchgw.TransportPlan(cost, potentials, marginals, 1e-5)
    got, expected = plan.topk(6), whole.topk(6)
    assert backend.tiling.report().kept < 0.6
    # some rows have not as many entries of any size
    assert float(expected[0].min()) < 1e-30
    torch.testing.assert_close(got[0], expected[0], rtol=1e-9, atol=1e-200)


@pytest.mark.parametrize("storable", [False, True])
def test_sweeps_that_give_up_tiles_store_the_cost_where_they_may(storable: bool) -> None:
    epsilon = 1e-3
    cost, marginals, potentials = curve_cost(60, 70, epsilon)
    problem = LinearProblem(cost, marginals, epsilon)
    prepared = tiled_eager((60, 70), 8, storable=storable).prepare(problem)
    sweeper, state = prepared.sweeper(potentials), potentials
    for _ in range(100):
        state = sweeper(state, 1, 1.0).state
        if not sweeper.two_level:
            break
    assert isinstance(sweeper._plain, StoredSweeper if storable else _StreamedKernel)
    one, two = (
        sweeper(state, 3, 1.3),
        softmin_sweep(EagerBackend().prepare(problem), state, 3, 1.3),
    )
    # points of weight zero stay where they are
    used = marginals.a > 0, marginals.b > 0, marginals.b > 0
    for got, expected, part in zip(one[:3], two[:3], used, strict=True):
        torch.testing.assert_close(got[part], expected[part], rtol=0, atol=ROUNDING * epsilon)


def test_draws_follow_the_plan() -> None:
    epsilon = 1e-3
    cost, marginals, potentials = curve_cost(60, 70, epsilon)
    prepared = tiled_eager((60, 70), 8).prepare(LinearProblem(cost, marginals, epsilon))
    generator = torch.Generator().manual_seed(0)
    row = 11
    drawn = prepared.draw(potentials, torch.full((20_000,), row), generator)
    expected = exact_plan(cost, marginals, potentials, epsilon)[row]
    frequency = torch.bincount(drawn, minlength=70) / 20_000
    # five standard deviations of a frequency
    assert float((frequency - expected / expected.sum()).abs().max()) < 5 * math.sqrt(0.25 / 20_000)
    assert (expected > 0.01 * expected.max()).sum() > 3


def test_tiles_are_skipped_where_the_plan_is_thin() -> None:
    """The share kept falls with epsilon, and everything is kept where epsilon is huge."""
    shares = []
    for epsilon in (1e3, 1e-2, 1e-3, 1e-4):
        cost, marginals, potentials = curve_cost(500, 400, epsilon, thickness=0.0)
        problem = tile_problem(cost, marginals, epsilon, block_orders(cost, (16, 16)))
        kept = problem.keep(*problem.exponents(potentials), 0.0)
        shares.append(TileLists.of(kept, 16).share)
    assert shares[0] == 1
    assert shares[1] > shares[2] > shares[3]
    assert shares[3] < 0.2


@pytest.mark.slow
def test_single_passes_go_over_all_tiles_where_most_are_kept(make: Maker) -> None:
    n, m = 130, 70
    cost, marginals, potentials = make.to(curve_cost(n, m, epsilon=10.0))
    backend = make((n, m), 8)
    values = torch.ones(m, 2, dtype=torch.float64, device=make.device)
    prepared = backend.prepare(LinearProblem(cost, marginals, 10.0))
    for _ in range(3):
        prepared.apply(potentials, values)
        prepared.softmin(potentials.g, axis=1)
        prepared.topk(potentials, 3)
    report = backend.tiling.report()
    assert report.kept == 1
    assert report.lists == 1
    # a sweep chooses anew, for all of its iterations, and what it finds counts from then on
    prepared.sweep(potentials, 1)
    assert backend.tiling.report().lists == 2


@pytest.mark.slow
def test_tiles_of_a_sweep_serve_the_products_that_follow(make: Maker) -> None:
    if make.kind is TiledEagerProblem:
        pytest.skip("chooses for each pass")
    n, m, epsilon = 230, 161, 1e-4
    cost, marginals, potentials = make.to(curve_cost(n, m, epsilon, thickness=0.0))
    backend = make((n, m), 16)
    values = torch.linspace(0, 1, m, dtype=torch.float64, device=make.device)[:, None]
    prepared = backend.prepare(LinearProblem(cost, marginals, epsilon))
    prepared.sweep(potentials, 1)
    kept, lists = backend.tiling.report()[1:3]
    assert kept < 0.5
    prepared.end_sweeps()
    moved = Potentials(potentials.f + epsilon, potentials.g - 2 * epsilon)
    plan = exact_plan(cost, marginals, moved, epsilon).to(make.device)
    near = prepared.apply(moved, values)
    ones = torch.ones(n, 1, dtype=torch.float64, device=make.device)
    across = prepared.T.apply(Potentials(*moved[::-1]), ones)
    torch.testing.assert_close(near, plan @ values, rtol=1e-6, atol=0)
    torch.testing.assert_close(across[:, 0], plan.sum(0), rtol=1e-6, atol=0)
    assert prepared.T.T is prepared
    assert backend.tiling.report().lists == lists
    # potentials that have risen too far have tiles of their own, and so has another cost
    far = Potentials(potentials.f + 10 * epsilon, potentials.g)
    prepared.apply(far, values)
    assert backend.tiling.report().lists == lists + 1
    backend.prepare(prepared.problem).apply(far, values)
    assert backend.tiling.report().lists == lists + 2


def test_a_result_keeps_no_tiles_and_no_kernel() -> None:
    x, y = factored_sides()
    plan = torchgw.solve(
        x,
        y,
        distances="sqeuclidean",
        epsilon=1e-3,
        options=torchgw.Options(storage="streamed", skip_tiles=True),
    ).lazy_plan
    assert isinstance(plan.prepared, TiledEagerProblem)
    assert "tiles" not in vars(plan.prepared)
    assert plan.prepared._sweeper is None
    plan @ torch.ones(600)
    assert "tiles" in vars(plan.prepared)
    again = pickle.loads(pickle.dumps(plan))
    assert "tiles" not in vars(again.prepared)
    assert torch.equal(again.T @ x, plan.T @ x)


def test_block_scaling_meets_both_marginals() -> None:
    generator = torch.Generator().manual_seed(0)
    masses = torch.rand(9, 7, generator=generator, dtype=torch.float64) + 0.5
    shift = 0.3 * torch.randn(9, generator=generator, dtype=torch.float64)
    rows, columns = masses.sum(1), masses.sum(0)
    masses[3], rows[3], masses[:, 2], columns[2] = 0, 0, 0, 0
    rows, columns = masses.sum(1), masses.sum(0)
    scaled = torch.exp(shift)[:, None] * masses
    x, _ = block_scaling(scaled, rows, columns)
    used = rows > 0
    # the answer is unique up to a constant
    difference = (x + shift)[used]
    assert float(difference.std()) < 1e-6
    assert float(shift.std()) > 0.1
    assert float(x[3]) == 0


def factored_sides():
    generator = torch.Generator().manual_seed(1)
    t = torch.rand(700, 1, generator=generator, dtype=torch.float64)
    x = torch.cat([t, t.square(), 0.02 * torch.rand(700, 1, generator=generator)], 1)
    return x, x[torch.randperm(700, generator=generator)][:600] @ torch.diag(
        torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)
    )


def test_solve_skips_tiles_and_says_so() -> None:
    x, y = factored_sides()
    options = {
        "distances": "sqeuclidean", "epsilon": 1e-3, "storage": "streamed", "random_state": 0,
    }  # fmt: skip
    skipping = solve_by_name(x, y, skip_tiles=True, **options)
    whole = solve_by_name(x, y, skip_tiles=False, **options)
    assert skipping.converged
    assert skipping.log["tiles"]["kept"] < 0.9
    # 16 roundings of float32
    assert 0 < skipping.log["tiles"]["bound"] <= 2e-6
    assert whole.log["tiles"] is None
    assert skipping.value == pytest.approx(whole.value, rel=1e-3)
    # the user's order is kept: rows belong to the points they were given for
    torch.testing.assert_close(skipping.marginal_a, whole.marginal_a, rtol=0, atol=1e-6)
    assert np.array_equal(skipping.lazy_plan.argmax(), whole.lazy_plan.argmax())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"storage": "stored"}, "stored"),
        ({"gradient": "sampled", "storage": "streamed"}, "gradient"),
        ({"gradient": "dense"}, "gradient"),
        ({"storage": "streamed", "backend": "compile"}, "backend='compile' has no"),
    ],
    ids=["stored", "sampled", "dense", "compile"],
)
def test_refused_where_there_is_nothing_to_skip(options: dict, reason: str) -> None:
    x, y = factored_sides()
    with pytest.raises(UnsupportedError, match=reason):
        solve_by_name(x[:50], y[:50], distances="sqeuclidean", skip_tiles=True, **options)


def test_refused_values() -> None:
    x, y = factored_sides()
    with pytest.raises(InvalidInputError, match="skip_tiles"):
        torchgw.solve(x[:50], y[:50], options=torchgw.Options(skip_tiles="yes"))


@pytest.mark.slow
def test_annealing_of_all_points_is_stored(monkeypatch):
    """From a large epsilon most tiles are kept for many iterations, which storing does faster."""
    # as if this were a larger problem
    monkeypatch.setattr(forecast, "_TILED_SECONDS", 0.0)
    points = spiral(1100, 0)[0], swiss_roll(1100, 1)[0]
    options = {"distances": "landmark", "random_state": 0, "max_iter": 3, "device": "cpu"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.ConvergenceWarning)
        searched, annealed = (solve_by_name(*points, n_init=n, **options) for n in (None, 1))
        # of five dimensions a few points say little, and this search follows a x b alone
        warnings.simplefilter("ignore", torchgw.SearchWarning)
        generator = torch.Generator().manual_seed(0)
        clouds = [torch.randn(1100, 5, generator=generator) for _ in points]
        cloud = solve_by_name(*clouds, search="fast", **options)
    assert searched.log["tiles"] is not None
    assert annealed.log["tiles"] is None
    assert cloud.alternatives == ()
    assert cloud.log["tiles"] is None
