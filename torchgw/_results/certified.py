"""The problem of a result as it is certified: in float64, of the data that were given."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import scipy
import torch
from torch import Tensor

from torchgw._boundary.arrays import to_numpy
from torchgw._certify.certificate import Certificate, certificate_of_points, make_certificate
from torchgw._certify.cuts import ACTIVE
from torchgw._certify.question import Points, Question
from torchgw._errors import SearchWarning, UnsupportedError, warn_user
from torchgw._plans.transport import TransportPlan, round_to_marginals
from torchgw._problem.limits import limits_of
from torchgw._problem.problem import stored_matrix
from torchgw._problem.table import Options
from torchgw._results.mapping import Extension
from torchgw._sinkhorn.duals import Array, Transport
from torchgw._sinkhorn.problem import DenseCost
from torchgw._solve.polish import descend, scale_to_marginals
from torchgw._solve.step import confined
from torchgw._tensors.deadline import countdown
from torchgw._typing import Marginals
from torchgw.distances.base import DistanceProvider
from torchgw.distances.new_points import straight_distances
from torchgw.distances.points import Space
from torchgw.distances.precomputed import DirectedDistance

# What `solve(certify=True)` proves, as a share of the value, and in how many seconds beyond the
# solve unless there is a time limit: those of `result.certify()`. Choices. [L1375]
_GAP, _SECONDS = 1e-3, 10.0


def question_of(extension: Extension, weights: Marginals) -> Question:
    """Read the problem of a result, float64 on the host."""
    alpha, sides = float(extension.known.alpha), [_side(extension, place) for place in (0, 1)]
    linear = extension.linear_cost() if alpha < 1 else None
    M = None if linear is None else to_numpy(linear.dense().matrix).astype(np.float64)
    # with alpha 0 the distances do not matter
    a, b = (to_numpy(part).astype(np.float64) for part in weights)
    a, b = a / a.sum(), b / b.sum()
    support = extension.allowed()
    return Question(
        sides[0][0], sides[1][0], a, b, alpha, M, (sides[0][1], sides[1][1]),
        None if support is None else to_numpy(support.cpu()),
    )  # fmt: skip


def certify(
    extension: Extension,
    solved: TransportPlan,
    plan: Callable[[], Tensor],
    *,
    seconds: float,
    gap: float,
    matchings: bool,
) -> Certificate:
    """Certify the plan (n, m) of a result; what is not covered is refused before any work."""
    known, (x, y) = extension.known, extension.spaces
    relaxed = known.own is not None or extension.mass != 1.0
    check_covered(known.loss.name, relaxed, (x, y), (known.distances(0), known.distances(1)))
    if not limits_of(solved.device).certifies(*solved.shape):
        if known.alpha < 1 or extension.allowed() is not None or matchings:
            raise UnsupportedError(
                "`certify` of so many points is for plans without a linear cost and pairs that are "
                "known or allowed. Certify a sample of the points."
            )
        a, b = (part.double() / part.double().sum() for part in solved.weights)
        X, Y = (to_numpy(side.points) * np.sqrt(side.scale) for side in (x, y))
        points = Points(X, Y, to_numpy(a), to_numpy(b))
        scale = float(x.scale), float(y.scale)
        return certificate_of_points(
            points, solved.rounded(a, b), seconds=seconds, gap=gap, scale=scale
        )
    question = question_of(extension, solved.weights)
    if matchings and not question.is_assignment:
        n, m = question.shape
        raise UnsupportedError(
            "kind='one_to_one' needs as many points on both sides, all of one weight; here are "
            f"{n} and {m}. Certify with kind='plan'."
        )

    def improve(matrix: Array) -> Array:
        """Follow a plan to a stationary one, unless matchings compete alone."""
        return matrix if matchings else _descended(question, matrix)

    given = plan()
    return make_certificate(
        question, exact_plan(question, given.cpu()), seconds=seconds, gap=gap,
        matchings=matchings, device=given.device, improve=improve,
        named=((_metric(x), _metric(y)), (float(x.scale), float(y.scale))),
    )  # fmt: skip


def certified_solve(solve: Callable[..., Any], init: Any, asked: Options) -> Any:
    """Solve, bound what any plan costs, and go on from the best plan that the bounds came by."""
    for name, odd in (
        ("differentiable", asked.differentiable is not None),
        ("distributed", bool(asked.distributed)),
        ("checkpoint", asked.checkpoint is not None),
        ("reflections", not asked.reflections),
    ):
        if odd:
            raise UnsupportedError(
                f"`certify` solves again from the best plan that its bounds come by, and `{name}` "
                "is about one solve. Leave it out, or call result.certify()."
            )
    left = countdown(asked.time_limit)
    gap = _GAP if asked.certify is True else float(asked.certify)
    plain = asked.replace(certify=False)
    with warnings.catch_warnings():
        # whether there may be a better optimum is what the bound says
        warnings.simplefilter("ignore", SearchWarning)
        result = solve(init=init, asked=plain, covered=True)
        found = result.certify(left() or _SECONDS, gap=gap)
        if found.plan is not None and found.best_value < found.value - found.rounding:
            again = plain.replace(search="auto", n_init=None, time_limit=left())
            other = solve(asked=again, init=found.plan.toarray())
            if other.report.objective < result.report.objective:
                question = question_of(other.extension, other.lazy_plan.weights)
                plan = exact_plan(question, other._certified_plan("plan").cpu())
                found = found.of(question.value(plan), scipy.sparse.csr_array(plan))
                result = replace(other, certificate=found)
    proof = result.certificate
    if proof.meets(gap):
        return replace(result, doubt="")
    doubt = (
        f"It is not proven that no plan is better by more than {gap:g} of the value: {proof}. Pass "
        "a larger `time_limit`; docs/certificates.md says which problems have tight bounds."
    )
    warn_user(doubt, SearchWarning)
    return replace(result, doubt=doubt)


def _descended(question: Question, plan: Array) -> Array:
    """Follow a plan to a stationary one of the objective."""
    support = None if question.allowed is None else torch.from_numpy(question.allowed)

    def cost_at(matrix: Tensor) -> Tensor:
        cost = torch.from_numpy(question.slope(matrix.numpy()))
        return cost if support is None else confined(DenseCost(cost), support, 0.0).matrix

    weights = Marginals(torch.from_numpy(question.a), torch.from_numpy(question.b))
    return descend(torch.from_numpy(plan), weights, None, cost_at, exact=True)[0].numpy()


def exact_plan(question: Question, plan: Tensor) -> Array:
    """Lead a plan to exact weights, within the pairs that may hold mass."""
    a, b = map(torch.from_numpy, (question.a, question.b))
    if question.allowed is None:
        return round_to_marginals(plan, a, b).numpy()
    found = scale_to_marginals(plan, Marginals(a, b))
    if found is not None:
        return found.numpy()
    # what no scaling leads there is replaced by the vertex below it, as polishing does
    slope = question.slope(plan.numpy())
    return Transport(question.a, question.b, question.allowed)(slope)[0]


def check_covered(
    loss: str,
    relaxed: bool,
    spaces: tuple[Space, Space],
    providers: tuple[DistanceProvider, DistanceProvider],
) -> None:
    """Refuse what no bound here is about."""
    if loss != "square":
        raise UnsupportedError(
            f"`certify` is for loss='square'; this solve had loss={loss!r}. "
            "`result.lower_bound` bounds the absolute loss."
        )
    if relaxed:
        raise UnsupportedError(
            "`certify` is for strict marginals; this solve had `unbalanced` or `mass`. Solve "
            "without them to certify the balanced problem."
        )
    limits, (n, m) = limits_of(providers[0].device), (part.n for part in providers)
    squared = all(_metric(space) == "sqeuclidean" for space in spaces)
    products = math.prod(space.points.shape[1] for space in spaces if space.points is not None)
    if not limits.certifies(n, m) and not (squared and products <= ACTIVE):
        raise UnsupportedError(
            f"`certify` takes up to {math.isqrt(limits.read):,} points a side, or squared "
            f"Euclidean distances with up to {ACTIVE} products of coordinates; here are {n:,} and "
            f"{m:,}. Use `result.lower_bound`, or certify a sample of the points."
        )
    for name, space, provider in zip("XY", spaces, providers, strict=True):
        if len(provider.relations()) > 1:
            raise UnsupportedError(
                f"`certify` bounds one relation, and {name} has {len(provider.relations())}. "
                "Certify each of them alone, or their sum."
            )
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
    table = to_numpy(straight_distances(space, space.points, space.points)) * space.scale
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
