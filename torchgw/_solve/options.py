"""The options of a call as the solver reads them, and which of them go together."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw._problem.marginals import MarginalRule
from torchgw._solve import table
from torchgw._solve.table import Precision, check_options
from torchgw._tensors.ranks import Ranks


@dataclass(kw_only=True, unsafe_hash=True, repr=False)
class Options(table.Options):
    """Options of a call that are checked, and what else the solver goes by."""

    epsilon: float | Literal["auto"] = "auto"
    rule: MarginalRule | None = None  # relaxed marginals; None for strict ones
    fixed_point: bool = False  # whether the plan is to be differentiated at a fixed point
    ranks: Ranks | None = None  # processes that share the solve
    # what an earlier solve of the same call has said of its time
    told: Literal["nothing", "loops", "all"] = "nothing"

    @classmethod
    def of(
        cls, asked: table.Options, epsilon: float | Literal["auto"], rule: MarginalRule | None
    ) -> "Options":
        """Read the options of a call; epsilon is a number, where a tensor was given."""
        check_options(epsilon=epsilon)
        read = {
            "epsilon": epsilon,
            "objective_tol": 0.0 if asked.differentiable else asked.objective_tol,
            "precision": merge_precision(asked.dtype, asked.precision),
            "resolution": asked.resolution or None,
        }
        fixed = asked.differentiable == "implicit"
        return cls(**vars(asked) | read, rule=rule, fixed_point=fixed)

    def __post_init__(self) -> None:
        """Refuse what does not go together; every option has been checked."""
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

    def check_combination(self, *, linear: bool, weight: float = 1.0) -> None:
        """Refuse what relaxed marginals do not combine with, with the reason."""
        if self.rule is None:
            return
        differentiable, checkpoint = self.differentiable is not None, self.checkpoint is not None
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
        if self.unbalanced_unit != "value" and differentiable:
            raise UnsupportedError(
                "unbalanced_unit='scale' follows the inputs, and derivatives take `unbalanced` as "
                "it is. Pass the number, in units of the value."
            )
        several = {
            "`differentiable` follows one": differentiable,
            "`checkpoint` keeps one": checkpoint,
        }
        for reason, holds in several.items():
            if self.rule.chosen and holds:
                raise UnsupportedError(
                    f"mass='auto' makes a solve for each of many masses, and {reason}. Pass the "
                    "number that mass='auto' finds without it, `result.report.mass`."
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
        """Refuse a thorough search where none would be made, and a start of many masses."""
        if given and self.rule is not None and self.rule.chosen:
            raise UnsupportedError(
                "mass='auto' begins each of its masses at the plan of another. Leave `init` out, "
                "or pass the mass of that plan."
            )
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

    def check_resolution(self, *, given: bool) -> "Options":
        """Refuse cells where all points are needed; where cells are "auto", take all points."""
        why = {
            "`init` says where to start": given,
            "derivatives are those of a plan of all points": self.differentiable is not None,
            "`checkpoint` keeps where the loop over all points stands": self.checkpoint is not None,
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
    if precision not in ("auto", names[dtype]):
        raise InvalidInputError(
            f"`dtype={dtype}` contradicts `precision={precision!r}`; pass one of them."
        )
    return names[dtype]
