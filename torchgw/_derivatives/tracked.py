"""A problem as a differentiable function of the tensors that require gradients; what is refused.

The providers of :mod:`torchgw.distances` are made for speed and have no graph. Here the same
distances are made by the few operations whose derivatives are needed, in memory O(n r).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw._problem.limits import limits_of
from torchgw._problem.losses import Loss
from torchgw._problem.named import ScaleName
from torchgw._problem.problem import FeatureMetric, MarginalRule, Problem, feature_cost
from torchgw._problem.table import Differentiable
from torchgw._sinkhorn.problem import Cost, DenseCost
from torchgw._solve.state import Options
from torchgw._typing import Marginals
from torchgw.distances.base import BLOCK_ENTRIES, DistanceProvider, both_ways
from torchgw.distances.curved import CurvedDistance
from torchgw.distances.landmark import LandmarkDistance, NystromDistance
from torchgw.distances.points import CurvedModel, PointDistance
from torchgw.distances.precomputed import DirectedDistance, PrecomputedDistance


def tracked_inputs(**inputs: Any) -> dict[str, Tensor]:
    """Pick the inputs, and what providers were made from, that are tensors with gradients."""
    for name in ("X", "Y"):
        provider = inputs[name]
        if isinstance(provider, DistanceProvider):
            inputs[f"D_{name}"] = provider.given
            kept = vars(provider).values() if provider.given is None else ()
            if any(isinstance(part, Tensor) and part.requires_grad for part in kept):
                raise UnsupportedError(
                    f"`{name}` is a {type(provider).__name__} of points that require a gradient, "
                    "and only points themselves get one. Pass them and `distances`."
                )
    features = inputs.pop("F", None)
    if features is not None:
        inputs.update(zip(("F_X", "F_Y"), features, strict=True))
    return {
        name: value
        for name, value in inputs.items()
        if isinstance(value, Tensor) and value.requires_grad
    }


def check_units(
    mode: Differentiable, options: Options, scale: ScaleName | None, loss: Loss
) -> ScaleName | None:
    """Check the options of a differentiable solve, and say what ``scale`` means in it."""
    if not isinstance(mode, str) or mode not in get_args(Differentiable):
        raise InvalidInputError(
            f"`differentiable` must be 'value', 'implicit', 'unrolled' or None; got {mode!r}."
        )
    if options.regularization != "entropic" or options.polish:
        raise UnsupportedError(
            "`differentiable` needs regularization='entropic' and polish=False: other plans are no "
            "fixed points of the entropic objective."
        )
    if not loss.is_square:
        raise UnsupportedError(
            f"`differentiable` knows the square loss only; got loss={loss.name!r}. Pass "
            "loss='square', or leave `differentiable` out."
        )
    if options.epsilon == "auto":
        raise InvalidInputError(
            "`differentiable` needs a number for `epsilon`: epsilon='auto' follows the inputs. "
            "Solve once with scale=None and without `differentiable`, and pass `result.epsilon`."
        )
    if options.rule is not None and mode == "unrolled":
        raise UnsupportedError(
            "differentiable='unrolled' iterates on strict marginals. Pass 'value' or 'implicit' "
            "with `unbalanced` and `mass`."
        )
    return None if scale == "auto" else scale


def check_tracked(
    inputs: Mapping[str, Tensor], problem: Problem, rule: MarginalRule | None, *, scaled: bool
) -> None:
    """Refuse inputs that have no gradient, with the reason."""
    if "alpha" in inputs and problem.alpha == 0 and rule and rule.fixed_mass is None:
        raise UnsupportedError(
            "`alpha` requires a gradient and is 0, where the penalties of `unbalanced` become "
            "those of a linear objective. Pass alpha > 0."
        )
    for name, provider in (("X", problem.source), ("Y", problem.target)):
        if (name in inputs or f"D_{name}" in inputs) and scaled:
            raise UnsupportedError(
                f"`{name}` requires a gradient and `scale` divides its distances by their maximum "
                "or mean, which moves with it. Pass `scale=None`, or divide before the call."
            )
        if name in inputs and (
            isinstance(provider, NystromDistance) and not isinstance(provider, LandmarkDistance)
        ):
            raise UnsupportedError(
                f"`{name}` requires a gradient, and factors from landmarks have none. Drop "
                "`n_landmarks`, or give that side's distances as a table that you computed "
                "differentiably."
            )
        if name in inputs and not isinstance(provider, (PointDistance, CurvedDistance)):
            raise UnsupportedError(
                f"`{name}` requires a gradient, and geodesics have none: the neighbour graph and "
                "its shortest paths jump when points move. Pass distances='sqeuclidean', "
                "'euclidean', 'cosine' or 'poincare', or `D_X`, `D_Y` that you computed "
                "differentiably."
            )


def check_stored(mode: Differentiable, rule: MarginalRule | None, weights: Marginals) -> None:
    """Refuse derivatives that would store too large a plan, or divide by weights of zero."""
    if mode == "unrolled":
        what, way = "differentiable='unrolled'", "pass differentiable='implicit'."
    elif rule is not None:
        what, way = "A derivative with `unbalanced` or `mass`", "take strict marginals."
    else:
        return
    n, m = map(len, weights)
    most = limits_of(weights.a.device).differentiated
    if n * m > most:
        raise UnsupportedError(
            f"{what} stores the plan and is limited to {most:,} pairs; got {n} x {m}. Take "
            f"fewer points, or {way}"
        )
    if not all(bool((weight > 0).all()) for weight in weights):
        raise UnsupportedError(
            f"{what} needs positive weights. Drop the points of weight zero, or {way}"
        )


class Definition(NamedTuple):
    """A problem, and the features that its linear cost was made from, if any."""

    problem: Problem
    features: tuple[Tensor, Tensor] | None
    metric: FeatureMetric
    rule: MarginalRule | None = None  # of relaxed marginals


@dataclass(frozen=True)
class Model:
    """Distances, weights and linear cost as functions of some inputs, float64."""

    source: TrackedSide
    target: TrackedSide
    a: Tensor
    b: Tensor
    linear: Cost | None
    alpha: float | Tensor
    tracked: frozenset[str]  # names of the inputs
    epsilon: Tensor | None = None  # if it is an input

    @property
    def source_moves(self) -> bool:
        """Whether alpha D_X moves."""
        return bool(self.tracked & {"X", "D_X", "alpha"})

    @property
    def target_moves(self) -> bool:
        """Whether alpha D_Y moves."""
        return bool(self.tracked & {"Y", "D_Y", "alpha"})

    @property
    def ways(self) -> list[tuple[TrackedSide, TrackedSide]]:
        """Both sides, in both directions if costs of either have directions."""
        return both_ways(self.source, self.target)

    def crossed(self, table: Tensor) -> Tensor:
        """Compute D_X table D_Y, or the mean of D_X table D_Y' over both ways, (n, m)."""
        return torch.stack([far.apply(near.apply(table).T).T for near, far in self.ways]).mean(0)

    @property
    def linear_moves(self) -> bool:
        """Whether (1 - alpha) M moves."""
        return bool(self.tracked & {"M", "F_X", "F_Y", "alpha"})

    @classmethod
    def of(cls, definition: Definition, inputs: Mapping[str, Tensor]) -> Model:
        """Write a problem as a function of the inputs; the rest of it is constant."""
        problem, features, metric, _ = definition
        device, dtype = problem.source.device, torch.float64
        moved = {name: value.to(device, dtype) for name, value in inputs.items()}
        a, b = (
            moved[name] / moved[name].sum() if name in moved else given
            for name, given in zip(("a", "b"), problem.marginals, strict=True)
        )
        source = side_of(problem.source, moved.get("X"), moved.get("D_X"))
        target = side_of(problem.target, moved.get("Y"), moved.get("D_Y"))
        linear = problem.linear
        if "M" in moved:
            table = moved["M"]
            if problem.support is not None:
                # infinite entries are no numbers
                table = torch.where(problem.support, table, 0.0)
            linear = DenseCost(table)
        if features is not None:
            pair = (item.to(device, dtype) for item in features)
            near, far = (
                moved.get(name, item) for name, item in zip(("F_X", "F_Y"), pair, strict=True)
            )
            linear = feature_cost(near, far, metric)
        alpha = moved.get("alpha", problem.alpha)
        return cls(source, target, a, b, linear, alpha, frozenset(inputs), moved.get("epsilon"))


