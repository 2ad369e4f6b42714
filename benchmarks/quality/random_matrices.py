"""Matrices without any structure, where starts end at different optima of near values."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import xlogy

from benchmarks.harness.evaluate import gw_value, made_feasible
from benchmarks.quality.instances import Array, Instance, from_matrices, uniform

__all__ = ["independent", "objective", "random_plan"]

_STARTS = 64
_STEPS = 400
_INNER = 20
_HEAT = 8.0


def independent(rng: np.random.Generator, n: int, m: int, epsilon: float) -> Instance:
    """Two symmetric matrices of independent uniform entries, at an epsilon of their own.

    No match is true. The answer is the best of 64 descents, the
    metric the objective over that of the answer.
    """
    d_x, d_y = (_symmetric(size, rng) for size in (n, m))
    found = _descents(d_x, d_y, epsilon, rng)
    instance = from_matrices(d_x, d_y, lambda plan: np.nan, epsilon=epsilon, divided=False)
    answer = min(found, key=lambda plan: objective(instance, plan, epsilon))
    best = objective(instance, answer, epsilon)
    return from_matrices(
        d_x, d_y, lambda plan: objective(instance, plan, epsilon) / best,
        answer=made_feasible(answer, uniform(n), uniform(m)), epsilon=epsilon, divided=False,
    )  # fmt: skip


def _symmetric(n: int, rng: np.random.Generator) -> Array:
    table = np.triu(rng.random((n, n)), 1)
    return np.asarray(table + table.T)


def objective(instance: Instance, plan: Array, epsilon: float) -> float:
    """Return the entropic objective of a plan once it has its marginals."""
    a, b = instance.marginals
    plan = made_feasible(plan, a, b)
    kl = xlogy(plan, plan).sum() - xlogy(a, a).sum() - xlogy(b, b).sum()
    return gw_value(instance.d_x, instance.d_y, plan) + epsilon * float(kl)


def random_plan(a: Array, b: Array, rng: np.random.Generator) -> Array:
    """Draw a plan of given weights: exponents of standard normal numbers, scaled."""
    plan = np.exp(2 * rng.normal(size=(len(a), len(b))))
    for _ in range(20):
        plan *= (a / plan.sum(1))[:, None]
        plan *= b / plan.sum(0)
    return np.asarray(plan)


def _descents(
    d_x: Array, d_y: Array, epsilon: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Descend by Sinkhorn at the linearised cost, all starts at once, to the target epsilon.

    Half of the starts are random plans at that epsilon. The others begin at the product plan and a
    larger one, and linearise at a random part of the rows, first a tenth and in the end all.
    """
    n, m = len(d_x), len(d_y)
    a, b = uniform(n), uniform(m)
    half = _STARTS // 2
    plans = np.stack(
        [np.outer(a, b)] * (half + 1) + [random_plan(a, b, rng) for _ in range(half - 1)]
    )
    potential = np.zeros((_STARTS, 1, m))
    for step in range(_STEPS):
        progress = min(1.0, step / (0.7 * _STEPS))
        kept = rng.random((half, n, 1)) < 0.1 + 0.9 * progress
        seen = plans.copy()
        seen[:half] *= kept / np.maximum(kept.mean(1, keepdims=True), 1 / n)
        heat = np.ones((_STARTS, 1, 1))
        heat[:half] = _HEAT ** (1 - progress)
        exponent = 4 * (d_x @ seen @ d_y) / (epsilon * heat) + potential
        kernel = np.exp(exponent - exponent.max(2, keepdims=True))
        scaling = np.ones((_STARTS, m))
        for _ in range(_INNER):
            rows = a / np.einsum("kij,kj->ki", kernel, scaling)
            # a column that no row sends to is tiny, not zero
            scaling = b / np.maximum(np.einsum("kij,ki->kj", kernel, rows), 1e-200)
        potential += np.log(scaling)[:, None]
        potential -= potential.mean(2, keepdims=True)
        plans = rows[:, :, None] * kernel * scaling[:, None]
    return np.asarray(plans)
