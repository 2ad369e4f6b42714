"""Where the starts of a multi-start begin: linear costs whose plans are guesses.

Each guess is a linear cost on the coarse problem, in units of the Gromov-Wasserstein cost, and a
schedule for epsilon. Guesses of different kinds fail on different problems.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
import scipy
import torch
from torch import Tensor

from torchgw._search.coarse import CoarseProblem, centre
from torchgw._sinkhorn.annealing import Annealing
from torchgw.distances.sampling import SpreadPoints

# Leading axes of each side whose signs are tried in all combinations. [L224]
AXES = 3
# Points up to which all axes are computed: some at each end of the spectrum take two calls. [L84]
_WHOLE_SPECTRUM = 128
# Levels of the distance distributions that are compared. [L224]
_QUANTILES = 32
# Entries of a row from which on a CPU sorts by NumPy, which takes 40 to 70% of the time. [L1242]
_SORTED = 64
# Epsilon at which a guess is taken up, as a share of the natural scale: above it is forgotten.
# [L105]
GUESS_EPSILON = 0.1
# How far below the target a ladder goes before it comes back, as a share of it. [L281]
_LADDER = 0.25


class Starts(NamedTuple):
    """Starts to be solved together, on the host; their costs are made by :func:`start_costs`."""

    labels: tuple[str, ...]
    rotations: Tensor  # (R, rank, rank) float64, of the last R starts
    epsilons: Tensor  # (iterations, B) float64


class Hints(NamedTuple):
    """The axes and distances from which the first costs of starts are made."""

    x_axes: Tensor  # (s, rank), leading axes of the centred table
    y_axes: Tensor  # (t, rank)
    # (2, s, t), squared distances between distributions of distances, and eccentricities
    apart: Tensor


def make_starts(scale: float, target: float, count: int, iterations: int, rank: int) -> Starts:
    """Return ``count`` starts, the most useful ones first."""
    # The product plan annealed from the natural scale; distance distributions (third lower bound
    # [1]) with and without a ladder of epsilons; eccentricities (first lower bound [1]); all
    # signs of `rank` leading axes; then random rotations of these.
    # [1] F. Memoli. Gromov-Wasserstein distances and the metric approach to object matching.
    # Foundations of Computational Mathematics 2011.
    whole = Annealing(max(target, scale), target)
    guess = Annealing(max(target, GUESS_EPSILON * scale), target)
    labels, rotations = _names_and_rotations(count, rank)
    schedules = {ladder: _schedule(guess, iterations, ladder=ladder) for ladder in (False, True)}
    epsilons = [schedules[label.endswith("ladder")] for label in labels]
    epsilons[0] = _schedule(whole, iterations, ladder=False)
    return Starts(labels, rotations, torch.tensor(epsilons, dtype=torch.float64, device="cpu").T)


@functools.lru_cache(maxsize=16)
def _names_and_rotations(count: int, rank: int) -> tuple[tuple[str, ...], Tensor]:
    """Return the names of all starts, and the rotations of those that have one."""
    labels = [
        "annealed",
        "distance distributions",
        "distance distributions, ladder",
        "eccentricities",
    ]
    fixed, rotations = len(labels), []
    shape, host = (rank, rank), torch.device("cpu")
    for pattern in range(2**rank):
        signs = [1.0 - 2.0 * (pattern >> axis & 1) for axis in range(rank)]
        labels.append("spectral " + "".join("+" if sign > 0 else "-" for sign in signs))
        rotations.append(torch.tensor(signs, dtype=torch.float64, device=host).diag())
    generator = torch.Generator().manual_seed(0)
    for number in range(count - len(labels)):
        normal = torch.randn(shape, dtype=torch.float64, device=host, generator=generator)
        labels.append(f"rotation {number + 1}" + (", ladder" if number % 2 else ""))
        rotations.append(torch.linalg.qr(normal).Q)
    return tuple(labels[:count]), torch.stack(rotations)[: max(0, count - fixed)]


def start_costs(problem: CoarseProblem, hints: Hints, rotations: Tensor, count: int) -> Tensor:
    """Return the first costs of :func:`make_starts`, (B, s, t) float64."""
    # lower bounds alpha |x_i - y_j|^2 + (1 - alpha) M by signatures x and y
    bounds = problem.alpha * problem.unit * hints.apart
    if problem.linear is not None:
        bounds = bounds + (1 - problem.alpha) * problem.linear
    guesses = torch.stack([problem.base, bounds[0], bounds[0], bounds[1]])[:count]
    # all together: on a GPU each product would take longer to launch than to compute
    weight = 4 * problem.alpha * problem.unit
    turned = problem.base - weight * (hints.x_axes @ rotations) @ hints.y_axes.T
    return torch.cat([guesses, turned])


def _schedule(anneal: Annealing, iterations: int, *, ladder: bool) -> list[float]:
    """Return epsilon at each iteration; of a ladder, the last quarter is at the target."""
    epsilons = [anneal(iteration) for iteration in range(iterations)]
    if ladder:
        rest = iterations - iterations // 4
        below = Annealing(anneal.start, _LADDER * anneal.target, decay=anneal.decay)
        epsilons[:rest] = [below(iteration) for iteration in range(rest)]
    return epsilons


def find_hints(problem: CoarseProblem) -> Hints:
    """Compute the hints for first costs on the host, and return them on the device."""
    # One read; LAPACK is faster at problems of this size, its answer the same everywhere, and a GPU
    # would load the code of sorts and distances for 60 ms. [L1020]
    sides = problem.source, problem.target
    tables = [part for side in sides for part in (side.table, side.weights)]
    host = torch.cat([part.flatten() for part in tables]).cpu()
    x, a, y, b = host.split([part.numel() for part in tables])
    source = problem.source._replace(table=x.view_as(tables[0]), weights=a)
    target = problem.target._replace(table=y.view_as(tables[2]), weights=b)
    axes = [_axes(centre(side)[0], side.weights) for side in (source, target)]
    rank = min(part.shape[1] for part in axes)
    apart = [
        torch.cdist(signature(source), signature(target)).square()
        for signature in (_distribution, _eccentricity)
    ]
    parts = (*(part[:, :rank] for part in axes), torch.stack(apart))
    return Hints(*(part.to(problem.x) for part in parts))


def _axes(table: Tensor, weights: Tensor) -> Tensor:
    """Return leading axes of a centred table, (s, rank), scaled so that table ~ +- axes axes'."""
    # The scale of a pair of axes in x P y is then that of a perfect match of the two.
    root = weights.sqrt()
    matrix = root[:, None] * table * root
    if len(matrix) <= _WHOLE_SPECTRUM:
        # half the time of float64, and only a start
        values, vectors = (part.double() for part in torch.linalg.eigh(matrix.float()))
    else:
        size = len(matrix)
        ends = (0, AXES - 1), (size - AXES, size - 1)
        parts = [eigenpairs(matrix.numpy(), *end) for end in ends]
        values = torch.from_numpy(np.concatenate([part[0] for part in parts]))
        vectors = torch.from_numpy(np.hstack([part[1] for part in parts]))
    order = values.abs().argsort(descending=True)[:AXES]
    found: Tensor = vectors[:, order] * values[order].abs() / root[:, None]
    return found


