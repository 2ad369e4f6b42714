"""One judge for every runner's plan, in float64, on exact distances that no runner provides."""

from __future__ import annotations

import sys
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr

from benchmarks.harness.registry import GWProblem, Problem, make_clouds
from torchgw import GraphWarning
from torchgw.distances import Geodesics, connect, geodesic_matrices, knn_graph

# The tests' definition of the objective is the benchmarks' too.
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
from reference import gw_value  # noqa: E402

__all__ = ["Evaluator", "combine", "gw_value", "made_feasible", "marginal_errors"]

Array = NDArray[np.float64]


class Evaluator:
    """Scores plans of one problem; distances are computed once, when first needed."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @cached_property
    def _graphs(self) -> list[Geodesics]:
        assert isinstance(self.problem, GWProblem)
        clouds = make_clouds(self.problem)
        tensors = [torch.from_numpy(points) for points in (clouds.x, clouds.y)]
        count = self.problem.n_neighbors
        with warnings.catch_warnings():
            # every runner whose own solve joins components says so itself
            warnings.simplefilter("ignore", GraphWarning)
            return [connect(knn_graph(points, count), points) for points in tensors]

    @cached_property
    def _tables(self) -> list[Array]:
        """All pairs, each side divided by its maximum."""
        return [(table / table.max()).numpy() for table in geodesic_matrices(self._graphs)]

    @cached_property
    def _largest(self) -> list[float]:
        """Largest distances of either side, by repeated sweeps."""
        return [graph.farthest(sweeps=8) for graph in self._graphs]

    def score(self, summary: dict[str, NDArray[Any]]) -> dict[str, float]:
        """Return marginal errors, the value with its standard error, and the correlation."""
        scores = marginal_errors(summary)
        if not isinstance(self.problem, GWProblem):
            return scores
        value, error = self._value(summary)
        scores |= {"gw_value": value, "gw_value_standard_error": error}
        if "plan" in summary:
            scores["gw_value_feasible"] = gw_value(*self._tables, made_feasible(summary["plan"]))
        clouds = make_clouds(self.problem)
        if clouds.angle_x is not None and clouds.angle_y is not None:
            matched = clouds.angle_y[summary["best"]]
            scores["spearman"] = float(spearmanr(clouds.angle_x, matched).statistic)
        return scores

    def _value(self, summary: dict[str, NDArray[Any]]) -> tuple[float, float]:
        if "plan" in summary:
            return gw_value(*self._tables, summary["plan"]), 0.0
        source, target = (
            graph.rows(index, n_jobs=None).numpy()[:, index] / largest
            for graph, index, largest in zip(
                self._graphs, summary["pairs"], self._largest, strict=True
            )
        )
        mass = float(summary["row"].sum())
        value, error = pairwise_mean((source - target) ** 2)
        return mass**2 * value, mass**2 * error


def pairwise_mean(table: Array) -> tuple[float, float]:
    """Return the mean of h(s, t) over s != t and its standard error, for s, t drawn alike.

    A U-statistic of order two is unbiased; its variance is 4 var(E[h | s]) / count to first order.
    """
    count = len(table)
    means = (table.sum(1) - table.diagonal()) / (count - 1)
    return float(means.mean()), float(2 * means.std(ddof=1) / count**0.5)


def made_feasible(plan: Array, a: Array | None = None, b: Array | None = None) -> Array:
    """Return a plan with exactly the marginals a and b, uniform by default, near the given one.

    A plan that misses its marginals may have a value below the optimum, so values are compared
    after this: Algorithm 2 of J. Altschuler, J. Weed, P. Rigollet, Near-linear time approximation
    algorithms for optimal transport via Sinkhorn iteration, NeurIPS 2017.
    """
    n, m = plan.shape
    a = np.full(n, 1 / n) if a is None else a
    b = np.full(m, 1 / m) if b is None else b
    plan = plan * np.minimum(1, a / np.maximum(plan.sum(1), 1e-300))[:, None]
    plan *= np.minimum(1, b / np.maximum(plan.sum(0), 1e-300))
    # rounding may leave a little less than nothing
    row, column = np.maximum(a - plan.sum(1), 0), np.maximum(b - plan.sum(0), 0)
    missing = row.sum()
    return plan + np.outer(row, column) / missing if missing > 0 else plan


def marginal_errors(summary: dict[str, NDArray[Any]]) -> dict[str, float]:
    """Return the errors of both marginals against uniform weights."""
    scores = {}
    for side in ("row", "column"):
        relative = np.abs(summary[side] * len(summary[side]) - 1)
        scores[f"{side}_error_max_relative"] = float(relative.max())
        scores[f"{side}_error_l1"] = float(relative.mean())
    return scores


def combine(scores: list[dict[str, float]]) -> dict[str, Any]:
    """Return medians over repeats (maxima of errors), and all values and correlations."""
    combined: dict[str, Any] = {}
    for name in scores[0] if scores else ():
        column = [score[name] for score in scores]
        worst = name.startswith(("row", "column"))
        combined[name] = float(np.max(column) if worst else np.median(column))
        if name in ("gw_value", "spearman"):
            combined[f"{name}s"] = column
    return combined
