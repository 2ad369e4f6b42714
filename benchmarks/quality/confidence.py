"""Is a share of `result.confidence()` the share of partners that are right? Reliability by bins."""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import networkx
import numpy as np

import torchgw

POINTS = 48
LEVELS = (0.02, 0.35)  # noise, as a share of the spread; drawn evenly of its logarithm


def _moons(rng: Any, n: int) -> Any:
    angle, side = np.pi * rng.random(n), rng.integers(2, size=n)
    return np.stack([np.cos(angle) + side, np.where(side, -1, 1) * np.sin(angle) + side / 2], 1)


def _turned(t: Any, *more: Any) -> Any:
    return np.stack([t * np.cos(9 * t), t * np.sin(9 * t), *more], 1)


SHAPES: dict[str, Callable[[Any, int], Any]] = {
    "ellipsoid": lambda rng, n: rng.normal(size=(n, 3)) * [3, 2, 1],
    "flat cloud": lambda rng, n: rng.normal(size=(n, 2)) * [2, 1],
    "ball of 5": lambda rng, n: rng.normal(size=(n, 5)),
    "ball of 10": lambda rng, n: rng.normal(size=(n, 10)),
    "heavy tails": lambda rng, n: rng.standard_t(3, size=(n, 3)),
    "square": lambda rng, n: rng.random((n, 2)),
    "cube": lambda rng, n: rng.random((n, 3)),
    "shell": lambda rng, n: (lambda x: x / np.linalg.norm(x, axis=1)[:, None])(
        rng.normal(size=(n, 3)) + [0.3, 0.0, 0.5]
    ),
    "spiral": lambda rng, n: _turned(rng.random(n)),
    "roll": lambda rng, n: _turned(rng.random(n), rng.random(n)),
    "arc": lambda rng, n: (lambda t: np.stack([np.cos(t), np.sin(t)], 1))(5 * rng.random(n)),
    "ring": lambda rng, n: (lambda t: np.stack([np.cos(t), np.sin(t)], 1))(6.2832 * rng.random(n)),
    "moons": _moons,
    "clusters": lambda rng, n: (
        0.3 * rng.normal(size=(n, 3)) + 2 * rng.normal(size=(4, 3))[rng.integers(4, size=n)]
    ),
    "line": lambda rng, n: np.stack([rng.random(n) ** 2, np.zeros(n)], 1),
}
GRAPHS = {
    "tree": lambda n, seed: networkx.random_labeled_tree(n, seed=seed),
    "small world": lambda n, seed: networkx.watts_strogatz_graph(n, 4, 0.2, seed=seed),
    "preferential": lambda n, seed: networkx.barabasi_albert_graph(n, 2, seed=seed),
}


def cases(seed: int) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Make a problem of each of 20 families, and the partner of each point, -1 if it has none."""
    rng, n = np.random.default_rng(seed), POINTS
    for name, shape in SHAPES.items():
        X, order = shape(rng, n), rng.permutation(n)
        level = np.exp(rng.uniform(*np.log(LEVELS)))
        Y = X + level * X.std() * rng.normal(size=X.shape)
        yield name, {"X": X, "Y": Y[order], "distances": "euclidean"}, np.argsort(order)
    for name, make in GRAPHS.items():
        table = networkx.to_numpy_array(make(n, seed))
        other, order = table.copy(), rng.permutation(n)
        ends = np.argwhere(np.triu(table))
        for i, j in ends[rng.permutation(len(ends))[: rng.integers(5)]]:
            other[i, j] = other[j, i] = 0.5
        sides = {"D_X": table, "D_Y": other[np.ix_(order, order)]}
        yield name, sides, np.argsort(order)
    X, order, left = rng.normal(size=(n, 3)) * [3, 2, 1], rng.permutation(n), rng.integers(n // 3)
    Y, truth = X.copy(), np.argsort(order)
    Y[:left] = rng.normal(size=(left, 3)) * [3, 2, 1]
    truth[:left] = -1
    yield "shared in part", {"X": X, "Y": Y[order], "distances": "euclidean"}, truth
    sides = {"X": X, "Y": rng.normal(size=(n, 3)) * [3, 2, 1], "distances": "euclidean"}
    yield "unrelated", sides, np.full(n, -1)


def main(arguments: list[str]) -> int:
    """Print how often partners of each confidence are right."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks confidence", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="problems of each family")
    parser.add_argument("--first", type=int, default=100, help="the first seed")
    parser.add_argument("--resamples", type=int, default=20)
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    shares, right, names, seconds = [], [], [], [0.0, 0.0]
    for seed in range(given.first, given.first + given.seeds):
        for name, sides, truth in cases(seed):
            times = [time.process_time()]
            result = torchgw.solve(**sides, random_state=0)
            times.append(time.process_time())
            found = result.confidence(given.resamples)
            times.append(time.process_time())
            seconds = [a + b for a, b in zip(seconds, np.diff(times), strict=True)]
            shares.append(found.partner)
            right.append(result.lazy_plan.argmax() == truth)
            names += [name] * len(truth)
    share, good, name = np.concatenate(shares), np.concatenate(right), np.array(names)
    print("| confidence | points | mean confidence | right |\n|---|---|---|---|")
    edges, error = np.linspace(0, 1, 6), 0.0
    for low, high in zip(edges, edges[1:], strict=False):
        bin_ = (share >= low) & ((share < high) | (high == 1))
        if bin_.any():
            error += bin_.mean() * abs(share[bin_].mean() - good[bin_].mean())
            print(
                f"| {low:.1f} to {high:.1f} | {bin_.sum()} | {share[bin_].mean():.2f} | "
                f"{good[bin_].mean():.2f} |"
            )
    above = share[good][:, None] - share[~good]
    order = (above > 0).mean() + (above == 0).mean() / 2
    print(f"\nmean error {error:.3f}; a right partner has more than a wrong one: {order:.2f}")
    print(f"CPU s: solves {seconds[0]:.1f}, confidence {seconds[1]:.1f}\n")
    print("| family | confidence | right |\n|---|---|---|")
    for each in dict.fromkeys(names):
        mine = name == each
        print(f"| {each} | {share[mine].mean():.2f} | {good[mine].mean():.2f} |")
    return 0
