"""Clouds of the plane laid on each other at all angles: what is found, and what solves do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import torchgw
from torchgw._problem.problem import Problem
from torchgw._starts.turns import best_turned
from torchgw._typing import Marginals
from torchgw.distances import PointDistance


def disc(n, rng):
    angle, radius = rng.uniform(0, 2 * np.pi, n), np.sqrt(rng.random(n))
    return np.column_stack([radius * np.cos(angle), radius * np.sin(angle)])


def problem(X, Y, a, b):
    sides = (PointDistance(torch.from_numpy(part), "sqeuclidean") for part in (X, Y))
    return Problem(*sides, Marginals(torch.from_numpy(a), torch.from_numpy(b)), 1.0, None)


def value(X, Y, plan):
    x, y = (((part[:, None] - part) ** 2).sum(-1) for part in (X, Y))
    a, b = plan.sum(1), plan.sum(0)
    return a @ x**2 @ a + b @ y**2 @ b - 2 * ((x @ plan @ y) * plan).sum()


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("n", [40, 160])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_turned_copy_is_found_from_any_plan(n, mirrored, weighted):
    rng = np.random.default_rng(n)
    X, a = disc(n, rng), rng.dirichlet(np.full(n, 9.0)) if weighted else np.full(n, 1 / n)
    turn, order = np.linalg.qr(rng.normal(size=(2, 2)))[0], rng.permutation(n)
    turn[0] *= np.linalg.det(turn) * (-1 if mirrored else 1)
    Y, b = X[order] @ turn.T + 3.0, a[order]
    plan = best_turned(problem(X, Y, a, b), np.outer(a, b))
    assert plan.sum(1) == pytest.approx(a)
    assert plan.sum(0) == pytest.approx(b)
    assert value(X, Y, plan) == pytest.approx(0, abs=1e-12)


def test_other_spaces_are_left_alone():
    rng = np.random.default_rng(0)
    a = np.full(20, 0.05)
    for X, Y in ((disc(20, rng), rng.normal(size=(20, 3))), (np.ones((20, 2)), disc(20, rng))):
        assert best_turned(problem(X, Y, a, a), np.outer(a, a)) is None


@pytest.mark.filterwarnings("ignore::torchgw.TorchGWWarning")
def test_a_polished_solve_costs_no_more_than_any_turn():
    X, Y = (disc(30, np.random.default_rng(side)) for side in range(2))
    result = torchgw.solve(X, Y, distances="sqeuclidean", scale=None, polish=True, random_state=0)
    assert "turns" in result.report.route
    a = np.full(30, 1 / 30)
    turned = value(X, Y, best_turned(problem(X, Y, a, a), np.asarray(result.plan)))
    assert result.value <= turned * (1 + 1e-6)
