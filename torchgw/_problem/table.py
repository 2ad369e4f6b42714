"""The options of a solve in one table: type, default, check and documentation of each.

A field of :class:`Parameters` is a row. The call on which it is documented, the object of options,
scikit-learn's estimators, the flags of the command line and docs/options.md are made from it.
"""

import inspect
import os
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from functools import partial, wraps
from numbers import Integral
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import numpy as np
import torch

from torchgw._boundary.arrays import check_seed, named_device
from torchgw._boundary.cache import open_cache
from torchgw._boundary.checks import both, check_choice, check_count, check_positive, named_fields
from torchgw._errors import InvalidInputError, InvalidTypeError, UnsupportedError, warn_user
from torchgw._problem.losses import LossName, find_loss
from torchgw._problem.named import DistanceName, ScaleName, pair_of_distances
from torchgw._problem.problem import FeatureMetric, check_alpha, check_marginal_rule, check_penalty
from torchgw._sinkhorn.choose import BackendName, check_backend
from torchgw._sinkhorn.contract import Backend
from torchgw._tensors.ranks import Distributed, check_distributed
from torchgw._typing import Iteration, Seed
from torchgw.distances.base import DistanceProvider
from torchgw.distances.graph import ConnectPolicy

GradientName = Literal["auto", "dense", "factored", "sampled"]
SearchName = Literal["auto", "fast", "thorough"]
Precision = Literal["auto", "mixed", "float64", "float32"]
Storage = Literal["auto", "stored", "streamed"]
Regularization = Literal["entropic", "proximal"]
Differentiable = Literal["value", "implicit", "unrolled"]

Check = Callable[[str, Any], object]
F = TypeVar("F", bound=Callable[..., Any])


class Option(NamedTuple):
    """One row of the table."""

    name: str
    type: Any
    default: Any
    check: Check
    # Its documentation; the first sentence is the help of its flag.
    doc: str
    # Whether `solve` has a parameter for it, beside `options`.
    common: bool
    # Its flag of the command line; None for what only Python can say.
    flag: str | None


def _option(
    default: Any, check: Check, doc: str, *, common: bool = False, flag: str | None = ""
) -> Any:
    """Write a row; its name and type are those of the field, and so is an empty flag."""
    row = {"check": check, "doc": doc, "common": common, "flag": flag}
    return field(default=default, metadata=row)


def _common(default: Any, check: Check, doc: str, *, flag: str | None = "") -> Any:
    """Write a row that is a parameter of `solve` as well."""
    return _option(default, check, doc, common=True, flag=flag)


def _one_of(words: Any, *, none: bool = False) -> Check:
    return lambda name, value: check_choice(name, value, get_args(words), none=none)


_count_or_none = partial(check_count, none=True)


def _same(value: Any, other: Any) -> bool:
    return value is other or (type(value) is type(other) and bool(value == other))


def _positive(hint: str, *instead: Any) -> Check:
    """Ask for a positive number, or for one of some other values."""

    def check(name: str, value: Any) -> None:
        if not any(_same(value, other) for other in instead):
            check_positive(name, value, hint)

    return check


def _yes_or_no(name: str, value: Any) -> None:
    if not isinstance(value, Integral):
        raise InvalidTypeError(f"`{name}` must be True or False; got {value!r}.")


def _yes_no_or(other: str | None) -> Check:
    def check(name: str, value: Any) -> None:
        if not isinstance(value, bool) and not _same(value, other):
            raise InvalidInputError(f"`{name}` must be True, False or {other!r}; got {value!r}.")

    return check


