"""The linear cost M: a given table, or distances between features of the two sides."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from torchgw._boundary.arrays import check_linear_cost, check_points, to_tensor
from torchgw._boundary.checks import check_choice, is_number, number_of
from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw._problem.limits import limits_of
from torchgw._sinkhorn.problem import Cost, DenseCost, FactoredCost
from torchgw.distances.factored import FactoredDistance
from torchgw.distances.points import ANGLES

FeatureMetric = Literal["sqeuclidean", "cosine", "correlation", "euclidean"]

# Signatures of nodes have variance one, adjacency matrices 0.01 to 0.02: at this weight both count
# alike. [L339]
_NAMED_ALPHA = 0.99


def check_feature_metric(features: Any, metric: FeatureMetric) -> None:
    """Refuse an unknown metric, and one that measures nothing."""
    check_choice("feature_metric", metric, get_args(FeatureMetric))
    if features is None and metric != "sqeuclidean":
        raise InvalidInputError(
            f"`feature_metric={metric!r}` was given without `features`. Pass both, or drop it."
        )


def check_features(value: Any, metric: FeatureMetric) -> tuple[Tensor, Tensor] | None:
    """Check a pair of features, (n, d) and (m, d), if any were given."""
    check_feature_metric(value, metric)
    if value is None:
        return None
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise InvalidInputError(
            "`features` must be a pair (F_X, F_Y) of shapes (n, d) and (m, d), or, for graphs, a "
            f"name such as 'degree'; got {type(value).__name__}."
        )
    source, target = (check_points(f"features[{side}]", item) for side, item in enumerate(value))
    if source.shape[1] != target.shape[1]:
        raise InvalidInputError(
            "`features` must have the same columns on both sides; got "
            f"{tuple(source.shape)} and {tuple(target.shape)}."
        )
    for side, item in enumerate((source, target)):
        first = item[:, :1] if metric == "correlation" else torch.zeros_like(item[:, :1])
        if metric in ANGLES and bool((item == first).all(1).any()):
            what = "zero" if metric == "cosine" else "constant"
            raise InvalidInputError(
                f"`features[{side}]` has a {what} row, which has no direction. Drop it, or pass "
                "feature_metric='sqeuclidean'."
            )
    return source, target


def is_fused(table: Any, features: tuple[Tensor, Tensor] | None) -> bool:
    """Say whether there is a linear cost; refuse two."""
    if table is not None and features is not None:
        raise InvalidInputError(
            "`M` and `features` are two ways to give one linear cost. Pass one of them."
        )
    return table is not None or features is not None


def linear_cost(
    table: Any,
    features: tuple[Tensor, Tensor] | None,
    metric: FeatureMetric,
    shape: tuple[int, int],
    device: torch.device,
) -> Cost | None:
    """Make M, shape (n, m), float64, from what was given; ``None`` if nothing was."""
    if table is not None:
        return DenseCost(check_linear_cost(table, shape).to(device).double())
    if features is None:
        return None
    rows = len(features[0]), len(features[1])
    if rows != shape:
        raise InvalidInputError(
            f"`features` must have one row per point, {shape[0]} and {shape[1]}; got {rows[0]} and "
            f"{rows[1]}."
        )
    source, target = (item.to(device).double() for item in features)
    if metric == "euclidean" and not limits_of(device).stores(*shape):
        raise UnsupportedError(
            f"feature_metric='euclidean' would store {shape[0]} x {shape[1]} distances, which is "
            "too many. Pass 'sqeuclidean' or 'cosine', which have factors and store none."
        )
    return feature_cost(source, target, metric)


def feature_cost(source: Tensor, target: Tensor, metric: FeatureMetric) -> Cost:
    """Compute distances between features, (n, d) and (m, d): factors, a table for "euclidean"."""
    if metric == "euclidean":
        # differentiable too, with derivative zero where two features coincide
        mode = "donot_use_mm_for_euclid_dist"
        return DenseCost(torch.cdist(source, target, compute_mode=mode))
    if metric == "correlation":
        source, target = (item - item.mean(1, keepdim=True) for item in (source, target))
    if metric in ANGLES:
        left, right = (item / item.norm(dim=1, keepdim=True) for item in (source, target))
        return FactoredCost(left, right, left.new_ones(len(left)), right.new_zeros(len(right)))
    # distances do not depend on the origin; numbers near it are small, and lose fewer digits
    middle = (source.mean(0) + target.mean(0)) / 2
    source, target = source - middle, target - middle
    return FactoredCost(2 * source, target, source.square().sum(1), target.square().sum(1))


def without_structure(
    table: Any, features: tuple[Tensor, Tensor] | None
) -> tuple[FactoredDistance, FactoredDistance]:
    """Make spaces for ``alpha=0``: as many points as the linear cost has, all at distance zero."""
    if features is not None:
        shape: tuple[int, ...] = len(features[0]), len(features[1])
    else:
        shape = () if table is None else tuple(to_tensor("M", table).shape)
    if len(shape) != 2:
        raise InvalidInputError(
            "`alpha=0` needs a linear cost: `M` of shape (n, m), or `features=(F_X, F_Y)`."
        )
    one = torch.ones(1, dtype=torch.float64, device="cpu")
    source, target = (FactoredDistance(one.new_zeros(size, 1), one) for size in shape)
    return source, target


def spread(cost: Cost, support: Tensor | None = None) -> float:
    """Compute the standard deviation of the entries of a cost on a support, all counted alike."""
    if support is not None:
        return float(cost.dense().matrix[support].std(correction=0))
    if isinstance(cost, DenseCost):
        return float(cost.matrix.std(correction=0))
    left, right, row, column = cost.centred()
    # centred rows, columns and products are uncorrelated
    products = ((left.T @ left) * (right.T @ right)).sum() / (len(left) * len(right))
    variance = row.var(correction=0) + column.var(correction=0) + products
    return float(variance.clamp_min(0).sqrt())


def check_alpha(
    alpha: float | Tensor | None, *, fused: bool, named: bool = False, tracked: bool = False
) -> float:
    """Choose the weight of the quadratic term: as given, or 1, or less with a linear cost."""
    # With a linear cost it is 0.5, or 0.99 with signatures that were asked for by name. Tensors
    # that require gradients are refused unless `tracked`.
    if alpha is None:
        return 1.0 if not fused else _NAMED_ALPHA if named else 0.5
    alpha = number_of("alpha", alpha, tracked=tracked)
    if not is_number(alpha) or not 0 <= alpha <= 1:
        raise InvalidInputError(f"`alpha` must be a number in [0, 1]; got {alpha!r}.")
    if alpha < 1 and not fused:
        raise InvalidInputError(
            f"`alpha={alpha}` weighs a linear cost, and none was given. Pass `M` or `features`, "
            "or drop `alpha`."
        )
    return float(alpha)
