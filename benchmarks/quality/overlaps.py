"""Slices and clouds that share an unknown part (L1393, L1394, L1467, L1530): what is right.

``python -m benchmarks overlaps``: two slices of one tissue, cut by a line, turned, with noise on
their places and, where asked, smooth genes with noise; and clouds that share some points. One line
of JSON each, with POT's partial solver on the same tables beside it.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import numpy as np
from scipy.spatial.distance import cdist

import torchgw
from benchmarks.harness.harness import tell

__all__ = ["clouds", "main", "slices"]

# Weights of the structure at which POT solves. A choice.
_POT_ALPHAS = (0.1, 0.5, 0.9, 0.99)

Generator = np.random.Generator
Array = np.ndarray[Any, Any]


class Overlap(NamedTuple):
    """Two sides, of which some points are the same."""

    x: Array
    y: Array
    partner: Array  # of each point of x, or -1
    genes: tuple[Array, Array] | None = None


def slices(
    g: Generator, n: int, overlap: float, *, grid: bool = True, noise: float = 0.05, genes: int = 10
) -> Overlap:
    """Cut two slices of n spots out of a strip, in units of the distance between spots."""
    total = round(n * (2 - overlap))
    high = int(np.sqrt(total / 1.4))
    wide = -(-total // high)
    cells = np.stack(np.meshgrid(np.arange(wide), np.arange(high), indexing="ij"), -1)
    places = cells.reshape(-1, 2)[:total] + 0.25 * g.normal(size=(total, 2))
    if not grid:
        places = g.uniform(size=(total, 2)) * [wide, high]
    angle = 0.3 * g.normal()
    places = places[(places @ [np.cos(angle), np.sin(angle)]).argsort()]
    waves, phases = g.normal(size=(genes, 4, 2)) / 3, g.uniform(0, 2 * np.pi, (genes, 4))
    heights = g.normal(size=(genes, 4)) / np.sqrt(2)
    told = (heights * np.cos(np.einsum("gfd,nd->ngf", waves, places) + phases)).sum(2)
    first, second = np.arange(n), g.permutation(np.arange(total - n, total))
    partner = np.full(total, -1)
    partner[second] = np.arange(n)
    turn = np.linalg.qr(g.normal(size=(2, 2)))[0]
    x, y = (places[some] + noise * g.normal(size=(n, 2)) for some in (first, second))
    seen = tuple(told[some] + 0.5 * g.normal(size=(n, genes)) for some in (first, second))
    return Overlap(x, y @ turn + 10 * g.normal(size=2), partner[first], (seen[0], seen[1]))


def clouds(g: Generator, n: int = 22, m: int = 23, shared: int = 15) -> Overlap:
    """Draw two clouds in the plane that share some points."""
    both = g.normal(size=(shared, 2))
    x, y = (np.concatenate([both, g.normal(size=(size - shared, 2))]) for size in (n, m))
    order, partner = g.permutation(m), np.full(n, -1)
    partner[:shared] = order.argsort()[:shared]
    return Overlap(x, (y @ np.linalg.qr(g.normal(size=(2, 2)))[0])[order], partner)


def main(arguments: list[str] | None = None) -> int:
    """Run the suite; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks overlaps", description=__doc__)
    parser.add_argument("--spots", type=int, default=300)
    parser.add_argument("--shares", type=float, nargs="*", default=[0.7, 0.4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--auto", action="store_true", help="mass='auto' in place of the true share"
    )
    parser.add_argument("--genes", type=int, default=0, help="so many genes as features")
    parser.add_argument("--clouds", action="store_true", help="12 clouds of 22 x 23 points too")
    parser.add_argument("--pot", action="store_true", help="POT's partial solver beside")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out/overlaps.jsonl"))
    asked = parser.parse_args(arguments)
    seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
    drawn = {
        f"{'grid' if grid else 'random'} {share:g} {seed}": slices(
            np.random.default_rng([seed, int(100 * share), grid]), asked.spots, share, grid=grid,
            genes=asked.genes or 10,
        )
        for share in asked.shares for grid in (True, False) for seed in seeds
    }  # fmt: skip
    if asked.clouds:
        first = 12 * asked.first_seed
        drawn |= {
            f"cloud {seed}": clouds(np.random.default_rng([seed, 22]))
            for seed in range(first, first + 12)
        }
    for name, one in drawn.items():
        row = {"case": name} | _judged(one, auto=asked.auto, genes=asked.genes > 0)
        if asked.pot:
            row |= _by_pot(one, genes=asked.genes > 0)
        tell(row, asked.out)
    return 0


def _mass(one: Overlap) -> float:
    return float((one.partner >= 0).sum() / max(len(one.x), len(one.y)))


def _right(one: Overlap, plan: Any) -> float:
    """Share of the points with a partner whose largest entry is that partner."""
    shared = one.partner >= 0
    return float((np.asarray(plan).argmax(1) == one.partner)[shared].mean())


def _judged(one: Overlap, *, auto: bool, genes: bool) -> dict[str, Any]:
    """Solve, and solve from the truth at the same mass and epsilon."""
    mass = _mass(one)
    options: dict[str, Any] = {"distances": "euclidean", "random_state": 0}
    if genes and one.genes is not None:
        options["features"] = one.genes
    clock = process_time()
    with warnings.catch_warnings():
        # the row tells what they say
        warnings.simplefilter("ignore")
        found = torchgw.solve(one.x, one.y, mass="auto" if auto else mass, **options)
        seconds = process_time() - clock
        plan = (one.partner[:, None] == np.arange(len(one.y))) / max(len(one.x), len(one.y))
        options |= {"epsilon": found.epsilon}
        if genes:
            options["alpha"] = found.alpha
        held = torchgw.solve(one.x, one.y, mass=mass, init=plan, **options)
    return {
        "right": _right(one, found.plan), "mass": found.report.mass, "share": mass,
        "objective": found.report.objective, "from_truth": held.report.objective,
        "right_from_truth": _right(one, held.plan), "alpha": found.alpha, "cpu_s": seconds,
        "said": bool(found.doubt) or bool(found.is_ambiguous),
    }  # fmt: skip


def _by_pot(one: Overlap, *, genes: bool) -> dict[str, Any]:
    """Solve by POT's partial solver at the true share; with genes at the best of four weights."""
    import ot

    tables = [cdist(side, side) for side in (one.x, one.y)]
    weights = [np.full(len(side), 1 / len(side)) for side in tables]
    options = {"m": _mass(one), "nb_dummies": 10}
    clock, right = process_time(), None
    with warnings.catch_warnings():
        # of linear problems that were not solved
        warnings.simplefilter("ignore")
        for alpha in _POT_ALPHAS if genes else (1.0,):
            try:
                if genes and one.genes is not None:
                    costs = cdist(*one.genes, "sqeuclidean")
                    largest = max(table.max() for table in tables)
                    plan = ot.gromov.partial_fused_gromov_wasserstein(
                        costs / costs.max(), *(table / largest for table in tables), *weights,
                        alpha=alpha, **options,
                    )  # fmt: skip
                else:
                    plan = ot.gromov.partial_gromov_wasserstein(*tables, *weights, **options)
            except ValueError:
                # it refuses where its linear program fails
                continue
            right = max(right or 0.0, _right(one, plan))
    return {"pot_right": right, "pot_cpu_s": process_time() - clock}
