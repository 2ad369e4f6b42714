"""How far answers are from the best there is: ``python -m benchmarks certificates``.

Clouds in the plane (``mixed``: 120 pairs of many shapes) and flat ones, tables of few points with
all permutations beside, and quadratic assignment problems; for each the gap that was proven, and
whether the default search had found the best plan already. CPU seconds of one thread. ``many``
bounds pairs of ``mixed`` with more points than tables hold, on a GPU if there is one.
"""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from collections.abc import Iterator

import numpy as np
import torch
from scipy.spatial.distance import cdist

import torchgw
from benchmarks.quality.real import read_data
from torchgw.distances import DirectedDistance

# What counts as met, or as the best: a share of the value.
_MET = 1e-3


def main(arguments: list[str]) -> int:
    """Print a line for each family."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks certificates", description=__doc__)
    parser.add_argument("families", nargs="*", default=["few", "plane", "flat"])
    parser.add_argument("--points", type=int, nargs="+", default=[50, 200])
    parser.add_argument("--count", type=int, default=20, help="problems of a family and size")
    parser.add_argument("--few", type=int, default=75, help="problems of each kind of few points")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--pairs", type=int, nargs="+", default=[91, 79], help="of many")
    parser.add_argument("--first", type=int, default=0, help="added to seeds: other problems")
    parser.add_argument("--verify", action="store_true", help="proofs of many, which takes longer")
    parser.add_argument("--part", type=int, nargs=2, default=[0, 1], help="K N: each N-th from K")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    for family in options.families:
        if family == "qap":
            _assignments(options)
        elif family == "few":
            for kind in ("squared", "euclidean", "tables", "directed"):
                _few(kind, options)
        elif family == "many":
            for n in options.points:
                for place, (kind, (X, Y)) in enumerate(_mixed(n, options.first)):
                    if place in options.pairs:
                        _many(kind, X, Y, options)
        else:
            for n in options.points:
                _clouds(family, n, options)
    return 0


def _drawn(shape: str, n: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a cloud in the plane."""
    angle, radius = rng.uniform(0, 2 * np.pi, n), np.sqrt(rng.random(n))
    circle = np.column_stack([np.cos(angle), np.sin(angle)])
    if shape == "disc":
        return radius[:, None] * circle
    if shape == "ring":
        return (1 + 0.1 * radius[:, None]) * circle
    if shape == "square":
        return rng.random((n, 2))
    if shape == "five groups":
        return rng.normal(size=(5, 2))[rng.integers(5, size=n)] * 2 + 0.3 * rng.normal(size=(n, 2))
    if shape == "spiral":
        return (1.5 * angle / np.pi)[:, None] * circle + 0.1 * rng.normal(size=(n, 2))
    return rng.normal(size=(n, 2)) * ([1, 0.5] if shape == "stretched" else [1, 1])


