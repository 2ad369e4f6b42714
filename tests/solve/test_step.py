"""The ends of an outer iteration: in any units the same, and as CUDA graphs the same to the bit."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
import torch
from problems import isometric_copy, random_weights, solve_by_name
from scipy.sparse import csr_matrix

import torchgw
from torchgw._plans.contract import Anchors
from torchgw._problem.problem import Problem
from torchgw._sinkhorn.choose import choose_backend
from torchgw._sinkhorn.loop import sinkhorn
from torchgw._sinkhorn.problem import DenseCost, LinearProblem
from torchgw._solve import loop
from torchgw._solve import step as steps
from torchgw._solve.step import CapturedStep, Step, choose_step
from torchgw._solve.strategy import make_gradient
from torchgw._tensors import cuda_graphs
from torchgw._tensors.operations import clone, tensors_of
from torchgw._typing import Marginals
from torchgw.distances import CallableDistance, DijkstraDistance, PointDistance

EPSILON = 0.3
GRADIENTS = ["dense", "factored", "sampled"]
# One kind of provider for each way that a gradient reads it.
METRICS = {"dense": "euclidean", "factored": "sqeuclidean", "sampled": "euclidean"}


def make_step(name, device, *, store=True, alpha=1.0, backend="auto", turn=0):
    x, y, _ = isometric_copy(40, noise=0.1, seed=turn)
    sides = [
        PointDistance(torch.from_numpy(points / 4).to(device), METRICS[name])
        for points in (x, y[:-3])
    ]
    weights = Marginals(
        *(torch.from_numpy(random_weights(side.n, turn)).to(device) for side in sides)
    )
    table = (1 + turn) * torch.rand(40, 37, dtype=torch.float64, device=device)
    linear = DenseCost(table) if alpha < 1 else None
    problem = Problem(*sides, weights, alpha, linear)
    generator = torch.Generator(device).manual_seed(3)
    gradient = make_gradient(name, problem, 32, 0.9)
    chosen = choose_backend(backend, torch.device(device), torch.float64)
    return Step(gradient, weights, chosen, generator, store)


def solved(plain, cost):
    prepared = plain.backend.prepare(LinearProblem(cost, plain.marginals, EPSILON))
    return sinkhorn(prepared, None, max_iter=50, tol=1e-12).potentials


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("name", GRADIENTS)
def test_epsilon_is_a_unit(name, store):
    plain = make_step(name, "cpu", store=store)
    cost = plain.linearise(plain.gradient.start())
    potentials = solved(plain, cost)
    prepared = plain.backend.prepare(LinearProblem(cost, plain.marginals, EPSILON))
    previous = plain.update(
        prepared, potentials, plain.gradient.start(), plain.gradient.start()
    ).coupling \
        if name == "sampled" else plain.gradient.start()  # fmt: skip
    state = plain.generator.get_state()
    expected = plain.update(prepared, potentials, previous, previous)
    plain.generator.set_state(state)
    epsilon = torch.tensor(EPSILON, dtype=torch.float64)
    got = plain.update_in_units(cost, epsilon, potentials, previous, previous)
    if name == "sampled":
        # the same draws from plans that differ by rounding
        assert torch.equal(got.coupling.source, expected.coupling.source)
        assert torch.equal(got.coupling.target, expected.coupling.target)
    else:
        pair = got.coupling.values, expected.coupling.values
        assert float(expected.coupling.values.norm()) > 0.01
        torch.testing.assert_close(*pair, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(got.told, expected.told, rtol=1e-11, atol=0, equal_nan=True)


def test_a_cpu_and_another_backend_are_not_captured():
    plain = make_step("dense", "cpu")
    assert choose_step(plain) is plain


def test_captured_follows_its_arguments(monkeypatch):
    """With a graph that calls the function again, in place of CUDA's."""

    class Graph:
        def __init__(self, record):
            self.replay = record

    monkeypatch.setattr(cuda_graphs, "capture", lambda record, *args, **kwargs: Graph(record))
    called = []

    def function(x, pair):
        called.append(x)
        return x + pair.source.sum()

    captured = cuda_graphs.Captured(
        function, cuda_graphs.GraphMemory(*[None] * 4), None, in_place=1
    )
    pair = Anchors(torch.ones(2), torch.zeros(2))
    place = torch.zeros(3)
    for number, x in enumerate([torch.zeros(3), place, place, torch.ones(3), torch.ones(4)]):
        shifted = Anchors(pair.source + number, pair.target)
        assert torch.equal(captured(x, shifted), x + shifted.source.sum())
    # the second call's is read where it lies, a later one is copied there; another shape is called
    assert called[1] is called[2] is called[3] is place
    assert torch.equal(place, torch.ones(3))
    assert called[4].shape == (4,)


