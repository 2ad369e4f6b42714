"""Problems with known answers, and random ones of awkward shape."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from torch.utils._python_dispatch import TorchDispatchMode

import torchgw
from torchgw._api import as_arguments
from torchgw._plans.given import StoredPlan
from torchgw._sinkhorn.problem import DenseCost, FactoredCost
from torchgw._solve.strategy import make_gradient
from torchgw._typing import Marginals, Potentials

# Real data beside the checkout; tests that need it are skipped where it is absent.
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def solve_by_name(X=None, Y=None, **named):
    """Solve with data and options in one dictionary, whatever is a parameter of `solve`."""
    return torchgw.solve(X, Y, **as_arguments(named))


def quick(count, values):
    """Values of a parameter, of which those after the first few are slow cases."""
    return [
        value if number < count else pytest.param(value, marks=pytest.mark.slow)
        for number, value in enumerate(values)
    ]


def skip_unless_kernels_run(device: torch.device) -> None:
    """Triton's kernels run on a GPU, or without one in the interpreter."""
    from torchgw._sinkhorn.kernels.operands import interpreted

    if device.type == "cpu" and not interpreted():
        pytest.skip("Triton compiles for GPUs here")


def check_reads(plan, mask, few=(1, 5, 20)):
    """Compare what is read of a plan with its entries, zero outside of a mask."""
    table, rng = np.asarray(plan.to_dense()), np.random.default_rng(0)
    assert (table[~mask] == 0).all()
    values = rng.normal(size=(table.shape[1], 2))
    assert np.asarray(plan @ values) == pytest.approx(table @ values)
    assert np.asarray(plan.rows(np.array([3, 0, 3]))) == pytest.approx(table[[3, 0, 3]])
    for k in few:
        best, columns = map(np.asarray, plan.topk(k))
        assert best == pytest.approx(-np.sort(-table, 1)[:, :k])
        assert np.take_along_axis(table, columns, 1) == pytest.approx(best)
        assert all(len(set(row)) == k for row in columns.tolist())
    rows, columns = map(np.asarray, plan.sample(1000, torch.Generator().manual_seed(0)))
    assert mask[rows, columns].all()


def check_slopes(solved, given, mode, rng):
    """Compare derivatives with central differences in one direction of all inputs.

    ``solved`` takes inputs, a mode of differentiation, and a plan to begin at. Of other modes than
    "value" the plan counts, too.
    """
    init = torch.as_tensor(solved(given, None, None).plan)
    init = init / init.sum()
    weight = torch.from_numpy(rng.random(tuple(init.shape)))

    def number(inputs):
        result = solved(inputs, None, init)
        plan = torch.as_tensor(result.plan)
        return result.report.objective + (float((plan * weight).sum()) if mode != "value" else 0)

    tracked = [part.clone().requires_grad_() for part in given]
    result = solved(tracked, mode, init)
    total = result.loss if mode == "value" else result.loss + (result.plan * weight).sum()
    steps = [torch.from_numpy(rng.normal(size=tuple(part.shape))) for part in given]
    ahead, behind = (
        number([part + sign * step for part, step in zip(given, steps, strict=True)])
        for sign in (1e-5, -1e-5)
    )
    slopes = torch.autograd.grad(total, tracked)
    found = sum(float((slope * step).sum()) for slope, step in zip(slopes, steps, strict=True))
    assert found == pytest.approx((ahead - behind) / 2e-5, rel=1e-5)


@dataclass(frozen=True)
class LinearProblem:
    """A cost in both forms with weights and potentials, float64."""

    factored: FactoredCost
    marginals: Marginals
    potentials: Potentials

    @property
    def dense(self) -> DenseCost:
        return self.factored.dense()

    def cost(self, kind: str, dtype: torch.dtype = torch.float64):
        return (self.dense if kind == "dense" else self.factored).to(dtype)


def linear_problem(n=13, m=17, rank=3, seed=0, zero_weights=False) -> LinearProblem:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    a, b = normal(n).abs() + 0.1, normal(m).abs() + 0.1
    if zero_weights:
        a[:: max(2, n // 3)] = 0
        b[1 :: max(2, m // 3)] = 0
        a[-1], b[0] = 1.0, 1.0
    cost = FactoredCost(normal(n, rank), normal(m, rank), normal(n), normal(m))
    return LinearProblem(
        cost, Marginals(a / a.sum(), b / b.sum()), Potentials(normal(n), normal(m))
    )


def isometric_copy(n=40, d=3, seed=0, noise=0.0):
    """Points, a rotated, shifted and permuted copy, and where each point went."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)) * np.arange(1, d + 1)
    rotation = np.linalg.qr(rng.normal(size=(d, d)))[0]
    order = rng.permutation(n)
    y = (x @ rotation + 5.0)[order] + noise * rng.normal(size=(n, d))
    return x, y, np.argsort(order)


def distance_matrices(n=30, m=25, seed=0):
    """Euclidean distances of two unrelated clouds, scaled to a maximum of one."""
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(n, 3)), rng.normal(size=(m, 2)) * [1, 2]
    tables = [cdist(points, points) for points in (x, y)]
    return [table / table.max() for table in tables]


def random_weights(n, seed=0):
    weights = np.random.default_rng(seed).uniform(0.5, 1.5, size=n)
    return weights / weights.sum()


def rewired(graph, share, seed=0):
    """Return a graph with a share of its edges removed and as many others added."""
    rng = np.random.default_rng(seed)
    graph = graph.copy()
    edges = np.argwhere(np.triu(graph, 1))
    for i, j in rng.choice(edges, int(share * len(edges)), replace=False):
        graph[i, j] = graph[j, i] = 0
    while np.triu(graph, 1).sum() < len(edges):
        i, j = rng.integers(len(graph), size=2)
        graph[i, j] = graph[j, i] = float(i != j)
    return graph


def shuffled(table, seed=0):
    """Return a table with its points in another order, and where each of them went."""
    order = np.random.default_rng(seed).permutation(len(table))
    return table[np.ix_(order, order)], order.argsort()


def weighted_clouds(rng):
    """Pairs of clouds in two and in three dimensions: sizes, both sides, and their weights."""
    sizes = [(10, 14), (21, 9), (16, 16), (30, 18)]
    xs = [rng.normal(size=(n, 2)) for n, _ in sizes]
    ys = [rng.normal(size=(m, 3)) for _, m in sizes]
    a = [random_weights(n, n) for n, _ in sizes]
    b = [random_weights(m, m) for _, m in sizes]
    return sizes, xs, ys, a, b


class LargestTensor(TorchDispatchMode):
    """Remember the size of the largest tensor that any operation returns."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(item, torch.Tensor):
                self.size = max(self.size, item.numel())
        return result


def dense_and_drawn(problem, plan):
    """Centre the costs of a plan (n, m), exact and by 40,000 drawn anchors."""
    generator = torch.Generator().manual_seed(0)
    a, b = problem.marginals
    tables = []
    for name in ("dense", "sampled"):
        gradient = make_gradient(name, problem, 40_000, 1.0)
        coupling = gradient.update(StoredPlan(torch.from_numpy(plan)), None, generator)
        table = gradient.linearise(coupling).cost.dense().matrix
        tables.append(table - (table @ b)[:, None] - a @ table + a @ table @ b)
    return tables
