"""Objectives of problems that all take the same steps: near their optima, whatever is beside."""

from __future__ import annotations

import numpy as np
import torch

import torchgw
from torchgw._batch.anneal import objectives
from torchgw._batch.packing import Packed, make_stack


def clouds(count, n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(count, n, 3, dtype=torch.float64, generator=generator)
    tables = torch.cdist(points, points)
    return tables / tables.amax((1, 2), keepdim=True)


def packed(x, y, epsilon=float("nan")):
    sides = [
        make_stack(
            part, part.new_full(part.shape[:2], 1 / part.shape[1]),
            torch.full((len(part),), part.shape[1]),
        )
        for part in (x, y)
    ]  # fmt: skip
    every, one = torch.arange(len(y)), torch.ones(len(y), dtype=torch.float64)
    return Packed(*sides, every if len(x) > 1 else 0 * every, every, one, epsilon * one, one)


def test_objectives_are_near_those_of_solves_to_the_end():
    """On average over many problems: single ones may end in another optimum."""
    x, y = clouds(24, 40), clouds(24, 30, seed=1)
    found = objectives(packed(x, y), 20)
    full = torchgw.solve_batch(x, y, scale=None, n_init=1).objective
    assert 0.98 < float(found.mean() / full.mean()) < 1.08


def test_many_steps_end_where_a_solve_does():
    # one optimum at a large epsilon; float32 leads there, float64 evaluates it
    x, y = clouds(6, 12), clouds(6, 14, seed=1)
    found = objectives(packed(x, y, 0.2), 200)
    full = torchgw.solve_batch(x, y, scale=None, epsilon=0.2, n_init=1, tol=1e-9)
    np.testing.assert_allclose(found, full.objective, rtol=1e-6)


def test_a_problem_has_its_objective_in_any_batch():
    x, y = clouds(1, 20), clouds(9, 20, seed=1)
    found = objectives(packed(x, y), 12)
    assert torch.equal(objectives(packed(x, y[2:5]), 12), found[2:5])


def test_permutations_and_exchanged_sides_change_nothing():
    x, y = clouds(4, 16), clouds(4, 16, seed=1)
    found, order = objectives(packed(x, y, 0.05), 60), torch.randperm(16)
    other = objectives(packed(x, y[:, order][:, :, order], 0.05), 60)
    np.testing.assert_allclose(other, found, rtol=1e-6)
    np.testing.assert_allclose(objectives(packed(y, x, 0.05), 60), found, rtol=1e-6)