def _mixed(n: int, first: int = 0) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    """Draw 50 noisy copies, 50 unrelated pairs, and 20 pairs of shapes with symmetries."""
    shapes, symmetric = ["normal", "stretched", "square", "five groups", "spiral"], [
        "disc", "ring", "square", "normal",
    ]  # fmt: skip
    for seed in range(120):
        rng = np.random.default_rng(first + seed)
        if seed < 50:
            X = _drawn(shapes[seed % 5], n, rng)
            noise = 0.1 * X.std() * rng.normal(size=X.shape)
            yield f"noisy copies of {shapes[seed % 5]}", (X, X[rng.permutation(n)] + noise)
        elif seed < 100:
            two = shapes[seed % 5], shapes[seed // 5 % 5]
            yield f"unrelated {two[0]}, {two[1]}", tuple(_drawn(each, n, rng) for each in two)
        else:
            shape = symmetric[seed % 4]
            yield f"near-symmetric {shape}", (_drawn(shape, n, rng), _drawn(shape, n, rng))


def _pairs(
    family: str, n: int, rng: np.random.Generator
) -> Iterator[tuple[str, tuple[np.ndarray, ...]]]:
    """Draw two clouds of each kind of a family."""
    stretch = [1.0, 1.0] if family == "plane" else [1.0, 0.2, 0.1]
    X = rng.normal(size=(n, len(stretch))) * stretch
    yield "noisy copy", (X, X[rng.permutation(n)] + 0.1 * rng.normal(size=X.shape) * stretch)
    yield "unrelated", (X, rng.normal(size=X.shape) * stretch)
    if family == "plane":
        discs = []
        for _ in range(2):
            angle, radius = rng.uniform(0, 2 * np.pi, n), np.sqrt(rng.random(n))
            discs.append(np.column_stack([radius * np.cos(angle), radius * np.sin(angle)]))
        yield "two discs", tuple(discs)


def _clouds(family: str, n: int, options: argparse.Namespace) -> None:
    """Certify the polished plans of clouds."""
    rows: dict[str, list[tuple[float, ...]]] = {}
    if family == "mixed":
        pairs = list(_mixed(n, options.first))
    else:
        seeds = map(np.random.default_rng, range(options.first, options.first + options.count))
        pairs = [pair for rng in seeds for pair in _pairs(family, n, rng)]
    first, step = options.part
    for kind, (X, Y) in pairs[first::step]:
        start = time.process_time()
        result = torchgw.solve(X, Y, distances="sqeuclidean", polish=True, random_state=0)
        solved = time.process_time()
        found = result.certify(options.seconds, gap=_MET)
        done = time.process_time()
        torchgw.verify(found.proof, X, Y)
        gap = (found.best_value - found.lower_bound) / found.best_value
        above = found.value / found.best_value - 1
        rows.setdefault(kind, []).append((gap, above, solved - start, done - solved))
    for kind, figures in rows.items():
        gap, above, solve, certify = np.array(figures).T
        print(
            f"{family} {n} {kind}: gap met {(gap <= _MET).sum()}/{len(gap)}, worst {gap.max():.1e}"
            f"; search best {(above <= _MET).sum()}/{len(gap)}, worst {above.max():.1e} above; "
            f"CPU s solve {np.median(solve):.2f}, certify {np.median(certify):.2f}, "
            f"at most {certify.max():.1f}",
            flush=True,
        )


def _many(kind: str, X: np.ndarray, Y: np.ndarray, options: argparse.Namespace) -> None:
    """Certify a pair of many points, whose plan has entropy."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sides = (torch.from_numpy(side).to(device) for side in (X, Y))
    start = time.monotonic()
    result = torchgw.solve(*sides, distances="sqeuclidean", random_state=0)
    solved = time.monotonic()
    found = result.certify(options.seconds, gap=_MET)
    best, proof = found.best_value, found.proof
    print(
        f"many {len(X)} {kind}, {device}: bound {found.lower_bound:.6g}, "
        f"{1 - found.lower_bound / best:.1e} below the best plan of {best:.6g}, which is "
        f"{1 - best / found.value:.1e} below that of the solve; {len(proof.arrays['heights'])} "
        f"cuts; solve {solved - start:.1f} s, certify {found.seconds:.1f}",
        flush=True,
    )
    if options.verify:
        start = time.monotonic()
        again = torchgw.verify(proof, X, Y)
        print(f"verified: {again}, {time.monotonic() - start:.0f} s", flush=True)


def _given(table: np.ndarray) -> np.ndarray | DirectedDistance:
    """Give a table as a solve takes it."""
    return table if (table == table.T).all() else DirectedDistance(table)


def _few(kind: str, options: argparse.Namespace) -> None:
    """Certify matchings of few points, with all permutations beside."""
    exact = wrong = best = 0
    worst, total = 0.0, options.few
    for seed in range(options.first, options.first + total):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(4, 9))
        if kind in ("squared", "euclidean"):
            metric = "sqeuclidean" if kind == "squared" else "euclidean"
            D_X, D_Y = (cdist(part, part, metric) for part in rng.normal(size=(2, n, 2)))
        else:
            D_X, D_Y = rng.random((2, n, n))
            if kind == "tables":
                D_X, D_Y = D_X + D_X.T, D_Y + D_Y.T
        orders = np.array(list(itertools.permutations(range(n))))
        least = min(float(((D_X - D_Y[order[:, None], order]) ** 2).mean()) for order in orders)
        result = torchgw.solve(D_X=_given(D_X), D_Y=_given(D_Y), random_state=0)
        found = result.certify(options.seconds, gap=1e-6, kind="one_to_one")
        torchgw.verify(found.proof, D_X=D_X, D_Y=D_Y)
        wrong += found.lower_bound > least * (1 + 1e-9)
        gap = (least - found.lower_bound) / least
        exact += gap <= 1e-5
        best += found.value <= least * (1 + 1e-9)
        worst = max(worst, gap)
    print(
        f"few {kind}: of {total}, bound above the least {wrong}, equal to it {exact}, worst gap "
        f"{worst:.1e}; matching() best {best}",
        flush=True,
    )


def _assignments(options: argparse.Namespace) -> None:
    """Bound quadratic assignment problems beside the best known."""
    data = read_data("qap.npz")
    shares = []
    for name in sorted({key.split("/")[0] for key in data}):
        A, B = (data[f"{name}/{part}"].astype(float) for part in "AB")
        known, n = float(data[f"{name}/best_known"]), len(A)
        if n > 30:
            continue
        result = torchgw.solve(D_X=_given(A), D_Y=_given(-B), random_state=0, n_init=1)
        start = time.process_time()
        found = result.certify(options.seconds, gap=1e-6, kind="one_to_one")
        seconds = time.process_time() - start
        torchgw.verify(found.proof, D_X=A, D_Y=-B)
        bound, value = (
            (each * n * n - (A**2).sum() - (B**2).sum()) / 2
            for each in (found.lower_bound, found.value)
        )
        shares.append(bound / known if known else 1.0)
        print(
            f"{name:8} best known {known:.0f}, bound {bound:.1f} ({shares[-1]:.3f}), matching "
            f"{value:.0f}, {found.method}, {seconds:.1f} s",
            flush=True,
        )
    print(f"qap: bound at least 95% on {(np.array(shares) >= 0.95).sum()} of {len(shares)}")