def side_of(provider: DistanceProvider, points: Tensor | None, table: Tensor | None) -> TrackedSide:
    """Write the distances of one side as a function of its points or its table, if one moves."""
    if points is not None and isinstance(provider, CurvedDistance):
        return _curved_side(points, provider.model, provider.curvature)
    if points is not None:
        assert isinstance(provider, PointDistance)
        if provider.metric == "euclidean":
            return _EuclideanSide(points - points.mean(0))
        squared = provider.metric == "sqeuclidean"
        if provider.metric == "correlation":
            points = points - points.mean(1, keepdim=True)
        if squared:
            return _FactoredSide(_squared_form(points))
        # 1 - cos is half the squared distance of x / |x|
        matrix, form = _squared_form(points / points.norm(dim=1, keepdim=True))
        return _FactoredSide(Form(matrix, form / 2))
    if table is not None:
        if provider.directed:
            return _ProvidedSide(DirectedDistance.unchecked(table))
        assert isinstance(provider, PrecomputedDistance)
        # symmetrised, as a derivative by one entry alone would leave the symmetric matrices
        return _ProvidedSide(PrecomputedDistance.unchecked((table + table.T) / 2))
    return _ProvidedSide(provider.to(provider.device, torch.float64))


class Form(NamedTuple):
    """Factors of distances: D = matrix @ form @ matrix.T."""

    matrix: Tensor  # (n, r)
    form: Tensor  # (r, r), constant


