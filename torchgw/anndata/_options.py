"""Options that all alignments of objects take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torchgw._boundary.checks import is_number
from torchgw._errors import InvalidInputError, InvalidTypeError
from torchgw.anndata._spaces import check_name


def check_options(solve_options: Any) -> dict[str, Any]:
    """Read options of a solve; the data come from the objects."""
    if solve_options is not None and not isinstance(solve_options, Mapping):
        raise InvalidTypeError(
            f"`solve_options` must be a dictionary; got {type(solve_options).__name__}."
        )
    options = dict(solve_options or {})
    taken = sorted({"X", "Y", "D_X", "D_Y", "M", "features"} & set(options))
    if taken:
        raise InvalidInputError(
            f"`solve_options` has {', '.join(taken)}, which come from the AnnData objects: use "
            "`use_rep`, `use_obsp` and `joint_rep`."
        )
    return options


def check_labels(labels: Any, key_added: Any) -> tuple[str, ...]:
    """Read names of columns."""
    check_name("key_added", key_added, none=False)
    listed = (labels,) if isinstance(labels, str) else () if labels is None else labels
    if not isinstance(listed, (tuple, list)) or not all(isinstance(name, str) for name in listed):
        raise InvalidTypeError(f"`labels` must be a name, or a list of names; got {labels!r}.")
    return tuple(listed)


def check_relaxation(tau_a: Any, tau_b: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Translate factors of half-steps, 2 rho / (2 rho + epsilon), into weights rho."""
    if tau_a is None and tau_b is None:
        return {}
    rho = []
    for name, tau in (("tau_a", tau_a), ("tau_b", tau_b)):
        tau = 1.0 if tau is None else tau
        if not is_number(tau) or not 0 < tau <= 1:
            raise InvalidInputError(
                f"`{name}` must be above 0 and at most 1, which is a strict marginal; got {tau!r}."
            )
        rho.append(float(tau))
    if rho == [1, 1]:
        return {}
    rivals = sorted({"unbalanced", "mass"} & set(options))
    if rivals:
        raise InvalidInputError(f"Pass `tau_a` and `tau_b` or `{rivals[0]}`, not both.")
    epsilon = options.get("epsilon", "auto")
    if not is_number(epsilon) or epsilon <= 0:
        raise InvalidInputError(
            "`tau_a` and `tau_b` are relative to epsilon, which has to be a positive number then: "
            "solve_options={'epsilon': 1e-3}."
        )
    weights = [math.inf if tau == 1 else float(epsilon) * tau / (2 * (1 - tau)) for tau in rho]
    return {"unbalanced": tuple(weights)}
