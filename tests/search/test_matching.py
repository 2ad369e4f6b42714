"""Copies of more points than are searched, which find their partners by themselves."""

import numpy as np
import pytest

import torchgw


@pytest.fixture
def few_points(limited):
    """Hundreds of points are searched by some of them, as thousands are."""
    limited(all_points=96)


def copied(n, noise=0.0, d=5, seed=0):
    """A round cloud, a rotated and permuted copy, and where each point went."""
    rng = np.random.default_rng(seed)
    x, order = rng.normal(size=(n, d)), rng.permutation(n)
    y = (x @ np.linalg.qr(rng.normal(size=(d, d)))[0])[order] + noise * rng.normal(size=(n, d))
    return x, y, np.argsort(order)


@pytest.mark.parametrize("idle", [0, 30])
def test_a_copy_in_five_dimensions_is_recognised(idle, few_points):
    """Sampled gradients annealed from the product plan end in another of the many rotations."""
    x, y, answer = copied(300, 0.02)
    a, b = np.ones(300), np.ones(300)
    a[:idle] = b[answer[:idle]] = 0
    result = torchgw.solve(
        x, y, a=a / a.sum(), b=b / b.sum(), distances="euclidean", gradient="sampled",
        random_state=0,
    )  # fmt: skip
    assert result.converged
    assert (np.asarray(result.lazy_plan.argmax()) == answer)[idle:].mean() > 0.95


def test_what_looks_like_a_copy_and_is_none_leads_no_solve_astray(few_points):
    """Features that send each point to another one than its distances do."""
    x, y, answer = copied(300, 0.02)
    other = np.random.default_rng(9).permutation(300)
    linear = np.ones((300, 300))
    linear[np.arange(300), other] = 0
    result = torchgw.solve(x, y, M=linear, alpha=0.1, distances="euclidean", random_state=0)
    assert (np.asarray(result.lazy_plan.argmax()) == other).mean() > 0.95


def test_doubt_between_coarse_optima_is_settled_by_all_points(few_points):
    """Equal directions in six dimensions, of which 96 points show several optima alike."""
    x, y, answer = copied(400, 0.01, d=6)
    result = torchgw.solve(x, y, distances="cosine", random_state=0)
    assert (np.asarray(result.lazy_plan.argmax()) == answer).mean() > 0.95
