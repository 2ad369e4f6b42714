"""Checks of single options and of arguments of plan methods; unknown arguments."""

import contextlib
import difflib
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeGuard, TypeVar

import numpy as np
import torch
from torch import Tensor

from torchgw._boundary.arrays import MASS_TOLERANCE, make_generator, to_tensor
from torchgw._errors import InvalidInputError, InvalidTypeError, TorchGWError, UnsupportedError
from torchgw._typing import Seed

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


# Arguments that only a solve of one problem has.
OF_SOLVE = "allowed", "groups", "pairs"
KNOWN_OF_PAIRS = "What is known of pairs is taken by torchgw.solve, of one problem."
# Names that arguments have in POT and elsewhere, and their names here.
_ELSEWHERE = {
    "C1": ("D_X", "Ca"), "C2": ("D_Y", "Cb"), "Ca": ("D_X",), "Cb": ("D_Y",),
    "D_X": ("Ca",), "D_Y": ("Cb",), "p": ("a",), "q": ("b",),
    "reg": ("epsilon",), "epsilon": ("reg",), "G0": ("init", "plan_init"), "plan_init": ("init",),
    "init": ("plan_init",), "loss_fun": ("loss",), "metric": ("distances",),
    "numItermax": ("max_iter",), "n_iter": ("max_iter",), "n_iters": ("max_iter",),
    "stopThr": ("tol",), "timeout": ("time_limit",), "max_seconds": ("time_limit",),
    "max_time": ("time_limit",), "n_starts": ("n_init",), "dist": ("distances",),
    "seed": ("random_state",), "rho": ("unbalanced",), "k": ("n_neighbors",),
    "sample_weight": ("a",), "m": ("mass",), "partial": ("mass",), "gpu": ("device",),
    "obsm": ("use_rep",), "rep": ("use_rep",), "cost": ("M",), "tau": ("unbalanced",),
    "tau_a": ("unbalanced",), "tau_b": ("unbalanced",),
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


def reject_unknown(
    function: F,
    nested: tuple[str, Sequence[str]] | None = None,
    former: Mapping[str, str] | None = None,
) -> F:
    """Make a function answer an unknown keyword with the nearest known one."""
    # `nested` is a keyword that takes a dictionary, and the keys that this may have. `former` are
    # other keywords that the function takes, and how they are spelled now.
    former = former or {}
    parameters = inspect.signature(function).parameters
    known = [name for name, item in parameters.items() if item.kind is not item.VAR_KEYWORD]
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
            if name in known or name in former:
                continue
            named = known[method:]
            near = [other for other in _ELSEWHERE.get(name, ()) if other in known]
            near += difflib.get_close_matches(name, [*named, *former], n=1)
            hint = f"Known: {', '.join(named)}."
            if near:
                hint = f"Did you mean {former.get(near[0], repr(near[0]))}?"
            if name in OF_SOLVE:
                hint = KNOWN_OF_PAIRS
            if nested and name in nested[1]:
                hint = f"Pass it as {nested[0]}={{{name!r}: ...}}."
            raise InvalidTypeError(f"{what.__name__}() has no argument {name!r}. {hint}")
        if torch.compiler.is_compiling():
            # torch.compile would trace every iteration, which takes minutes and gains nothing
            return torch.compiler.disable(function)(*args, **kwargs)
        # settings that NumPy code changes inside are restored, even where an interrupt hits a
        # context that was to do so
        with np.errstate():
            return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


def named_fields(kind: type[T]) -> type[T]:
    """Make the constructor of a dataclass answer an unknown field with the nearest known one."""
    kind.__init__ = reject_unknown(kind.__init__)  # type: ignore[method-assign]
    return kind


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


def check_flag(name: str, value: object) -> None:
    """Refuse anything but True or False."""
    if not isinstance(value, bool):
        raise InvalidTypeError(f"`{name}` must be True or False; got {value!r}.")


def check_not_negative(name: str, value: object, *, none: bool = False) -> None:
    """Refuse anything but a finite number of at least 0, or ``None`` if that will do."""
    known = isinstance(value, Real) and 0 <= float(value) < math.inf
    if not (known or (none and value is None)):
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


def check_within(name: str, value: object, low: int, high: int, why: str = "") -> int:
    """Refuse anything but an integer between two others, both included; return that."""
    if not isinstance(value, Integral) or isinstance(value, bool) or not low <= int(value) <= high:
        raise InvalidInputError(
            f"`{name}` must be an integer between {low} and {high}{why}; got {value!r}."
        )
    return int(value)


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


# Names of things that a message lists; how many there are besides is said. A choice. [L1370]
_NAMED = 10


def first_of(names: Sequence[object]) -> str:
    """List the first of some names, and say how many there are besides."""
    first, others = ", ".join(map(str, names[:_NAMED])), len(names) - _NAMED
    return f"{first} and {others:,} more" if others > 0 else first


def listed(names: Sequence[str]) -> str:
    """Write some words out as a choice: 'one', 'two' or 'three'."""
    quoted = [repr(name) for name in names]
    return " or ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)


def as_values(name: str, value: Any, device: torch.device) -> Tensor:
    """Convert numbers that a plan multiplies, on its device; a tensor keeps its gradient."""
    checked = to_tensor(name, value)
    return (value if isinstance(value, Tensor) else checked).to(device)


def as_points_of(value: Any, count: int, device: torch.device) -> Tensor:
    """Convert points that a plan averages to float64, (count, d)."""
    points = as_values("points", value, device).double()
    if points.ndim != 2 or points.shape[0] != count:
        raise InvalidInputError(
            f"`points` must have shape ({count}, d), one row per target point; "
            f"got {tuple(points.shape)}."
        )
    return points


def as_index(value: Any, count: int, device: torch.device) -> Tensor:
    """Convert row numbers to an integer tensor (s,); negative ones count from the end."""
    index = torch.atleast_1d(to_tensor("index", value)).to(device)
    whole = not (index.dtype.is_floating_point or index.dtype == torch.bool)
    if index.ndim != 1 or not (whole or index.numel() == 0):
        raise InvalidInputError(
            f"`index` must be row numbers, integers of shape (s,); got {index.dtype} of shape "
            f"{tuple(index.shape)}. Pass `mask.nonzero()[:, 0]` for a mask."
        )
    index = index.to(torch.int64)
    if index.numel() and not -count <= int(index.min()) <= int(index.max()) < count:
        raise InvalidInputError(
            f"`index` must be within 0 and {count - 1}; got {int(index.min())} to "
            f"{int(index.max())}."
        )
    return torch.where(index < 0, index + count, index)


def as_mass(name: str, value: Any, weight: Tensor) -> Tensor:
    """Convert masses that a plan is to have in place of its weights."""
    mass = as_values(name, value, weight.device).to(weight.dtype)
    if mass.shape != weight.shape or not bool((mass >= 0).all() and mass.isfinite().all()):
        raise InvalidInputError(
            f"`{name}` must be {len(weight)} finite masses, none negative; got shape "
            f"{tuple(mass.shape)}."
        )
    return mass


def check_equal_masses(a: Tensor, b: Tensor) -> None:
    """Refuse marginals of different mass, which no plan can have."""
    first, second = float(a.sum()), float(b.sum())
    if abs(first - second) > MASS_TOLERANCE * max(first, second):
        raise InvalidInputError(
            f"`a` and `b` must have equal sums; got {first:.6g} and {second:.6g}. Scale one of "
            "them, or pass both."
        )


def check_threshold(threshold: Any) -> None:
    """Refuse anything but a share of a row's mass."""
    if not isinstance(threshold, Real) or not 0 <= threshold <= 1:  # type: ignore[operator]
        raise InvalidInputError(
            f"`threshold` must be a share of a row's mass, within 0 and 1; got {threshold!r}."
        )


def check_draw(count: object, random_state: Seed | None, device: torch.device) -> torch.Generator:
    """Check the number of draws from a plan, and make their generator; a given one goes on."""
    check_count("count", count)
    if not isinstance(random_state, torch.Generator):
        return make_generator(random_state, device)[0]
    if random_state.device.type != device.type:
        raise InvalidInputError(
            f"`random_state` must be a torch.Generator(device='{device}'), where the plan is, or a "
            f"seed; got a generator on {random_state.device}."
        )
    return random_state