class _ProvidedSide:
    """The distances of a provider: a given table, or a side that no gradient is asked of."""

    def __init__(self, provider: DistanceProvider) -> None:
        self.provider, self.apply = provider, provider.apply
        self.mean_square, self.columns = provider.mean_square, provider.columns

    def form(self) -> Form | None:
        factors = self.provider.factors()
        return None if factors is None else Form(factors.matrix, factors.signs.diag())

    def ways(self) -> tuple[TrackedSide, ...]:
        # the costs in both directions, of which D is the mean
        ways = self.provider.ways()
        return (self,) if len(ways) == 1 else tuple(map(_ProvidedSide, ways))


class _FactoredSide:
    """Squared Euclidean or cosine distances of points."""

    def __init__(self, form: Form) -> None:
        self._form = form

    def form(self) -> Form:
        return self._form

    def ways(self) -> tuple[TrackedSide, ...]:
        return (self,)

    def apply(self, values: Tensor) -> Tensor:
        matrix, form = self._form
        return matrix @ (form @ (matrix.T @ values))

    def mean_square(self, weights: Tensor) -> Tensor:
        matrix, form = self._form
        inner = form @ (matrix.T @ (weights[:, None] * matrix)) @ form
        return ((matrix @ inner) * matrix).sum(1)

    def columns(self, index: Tensor) -> Tensor:
        matrix, form = self._form
        return matrix @ (form @ matrix[index].T)


class _StreamedSide:
    """Distances of points by their coordinates, streamed by blocks of ``rows``, (n, k)."""

    # `between` makes distances (q, s) of two blocks of rows

    def __init__(self, rows: Tensor, between: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.rows, self.between = rows, between

    def form(self) -> None:
        return None

    def ways(self) -> tuple[TrackedSide, ...]:
        return (self,)

    def _by_blocks(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Join a function of blocks of rows of D, which its derivative computes again."""
        height = max(1, BLOCK_ENTRIES // self.rows.numel())

        def block(near: Tensor) -> Tensor:
            return function(self.between(near, self.rows))

        if height >= len(self.rows):
            # nothing to save, and the first checkpoint of a process loads torch.compile
            return block(self.rows)
        parts = (checkpoint(block, part, use_reentrant=False) for part in self.rows.split(height))
        return torch.cat(list(parts))

    def apply(self, values: Tensor) -> Tensor:
        return self._by_blocks(lambda distance: distance @ values)

    def mean_square(self, weights: Tensor) -> Tensor:
        return self._by_blocks(lambda distance: distance.square() @ weights)

    def columns(self, index: Tensor) -> Tensor:
        return self.between(self.rows, self.rows[index])


class _EuclideanSide(_StreamedSide):
    """Euclidean distances of points; their derivative at a coincidence is zero."""

    def __init__(self, points: Tensor) -> None:
        super().__init__(points, _euclidean)

    def mean_square(self, weights: Tensor) -> Tensor:
        return _FactoredSide(_squared_form(self.rows)).apply(weights[:, None])[:, 0]


# The distances D of one side, differentiable in inputs and arguments: ``form()``, factors if there
# are any; ``ways()``, itself or costs there and back; ``apply(values)``, D @ values;
# ``mean_square(weights)``, (D * D) @ weights; ``columns(index)``, D[:, index].
TrackedSide = _ProvidedSide | _FactoredSide | _StreamedSide


def _curved_side(points: Tensor, model: CurvedModel, curvature: float) -> _StreamedSide:
    """Make distances of constant curvature; where points coincide their derivative is zero."""
    root = math.sqrt(curvature)
    points = points * root
    # points move along the sphere; on the hyperboloid the time coordinate follows the others
    if model == "sphere":

        def angle(x: Tensor, y: Tensor) -> Tensor:
            return 2 / root * torch.atan2(_euclidean(x, y), _euclidean(x, -y))

        return _StreamedSide(points / points.norm(dim=1, keepdim=True), angle)
    if model == "lorentz":
        points = points[:, 1:]
        time = (1 + points.square().sum(1, keepdim=True)).sqrt()
        points, factor = points / (1 + time), ((1 + time) / 2).sqrt()
    else:
        factor = (1 - points.square().sum(1, keepdim=True)).rsqrt()

    def arc(x: Tensor, y: Tensor) -> Tensor:
        return 2 / root * (_euclidean(x[:, :-1], y[:, :-1]) * x[:, -1:] * y[:, -1]).asinh()

    return _StreamedSide(torch.cat([points, factor], 1), arc)


def _euclidean(x: Tensor, y: Tensor) -> Tensor:
    """Compute |x_i - y_j|, with derivative zero where it is zero."""
    square = (x[:, None, :] - y).square().sum(2)
    away = square > 0
    return torch.where(away, torch.where(away, square, 1.0).sqrt(), 0.0)


def _squared_form(points: Tensor) -> Form:
    """Write |x_i - x_j|^2 = u_i + u_j - 2 x_i . x_j as a form of (1, u, x), u = |x|^2."""
    points = points - points.mean(0)
    square = points.square().sum(1, keepdim=True)
    form = -2 * torch.eye(points.shape[1] + 2, dtype=points.dtype, device=points.device)
    form[:2, :2] = form.new_tensor([[0.0, 1.0], [1.0, 0.0]])
    return Form(torch.cat([torch.ones_like(square), square, points], dim=1), form)
