"""Which problem of POT a call of ``solve_gromov`` is; what is not solved here is refused."""

from __future__ import annotations

from numbers import Real
from typing import Any, Literal

from torchgw._errors import InvalidInputError, TorchGWWarning, UnsupportedError, warn_user

Kind = Literal["balanced", "semirelaxed", "partial", "kl", "l2"]

# The losses of solve_gromov, and those of ot.gromov.
LOSSES = {"L2": "square_loss", "KL": "kl_loss"}


def kind_of(unbalanced: Any, unbalanced_type: str) -> Kind:
    """Say which marginals a plan must have."""
    name = str(unbalanced_type).lower()
    if name == "semirelaxed":
        return "semirelaxed"
    if unbalanced is None:
        if name == "partial":
            warn_user(
                "`unbalanced=None` is the balanced problem whatever `unbalanced_type` says; pass "
                "the mass that is to move.",
                TorchGWWarning,
            )
        return "balanced"
    if name not in ("kl", "l2", "partial"):
        raise UnsupportedError(
            f"`unbalanced_type={unbalanced_type!r}` is not solved here. Use 'KL', 'L2', "
            "'semirelaxed' or 'partial'."
        )
    both = unbalanced if isinstance(unbalanced, (tuple, list)) and name != "partial" else None
    if not all(isinstance(weight, Real) and float(weight) > 0 for weight in both or (unbalanced,)):
        raise InvalidInputError(
            f"`unbalanced` must be a positive number, the weight of a penalty or the mass that a "
            f"partial plan moves; got {unbalanced!r}."
        )
    return name  # type: ignore[return-value]


def refuse(
    kind: Kind, loss: str, reg: float | None, reg_type: str, n_threads: int, method: str | None
) -> None:
    """Refuse arguments that torchgw has no counterpart for, with the reason."""
    if str(loss).upper() not in LOSSES:
        known = " or ".join(map(repr, LOSSES))
        raise UnsupportedError(f"`loss` must be {known}, as in POT; got {loss!r}.")
    if reg is not None and not (isinstance(reg, Real) and reg >= 0):
        raise InvalidInputError(f"`reg` must be a number, not negative; got {reg!r}.")
    if str(reg_type).lower() != "entropy":
        raise UnsupportedError(f"`reg_type` must be 'entropy'; got {reg_type!r}. Use POT.")
    if n_threads != 1:
        raise UnsupportedError(
            f"`n_threads` must be 1; got {n_threads!r}: the linear solvers have one thread."
        )
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
