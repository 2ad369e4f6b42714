"""Every option of a solve, checked once."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any, Literal, get_args

import numpy as np
import torch

from torchgw._boundary.checks import check_choice, check_count, check_positive
from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw._gradients.choose import GradientName
from torchgw._problem.marginals import MarginalRule
from torchgw._search.alternatives import SearchName
from torchgw._sinkhorn.choose import check_backend
from torchgw._tensors.ranks import Ranks

Precision = Literal["auto", "mixed", "float64", "float32"]
Storage = Literal["auto", "stored", "streamed"]
Regularization = Literal["entropic", "proximal"]
Differentiable = Literal["value", "implicit", "unrolled"]


@dataclass(frozen=True)
class Options:
    """Options of the solver proper; :func:`torchgw.solve` documents each."""

    epsilon: float | Literal["auto"] = "auto"
    gradient: GradientName = "auto"
    n_anchors: int | None = None
    n_init: int | None = None
    search: SearchName = "auto"
    redraw: float = 0.9
    max_iter: int = 500
    min_iter: int = 40
    tol: float = 1e-5
    objective_tol: float = 1e-4
    inner_max_iter: int = 2000
    inner_tol: float | None = None
    backend: Any = "auto"  # a name, or a Backend
    precision: Precision = "auto"
    storage: Storage = "auto"
    regularization: Regularization = "entropic"
    polish: bool | None = None  # None: proximal steps where plans are stored
    rule: MarginalRule | None = None  # relaxed marginals; None for strict ones
    skip_tiles: bool | Literal["auto"] = "auto"
    resolution: float | Literal["auto"] | None = "auto"
    fixed_point: bool = False  # whether the plan is to be differentiated at a fixed point
    ranks: Ranks | None = None  # processes that share the solve
    # what an earlier solve of the same call has said of its time
    told: Literal["nothing", "loops", "all"] = "nothing"

    def __post_init__(self) -> None:
        """Check every field; the messages name the argument of :func:`torchgw.solve`."""
        for item in fields(self):
            value = getattr(self, item.name)
            # numbers as results report them, which can go into JSON
            single = isinstance(value, torch.Tensor) and value.ndim == 0 and not value.requires_grad
            if isinstance(value, np.generic) or single:
                object.__setattr__(self, item.name, value.item())
        if not isinstance(self.epsilon, str) or self.epsilon != "auto":
            check_positive("epsilon", self.epsilon, "pass epsilon='auto' for an automatic value")
        check_choice("gradient", self.gradient, get_args(GradientName))
        check_choice("search", self.search, get_args(SearchName))
        check_backend(self.backend)
        check_choice("precision", self.precision, get_args(Precision))
        check_choice("storage", self.storage, get_args(Storage))
        check_choice("regularization", self.regularization, get_args(Regularization))
        if self.polish is not None and not isinstance(self.polish, bool):
            raise InvalidInputError(f"`polish` must be True, False or None; got {self.polish!r}.")
        known = isinstance(self.skip_tiles, bool) or (
            isinstance(self.skip_tiles, str) and self.skip_tiles == "auto"
        )
        if not known:
            raise InvalidInputError(
                f"`skip_tiles` must be True, False or 'auto'; got {self.skip_tiles!r}."
            )
        resolution: Any = self.resolution
        if isinstance(resolution, Real) and not isinstance(resolution, bool) and resolution == 0:
            object.__setattr__(self, "resolution", None)
        elif resolution is not None and not (isinstance(resolution, str) and resolution == "auto"):
            check_positive("resolution", self.resolution, "0 or None solves on all points")
        for name in ("max_iter", "min_iter", "inner_max_iter", "n_anchors", "n_init"):
            check_count(name, getattr(self, name), none=name.startswith("n_"))
        check_positive("tol", self.tol, "small values mean more iterations")
        number = isinstance(self.objective_tol, Real) and not isinstance(self.objective_tol, bool)
        if not number or self.objective_tol != 0:
            check_positive("objective_tol", self.objective_tol, "0 switches the rule off")
        if self.inner_tol is not None:
            check_positive("inner_tol", self.inner_tol, "small values mean more iterations")
        check_positive("redraw", self.redraw, "0.9 redraws nine anchors of ten")
        if self.redraw > 1:
            raise InvalidInputError(
                f"`redraw` is the share of anchors redrawn, in (0, 1]; got {self.redraw!r}."
            )

        self.check_gradient(self.gradient)

    def check_gradient(self, gradient: str, advice: Callable[[], str] = str) -> None:
        """Refuse the sampled gradient, asked for or chosen, where an exact one is needed."""
        if gradient != "sampled":
            return
        if self.polish:
            raise UnsupportedError(
                "`polish=True` needs an exact gradient, and this solve samples its own. Pass "
                f"gradient='dense' or 'factored', or polish=False.{advice()}"
            )
        if self.fixed_point:
            raise UnsupportedError(
                "differentiable='implicit' needs a fixed point, and a sampled gradient has none. "
                "Pass gradient='dense' or 'factored', or differentiable='value'."
            )

    def check_combination(
        self, *, linear: bool, differentiable: bool, checkpoint: bool, weight: float = 1.0
    ) -> None:
        """Refuse what relaxed marginals do not combine with, with the reason."""
        if self.rule is None:
            return
        with_squares = {
            "`differentiable` follows penalties by entropy": differentiable,
            "`checkpoint` keeps one solve of several": checkpoint,
            "`alpha=0` is unbalanced transport, which ot.solve has": weight == 0,
        }
        for reason, holds in with_squares.items():
            if self.rule.squares and holds:
                raise UnsupportedError(
                    f"`unbalanced_type='l2'` solves for some penalties by entropy, and {reason}. "
                    "Leave one of them out."
                )
        relaxed = "`unbalanced`" if self.rule.mass is None else "`mass`"
        if self.regularization == "proximal":
            raise UnsupportedError(
                f"regularization='proximal' is for plans of given marginals, and {relaxed} relaxes "
                "them. Pass regularization='entropic'."
            )
        if self.polish and not self.rule.polyhedral:
            raise UnsupportedError(
                "`polish=True` moves between plans whose marginals are given, free or bounded, and "
                f"{relaxed} penalises them. Pass polish=False, (inf, 0) or (0, inf)."
            )
        if differentiable and self.gradient == "sampled":
            raise UnsupportedError(
                f"`differentiable` with {relaxed} needs an exact gradient. Pass gradient='auto', "
                "'dense' or 'factored'."
            )
        if linear and checkpoint and self.rule.fixed_mass is None:
            raise UnsupportedError(
                "`checkpoint` with a linear cost (`M` or `features`) needs plans of a mass that is "
                "known. Make one side strict, (inf, rho), or pass `mass`."
            )

    def check_search(self, *, given: bool, crossed: bool) -> None:
        """Refuse a thorough search where none would be made."""
        if self.search != "thorough":
            return
        why = {
            "`init` says where to start": given,
            "n_init=1 asks for a single start": self.n_init == 1,
            "relaxed marginals have starts of their own": self.rule is not None,
            "with the absolute loss that takes too long": not crossed,
        }
        for reason, holds in why.items():
            if holds:
                raise UnsupportedError(
                    f"search='thorough' follows many starts on all points, and {reason}. Leave one "
                    "of them out."
                )

    def check_resolution(self, *, given: bool, differentiable: bool, checkpoint: bool) -> "Options":
        """Refuse cells where all points are needed; where cells are "auto", take all points."""
        why = {
            "`init` says where to start": given,
            "derivatives are those of a plan of all points": differentiable,
            "`checkpoint` keeps where the loop over all points stands": checkpoint,
            "proximal steps sharpen the plan of points": self.regularization == "proximal",
            "`polish` makes a plan of points": bool(self.polish),
            "the masses of `unbalanced` and `mass` are not known beforehand": self.rule is not None,
            f"gradient={self.gradient!r} reads no means of them as 'factored' does": (
                self.gradient not in ("auto", "factored")
            ),
        }
        reasons = [reason for reason, holds in why.items() if holds]
        if not reasons:
            return self
        if self.resolution not in ("auto", None):
            raise UnsupportedError(
                f"`resolution` solves on cells of near points, and {reasons[0]}. Leave out "
                "`resolution`, or the other."
            )
        return replace(self, resolution=None)

    @property
    def sharp(self) -> bool:
        """Whether the plan is to minimise the objective without entropy: proximal or polished."""
        return bool(self.polish) or (self.polish is None and self.regularization == "proximal")

    @property
    def patience(self) -> int:
        """Checks without progress before a sampled solve stops."""
        return max(self.min_iter // 2, 20)


def merge_precision(dtype: torch.dtype | None, precision: Precision) -> Precision:
    """Return the precision that ``dtype`` and ``precision`` ask for together."""
    if dtype is None:
        return precision
    names: dict[torch.dtype, Precision] = {torch.float32: "float32", torch.float64: "float64"}
    if not isinstance(dtype, torch.dtype) or dtype not in names:
        raise InvalidInputError(f"`dtype` must be torch.float32 or torch.float64; got {dtype!r}.")
    if precision not in ("auto", names[dtype]):
        raise InvalidInputError(
            f"`dtype={dtype}` contradicts `precision={precision!r}`; pass one of them."
        )
    return names[dtype]
