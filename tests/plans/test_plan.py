"""The implicit plan equals the matrix that it stands for."""

from __future__ import annotations

import copy
import functools
import pickle

import numpy as np
import pytest
import reference
import scipy.sparse
import torch
from problems import linear_problem

import torchgw
from torchgw import InvalidInputError, PlanTooLargeError, TransportPlan, UnsupportedError
from torchgw._derivatives.plan import DifferentiablePlan
from torchgw._plans.contract import Anchors, Plan
from torchgw._plans.given import PairPlan, SparsePlan, StoredPlan
from torchgw._sinkhorn import problem as problem_module
from torchgw._sinkhorn.eager import EagerBackend
from torchgw._sinkhorn.loop import sinkhorn
from torchgw._sinkhorn.problem import DenseCost, LinearProblem
from torchgw._tensors import machine
from torchgw._tensors.operations import sparse_tensor
from torchgw._typing import Marginals, Potentials
from torchgw._variants.solve_low_rank import LowRankPlan

EPSILON = 0.5


@pytest.fixture(params=["dense", "factored"])
def pair(request, monkeypatch):
    """A plan and its matrix; blocks are small so that streaming has several."""
    monkeypatch.setitem(problem_module._BLOCK_BYTES, "cpu", 20 * 8 * 4)
    problem = linear_problem(31, 20, 3, zero_weights=True)
    cost = problem.cost(request.param)
    start = Potentials(*map(torch.zeros_like, problem.marginals))
    solved = sinkhorn(
        EagerBackend().prepare(LinearProblem(cost, problem.marginals, EPSILON)), start,
        max_iter=500, tol=1e-12,
    )  # fmt: skip
    plan = TransportPlan(cost, solved.potentials, problem.marginals, EPSILON)
    a, b = (w.numpy() for w in problem.marginals)
    potentials = (p.numpy() for p in solved.potentials)
    return plan, reference.plan(problem.dense.matrix.numpy(), a, b, *potentials, EPSILON)


def test_products(pair):
    plan, matrix = pair
    rng = np.random.default_rng(0)
    v, u = rng.normal(size=(20, 3)), rng.normal(size=31)
    np.testing.assert_allclose((plan @ v).numpy(), matrix @ v, atol=1e-14)
    np.testing.assert_allclose((plan.T @ u).numpy(), matrix.T @ u, atol=1e-14)
    np.testing.assert_allclose(plan.push(u).numpy(), matrix.T @ u, atol=1e-14)
    np.testing.assert_allclose(plan.pull(v).numpy(), matrix @ v, atol=1e-14)
    assert (plan @ v.astype(np.float32)).dtype == torch.float64
    assert (plan @ np.arange(20)).dtype == torch.float64
    with pytest.raises(InvalidInputError, match=r"values of shape \(20,\)"):
        plan @ u


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_products_from_the_left(pair, kind):
    plan, matrix = pair
    values = np.random.default_rng(0).normal(size=(2, 31))
    np.testing.assert_allclose((kind(values) @ plan).numpy(), values @ matrix, atol=1e-14)
    np.testing.assert_allclose((kind(values[0]) @ plan).numpy(), values[0] @ matrix, atol=1e-14)
    with pytest.raises(InvalidInputError, match=r"`values @ plan` needs .* \(c, 31\)"):
        kind(values.T) @ plan


def test_rows_dense_marginals(pair):
    plan, matrix = pair
    assert plan.shape == plan.T.T.shape == matrix.shape
    np.testing.assert_allclose(np.asarray(plan.to_dense()), matrix, atol=1e-15)
    np.testing.assert_allclose(np.asarray(plan.T.to_dense()), matrix.T, atol=1e-15)
    np.testing.assert_allclose(np.asarray(plan.rows([3, 3, 30])), matrix[[3, 3, 30]], atol=1e-15)
    for got, expected in zip(plan.marginals(), (matrix.sum(1), matrix.sum(0)), strict=True):
        np.testing.assert_allclose(got.numpy(), expected, atol=1e-14)


