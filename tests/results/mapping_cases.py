"""Curves, and solves of them, that the tests of mappings and files share."""

from __future__ import annotations

import warnings

from problems import solve_by_name

import torchgw

DISTANCES = [
    "euclidean", "sqeuclidean", "cosine", "precomputed", "landmark", "dijkstra",
    ("landmark", "euclidean"), ("euclidean", "landmark"), ("sqeuclidean", "precomputed"),
]  # fmt: skip


def solve(X=None, Y=None, **settings):
    """Far enough for a plan that is no product plan; whether it converged does not matter here.

    Nor does whether it is the best: one start is enough, unless a test asks for more.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.ConvergenceWarning)
        return solve_by_name(X, Y, **{"max_iter": 12, "random_state": 0, "n_init": 1} | settings)
