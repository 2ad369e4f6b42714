"""The linearised cost of points that a solve has not seen.

The cost (2) at a plan P is linear in the distances of a source point: its row needs d(x, .) alone,

    C(x, j) = -4 alpha sum_kl d(x, k) P_kl DY_lj

up to a term of the row, which no conditional plan sees; another loss than the square one has its
functions of d and DY in their places.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchgw._gradients.contract import Coupling
from torchgw._gradients.means import part_means
from torchgw._plans.pairs import Anchors
from torchgw._problem.cross_terms import MinimumCross
from torchgw._problem.losses import Loss, spread_parts, transformed
from torchgw._problem.problem import stored_matrix
from torchgw._results.new_points import Side
from torchgw._sinkhorn.cost import Cost, DenseCost, FactoredCost
from torchgw.distances.base import DistanceProvider, Entrywise
from torchgw.distances.new_points import CrossDistance, factor_rows

__all__ = ["CostOf", "cost_function"]

# The cost (q, m) of a block of new points.
CostOf = Callable[[CrossDistance, slice], Cost]


def cost_function(
    source: Side, target: Side, coupling: Coupling, alpha: float, loss: Loss
) -> tuple[CostOf, int]:
    """Return the cost of new source points, a block at a time, and how many distances each reads.

    ``coupling`` is that of P as :class:`torchgw._results.extension.Extension` keeps it.
    """
    if isinstance(coupling, Anchors):
        return _sampled(source, target, coupling, 4 * alpha, loss)
    if loss.cross is None:
        return _minimum(source, target, coupling, 4 * alpha)
    near, far = loss.cross if source.name == "X" else loss.cross[::-1]
    return _products(
        source, transformed(target.distances, far), target.encoded, coupling, near, 4 * alpha
    )


def _products(
    source: Side,
    target: DistanceProvider,
    encoded: bool,
    coupling: Tensor,
    near: Entrywise,
    weight: float,
) -> tuple[CostOf, int]:
    """Return the cost of a loss whose cross term is a product, of near(d) and ``target``."""
    index, coupling = source.reference, coupling.double()
    width = source.distances.n if index is None else len(index)
    turn: Tensor | float = weight
    if index is not None:
        factors = source.distances.factors()
        assert factors is not None
        turn = weight * factor_rows(source.distances, index) * factors.signs.double()

    def near_rows(cross: CrossDistance, block: slice) -> Tensor:
        rows = near(cross.rows(block, index))
        return rows @ turn if isinstance(turn, Tensor) else rows * turn

    def stored(cross: CrossDistance, block: slice) -> Cost:
        # the coupling is sparse where it comes from a file
        right = coupling.T @ near_rows(cross, block).T
        return DenseCost(-target.apply(right.to(target.dtype)).T.double())

    if not (encoded or source.encoded):
        return stored, width
    inner: Tensor | None = None
    if encoded:
        factors = target.factors()
        assert factors is not None
        right, inner = factors.matrix, coupling * factors.signs.double()
    else:
        right = target.apply(coupling.T.to(target.dtype))

    def factored(cross: CrossDistance, block: slice) -> Cost:
        left = near_rows(cross, block)
        left = left if inner is None else left @ inner
        return FactoredCost.of_products(left, right.double()).centred()

    return factored, width


def _minimum(source: Side, target: Side, coupling: Tensor, weight: float) -> tuple[CostOf, int]:
    """Return the cost of the absolute loss, from stored distances."""
    table = stored_matrix(target.distances).double()
    plan = coupling.double()
    plan = plan.to_dense() if plan.is_sparse else plan

    def cost(cross: CrossDistance, block: slice) -> Cost:
        return DenseCost(-weight * MinimumCross(cross.rows(block, None), table)(plan))

    return cost, source.distances.n


def _sampled(
    source: Side, target: Side, anchors: Anchors, weight: float, loss: Loss
) -> tuple[CostOf, int]:
    """Return the cost of a sampled gradient at some anchors, with its mean distances."""
    side, count = "XY".index(source.name), len(anchors.source)
    parts = spread_parts(count, loss.parts, anchors.source.device)
    assert source.mean is not None
    assert target.mean is not None
    nodes, mass, _ = source.mean
    index = None if nodes is None else torch.cat([anchors.source, nodes])
    mean = target.mean.values.reshape(target.distances.n, -1)
    far = loss.part(1 - side, target.distances.columns(anchors.target), parts)
    right = torch.cat([far - mean[:, parts], mean], dim=1).double()

    def cost(cross: CrossDistance, block: slice) -> Cost:
        rows = cross.rows(block, index)
        to_anchors = rows[:, anchors.source] if index is None else rows[:, :count]
        to_nodes = rows if index is None else rows[:, count:]
        own = part_means(loss, side, to_nodes, mass.to(rows.dtype))
        near = loss.part(side, to_anchors, parts) - own[:, parts]
        left = torch.cat([near / count, own / loss.parts], dim=1)
        return FactoredCost.of_products(weight * left.double(), right).centred()

    return cost, source.distances.n if index is None else len(index)