def test_argmax_topk_sparse(pair):
    plan, matrix = pair
    filled = matrix.sum(1) > 0
    np.testing.assert_array_equal(np.asarray(plan.argmax())[filled], matrix.argmax(1)[filled])
    columns = matrix.sum(0) > 0
    np.testing.assert_array_equal(plan.argmax(axis=0).numpy()[columns], matrix.argmax(0)[columns])
    values, index = plan.topk(4)
    np.testing.assert_allclose(values.numpy(), -np.sort(-matrix, axis=1)[:, :4], atol=1e-15)
    kept = plan.to_sparse(k=4)
    assert scipy.sparse.issparse(kept)
    np.testing.assert_allclose(kept.sum(), values.sum(), rtol=1e-12)
    rows = np.arange(31)[:, None]
    np.testing.assert_allclose(kept.toarray()[rows, index.numpy()], values.numpy(), atol=1e-15)
    close = plan.to_sparse(threshold=1e-3).toarray()
    assert np.abs(close - matrix).sum() < 1e-3 * 20
    assert (close > 0).sum() < (matrix > 0).sum()
    # the largest of each row stays whatever its share
    alone = plan.to_sparse(threshold=1.0).toarray()
    np.testing.assert_array_equal((alone > 0).sum(1), filled)
    with pytest.raises(InvalidInputError, match="between 1 and 20"):
        plan.topk(21)
    with pytest.raises(InvalidInputError, match="axis"):
        plan.argmax(axis=2)


def test_rounding_to_different_masses_is_refused(pair):
    plan, _ = pair
    a, b = plan.weights
    with pytest.raises(InvalidInputError, match="`a` and `b` must have equal sums; got 2 and 1"):
        plan.rounded(a=2 * a)
    # a difference that float32 leaves is none
    rounded = plan.rounded(a.float(), b)
    assert float((rounded.marginals()[1] - b).abs().sum()) < 1e-6


def test_barycentric_is_defined_for_zero_weights(pair):
    plan, matrix = pair
    points = np.random.default_rng(1).normal(size=(20, 2))
    got = plan.barycentric(points).numpy()
    assert np.isfinite(got).all()
    filled = matrix.sum(1) > 0
    assert not filled.all()
    expected = matrix[filled] @ points / matrix[filled].sum(1, keepdims=True)
    np.testing.assert_allclose(got[filled], expected, atol=1e-12)


def test_draws_have_a_seed(pair):
    plan = pair[0]
    drawn = [plan.sample(9, seed) for seed in (0, np.random.default_rng(0), None)]
    assert torch.equal(drawn[0].target, plan.sample(9, torch.Generator().manual_seed(0)).target)
    assert torch.equal(drawn[1].target, plan.sample(9, np.random.default_rng(0)).target)
    assert drawn[2].source.shape == (9,)


@pytest.mark.slow
def test_sample_follows_the_plan(pair):
    plan, matrix = pair
    generator = torch.Generator().manual_seed(0)
    count = 20_000
    drawn = plan.sample(count, generator)
    table = np.zeros_like(matrix)
    np.add.at(table, (drawn.source.numpy(), drawn.target.numpy()), 1 / count)
    # standard deviation of each entry is at most sqrt(p / count); five of them
    assert (np.abs(table - matrix) <= 5 * np.sqrt(matrix / count) + 5 / count).all()
    assert table[matrix == 0].sum() == 0
    again = plan.sample(count, torch.Generator().manual_seed(0))
    assert torch.equal(again.target, drawn.target)


def plans(plan, matrix):
    """The same coupling as each kind of plan, and as the transpose of each."""
    table = torch.from_numpy(matrix)
    source, target = table.nonzero().T
    entries = sparse_tensor(torch.stack([source, target]), table[source, target], plan.shape)
    kinds = {
        "transport": plan,
        "sparse": SparsePlan(entries, plan.potentials, plan.weights, plan.epsilon),
        "rounded": plan.rounded(),
        "stored": StoredPlan(table),
        "pairs": PairPlan(Anchors(source, target), table[source, target], plan.shape),
        "low rank": LowRankPlan(table, torch.eye(20).double(), torch.ones(20).double()),
        "differentiable": DifferentiablePlan(plan, lambda t, v: (plan.T if t else plan) @ v),
    }
    turned = {f"{name}, turned twice": kind.T.T for name, kind in kinds.items()}
    return {**kinds, **turned}


