"""A problem of POT as a call of :func:`torchgw.solve`; what is not solved here is refused."""

from __future__ import annotations

import math
from numbers import Real
from typing import Literal, NamedTuple

from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw._problem import losses
from torchgw._problem.losses import LossName
from torchgw._solve.options import Regularization

__all__ = ["Call", "LOSSES", "call_of", "kind_of", "refuse", "refuse_combination"]

# POT's names of losses, and ours.
LOSSES: dict[str, LossName] = {
    loss.pot: loss.name for loss in losses.LOSSES.values() if loss.pot is not None
}


class Call(NamedTuple):
    """What a problem of POT is for :func:`torchgw.solve`."""

    epsilon: float | Literal["auto"]
    unbalanced: float | tuple[float, float] | None = None
    mass: float | None = None
    regularization: Regularization = "entropic"
    polish: bool = False
    unit: float = 1.0  # POT's objective over ours


def kind_of(unbalanced: float | None, unbalanced_type: str) -> str:
    """Say which marginals a plan must have: balanced, KL, semi-relaxed or partial."""
    name = str(unbalanced_type).lower()
    if name == "semirelaxed":
        return name
    if unbalanced is None:
        return "balanced"
    if name not in ("kl", "partial"):
        raise UnsupportedError(
            f"`unbalanced_type={unbalanced_type!r}` is not solved here: penalties of marginals are "
            "KL. Use POT, or 'KL', 'semirelaxed' or 'partial'."
        )
    if not isinstance(unbalanced, Real) or not unbalanced > 0:
        raise InvalidInputError(
            f"`unbalanced` must be a positive number, the weight of KL or the mass that a partial "
            f"plan moves; got {unbalanced!r}."
        )
    return name


def call_of(
    kind: str, unbalanced: float | None, alpha: float, reg: float | None, method: str | None
) -> Call:
    """Find the options of :func:`torchgw.solve` for a problem of POT."""
    epsilon: float | Literal["auto"] = reg or "auto"
    if kind == "partial":
        return Call(epsilon, mass=unbalanced, polish=not reg)
    if kind == "semirelaxed":
        return Call("auto", (math.inf, 0.0), polish=True)
    if kind == "kl":
        assert unbalanced is not None
        epsilon = reg / alpha if reg else "auto"
        return Call(epsilon, unbalanced / (2 * alpha), unit=alpha)
    sharp = not reg or method == "PPA"
    return Call(epsilon, regularization="proximal" if sharp else "entropic", polish=not reg)


def refuse(loss: str, symmetric: bool | None, reg_type: str, n_threads: int) -> None:
    """Refuse arguments that torchgw has no counterpart for, with the reason."""
    if str(loss).upper() not in LOSSES:
        known = " or ".join(map(repr, LOSSES))
        raise UnsupportedError(f"`loss` must be {known}, as in POT; got {loss!r}.")
    if symmetric is False:
        raise UnsupportedError(
            "`symmetric=False` is not implemented: distances are symmetric. Use POT for directed "
            "costs, or pass (C + C.T) / 2."
        )
    if str(reg_type).lower() != "entropy":
        raise UnsupportedError(f"`reg_type` must be 'entropy'; got {reg_type!r}. Use POT.")
    if n_threads != 1:
        raise UnsupportedError(
            f"`n_threads` must be 1; got {n_threads!r}. Threads are set for all of PyTorch: "
            "torch.set_num_threads."
        )


def refuse_combination(
    kind: str, *, linear: bool, alpha: float, reg: float | None, method: str | None
) -> None:
    """Refuse arguments that do not go together, with the reason."""
    if reg is not None and reg < 0:
        raise InvalidInputError(f"`reg` must not be negative; got {reg!r}.")
    if method not in (None, "PGD", "PPA"):
        raise UnsupportedError(f"`method` must be 'PGD', 'PPA' or None; got {method!r}.")
    if not reg and method is not None:
        raise UnsupportedError(
            f"`method={method!r}` is a choice for regularised problems. Pass `reg`, or drop it."
        )
    if kind != "balanced" and method == "PPA":
        raise UnsupportedError(
            "method='PPA' keeps to the last plan and so both of its marginals. Drop it, or "
            "`unbalanced`."
        )
    if alpha == 0 and kind == "kl":
        raise UnsupportedError(
            "`alpha=0` with KL marginals is unbalanced transport without structure: use "
            "ot.solve(M, a, b, reg, unbalanced=...)."
        )
    if alpha == 0 and linear and not reg:
        raise UnsupportedError(
            "`alpha=0` without `reg` is a linear program: use ot.solve(M, a, b). Or pass `reg`."
        )
    if kind == "kl" and linear and alpha != 1:
        raise UnsupportedError(
            "KL marginals with a linear cost are not solved here: M grows with the mass of the "
            "plan and the quadratic cost with its square, and torchgw iterates on plans of mass "
            "one. Use POT, or drop `M`."
        )