def _yes_no_or_share(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        check_positive(name, value, "1e-3 is a thousandth of the value, which True asks for")


def _curvature(name: str, value: Any) -> None:
    pair = both(1.0 if value is None else value)
    if len(pair) != 2:
        raise InvalidInputError(
            f"`{name}` must be one number, or a pair of them; got {len(pair)} items."
        )
    for one in pair:
        check_positive(name, one, "1 is the unit ball, hyperboloid and sphere")


def _share(name: str, value: Any) -> None:
    check_positive(name, value, "0.9 redraws nine anchors of ten")
    if value > 1:
        raise InvalidInputError(
            f"`{name}` is the share of anchors redrawn, in (0, 1]; got {value!r}."
        )


def _dtype(name: str, value: Any) -> None:
    known = isinstance(value, torch.dtype) and value in (torch.float32, torch.float64)
    if value is not None and not known:
        raise InvalidInputError(f"`{name}` must be torch.float32 or torch.float64; got {value!r}.")


def _callable(name: str, value: Any) -> None:
    if value is not None and not callable(value):
        raise InvalidTypeError(
            f"`{name}` must be callable, called with an Iteration; got {type(value).__name__}."
        )


def _file(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, (str, os.PathLike)):
        raise InvalidTypeError(f"`{name}` must be the name of a file; got {value!r}.")


@dataclass(kw_only=True, eq=False, repr=False)
class Parameters:
    """The table, but for options that only tensors have a use for."""

    distances: DistanceName | DistanceProvider | tuple[Any, Any] = _common(
        "auto", lambda _, value: pair_of_distances(value),
        "How distances are computed from points.",
    )  # fmt: skip
    feature_metric: FeatureMetric = _option(
        "sqeuclidean", _one_of(FeatureMetric),
        'Distance of ``features``, in the units given. Nothing of size (n, m) is stored but by '
        '``"euclidean"``.', flag=None,
    )  # fmt: skip
    alpha: float | torch.Tensor | Literal["auto"] | None = _common(
        None,
        lambda _, value: (
            None if isinstance(value, str) and value == "auto" else check_alpha(value, fused=True)
        ),
        'Weight of the distances, beside a linear cost; ``"auto"``: both count alike at the match.',
    )  # fmt: skip
    loss: LossName = _common(
        "square", lambda _, value: find_loss(value),
        "How distances of the two sides are compared.",
    )  # fmt: skip
    n_neighbors: int | None = _common(
        None, _count_or_none, "Neighbours of a point in the graph; about log n by default."
    )  # fmt: skip
    n_landmarks: int | None = _option(
        None, _count_or_none,
        'Landmarks of each side, for ``distances="landmark"``. By default as many as bring the '
        "error to 2%; ``result.report.landmarks`` has count, rank and estimated error.",
    )  # fmt: skip
    curvature: float | tuple[float, float] | None = _option(
        None, _curvature,
        "Curvature c > 0 of poincare, lorentz and sphere distances, of both sides or of each. It "
        "is -c for the first two, and the radius of the sphere is 1 / sqrt(c); 1 by default.",
    )  # fmt: skip
    disconnected: ConnectPolicy = _option(
        "stitch", _one_of(ConnectPolicy),
        "What to do with a graph in pieces. Join them by the shortest edges, or give unreachable "
        "pairs 1.5 times the largest finite distance; either warns.",
    )  # fmt: skip
    scale: ScaleName | None = _common(
        "auto", _one_of(ScaleName, none=True), "What distances are divided by."
    )  # fmt: skip
    epsilon: float | torch.Tensor | Literal["auto"] = _common(
        "auto", _positive("pass epsilon='auto' for an automatic value", "auto"),
        "Entropic regularisation, in units of squared scaled distances.",
    )  # fmt: skip
    gradient: GradientName = _common(
        "auto", _one_of(GradientName), "How the cost is computed from a plan."
    )  # fmt: skip
    n_anchors: int | None = _option(
        None, _count_or_none,
        "Anchor pairs of the sampled gradient. By default 4 sqrt(max(n, m)) within 256 and 1,024; "
        "more where ``report.cost_standard_error`` is above a tenth of ``report.cost_size``.",
    )  # fmt: skip
    redraw: float = _option(
        0.9, _share, "Share of the anchors that an iteration of a sampled solve draws anew."
    )  # fmt: skip
    n_init: int | None = _common(
        None, _count_or_none, "Number of starts, on few points; 16 by default."
    )  # fmt: skip
    search: SearchName = _common(
        "auto", _one_of(SearchName), "How far to look for a better match."
    )  # fmt: skip
    reflections: bool = _option(
        True, _yes_or_no,
        "Whether the match may be a mirror image. ``False``, of points in 2 or 3 dimensions and of "
        "surfaces whose triangles look outside, solves again from optima that keep left and right "
        "where the best one does not; ``result.handedness()`` tells.",
    )  # fmt: skip
    certify: bool | float = _common(
        False, _yes_no_or_share,
        "Whether to prove how much better any other plan could be, and to go on from better ones.",
    )  # fmt: skip
    max_iter: int = _common(500, check_count, "Outer iterations at most.")
    time_limit: float | None = _common(
        None, _positive("seconds; None is as long as it takes", None),
        "Time after which a solve ends with the best that it has found.",
    )  # fmt: skip
    min_iter: int = _option(
        40, check_count,
        "A sampled solve ends after half of it, 20 at least, iterations without progress.",
    )  # fmt: skip
    tol: float = _common(
        1e-5, _positive("small values mean more iterations"),
        "Relative change of the plan at which to stop.",
    )  # fmt: skip
    objective_tol: float = _option(
        1e-4, _positive("0 switches the rule off", 0, 0.0),
        "Relative decrease of the objective per iteration at which to stop; 0 is never. It is a "
        "mean over five iterations, below which an exact entropic solve ends (status ``FLAT``), "
        "unless the changes of the plan shrink. ``differentiable`` switches it off.",
    )  # fmt: skip
    inner_max_iter: int = _option(
        2000, check_count, "Sinkhorn iterations at most, in an outer one."
    )  # fmt: skip
    inner_tol: float | None = _option(
        None, _positive("small values mean more iterations", None),
        "L1 error of the marginals at which Sinkhorn stops in the end. By default 5e-7, or 1e-5 "
        "for large costs. A converged plan misses its marginals by ten times that at most; in "
        "float32 by 2e-4 by default.",
    )  # fmt: skip
    unbalanced: float | tuple[float, float] | None = _common(
        None, lambda _, value: check_marginal_rule(value, None),
        "Penalty where weights are not met, of both sides or of each; inf: they are met, 0: they "
        "may be missed freely.",
    )  # fmt: skip
    unbalanced_type: Literal["kl", "l2"] = _option(
        "kl", lambda _, value: check_penalty(value),
        'What ``unbalanced`` weighs. ``"l2"`` is |P1 x P1 - a x a|^2 / 2, as in POT; the entropy '
        "stays KL. For about the same plan rho is larger by a factor n m.",
    )  # fmt: skip
    unbalanced_unit: Literal["value", "scale"] = _option(
        "value", _one_of(Literal["value", "scale"]),
        'Unit of ``unbalanced``: that of the value, or ``"scale"``, by how much costs vary.',
    )  # fmt: skip
    mass: float | Literal["auto"] | None = _common(
        None, lambda _, value: check_marginal_rule(None, value),
        'Share of the mass to move, at the least cost; ``"auto"`` finds how much matches.',
    )  # fmt: skip
    regularization: Regularization = _common(
        "entropic", _one_of(Regularization),
        "Whether the entropy stays, or vanishes by proximal steps.",
    )  # fmt: skip
    polish: bool | None = _common(
        None, _yes_no_or(None), "Whether to lower the value further without entropy in the end."
    )  # fmt: skip
    backend: BackendName | Backend = _option(
        "auto", lambda _, value: check_backend(value),
        "Implementation of Sinkhorn's half-steps. One of ``torchgw.backends.NAMES``, such as "
        '``"triton"``, which runs or raises, or an object like ``torchgw.backends.Backend``.',
    )  # fmt: skip
    device: torch.device | str | int | None = _common(
        None, lambda _, value: None if value is None else named_device(value),
        "PyTorch device, such as cpu or cuda:0; that of the inputs by default.",
    )  # fmt: skip
    dtype: torch.dtype | None = _option(
        None, _dtype, 'The same as ``precision="float32"`` or ``"float64"``.', flag=None
    )  # fmt: skip
    precision: Precision = _option(
        "auto", _one_of(Precision),
        'Floating-point numbers of the iterations. ``"mixed"`` iterates in float32 and ends with '
        'marginals and values in float64; ``"auto"`` is float64 for small problems. Where float32 '
        "cannot resolve ``epsilon``, the status is ``PRECISION_LIMIT``.",
    )  # fmt: skip
    storage: Storage = _option(
        "auto", _one_of(Storage),
        "Whether costs are stored, or computed from factors as they are read. ``\"auto\"`` takes "
        "what is faster and fits. The dense gradient and ``M`` are stored.",
    )  # fmt: skip
    skip_tiles: bool | Literal["auto"] = _option(
        "auto", _yes_no_or("auto"),
        "Whether streamed half-steps and products leave out nearly empty blocks of the plan. These "
        "tiles hold at most a few roundings of any row's or column's mass, see ``report.tiles``.",
    )  # fmt: skip
    resolution: float | Literal["auto"] | None = _option(
        "auto", _positive("0 or None solves on all points", 0, 0.0, None, "auto"),
        "Marginal error that a large problem may end with, solved on groups of near points "
        "(cells); 0: solve on all points. It is an L1 error; ``report.resolution`` says what was "
        'measured. ``"auto"`` is 1e-3, or ten times ``inner_tol``, with factored distances from '
        "about 300,000 points per side on a GPU and 200,000 on a CPU. None is 0.",
    )  # fmt: skip
    random_state: Seed | None = _common(
        None, lambda _, value: check_seed(value), "Seed of every random choice.", flag="--seed"
    )  # fmt: skip
    cache: str | os.PathLike[str] | None = _option(
        None, lambda _, value: value is None or open_cache(value),
        "Folder that keeps graphs and distances for later calls. Neighbour graphs, geodesics and "
        "landmarks are found by the content of what they were made from. Files are verified when "
        "read; nothing is ever removed.",
    )  # fmt: skip
    callback: Callable[[Iteration], Any] | None = _option(
        None, _callable,
        "Called with an ``Iteration`` after each outer iteration; returning ``True`` stops.",
        flag=None,
    )  # fmt: skip
    verbose: bool = _common(
        False, _yes_or_no, "Show progress on standard error.", flag=None
    )  # fmt: skip
    distributed: Distributed = _option(
        False, lambda _, value: check_distributed(value),
        "Whether the processes of ``torch.distributed`` share the solve. Every process makes the "
        "same call with the same input, or None where the first alone has it, and gets the same "
        "result, whose bits do not depend on how many there are. ``\"auto\"`` makes use of a "
        "process group if there is one. See docs/distributed.md.", flag=None,
    )  # fmt: skip
    checkpoint: str | os.PathLike[str] | None = _option(
        None, _file,
        "File from which an interrupted solve goes on. It keeps the state of the outer iterations, "
        "written about every minute. If it exists, the solve goes on from it, without a search; "
        "input and options have to be the same. It is removed when the solve has ended.",
    )  # fmt: skip


@named_fields
@dataclass(kw_only=True, unsafe_hash=True, repr=False)
class Options(Parameters):
    """Options of a solve as one object: ``solve(X, Y, options=torchgw.Options(inner_tol=1e-9))``.

    Every option of :func:`torchgw.solve` is taken by its name, also those that ``solve`` has a
    parameter for, and is checked here. The object does not change; options that are the same are
    equal, and what is printed is what differs from the defaults. docs/options.md has the table.

    Raises
    ------
    InvalidInputError, InvalidTypeError
        For a name that is no option, with the nearest one, and for a value that cannot be meant.

    Examples
    --------
    >>> import torchgw
    >>> tight = torchgw.Options(tol=1e-8, inner_tol=1e-10)
    >>> tight.replace(precision="float64")
    Options(tol=1e-08, inner_tol=1e-10, precision='float64')
    >>> tight.inner_max_iter
    2000
    """

    differentiable: Differentiable | None = _common(
        None, _one_of(Differentiable, none=True),
        "Whether ``result.loss`` carries gradients.", flag=None,
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Check every option; numbers may be those of NumPy and PyTorch."""
        for name, option in TABLE.items():
            value = getattr(self, name)
            if isinstance(value, torch.Tensor) and value.ndim == 0:
                # of `alpha` and `epsilon`: a solve that follows gradients reads it, or refuses it
                if value.requires_grad or torch._C._functorch.is_functorch_wrapped_tensor(value):
                    continue
                value = value.item()
            elif isinstance(value, np.generic):
                value = value.item()
            vars(self)[name] = value
            option.check(name, value)

    def __setattr__(self, name: str, value: object) -> None:
        """Take every field once."""
        if name in vars(self) or name not in self.__dataclass_fields__:
            raise FrozenInstanceError(
                f"Options do not change: make others by options.replace({name}=...)."
            )
        vars(self)[name] = value

    def __delattr__(self, name: str) -> None:
        """Refuse it."""
        raise FrozenInstanceError(f"Options keep what they have; `{name}` cannot be deleted.")

    def __repr__(self) -> str:
        """Write what differs from the defaults."""
        shown = (f"{name}={value!r}" for name, value in self.given.items())
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def given(self) -> dict[str, Any]:
        """The options that differ from their defaults, by their names."""
        return differing(vars(self))

    def replace(self, **changes: Any) -> "Options":
        """Make options with some changes."""
        return replace(self, **changes)


# The table, by name.
TABLE: dict[str, Option] = {
    item.name: Option(item.name, item.type, item.default, **item.metadata)
    for item in fields(Options)
}
TABLE |= {
    name: option._replace(flag=f"--{name.replace('_', '-')}")
    for name, option in TABLE.items()
    if option.flag == ""
}


def check_options(**values: Any) -> None:
    """Check options of other calls than `solve` as that does."""
    for name, value in values.items():
        TABLE[name].check(name, value.item() if isinstance(value, np.generic) else value)


def differing(values: Mapping[str, Any]) -> dict[str, Any]:
    """Pick the options that differ from their defaults."""
    return {
        name: values[name]
        for name, option in TABLE.items()
        if name in values and not _same(values[name], option.default)
    }


# Options that `solve` has no parameters for any more: it takes them so with a warning that says
# how they are spelled; `momentum` is what `redraw` was called before.
FORMER = {name: f"options=torchgw.Options({name}=...)" for name in TABLE if not TABLE[name].common}
# that came later
del FORMER["reflections"]
FORMER["momentum"] = FORMER["redraw"]


def gather(
    parameters: Mapping[str, Any], options: Options | None, former: Mapping[str, Any]
) -> Options:
    """Read the options of a call: from its parameters, its object of options, and former names."""
    given = differing(parameters)
    if former.get("momentum", 0) is None:
        former = {name: value for name, value in former.items() if name != "momentum"}
    if former:
        spelled = ", ".join(f"`{name}` is now {FORMER[name]}" for name in former)
        warn_user(f"{spelled}.", DeprecationWarning)
        given |= differing(
            {"redraw" if name == "momentum" else name: value for name, value in former.items()}
        )
    if options is None:
        return Options(**given)
    _check_once(given, options)
    return options.replace(**given) if given else options


def _check_once(given: Mapping[str, Any], options: Options) -> None:
    """Refuse what is no object of options, and an option that is given beside it too."""
    if not isinstance(options, Options):
        raise InvalidTypeError(
            f"`options` must be torchgw.Options(...); got {type(options).__name__}. Pass "
            "options=torchgw.Options(**names_and_values)."
        )
    for name in given.keys() & options.given.keys():
        raise InvalidInputError(
            f"`{name}` is given twice: {name}={given[name]!r}, and in "
            f"options=Options({name}={options.given[name]!r}). Drop one of them."
        )


def takes_options(function: F) -> F:
    """Let a call of many problems take those of its parameters that are options from an object."""
    # derivatives of many problems are of one kind, and said by True
    own = set(inspect.signature(function).parameters) - {"differentiable"}

    @wraps(function)
    def called(*args: Any, options: Options | None = None, **named: Any) -> Any:
        if options is None:
            return function(*args, **named)
        _check_once(differing(named), options)
        for name in options.given.keys() - own:
            raise UnsupportedError(
                f"`{name}` is an option of torchgw.solve that {function.__name__} does not have. "
                "Leave it out of `options`, or loop over torchgw.solve."
            )
        return function(*args, **named | options.given)

    return called  # type: ignore[return-value]


def spelled(kind: Any) -> str:
    """Write a type in words."""
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return ", ".join(f'"{word}"' for word in parts)
    if get_origin(kind) in (Union, UnionType):
        # a path is one thing, as are the generators of several packages
        names = [
            spelled(part) for part in parts if part is not str or os.PathLike[str] not in parts
        ]
        return ", ".join(dict.fromkeys(names))
    if get_origin(kind) is tuple:
        return "pair"
    known = {NoneType: "None", Callable: "callable", os.PathLike: "path", Backend: "object"}
    return str(known.get(get_origin(kind) or kind, kind.__name__))


def _documented(option: Option) -> str:
    """Write a row as numpydoc has parameters."""
    head = f"{option.name} : {spelled(option.type)}, by default {option.default!r}"
    return "\n".join([head, *textwrap.wrap(option.doc, 88, initial_indent=4 * " ",
                      subsequent_indent=4 * " ")])  # fmt: skip


# from Python 3.13 on docstrings have no indentation
Options.__doc__ = inspect.cleandoc(Options.__doc__ or "").replace(
    "Raises\n",
    "\n".join(["Parameters", "----------", *map(_documented, TABLE.values()), "", "Raises\n"]),
)