KINDS = ["transport", "sparse", "rounded", "stored", "pairs", "low rank", "differentiable"]


@pytest.mark.parametrize("turned", ["", ", turned twice"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_plan_reads_like_its_matrix(pair, kind, turned):
    plan, matrix = pair
    read = plans(plan, matrix)[kind + turned]
    assert isinstance(read, Plan)
    assert read.shape == matrix.shape
    assert read.device == plan.device
    assert read.dtype == torch.float64
    # the columns of a solved plan miss their weights by up to 1e-12, which rounding moves
    close = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12)
    v, u = np.random.default_rng(0).normal(size=(20, 2)), np.arange(31.0)
    tensors = torch.from_numpy(v), torch.from_numpy(u)
    close(read @ tensors[0], matrix @ v)
    close(read @ tensors[0][:, 0], matrix @ v[:, 0])
    close(read.T @ tensors[1], matrix.T @ u)
    close(tensors[1] @ read, u @ matrix)
    close(u @ read, u @ matrix)
    close(read.push(tensors[1]), u @ matrix)
    close(read.pull(tensors[0]), matrix @ v)
    close(read.rows([3, -1, 3]), matrix[[3, -1, 3]])
    close(read.stored(), matrix)
    close(read.to_dense(), matrix)
    for got, expected in zip(read.marginals(), (matrix.sum(1), matrix.sum(0)), strict=True):
        close(got, expected)
    values, columns = read.topk(3)
    close(values, -np.sort(-matrix, axis=1)[:, :3])
    filled, reached = matrix.sum(1) > 0, matrix.sum(0) > 0
    close(np.take_along_axis(matrix, columns.numpy(), 1)[filled], values[filled])
    np.testing.assert_array_equal(read.argmax()[filled], matrix.argmax(1)[filled])
    np.testing.assert_array_equal(read.argmax(axis=0)[reached], matrix.argmax(0)[reached])
    close(read.to_sparse(k=20).toarray(), matrix)
    close(read.to_sparse(threshold=0.0).toarray(), matrix)
    generator = torch.Generator().manual_seed(0)
    places, order = torch.linspace(0, 0.999, 1000, dtype=torch.float64), torch.arange(31)
    for drawn in (read.sample(1000, generator), read.sample_at(places, order, generator)):
        assert (matrix[drawn.source.numpy(), drawn.target.numpy()] > 0).all()
    share = torch.bincount(drawn.source, minlength=31) / 1000
    # at even steps of the cumulative mass
    close(share, matrix.sum(1), atol=2e-3)
    expected = matrix[filled] @ v / matrix[filled].sum(1, keepdims=True)
    if kind in ("transport", "differentiable"):
        # points of weight zero have a conditional plan
        close(read.barycentric(v)[filled], expected)
    else:
        with pytest.raises(UnsupportedError, match=f"{(~filled).sum()} points .* mapped nowhere"):
            read.barycentric(v)
        whole = read.T.barycentric(np.ones((31, 1))) if reached.all() else None
        assert whole is None or float((whole - 1).abs().max()) < 1e-9


def test_what_a_sparse_plan_has_lost(pair):
    sparse = plans(*pair)["sparse"]
    assert not isinstance(sparse, TransportPlan)
    for ask in (lambda: sparse.cost, sparse.rounded):
        with pytest.raises(UnsupportedError, match=r"largest entries.*dense=True"):
            ask()
    # but it extends to other points
    cost = DenseCost(torch.rand(4, 20, dtype=torch.float64))
    extended = sparse.extend(cost)
    torch.testing.assert_close(extended.to_dense(), pair[0].extend(cost).to_dense())


@pytest.mark.parametrize("k", [1, 3, 9])
def test_largest_entries_of_a_sparse_plan(k):
    """Whether or not all rows have so many, each row has its own, in order."""
    rng = np.random.default_rng(0)
    matrix = np.zeros((12, 15))
    for row in matrix:
        row[rng.permutation(15)[: rng.integers(3, 12)]] = rng.random()
    matrix *= rng.random(matrix.shape) + 0.5
    zero = Potentials(*(torch.zeros(size, dtype=torch.float64) for size in matrix.shape))
    plan = SparsePlan(torch.from_numpy(matrix).to_sparse(), zero, Marginals(*zero), 1.0)
    values, columns = plan.topk(k)
    np.testing.assert_array_equal(values.numpy(), -np.sort(-matrix, axis=1)[:, :k])
    np.testing.assert_array_equal(np.take_along_axis(matrix, columns.numpy(), 1), values.numpy())


def test_stored_plan_reads_like_the_implicit_one(pair):
    plan, matrix = pair
    stored = StoredPlan(torch.from_numpy(matrix))
    v = torch.randn(20, 2, dtype=torch.float64)
    torch.testing.assert_close(stored @ v, plan @ v)
    torch.testing.assert_close(stored.T.stored(), plan.T.to_dense())
    places, order = torch.linspace(0, 0.999, 1000, dtype=torch.float64), torch.arange(len(matrix))
    drawn = stored.sample_at(places, order, torch.Generator().manual_seed(0))
    assert (matrix[drawn.source.numpy(), drawn.target.numpy()] > 0).all()


@pytest.mark.parametrize(
    ("limit", "stat", "total", "free"),
    [
        ("1000", "active_file 70\ninactive_file 30\n", "", 700),
        ("1000", "inactive_file 9\ntotal_inactive_file 30\ntotal_active_file 70\n", "total_", 700),
        ("max", "", "", 4096),
        (None, "", "", 4096),
    ],
)
def test_containers_have_less_memory_than_their_machine(
    tmp_path, monkeypatch, limit, stat, total, free
):
    """Their processes are killed beyond the limit, whatever the machine has."""
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 4 kB\n")
    if limit is not None:
        (tmp_path / "limit").write_text(limit + "\n")
    (tmp_path / "used").write_text("400\n")
    (tmp_path / "memory.stat").write_text(stat)
    monkeypatch.setattr(machine, "_MACHINE", tmp_path / "meminfo")
    files = (tmp_path / "limit", tmp_path / "used", total)
    monkeypatch.setattr(machine, "_CONTAINER", ((tmp_path / "absent", None, ""), files))
    assert machine.free_memory(torch.device("cpu")) == free


def test_refuses_a_dense_plan_that_would_not_fit(pair, monkeypatch):
    plan, _ = pair
    monkeypatch.setattr("torchgw._plans.contract.free_memory", lambda device: 100)
    with pytest.raises(PlanTooLargeError, match=r"4,960 bytes.*to_sparse"):
        plan.to_dense()


def test_an_array_of_a_plan_is_its_matrix(monkeypatch):
    X = np.random.default_rng(0).normal(size=(30, 2))
    result = torchgw.solve(X, X[:20], distances="euclidean", n_init=1, random_state=0)
    for plan in (result.lazy_plan, result.lazy_plan.T, result.lazy_plan.rounded()):
        array = np.asarray(plan)
        assert array.shape == plan.shape
        np.testing.assert_array_equal(array, plan.to_dense())
        assert np.array(plan, dtype=np.float32).dtype == np.float32
    with pytest.raises(torchgw.InvalidInputError, match="always new"):
        np.array(result.lazy_plan, copy=False)
    monkeypatch.setattr("torchgw._plans.contract.free_memory", lambda device: 100)
    with pytest.raises(torchgw.PlanTooLargeError, match="to_sparse"):
        np.asarray(result.lazy_plan)


def test_a_pickle_is_small():
    X = np.random.default_rng(0).normal(size=(200, 3))
    result = torchgw.solve(X, X[::-1], distances="sqeuclidean", random_state=0)
    whole = sum(one.plan.nbytes for one in result.alternatives)
    size = len(pickle.dumps(result))
    assert size < 300_000 < whole
    for one, again in zip(
        result.alternatives, pickle.loads(pickle.dumps(result)).alternatives, strict=True
    ):
        assert one.relation == again.relation
        assert np.abs(one.plan - again.plan).sum() < 1e-4
        # a copy is whole
        assert np.array_equal(copy.deepcopy(one).plan, one.plan)
