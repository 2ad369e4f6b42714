"""The problem of a result as it is certified: in float64, of the data that were given."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchgw._boundary.arrays import to_numpy
from torchgw._certify.certificate import Certificate, make_certificate
from torchgw._certify.question import Array, Question
from torchgw._certify.transport import Transport
from torchgw._errors import UnsupportedError
from torchgw._plans.transport import round_to_marginals
from torchgw._problem.limits import limits_of
from torchgw._problem.problem import stored_matrix
from torchgw._results.mapping import Extension
from torchgw._solve.polish import scale_to_marginals
from torchgw._typing import Marginals
from torchgw.distances.new_points import Space
from torchgw.distances.precomputed import DirectedDistance


def certify(
    extension: Extension,
    weights: Marginals,
    plan: Callable[[], Tensor],
    *,
    seconds: float,
    gap: float,
    matchings: bool,
) -> Certificate:
    """Certify the plan (n, m) of a result; what is not covered is refused before any work."""
    _check(extension, weights)
    known, spaces = extension.known, extension.spaces
    sides = [_side(extension, place) for place in (0, 1)]
    linear = extension.linear_cost() if known.alpha < 1 else None
    M = None if linear is None else to_numpy(linear.dense().matrix).astype(np.float64)
    # with alpha 0 the distances do not matter
    a, b = (to_numpy(part).astype(np.float64) for part in weights)
    a, b = a / a.sum(), b / b.sum()
    support = extension.allowed()
    question = Question(
        sides[0][0], sides[1][0], a, b, float(known.alpha), M, (sides[0][1], sides[1][1]),
        None if support is None else to_numpy(support.cpu()),
    )  # fmt: skip
    if matchings and not question.is_assignment:
        raise UnsupportedError(
            "kind='one_to_one' needs as many points on both sides, all of one weight; here are "
            f"{len(a)} and {len(b)}. Certify with kind='plan'."
        )
    given = plan()
    exact = _exact(question, given.cpu())
    metrics = tuple(None if _metric(space) is None else str(space.metric) for space in spaces)
    return make_certificate(
        question, exact, seconds=seconds, gap=gap, matchings=matchings, device=given.device,
        named=((metrics[0], metrics[1]), (float(spaces[0].scale), float(spaces[1].scale))),
    )  # fmt: skip


def _exact(question: Question, plan: Tensor) -> Array:
    """Lead a plan to exact weights, within the pairs that may hold mass."""
    a, b = map(torch.from_numpy, (question.a, question.b))
    if question.allowed is None:
        return np.asarray(round_to_marginals(plan, a, b).numpy())
    found = scale_to_marginals(plan, Marginals(a, b))
    if found is not None:
        return np.asarray(found.numpy())
    # what no scaling leads there is replaced by the vertex below it, as polishing does
    slope = question.slope(plan.numpy())
    return Transport(question.a, question.b, question.allowed)(slope)[0]


def _check(extension: Extension, weights: Marginals) -> None:
    """Refuse what no bound here is about."""
    known = extension.known
    if known.loss.name != "square":
        raise UnsupportedError(
            f"`certify` is for loss='square'; this solve had loss={known.loss.name!r}. "
            "`result.lower_bound` bounds the absolute loss."
        )
    if known.own is not None or extension.mass != 1.0:
        raise UnsupportedError(
            "`certify` is for strict marginals; this solve had `unbalanced` or `mass`. Solve "
            "without them to certify the balanced problem."
        )
    most = limits_of(weights.a.device).certified_points
    if max(map(len, weights)) > most:
        raise UnsupportedError(
            f"`certify` takes up to {most:,} points a side; here are {len(weights.a):,} and "
            f"{len(weights.b):,}. Use `result.lower_bound`, or certify a sample of the points."
        )
    for side, (name, space) in enumerate(zip("XY", extension.spaces, strict=True)):
        provider = known.distances(side)
        points = None if _metric(space) is None else space.points
        dtype = provider.dtype if points is None else points.dtype
        if dtype != torch.float64:
            raise UnsupportedError(
                f"`certify` needs the data of {name} in float64; this solve has them in {dtype}. "
                f"Pass {name} or D_{name} as float64, and precision='float64'."
            )
        if not provider.cheap_columns:
            raise UnsupportedError(
                f"`certify` reads all distances, and those of {name} are costly. Solve with "
                "distances='precomputed'."
            )


def _metric(space: Space) -> str | None:
    """Name the metric of points; ``None`` for tables, graphs and curved spaces."""
    return None if space.curvature is not None or space.points is None else space.metric


def _side(extension: Extension, place: int) -> tuple[Array, Array | None]:
    """Compute the distances of a side (n, n), and points of which G is minus the inner products."""
    space = extension.spaces[place]
    metric: Any = _metric(space)
    if metric is None:
        known = extension.known.distances(place)
        # what a directed provider reads is the mean over both ways
        read = known.table if isinstance(known, DirectedDistance) else stored_matrix(known)
        return np.ascontiguousarray(to_numpy(read)), None
    assert space.points is not None
    points = to_numpy(space.points).astype(np.float64)
    table = to_numpy(space.between(space.points, space.points)) * space.scale
    # a distance is that of (i, k) and of (k, i), to the last bit
    table = np.maximum(table, table.T)
    if metric == "euclidean":
        return table, None
    if metric == "correlation":
        points = points - points.mean(1, keepdims=True)
    if metric == "sqeuclidean":
        return table, points * np.sqrt(2 * space.scale)
    points = points / np.linalg.norm(points, axis=1, keepdims=True)
    return table, points * np.sqrt(space.scale)
