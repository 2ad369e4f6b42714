"""The named problems: what is asked, not how it is solved.

Three kinds. A ``GWProblem`` is a whole solve from two point clouds, a ``SinkhornProblem`` a fixed
number of Sinkhorn iterations over one stored cost, a ``HalfStepProblem`` half-steps over a cost
that is too large to store. Data come from a fixed seed: every process makes the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchgw.datasets import spiral, swiss_roll
from torchgw.distances.graph import default_n_neighbors

__all__ = [
    "PROBLEMS", "Clouds", "GWProblem", "HalfStepProblem", "Problem", "SinkhornProblem",
    "linear_clouds", "make_clouds",
]  # fmt: skip


@dataclass(frozen=True)
class GWProblem:
    """Two point clouds to align by geodesics on their nearest-neighbour graphs."""

    name: str
    n: int
    m: int
    data: Literal["spiral", "gaussian"]
    distances: Literal["precomputed", "landmark"]  # as torchgw.solve names them
    n_neighbors: int
    # for squared distances that are divided by the largest on either side; "auto" is ours
    epsilon: float | Literal["auto"]
    seed: int = 0
    dimensions: tuple[int, int] = (3, 5)  # of Gaussian clouds
    kind: str = "gw"


@dataclass(frozen=True)
class SinkhornProblem:
    """A forced number of full iterations (a row and a column update) over a stored cost."""

    name: str
    n: int
    m: int
    dtype: Literal["float32", "float64"]
    iterations: int = 100
    rank: int = 8  # dimension of the clouds whose squared distances are the cost
    kind: str = "sinkhorn"


@dataclass(frozen=True)
class HalfStepProblem:
    """Half-steps, by turns over rows and columns, of a cost that is kept as factors."""

    name: str
    n: int
    m: int
    rank: int
    dtype: Literal["float32", "float64"] = "float32"
    half_steps: int = 20
    kind: str = "half-step"


Problem = GWProblem | SinkhornProblem | HalfStepProblem


class Clouds(NamedTuple):
    """Points of both sides, and where on the curve they lie if there is a curve."""

    x: NDArray[np.float64]  # (n, d)
    y: NDArray[np.float64]  # (m, d')
    angle_x: NDArray[np.float64] | None  # (n,)
    angle_y: NDArray[np.float64] | None  # (m,)


def make_clouds(problem: GWProblem) -> Clouds:
    """Return the points of a problem."""
    if problem.data == "spiral":
        x, angle_x = spiral(problem.n, random_state=problem.seed)
        y, angle_y = swiss_roll(problem.m, random_state=problem.seed + 1)
        return Clouds(x, y, angle_x, angle_y)
    rng = np.random.default_rng(problem.seed)
    d, d_other = problem.dimensions
    x, y = rng.standard_normal((problem.n, d)), rng.standard_normal((problem.m, d_other))
    return Clouds(x, y, None, None)


def linear_clouds(
    problem: SinkhornProblem | HalfStepProblem,
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Return two clouds, shapes (n, r) and (m, r), whose squared distances are the cost; epsilon.

    The inner products over epsilon have a standard deviation of 10.
    """
    rng = np.random.default_rng(problem.rank)
    x, y = (rng.standard_normal((size, problem.rank)) + 0.5 for size in (problem.n, problem.m))
    return x, y, 0.2 * problem.rank**0.5


def _spiral(n: int, m: int, distances: Literal["precomputed", "landmark"]) -> GWProblem:
    # small enough for a lower value than that of torchgw 0.4.2 at its own epsilon
    return GWProblem(f"spiral-{n}x{m}", n, m, "spiral", distances, n_neighbors=5, epsilon=5e-4)


def _gaussian(n: int, m: int) -> GWProblem:
    # 10 neighbours: with 5 the clouds fall into dozens of components
    name = f"gaussian-{n}x{m}"
    return GWProblem(name, n, m, "gaussian", "precomputed", n_neighbors=10, epsilon=5e-3)


def _wide(n: int, m: int) -> GWProblem:
    # what torchgw.solve does by default
    k, name = default_n_neighbors(n), f"wide-{n}x{m}"
    return GWProblem(name, n, m, "gaussian", "precomputed", k, "auto", dimensions=(10, 12))


_ALL: tuple[Problem, ...] = (
    GWProblem("tiny", 150, 180, "spiral", "precomputed", n_neighbors=5, epsilon=5e-3),
    SinkhornProblem("sinkhorn-tiny-float64", 61, 71, "float64"),
    HalfStepProblem("half-step-tiny", 200, 200, rank=4),
    _spiral(400, 500, "precomputed"),
    _spiral(4_000, 5_000, "landmark"),
    _spiral(10_000, 12_000, "landmark"),
    _spiral(20_000, 20_000, "landmark"),
    _spiral(20_000, 25_000, "landmark"),
    _spiral(45_000, 45_000, "landmark"),
    _spiral(60_000, 60_000, "landmark"),
    _gaussian(2_000, 2_500),
    _gaussian(5_000, 6_000),
    _wide(500, 600),
    _wide(5_000, 6_000),
    SinkhornProblem("sinkhorn-5001x6001-float32", 5_001, 6_001, "float32"),
    SinkhornProblem("sinkhorn-5001x6001-float64", 5_001, 6_001, "float64"),
    SinkhornProblem("sinkhorn-10001x12001-float32", 10_001, 12_001, "float32"),
    SinkhornProblem("sinkhorn-10001x12001-float64", 10_001, 12_001, "float64"),
    HalfStepProblem("half-step-100000-r16", 100_000, 100_000, rank=16),
    HalfStepProblem("half-step-100000-r32", 100_000, 100_000, rank=32),
    HalfStepProblem("half-step-100000-r64", 100_000, 100_000, rank=64),
)
PROBLEMS: dict[str, Problem] = {problem.name: problem for problem in _ALL}
