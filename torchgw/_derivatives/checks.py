"""What can be differentiated: the inputs that ask for it, and what is refused."""

from collections.abc import Mapping
from typing import Any, get_args

from torch import Tensor

from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw._problem.limits import limits_of
from torchgw._problem.losses import Loss
from torchgw._problem.marginals import MarginalRule
from torchgw._problem.named import ScaleName
from torchgw._problem.problem import Problem
from torchgw._solve.options import Options
from torchgw._solve.table import Differentiable
from torchgw._typing import Marginals
from torchgw.distances.base import DistanceProvider
from torchgw.distances.curved import CurvedDistance
from torchgw.distances.landmark import LandmarkDistance, NystromDistance
from torchgw.distances.points import PointDistance


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