def test_functions_are_kept_by_kind(monkeypatch):
    """The first solve of a kind calls, the second records, later ones replay; few are kept."""
    memory = cuda_graphs.GraphMemory(None, None, None, OrderedDict())
    monkeypatch.setattr(cuda_graphs, "borrow_memory", lambda owner, device: memory)
    recorded = []

    class Graph:
        def __init__(self, record, *args, **kwargs):
            recorded.append(record)
            self.replay = record

    monkeypatch.setattr(cuda_graphs, "capture", Graph)
    pair = Anchors(torch.ones(2), torch.zeros(2))
    for number in range(4):
        call = cuda_graphs.Replayer(torch.device("cpu"), "kind")
        shifted = Anchors(pair.source + number, None)
        assert torch.equal(call("f", lambda p: 2 * p.source, shifted), 2 * shifted.source)
        assert len(recorded) == (number > 0)
    for kind in range(8):
        cuda_graphs.Replayer(torch.device("cpu"), kind)
    assert [kind for _, kind in memory.kept] == list(range(8))
    assert clone(shifted).target is None


def test_kept_steps_follow_their_problem(monkeypatch):
    """With graphs that call again, on the tables that the first solve has left."""
    memory = cuda_graphs.GraphMemory(None, None, None, OrderedDict())
    monkeypatch.setattr(steps, "borrow_memory", lambda owner, device: memory)

    class Graph:
        def __init__(self, record, *args, **kwargs):
            self.replay = record

    monkeypatch.setattr(cuda_graphs, "capture", Graph)
    for alpha in (1.0, 0.5):
        for turn in range(3):
            plain = make_step("dense", "cpu", alpha=alpha, turn=turn)
            before = [part.clone() for part in plain.gradient.tables()]
            expected = run(CapturedStep(plain, replay=False), plain, 4)
            got = run(CapturedStep(plain), plain, 4)
            for ours, theirs in zip(got, expected, strict=True):
                assert all(same(x, y) for x, y in zip(ours, theirs, strict=True))
            # the user's tables are read, and never written to
            assert all(map(torch.equal, plain.gradient.tables(), before))
    assert len(memory.kept) == 2


def run(step, plain, count=6):
    """Iterate; return everything that came by, copied."""
    coupling, seen = plain.gradient.start(), []
    for turn in range(count):
        cost = step.linearise(coupling)
        problem = LinearProblem(cost, plain.marginals, EPSILON / (1 + turn))
        prepared = plain.backend.prepare(problem)
        coupling, report = step.update(prepared, solved(plain, cost), coupling, coupling)
        seen.append((coupling, clone(cost), report.clone()))
    return seen