def eigenpairs(matrix: Any, first: int, last: int) -> tuple[Any, Any]:
    """Compute eigenvalues of some places in ascending order (k,), and their vectors (n, k)."""
    values, vectors = scipy.linalg.eigh(matrix, subset_by_index=(first, last), driver="evr")
    if len(values) <= last - first:
        # of many equal ones LAPACK's fastest way loses some
        values, vectors = scipy.linalg.eigh(matrix, driver="evd")
        values, vectors = values[first : last + 1], vectors[:, first : last + 1]
    return values, vectors


def _eccentricity(side: SpreadPoints) -> Tensor:
    """Return the root mean squared distance of each point, (s, 1)."""
    return (side.table.square() @ side.weights).sqrt()[:, None]


def _distribution(side: SpreadPoints) -> Tensor:
    return distance_quantiles(side.table, side.weights)


def distance_quantiles(table: Tensor, weights: Tensor) -> Tensor:
    """Return quantiles of each row of distances (s, n) by weight, (s, q), each over sqrt(q)."""
    if table.device.type == "cpu" and bool((weights == weights[0]).all()):
        # NumPy sorts by vector instructions, without returning the order, which is not needed
        values = torch.from_numpy(np.sort(table.numpy(), axis=1))
        cumulative = weights.cumsum(0).expand_as(values).contiguous()
    else:
        order = _order(table)
        values, cumulative = table.gather(1, order), weights[order].cumsum(1)
    levels = torch.arange(_QUANTILES, dtype=values.dtype, device=values.device) + 0.5
    levels = (levels / _QUANTILES * cumulative[:, -1:]).contiguous()
    position = torch.searchsorted(cumulative, levels).clamp_(max=values.shape[1] - 1)
    found: Tensor = values.gather(1, position) / _QUANTILES**0.5
    return found


def _order(table: Tensor) -> Tensor:
    """Sort each row of a table: the places of its entries, ascending."""
    if table.device.type == "cpu" and table.shape[1] >= _SORTED:
        return torch.from_numpy(np.argsort(table.numpy(), axis=1))
    return table.argsort(dim=1)
