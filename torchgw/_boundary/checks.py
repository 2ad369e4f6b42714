"""Checks of single options: counts, positive numbers, choices, unknown arguments."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral, Real
from typing import Any, TypeGuard, TypeVar

import torch

from torchgw._errors import InvalidInputError, InvalidTypeError, TorchGWError, UnsupportedError

F = TypeVar("F", bound=Callable[..., Any])


# Names that arguments have in POT and elsewhere, and their names here.
_ELSEWHERE = {
    "C1": ("D_X", "Ca"), "C2": ("D_Y", "Cb"), "Ca": ("D_X",), "Cb": ("D_Y",),
    "D_X": ("Ca",), "D_Y": ("Cb",), "p": ("a",), "q": ("b",),
    "reg": ("epsilon",), "epsilon": ("reg",), "G0": ("init", "plan_init"), "plan_init": ("init",),
    "init": ("plan_init",), "loss_fun": ("loss",), "metric": ("distances",),
    "numItermax": ("max_iter",), "n_iter": ("max_iter",), "stopThr": ("tol",),
    "seed": ("random_state",), "rho": ("unbalanced",), "k": ("n_neighbors",),
    "sample_weight": ("a",),
}  # fmt: skip


@contextlib.contextmanager
def called(**names: str) -> Iterator[None]:
    """Let errors name arguments (in backticks) as the caller did: ``called(init="T_init")``."""

    def renamed(span: re.Match[str]) -> str:
        return re.sub(r"[A-Za-z_]\w*", lambda name: names.get(name[0], name[0]), span[0])

    try:
        yield
    except TorchGWError as error:
        error.args = (re.sub(r"`[^`]*`", renamed, str(error)), *error.args[1:])
        raise


def reject_unknown(function: F, nested: tuple[str, Callable[..., Any]] | None = None) -> F:
    """Make a function answer an unknown keyword with the nearest known one.

    ``nested`` is a keyword that takes a dictionary, and the function whose keywords that has.
    """
    parameters = inspect.signature(function).parameters
    known = list(parameters)
    inner = inspect.signature(nested[1]).parameters if nested else {}
    kinds = [item.kind for item in parameters.values()]
    free = inspect.Parameter.VAR_POSITIONAL in kinds
    placed = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method = known[:1] == ["self"]

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        what = type(args[0]) if function.__name__ == "__init__" else function
        if len(args) > placed and not free:
            count = placed - method
            example = known[placed if placed < len(known) else -1]
            raise InvalidTypeError(
                f"{what.__name__}() takes {count or 'no'} argument{'' if count == 1 else 's'} "
                f"without a name; got {len(args) - method}. Pass the others by name, as "
                f"{example}=..."
            )
        for name in kwargs:
            if name in known:
                continue
            named = known[method:]
            near = [other for other in _ELSEWHERE.get(name, ()) if other in known]
            near += difflib.get_close_matches(name, named, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(named)}."
            if nested and name in inner:
                hint = f"Pass it as {nested[0]}={{{name!r}: ...}}."
            raise InvalidTypeError(f"{what.__name__}() has no argument {name!r}. {hint}")
        if torch.compiler.is_compiling():
            # torch.compile would trace every iteration, which takes minutes and gains nothing
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


def both(value: Any) -> tuple[Any, ...]:
    """Spread one value over both sides; a tuple or list has one for each already."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value, value)


def number_of(name: str, value: Any, *, tracked: bool) -> Any:
    """Read a tensor of shape () as a number; one that requires a gradient only if ``tracked``."""
    if not isinstance(value, torch.Tensor) or value.ndim > 0:
        return value
    if value.requires_grad and not tracked:
        raise UnsupportedError(
            f"`{name}` has gradients with `differentiable` only; pass differentiable='value', or "
            f"float({name})."
        )
    return value.item()


def is_number(value: object) -> TypeGuard[float]:
    """Tell whether a value is a real number: no bool, and not NaN."""
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(float(value))


def check_not_negative(name: str, value: object) -> None:
    """Refuse anything but a finite number of at least 0."""
    if not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise InvalidInputError(f"`{name}` must be finite and not negative; got {value!r}.")


def check_positive(name: str, value: object, hint: str) -> None:
    """Refuse anything but a positive finite number."""
    if not is_number(value) or not 0 < value < math.inf:
        raise InvalidInputError(
            f"`{name}` must be a positive finite number ({hint}); got {value!r}."
        )


def check_count(name: str, value: object, *, none: bool = False) -> None:
    """Refuse anything but an integer of at least 1, or ``None`` if that will do."""
    if none and value is None:
        return
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        also = ", or None" if none else ""
        raise InvalidInputError(f"`{name}` must be an integer of at least 1{also}; got {value!r}.")


def check_within(name: str, value: object, low: int, high: int, why: str = "") -> None:
    """Refuse anything but an integer between two others, both included."""
    if not isinstance(value, Integral) or isinstance(value, bool) or not low <= int(value) <= high:
        raise InvalidInputError(
            f"`{name}` must be an integer between {low} and {high}{why}; got {value!r}."
        )


def check_choice(
    name: str, value: object, choices: tuple[str, ...], advice: str = "", *, none: bool = False
) -> None:
    """Refuse anything but one of some words, or ``None`` if that will do."""
    if (isinstance(value, str) and value in choices) or (none and value is None):
        return
    few = len(choices) <= 2
    known = listed(choices) if few else "one of " + ", ".join(map(repr, choices))
    also = " or None" if none else ""
    raise InvalidInputError(f"`{name}` must be {known}{also}; got {value!r}. {advice}".rstrip())


def listed(names: Sequence[str]) -> str:
    """Write some words out as a choice: 'one', 'two' or 'three'."""
    quoted = [repr(name) for name in names]
    return " or ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)