def same(one, other):
    parts = tensors_of(one), tensors_of(other)
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(*parts, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("alpha", [1.0, 0.5], ids=["", "fused"])
@pytest.mark.parametrize("store", [True, False], ids=["stored", "streamed"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_graphs_change_no_bit(name, store, alpha):
    plain = make_step(name, "cuda", store=store, alpha=alpha)
    assert isinstance(choose_step(plain), CapturedStep)
    state = plain.generator.get_state()
    expected = run(CapturedStep(plain, replay=False), plain)
    after = plain.generator.get_state()
    plain.generator.set_state(state)
    step = CapturedStep(plain)
    got = run(step, plain)
    for turn, pair in enumerate(zip(got, expected, strict=True)):
        for part, (ours, theirs) in enumerate(zip(*pair, strict=True)):
            assert same(ours, theirs), (turn, ("coupling", "cost", "report")[part], ours, theirs)
    # a replay takes as many random numbers as the calls
    assert torch.equal(plain.generator.get_state(), after)
    assert step._ends.update._graph is not None
    if name == "sampled":
        assert isinstance(got[-1][0], Anchors)
        assert not torch.equal(got[-1][0].target, got[-2][0].target)


@pytest.mark.gpu
@pytest.mark.parametrize("alpha", [1.0, 0.5], ids=["", "fused"])
def test_kept_graphs_change_no_bit(alpha):
    for turn in (0, 1, 2, 0):
        plain = make_step("dense", "cuda", alpha=alpha, turn=turn)
        expected = run(CapturedStep(plain, replay=False), plain)
        step = choose_step(plain)
        assert isinstance(step, CapturedStep)
        for ours, theirs in zip(run(step, plain), expected, strict=True):
            assert all(same(x, y) for x, y in zip(ours, theirs, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_a_solve_is_the_same_without_graphs(gradient, monkeypatch):
    x, y, _ = isometric_copy(60, noise=0.1)
    call = {"distances": "sqeuclidean", "gradient": gradient, "device": "cuda", "epsilon": 0.01}

    def solve(generator):
        return solve_by_name(x, y, random_state=generator, **call)

    seed = torch.Generator("cuda").manual_seed(1)
    results = [solve(1), solve(1), solve(seed), solve(seed)]
    monkeypatch.setattr(loop, "choose_step", lambda step: CapturedStep(step, replay=False))
    results.append(solve(1))
    plans = [result.plan for result in results]
    # the same seed is the same bits, with graphs and without
    assert np.array_equal(plans[0], plans[1])
    assert np.array_equal(plans[0], plans[4])
    if gradient == "sampled":
        # one generator goes on from solve to solve
        assert not np.array_equal(plans[2], plans[3])
    assert results[0].history == results[4].history or gradient == "sampled"


@pytest.mark.gpu
def test_a_provider_on_the_host_is_not_captured():
    n = 40
    edges = np.arange(n - 1)
    half = csr_matrix((np.ones(n - 1), (edges, edges + 1)), shape=(n, n))
    dijkstra = DijkstraDistance(csr_matrix(half + half.T), device="cuda")
    table = torch.rand(n, n, device="cuda", dtype=torch.float64)
    callable_ = CallableDistance(n, lambda index: table[:, index], device="cuda")
    plain = make_step("sampled", "cuda")
    for provider in (dijkstra, callable_):
        problem = Problem(provider, plain.gradient.problem.target, plain.marginals, 1.0, None)
        gradient = make_gradient("sampled", problem, 32, 0.9)
        host = Step(gradient, plain.marginals, plain.backend, plain.generator, True)
        assert choose_step(host) is host
    eager = make_step("dense", "cuda", backend="eager")
    assert choose_step(eager) is eager


@pytest.mark.gpu
def test_inference_mode_leaves_nothing_behind():
    """What is kept from solve to solve can be written to in either mode."""
    x, y, _ = isometric_copy(70, noise=0.1)
    plans = []
    for number in range(6):
        with torch.inference_mode(number % 2 == 0):
            plans.append(torchgw.solve(x, y, distances="euclidean", device="cuda").plan)
    assert all(np.array_equal(plan, plans[0]) for plan in plans)


@pytest.mark.gpu
def test_memory_does_not_grow_with_solves():
    x, y, _ = isometric_copy(300, noise=0.1)
    held = []
    for seed in range(6):
        torchgw.solve(x, y, distances="euclidean", device="cuda", random_state=seed)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_reserved())
    assert held[-1] == held[2]
