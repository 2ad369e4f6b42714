"""Every option of a solve, checked once, as frozen dataclasses."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch

from torchgw._errors import InvalidInputError, InvalidTypeError, UnsupportedError
from torchgw._relaxation import Relaxation

__all__ = [
    "BackendName",
    "Differentiable",
    "GradientName",
    "Options",
    "Precision",
    "Regularization",
    "Storage",
    "check_count",
    "check_positive",
    "merge_precision",
    "reject_unknown",
]

GradientName = Literal["auto", "dense", "factored", "sampled"]
BackendName = Literal["auto", "triton", "compile", "eager"]
Precision = Literal["auto", "mixed", "float64", "float32"]
Storage = Literal["auto", "stored", "streamed"]
Regularization = Literal["entropic", "proximal"]
Differentiable = Literal["value", "implicit", "unrolled"]

# What makes an object a torchgw.backends.Backend.
_BACKEND_PARTS = (
    "name", "softmin", "sweeper", "solve_batch", "apply", "dense", "transposed", "topk", "draw",
)  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])


# Names of POT and others, and what they are here.
_ELSEWHERE = {
    "C1": ("D_X", "Ca"), "C2": ("D_Y", "Cb"), "Ca": ("D_X",), "Cb": ("D_Y",),
    "D_X": ("Ca",), "D_Y": ("Cb",), "p": ("a",), "q": ("b",),
    "reg": ("epsilon",), "epsilon": ("reg",), "G0": ("init", "plan_init"), "plan_init": ("init",),
    "init": ("plan_init",), "loss_fun": ("loss",), "metric": ("distances",),
    "numItermax": ("max_iter",), "n_iter": ("max_iter",), "stopThr": ("tol",),
    "seed": ("random_state",), "rho": ("unbalanced",), "k": ("n_neighbors",),
    "sample_weight": ("a",),
}  # fmt: skip


def reject_unknown(function: F, nested: tuple[str, Callable[..., Any]] | None = None) -> F:
    """Turn an unknown keyword into an error that names the nearest known one.

    Parameters
    ----------
    function : callable
        Whose keywords are checked.
    nested : pair of str and callable, optional
        A keyword that takes a dictionary, and the function whose keywords that has.
    """
    known = list(inspect.signature(function).parameters)
    inner = inspect.signature(nested[1]).parameters if nested else {}

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name in known:
                continue
            near = [other for other in _ELSEWHERE.get(name, ()) if other in known]
            near += difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."
            if nested and name in inner:
                hint = f"Pass it as {nested[0]}={{{name!r}: ...}}."
            what = type(args[0]) if function.__name__ == "__init__" else function
            raise InvalidTypeError(f"{what.__name__}() has no argument {name!r}. {hint}")
        if torch.compiler.is_compiling():
            # torch.compile would trace every iteration, for minutes and to no use
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


@dataclass(frozen=True)
class Options:
    """Options of the solver proper; :func:`torchgw.solve` documents each."""

    epsilon: float | Literal["auto"] = "auto"
    gradient: GradientName = "auto"
    n_anchors: int | None = None
    n_init: int | None = None
    momentum: float = 0.9
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
    polish: bool = False
    relaxation: Relaxation | None = None
    skip_tiles: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        """Check every field; the messages name the argument of :func:`torchgw.solve`."""
        for item in fields(self):
            value = getattr(self, item.name)
            # as results report them, to JSON for one
            if isinstance(value, np.generic):
                object.__setattr__(self, item.name, value.item())
        if not isinstance(self.epsilon, str) or self.epsilon != "auto":
            check_positive("epsilon", self.epsilon, "pass epsilon='auto' for an automatic value")
        _check_choice("gradient", self.gradient, get_args(GradientName))
        _check_backend(self.backend)
        _check_choice("precision", self.precision, get_args(Precision))
        _check_choice("storage", self.storage, get_args(Storage))
        _check_choice("regularization", self.regularization, get_args(Regularization))
        if not isinstance(self.polish, bool):
            raise InvalidInputError(f"`polish` must be True or False; got {self.polish!r}.")
        known = isinstance(self.skip_tiles, bool) or (
            isinstance(self.skip_tiles, str) and self.skip_tiles == "auto"
        )
        if not known:
            raise InvalidInputError(
                f"`skip_tiles` must be True, False or 'auto'; got {self.skip_tiles!r}."
            )
        for name in ("max_iter", "min_iter", "inner_max_iter"):
            check_count(name, getattr(self, name))
        for name in ("n_anchors", "n_init"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        check_positive("tol", self.tol, "small values mean more iterations")
        number = isinstance(self.objective_tol, Real) and not isinstance(self.objective_tol, bool)
        if not number or self.objective_tol != 0:
            check_positive("objective_tol", self.objective_tol, "0 switches the rule off")
        if self.inner_tol is not None:
            check_positive("inner_tol", self.inner_tol, "small values mean more iterations")
        check_positive("momentum", self.momentum, "0.9 redraws nine anchors of ten")
        if self.momentum > 1:
            raise InvalidInputError(
                f"`momentum` is the share of anchors redrawn, in (0, 1]; got {self.momentum!r}."
            )

    def check_combination(self, *, linear: bool, differentiable: bool) -> None:
        """Refuse what relaxed marginals do not combine with, with the reason."""
        if self.relaxation is None:
            return
        relaxed = "`unbalanced`" if self.relaxation.mass is None else "`mass`"
        if self.regularization == "proximal":
            raise UnsupportedError(
                f"regularization='proximal' keeps to the last plan, and {relaxed} would let its "
                "mass follow the steps. Pass regularization='entropic'."
            )
        if self.polish and not self.relaxation.polyhedral:
            raise UnsupportedError(
                "`polish=True` moves between plans whose marginals are given, free or bounded, and "
                f"{relaxed} penalises them. Pass polish=False, (inf, 0) or (0, inf)."
            )
        if differentiable:
            raise UnsupportedError(
                f"`differentiable` knows strict marginals only, and {relaxed} relaxes them. Leave "
                "one of them out."
            )
        if linear and self.relaxation.fixed_mass is None:
            raise UnsupportedError(
                "A linear cost (`M` or `features`) grows with the mass of a plan and the quadratic "
                "cost with its square, so that they cannot share the normalised plans which "
                "`unbalanced` iterates on. Make one side strict, (inf, rho), pass `mass`, or leave "
                "the linear cost out."
            )

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


def check_positive(name: str, value: object, hint: str) -> None:
    """Refuse anything but a positive finite number."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:  # type: ignore[arg-type, operator]
        raise InvalidInputError(
            f"`{name}` must be a positive finite number ({hint}); got {value!r}."
        )


def check_count(name: str, value: object) -> None:
    """Refuse anything but an integer of at least 1."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise InvalidInputError(f"`{name}` must be an integer of at least 1; got {value!r}.")


def _check_backend(backend: object) -> None:
    """Refuse an unknown name, and an object that is not all of a backend."""
    missing = [name for name in _BACKEND_PARTS if not hasattr(backend, name)]
    if isinstance(backend, str) or len(missing) == len(_BACKEND_PARTS):
        _check_choice("backend", backend, get_args(BackendName))
    elif missing:
        raise InvalidInputError(
            f"`backend` must have all of a torchgw.backends.Backend; a {type(backend).__name__} "
            f"has no {', '.join(missing)}. Subclass torchgw.backends.EagerBackend, which does."
        )


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        known = ", ".join(repr(choice) for choice in choices)
        raise InvalidInputError(f"`{name}` must be one of {known}; got {value!r}.")
