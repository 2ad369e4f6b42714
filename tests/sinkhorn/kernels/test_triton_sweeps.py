"""Triton sweeps, their launch shapes and CUDA graphs, against their definition in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernel_cases import (
    EPSILON,
    assert_close,
    factored,
    warm,
    weights,
    wide,
)

from torchgw._sinkhorn.contract import Sweep, softmin_sweep
from torchgw._sinkhorn.eager import EagerBackend
from torchgw._sinkhorn.kernels import stored, sweeps
from torchgw._sinkhorn.kernels.stored import SweepShape
from torchgw._sinkhorn.problem import (
    STRICT,
    Cost,
    DenseCost,
    FactoredCost,
    LinearProblem,
    checked,
    softmin,
)
from torchgw._tensors.cuda_graphs import GraphMemory
from torchgw._triton_sinkhorn import TritonBackend, TritonProblem
from torchgw._typing import Marginals, Potentials

# The interpreter computes lanes that are masked afterwards, as the GPU does, but NumPy warns.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*"),
    pytest.mark.usefixtures("poisoned"),
]


def prepare(
    cost: Cost,
    marginals: Marginals,
    tau: tuple[float, float] = (1.0, 1.0),
    epsilon: float = EPSILON,
    **options: Any,
) -> TritonProblem:
    return TritonBackend(**options).prepare(LinearProblem(cost, marginals, epsilon, tau))


def reference_sweep(
    cost: Cost,
    marginals: Marginals,
    start: Potentials,
    count: int,
    *,
    relaxation: float = 1.0,
    tau: tuple[float, float] = (1.0, 1.0),
) -> Sweep:
    """Iterate f <- f + w (tau softmin(g) - f) in float64, and end with a plain iteration."""
    exact, weight = cost.to(torch.float64), Marginals(*wide(*marginals))
    f, g = wide(*start)
    for _ in range(count - (relaxation == 1)):
        f = f + relaxation * (tau[0] * softmin(exact, weight.log_b, g, EPSILON, axis=1) - f)
        g = g + relaxation * (tau[1] * softmin(exact, weight.log_a, f, EPSILON, axis=0) - g)
    last = tau[0] * softmin(exact, weight.log_b, g, EPSILON, axis=1)
    g_next = tau[1] * softmin(exact, weight.log_a, last, EPSILON, axis=0)
    state = Potentials(last, g_next) if relaxation == 1 else Potentials(f, g)
    ok = torch.ones((), dtype=torch.bool, device=f.device)
    return Sweep(last, g, g_next, state, checked(ok, g, g_next, weight.b, EPSILON))


def assert_sweeps_close(
    got: Sweep, expected: Sweep, marginals: Marginals, dtype: torch.dtype
) -> None:
    """Compare where there is mass: the other points of a sweep stay where they were."""
    assert bool(got.check[0])
    a, b = (weight > 0 for weight in marginals)
    masks = (a, b, b, a, b)
    parts = (*got[:3], *got.state), (*expected[:3], *expected.state)
    for mask, part, reference in zip(masks, *parts, strict=True):
        assert_close(part[mask], reference[mask], dtype)


@pytest.mark.parametrize("tau", [(1.0, 1.0), (0.7, 0.9)], ids=["balanced", "relaxed"])
@pytest.mark.parametrize("relaxation", [pytest.param(1.0, marks=pytest.mark.slow), 1.4])
@pytest.mark.parametrize("kind", ["factored", "dense"])
def test_sweep(
    kind: str,
    relaxation: float,
    tau: tuple[float, float],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    cost: Cost = factored(33, 70, 3, device, dtype)
    if kind == "dense":
        cost = cost.dense()
    marginals = weights(33, 70, device, dtype)
    start = warm(cost, marginals)
    expected = reference_sweep(cost, marginals, start, 3, relaxation=relaxation, tau=tau)
    got = prepare(cost, marginals, tau).sweep(start, 3, relaxation)
    assert_sweeps_close(got, expected, marginals, dtype)


def test_sweep_equals_softmins(device: torch.device) -> None:
    cost = factored(20, 30, 2, device, torch.float64)
    marginals = weights(20, 30, device, torch.float64)
    start = warm(cost, marginals)
    prepared = prepare(cost, marginals)
    expected = softmin_sweep(prepared, start, 2)
    sweep = prepared.sweep(start, 2)
    assert_sweeps_close(sweep, expected, marginals, torch.float64)


@pytest.mark.parametrize("kind", ["factored", pytest.param("dense", marks=pytest.mark.slow)])
def test_relaxed_fixed_point(kind: str, device: torch.device) -> None:
    # tau * softmin has its own fixed point; damping, tau * new + (1 - tau) * old, has the balanced
    # one. The iteration contracts by tau^2, so that 27 of them reach 1e-16.
    cost: Cost = factored(12, 17, 2, device, torch.float64)
    if kind == "dense":
        cost = cost.dense()
    marginals, tau = weights(12, 17, device, torch.float64), (0.5, 0.5)
    start = warm(cost, marginals)
    sweep = prepare(cost, marginals, tau).sweep(start, 27)
    f = tau[0] * softmin(cost, marginals.log_b, sweep.g, EPSILON, axis=1)
    g = tau[1] * softmin(cost, marginals.log_a, f, EPSILON, axis=0)
    used = [weight > 0 for weight in marginals]
    assert_close(sweep.f[used[0]], f[used[0]], torch.float64)
    assert_close(sweep.g[used[1]], g[used[1]], torch.float64)
    balanced = reference_sweep(cost, marginals, start, 27)
    assert float((sweep.f - balanced.f)[used[0]].abs().max()) > 0.01


PLAN = SweepShape(width=64, warps=4, programs=4, ahead=0, held=True)
PLANS = {
    "held": PLAN, "one tile": PLAN._replace(width=256), "a tile ahead": PLAN._replace(ahead=1),
    "a row ahead": PLAN._replace(ahead=3), "reread": PLAN._replace(held=False),
    "reread, two tiles ahead": PLAN._replace(held=False, ahead=2),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(("n", "m"), [(1, 1), (9, 181)])
def test_dense_plans(name: str, n: int, m: int, device: torch.device, dtype: torch.dtype) -> None:
    cost = factored(n, m, 2, device, dtype).dense()
    # rows of odd pitch inside NaN: what lies outside a row must not leak
    frame = torch.full((n + 1, m + 5), float("nan"), dtype=dtype, device=device)
    frame[:n, :m] = cost.matrix
    cost = DenseCost(frame[:n, :m])
    marginals = weights(n, m, device, dtype)
    start = warm(cost, marginals)
    sweep = prepare(cost, marginals, shape=PLANS[name]).sweep(start, 2)
    assert_sweeps_close(sweep, reference_sweep(cost, marginals, start, 2), marginals, dtype)


def test_dense_beyond_one_tile(
    device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "ROW_BYTES", 50 * dtype.itemsize)
    cost = factored(7, 90, 2, device, dtype).dense()
    cost = DenseCost(cost.matrix.T.contiguous().T)
    marginals = weights(7, 90, device, dtype)
    start = warm(cost, marginals)
    sweep = prepare(cost, marginals).sweep(start, 2)
    assert_sweeps_close(sweep, reference_sweep(cost, marginals, start, 2), marginals, dtype)


@pytest.mark.parametrize("kind", ["factored", "dense"])
@pytest.mark.parametrize("shift", [-200.0, 200.0], ids=["overflow", "underflow"])
def test_cold_start_is_reported(kind: str, shift: float, device: torch.device) -> None:
    cost: Cost = factored(9, 11, 2, device, torch.float32)
    if kind == "dense":
        cost = cost.dense()
    marginals = weights(9, 11, device, torch.float32)
    start = warm(cost, marginals)
    cold = Potentials(start.f - shift * EPSILON, start.g)
    assert not bool(prepare(cost, marginals).sweep(cold, 1).check[0])


def test_drift_is_reported(device: torch.device) -> None:
    # moving mass from f to g changes no plan, but leaves the kernel far behind
    cost = factored(9, 11, 2, device, torch.float32).dense()
    marginals = weights(9, 11, device, torch.float32)
    start = warm(cost, marginals)
    sweeper = prepare(cost, marginals).sweeper(start)
    for nats, ok in ((10.0, True), (25.0, False)):
        moved = Potentials(start.f + nats * EPSILON, start.g - nats * EPSILON)
        assert bool(sweeper(moved, 1).check[0]) == ok


@pytest.mark.parametrize("kind", ["factored", "dense"])
def test_sweeps_go_on(kind: str, device: torch.device) -> None:
    cost: Cost = factored(20, 30, 2, device, torch.float64)
    if kind == "dense":
        cost = cost.dense()
    marginals = weights(20, 30, device, torch.float64)
    start = warm(cost, marginals)
    sweeper = prepare(cost, marginals).sweeper(start)
    first = sweeper(start, 2)
    kept = first.g.clone()
    second = sweeper(first.state, 1)
    assert torch.equal(first.g, kept)
    assert_sweeps_close(
        second, reference_sweep(cost, marginals, start, 3), marginals, torch.float64
    )


@pytest.mark.parametrize("kind", ["factored", "dense"])
def test_pairs_without_mass(kind: str, device: torch.device) -> None:
    # nothing bounds exp(f_i + g_j - C_ij) where a_i = b_j = 0, and infinity times zero is NaN
    cost = factored(9, 11, 2, device, torch.float32)
    marginals = weights(9, 11, device, torch.float32)
    start = warm(cost, marginals)
    start = Potentials(
        *(part.where(w > 0, 500.0) for part, w in zip(start, marginals, strict=True))
    )
    given: Cost = cost.dense() if kind == "dense" else cost
    sweep = prepare(given, marginals).sweep(start, 2)
    expected = reference_sweep(given, marginals, start, 2)
    assert_sweeps_close(sweep, expected, marginals, torch.float32)
    plan = prepare(given, marginals).apply(start, torch.ones(11, 3, device=device))
    assert bool(torch.isfinite(plan).all())
    assert bool((plan[marginals.a == 0] == 0).all())


def test_mixed_dtypes(device: torch.device) -> None:
    # potentials stay float64 beside a float32 cost
    cost = factored(9, 11, 2, device, torch.float32)
    marginals = Marginals(*wide(*weights(9, 11, device, torch.float32)))
    start = Potentials(*wide(*warm(cost, marginals)))
    sweep = prepare(cost, marginals).sweep(start, 2)
    assert sweep.f.dtype == torch.float64
    assert_sweeps_close(sweep, reference_sweep(cost, marginals, start, 2), marginals, torch.float32)


def dense_problem(seed: int, dtype: torch.dtype) -> tuple[DenseCost, Marginals, Potentials]:
    device = torch.device("cuda")
    cost = factored(300, 400, 2 + seed, device, dtype).dense()
    marginals = weights(300, 400, device, dtype)
    return cost, marginals, warm(cost, marginals)


def same(got: Sweep, expected: Sweep) -> bool:
    """Whether two sweeps agree bit by bit."""
    pairs = zip((*got[:3], *got.state), (*expected[:3], *expected.state), strict=True)
    return all(torch.equal(part, reference) for part, reference in pairs)


def test_kernels_made_by_graphs_follow_their_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """With graphs that call again, as the interpreter has no others."""

    class Again:
        def __init__(self, record: Callable[[], None], *args: Any, **options: Any) -> None:
            self.replay = record

    monkeypatch.setattr(sweeps, "capture", Again)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    memory = GraphMemory(*4 * [None])  # type: ignore[arg-type]
    monkeypatch.setattr(sweeps, "borrow_memory", lambda *_: memory)
    device, dtype = torch.device("cpu"), torch.float64
    costs = [factored(12, 14, rank, device, dtype).dense() for rank in (2, 3)]
    replay = sweeps._Replay(costs[0], stored.sweep_shape(costs[0]))
    marginals = weights(12, 14, device, dtype)
    # a relaxed problem in between is prepared by launches
    for turn, tau in enumerate((STRICT, STRICT, (0.7, 0.9), STRICT, STRICT)):
        cost, epsilon = costs[turn % 2], EPSILON * (1 + turn)
        start = warm(cost, marginals)
        prepared = prepare(cost, marginals, tau, epsilon)
        replay.take(prepared.plan(start), tau)
        graphed = sweeps._GraphedSweeper(replay, "key", start)
        launched = prepare(cost, marginals, tau, epsilon, graphs=False).sweeper(start)
        for state in (start, Potentials(*(2 * part for part in start))):
            assert same(graphed(state, 2), launched(state, 2))
    assert {kind[2] for kind in replay.graphs} == {True, False}


@pytest.mark.gpu
def test_graphs_change_no_bit(dtype: torch.dtype) -> None:
    # the second sweep of a length is captured, the third replayed; workspaces go from one problem
    # to the next, and two sweepers at a time do not mix
    problems = [(*dense_problem(seed, dtype), epsilon) for seed, epsilon in ((0, 0.37), (1, 0.5))]
    for _ in range(3):
        sweepers = [
            [
                prepare(cost, marginals, epsilon=epsilon, graphs=graphs).sweeper(start)
                for graphs in (False, True)
            ]
            for cost, marginals, start, epsilon in problems
        ]
        states = [start for _, _, start, _ in problems]
        for count, relaxation in ((4, 1.0), (4, 1.0), (4, 1.3), (4, 1.5), (4, 1.0), (2, 1.0)):
            for place, (launched, graphed) in enumerate(sweepers):
                expected = launched(states[place], count, relaxation)
                got = graphed(states[place], count, relaxation)
                assert same(got, expected)
                assert bool(got.check[0])
                states[place] = got.state
        del sweepers, launched, graphed


@pytest.mark.gpu
def test_sweep_inside_a_graph() -> None:
    cost, marginals, start = dense_problem(0, torch.float32)
    expected = prepare(cost, marginals, graphs=False).sweep(start, 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sweep = prepare(cost, marginals).sweep(start, 3)
    # what others do meanwhile must not reach the buffers of the graph
    for _ in range(3):
        other, weight, potentials = dense_problem(1, torch.float32)
        prepare(other, weight).sweep(potentials, 3)
    graph.replay()
    assert torch.equal(sweep.g_next, expected.g_next)


@pytest.mark.gpu
def test_recorded_half_steps_are_those_of_the_definition(dtype):
    """Thrice: as they are, recorded, and replayed."""
    for seed in range(3):
        marginals = weights(40, 30, torch.device("cuda"), torch.float64)
        cost = torch.rand(40, 30, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)
        prepared = prepare(DenseCost(cost), marginals, least_entries=2**20)
        start = Potentials(*(torch.zeros_like(weight) for weight in marginals))
        found, expected = prepared.safe_sweep(start, 6), softmin_sweep(prepared, start, 6)
        for ours, theirs in zip(found[:3], expected[:3], strict=True):
            assert_close(ours, theirs, dtype)
        assert bool(found.check[0])


@pytest.mark.parametrize("count", [2, 25])
def test_streamed_sweeps_follow_potentials_that_go_far(
    count: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums over a kernel made far away are of no use; a kernel that is not stored costs nothing."""
    n, epsilon = 40, 3e-3
    x = torch.linspace(0, 1, n, dtype=torch.float64, device=device)[:, None]
    y = x**3
    cost = FactoredCost(2 * x, y, (x**2)[:, 0], (y**2)[:, 0])
    marginals = Marginals(*2 * (torch.full((n,), 1 / n, dtype=torch.float64, device=device),))
    exact = EagerBackend().prepare(LinearProblem(cost, marginals, epsilon))
    start = exact.half_steps(torch.zeros(n, dtype=torch.float64, device=device))

    def usable(dtype: torch.dtype) -> list[bool]:
        prepared = prepare(cost.to(dtype), marginals, epsilon=epsilon)
        state, other, usable = start, start, list[bool]()
        for relaxation in [1.0, 1.0, 1.5] if count > 2 else [*20 * [1.0], *5 * [1.5]]:
            sweep = prepared.sweep(state, count, relaxation)
            expected = softmin_sweep(exact, other, count, relaxation)
            state, other = sweep.state, expected.state
            usable.append(bool(sweep.check[0]))
            if usable[-1] and dtype == torch.float64:
                # a thousand roundings of exponents of size 1 / epsilon
                assert float((sweep.g_next - expected.g_next).abs().max()) / epsilon < 1e-10
        # further than a sweep can see from where it began
        assert float((other.g - start.g).abs().max()) / epsilon > 40
        return usable

    assert all(usable(torch.float64) + usable(torch.float32))
    monkeypatch.setattr(sweeps, "_FAR", float("inf"))
    # float64 has digits for these sums, over a kernel that was made where the sweeps began
    assert all(usable(torch.float64))
    assert not all(usable(torch.float32))
