"""Distances between points that a provider has not seen and the points that it knows."""

from typing import cast

import torch
from torch import Tensor

from torchgw._errors import InvalidInputError
from torchgw._tensors.operations import NOTHING, at_even_steps
from torchgw.distances._graph.neighbours import nearest
from torchgw.distances.base import BLOCK_ENTRIES, DistanceProvider, ScaledDistance
from torchgw.distances.curved import curved_distances
from torchgw.distances.landmark import NystromDistance
from torchgw.distances.points import CurvedModel, PointMetric, Space, pairwise_distances

# Points that determine the factors of a new point: at least so many, and so many per factor. [L312]
_REFERENCE_POINTS = 2_000
_REFERENCE_PER_FACTOR = 4
# Known points next to a new one whose factors are averaged. [L1665]
_NEAR = 8


class CrossDistance:
    """Distances of q new points to the n points of one side, in the units of its provider."""

    # The new points are given as `points` (q, d), or by a `table` (q, n) of distances in the units
    # of the user. Point metrics are computed. A geodesic goes through the nearest known points,
    #   d(x, i) = min over the k nearest j of |x - x_j| + D_ji,
    # so that new points shorten no path between known ones, and a new point that equals a known one
    # has its distances.

    def __init__(
        self, space: Space, provider: DistanceProvider, points: Tensor | None, table: Tensor | None
    ) -> None:
        self._space, self._provider, self._points, self._table = space, provider, points, table
        self._columns: tuple[Tensor, Tensor] | None = None
        given = points if table is None else table
        assert given is not None
        self.n_new = given.shape[0]

    def block_size(self, width: int) -> int:
        """Count the new points that fit into a working block, for ``width`` distances of each."""
        paths = self._space.n_neighbors if self._table is None else 1
        return max(1, BLOCK_ENTRIES // (width * paths))

    def rows(self, block: slice, index: Tensor | None) -> Tensor:
        """Compute distances of some new points to the known points ``index``, or to all, (q, s)."""
        space, dtype = self._space, torch.float64
        if self._table is not None:
            table = self._table[block]
            return (table if index is None else table[:, index]).to(dtype) * space.scale
        assert self._points is not None
        assert space.points is not None
        new, known = self._points[block], space.points
        if space.metric is not None:
            chosen = known if index is None else known[index]
            return straight_distances(space, new, chosen) * space.scale
        new = new.to(dtype)
        return self._through_neighbours(new, known, index)

    def apart(self, block: slice) -> Tensor:
        """Compute how far some new points are from each known one, not scaled, (q, n).

        Of geodesics these are the lengths of straight lines: near points have short ones too.
        """
        if self._table is not None:
            return self._table[block].double()
        assert self._points is not None
        assert self._space.points is not None
        new, known = self._points[block], self._space.points
        if self._space.metric is not None:
            return straight_distances(self._space, new, known)
        return pairwise_distances(new.double(), known.double(), "euclidean")

    def _through_neighbours(self, new: Tensor, known: Tensor, index: Tensor | None) -> Tensor:
        count = min(self._space.n_neighbors, known.shape[0])
        length, at = nearest(known.double(), new, count)
        length = length * self._space.scale
        # A copy of a known point has its distances, even where they are approximate and break the
        # triangle inequality.
        length[:, 1:][length[:, 0] == 0] = torch.inf
        if index is None:
            used, place = torch.unique(at, return_inverse=True)
            paths = self._provider.columns(used).T[place]
        else:
            # read once for all blocks
            if self._columns is None or self._columns[0] is not index:
                self._columns = index, self._provider.columns(index)
            paths = self._columns[1][at]
        return (paths.double() + length[:, :, None]).amin(dim=1)


def straight_distances(space: Space, new: Tensor, known: Tensor) -> Tensor:
    """Compute the distances of new points and known ones, (q, s) float64, not scaled."""
    assert space.metric is not None
    if space.curvature is not None:
        # in the given dtype, from which follows how far rounding may move a point out of its space
        return curved_distances(new, known, cast(CurvedModel, space.metric), space.curvature)
    return pairwise_distances(new.double(), known.double(), cast(PointMetric, space.metric))


def factor_reference(provider: DistanceProvider) -> Tensor:
    """Choose known points whose distances determine the factors of a new one."""
    # landmarks, which Nystrom factors are made from, or points at even steps
    inner = provider.provider if isinstance(provider, ScaledDistance) else provider
    if isinstance(inner, NystromDistance):
        return inner.landmarks
    factors = provider.factors()
    assert factors is not None
    count = max(_REFERENCE_POINTS, _REFERENCE_PER_FACTOR * factors.signs.numel())
    return at_even_steps(provider.n, min(provider.n, count), provider.device)


def factor_rows(provider: DistanceProvider, reference: Tensor) -> Tensor:
    """Compute the matrix B, (s, r), that turns distances to ``reference`` into factors."""
    # A new point with distances d to the points R has the factors a with a diag(s) A_R' = d, that
    # is a = d B with B = (diag(s) A_R')^+. For landmarks this is Nystrom's formula.
    factors = provider.factors()
    if factors is None:
        raise InvalidInputError("These distances have no factors.")
    known = factors.matrix[reference].double() * factors.signs.double()
    return torch.linalg.pinv(known.T, rtol=NOTHING)


def averaged_factors(known: Tensor, factors: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Average the factors of the known points next to each point, (q, r); name the nearest, (q,).

    Weights are inverse distances, so a copy of a known point has its factors.
    """
    length, at = nearest(known, points, min(_NEAR, len(known)))
    share = torch.where(length[:, :1] == 0, (length == 0).double(), 1 / length)
    share = share / share.sum(1, keepdim=True)
    # no table of the factors of all neighbours is made
    bag = torch.nn.functional.embedding_bag
    return bag(at, factors, per_sample_weights=share, mode="sum"), at[:, 0]
