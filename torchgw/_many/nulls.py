"""Spaces as they would be by chance: what is kept of one, and what is drawn anew."""

from typing import Any, Literal

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._errors import InvalidInputError

Null = Literal["auto", "rotated", "columns", "entries", "rewired"]

# Entries of tables of null spaces that are kept at a time: 512 MB. A choice.
ENTRIES = 2**26


def rotated(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Turn the points (n, d), as columns of n numbers, about their mean: (count, n, d)."""
    mean = points.mean(0)
    centred = points - mean
    left, sizes, axes = torch.linalg.svd(centred, full_matrices=False)
    # coordinates of rounding have no direction
    rank = int((sizes > len(points) * torch.finfo(sizes.dtype).eps * sizes.max()).sum())
    drawn = torch.randn(
        count, len(points), rank, dtype=points.dtype, device=points.device, generator=generator
    )
    drawn -= drawn.mean(1, keepdim=True)
    # without a sign left open, and faster than QR, whose factor it is
    lower = torch.linalg.cholesky(drawn.mT @ drawn)
    turned = torch.linalg.solve_triangular(lower, drawn.mT, upper=False).mT
    made: Tensor = mean + turned * sizes[:rank] @ axes[:rank]
    return made


def columns_shuffled(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Shuffle each column of points (n, d) by itself: (count, n, d)."""
    keys = torch.rand(count, *points.shape, device=points.device, generator=generator)
    return points.expand(count, *points.shape).gather(1, keys.argsort(1))


def entries_shuffled(table: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Shuffle the entries of a symmetric table (n, n) beside its diagonal: (count, n, n)."""
    n = len(table)
    i, j = torch.triu_indices(n, n, 1, device=table.device)
    keys = torch.rand(count, len(i), device=table.device, generator=generator)
    made = table.diagonal().diag_embed().repeat(count, 1, 1)
    made[:, i, j] = made[:, j, i] = table[i, j][keys.argsort(1)]
    return made


def points_of(name: str, table: Tensor) -> Tensor:
    """Find points (n, d) whose Euclidean distances a table has; refuse one that has none."""
    square = table.double().square()
    gram = -(square - square.mean(0) - square.mean(1, keepdim=True) + square.mean()) / 2
    sizes, vectors = torch.linalg.eigh(gram)
    # negative eigenvalues up to a share of the largest are rounding
    if bool(sizes[0] < -1e-8 * sizes[-1]):
        raise InvalidInputError(
            f"null='rotated' turns points, and `{name}` has distances of none in a Euclidean space "
            f"(eigenvalues down to {float(sizes[0] / sizes[-1]):.2g} of the largest). Pass the "
            "points and `distances`, or null='entries', which shuffles the table."
        )
    found: Tensor = vectors * sizes.clamp_min(0).sqrt()
    return found


def rewired(graph: Any, count: int, seed: int) -> list[scipy.sparse.csr_array]:
    """Exchange ends of edges, so that each node keeps its degree; lengths stay with first ends.

    Copies begin at one graph, to which as many steps lead from the graph given: then it and they
    are exchangeable, however few the steps [1]_.

    References
    ----------
    .. [1] J. Besag, P. Clifford. Generalized Monte Carlo significance tests. Biometrika 1989.
    """
    rng = np.random.default_rng(seed)
    upper = scipy.sparse.triu(scipy.sparse.csr_array(graph), 1).tocoo()
    n: int = upper.shape[0]
    edges = np.stack([upper.row, upper.col], 1).astype(np.int64)
    hub = _exchanged(edges[None], n, rng)
    width = max(1, ENTRIES // n**2)
    made = []
    for begin in range(0, count, width):
        some = min(width, count - begin)
        for ends in _exchanged(np.repeat(hub, some, 0), n, rng):
            half = scipy.sparse.coo_array((upper.data, (ends[:, 0], ends[:, 1])), shape=(n, n))
            made.append((half + half.T).tocsr())
    return made


def _exchanged(edges: NDArray[np.int64], n: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Exchange ends of the edges (count, e, 2) of graphs side by side, where none is doubled."""
    count, total = edges.shape[:2]
    if total < 2:
        return edges
    known = np.zeros((count, n, n), bool)
    every = np.arange(count)
    for first, second in ((0, 1), (1, 0)):
        known[every[:, None], edges[:, :, first], edges[:, :, second]] = True
    # ten times the edges: a p-value is valid for any number, and samples are about independent
    for _ in range(10 * total):
        one, other = rng.integers([[total], [total - 1]], size=(2, count))
        other += (other >= one).astype(np.int64)
        turn = rng.integers(2, size=(2, count))
        u, v = edges[every, one, turn[0]], edges[every, one, 1 - turn[0]]
        x, y = edges[every, other, turn[1]], edges[every, other, 1 - turn[1]]
        may = (u != y) & (x != v) & ~known[every, u, y] & ~known[every, x, v]
        here, u, v, x, y = every[may], u[may], v[may], x[may], y[may]
        known[here, u, v] = known[here, v, u] = known[here, x, y] = known[here, y, x] = False
        known[here, u, y] = known[here, y, u] = known[here, x, v] = known[here, v, x] = True
        edges[here, one[may]] = np.stack([u, y], 1)
        edges[here, other[may]] = np.stack([x, v], 1)
    return edges
