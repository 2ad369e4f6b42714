"""The arguments that functions of ``ot.gromov`` share, read and checked."""

import functools
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple, ParamSpec

import numpy as np
from torch import Tensor

from torchgw._boundary.arrays import check_list
from torchgw._boundary.checks import (
    KNOWN_OF_PAIRS,
    OF_SOLVE,
    check_count,
    check_positive,
    is_number,
)
from torchgw._errors import (
    InvalidInputError,
    InvalidTypeError,
    TorchGWWarning,
    UnsupportedError,
    warn_user,
)
from torchgw.pot._arrays import Array, Arrays, Mask, product
from torchgw.pot._quadratic import Quadratic, Transformed, quadratic, table_slopes

# How far a starting plan may miss its marginals, as in POT. [L389]
_MARGINALS = 1e-8


# Arguments that are counts from one on, limits of steps, and tolerances, whatever the function.
_COUNTS = ("N",)
_STEPS = ("max_iter", "numItermax")
_TOLERANCES = ("tol", "tol_rel", "tol_abs", "stopThr")


# What messages say that lists hold.
EACH = "with one entry for each structure"


class Problem(NamedTuple):
    """Minimise (1 - alpha) <M, T> + alpha sum L(C1_ik, C2_jl) T_ij T_kl."""

    arrays: Arrays
    loss: str
    term: Quadratic
    C1: Array
    C2: Array
    p: Array
    q: Array
    M: Array | None
    alpha: float

    @property
    def linear(self) -> Array | float:
        """The linear cost with its weight."""
        return 0.0 if self.M is None else (1 - self.alpha) * self.M

    def slope(self, plan: Array) -> Array:
        """Compute the derivative of the objective by the plan."""
        return self.linear + self.alpha * self.term.gradient(plan)

    def parts(self, plan: Array) -> tuple[float, float]:
        """Compute the linear and the quadratic part of the objective, with their weights."""
        linear = 0.0 if self.M is None else (1 - self.alpha) * float(np.vdot(self.M, plan))
        return linear, self.alpha * self.term.value(plan)

    def slopes(self, plan: Array) -> tuple[Array, Array]:
        """Differentiate the objective at a fixed plan by the two tables."""
        first, second = table_slopes(self.C1, self.C2, self.loss, plan)
        return self.alpha * first, self.alpha * second

    def keep(self, first: Mask, second: Mask) -> "Problem":
        """Leave out points, by masks of those that stay."""
        f1, f2, h1, h2 = self.term.parts
        of_rows, of_columns = np.ix_(first, first), np.ix_(second, second)
        parts = Transformed(f1[of_rows], f2[of_columns], h1[of_rows], h2[of_columns])
        return self._replace(
            term=self.term._replace(parts=parts), C1=self.C1[of_rows], C2=self.C2[of_columns],
            p=self.p[first], q=self.q[second],
            M=None if self.M is None else self.M[np.ix_(first, second)],
        )  # fmt: skip


def scalar(value: Any) -> Any:
    """Take a number out of an array or tensor without dimensions."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def check_number(name: str, value: Any) -> Any:
    """Check an argument if it is a number in every function that has it; return that number."""
    if name in _COUNTS:
        check_count(name, value)
    if name not in _STEPS and name not in _TOLERANCES:
        return value
    value = scalar(value)
    if name in _TOLERANCES and is_number(value):
        return value
    if name in _STEPS and is_number(value) and 0 <= value < np.inf:
        return int(value)
    what = "finite and not negative" if name in _STEPS else "such as 1e-9"
    raise InvalidInputError(f"`{name}` must be a number, {what}; got {value!r}.")


def check_epsilon(name: str, value: Any) -> float:
    """Read the weight of the entropy."""
    value = scalar(value)
    check_positive(name, value, "the weight of the entropy, or of a step")
    return float(value)


def check_share(alpha: Any) -> float:
    """Read the weight of one of two terms, beside one less that."""
    value = alpha.item() if isinstance(alpha, Tensor) and alpha.numel() == 1 else scalar(alpha)
    if not is_number(value) or not 0 <= value <= 1:
        raise InvalidInputError(f"`alpha` must be a number in [0, 1]; got {alpha!r}.")
    return float(value)


def check_limits(**given: Any) -> None:
    """Refuse limits of a step that are no numbers; None is no limit."""
    for name, value in given.items():
        if value is not None and not is_number(scalar(value)):
            raise InvalidInputError(f"`{name}` must be a number; got {value!r}.")


def read_features(arrays: Arrays, Ys: Any, counts: list[int]) -> list[Array]:
    """Read features of structures with so many points, of the same columns in all."""
    first = arrays.read("Ys[0]", Ys[0])
    if first.ndim != 2:
        raise InvalidInputError(f"`Ys[0]` must have shape (n, d); got {first.shape}.")
    shapes = [(count, first.shape[1]) for count in counts]
    return [
        arrays.read(f"Ys[{k}]", table, shape)
        for k, (table, shape) in enumerate(zip(Ys, shapes, strict=True))
    ]


def check_lengths(**given: Any) -> None:
    """Refuse lists that do not have an entry for each structure; None is no list."""
    lists = {name: listed for name, listed in given.items() if listed is not None}
    counts = {name: len(check_list(name, item, EACH)) for name, item in lists.items()}
    if min(counts.values()) == 0 or len(set(counts.values())) > 1:
        names = ", ".join(f"`{name}`" for name in counts)
        raise InvalidInputError(
            f"{names} must have one entry for each structure; got {[*counts.values()]} of them."
        )


def read_problem(
    C1: Any,
    C2: Any,
    p: Any,
    q: Any,
    loss: str,
    symmetric: bool | None,
    *,
    M: Any = None,
    alpha: Any = 1.0,
    also: tuple[Any, ...] = (),
    names: dict[str, str] | None = None,
) -> Problem:
    """Read tables, weights and the linear cost of a problem."""
    arrays = Arrays(*((C1, C2) if M is None else (C1, C2, M)), p, q, *also, names=names)
    first, second = arrays.table("C1", C1), arrays.table("C2", C2)
    n, m = len(first), len(second)
    linear = None if M is None else arrays.read("M", M, (n, m))
    return Problem(
        arrays, loss, quadratic(first, second, loss, symmetric), first, second,
        arrays.weights("p", p, n), arrays.weights("q", q, m), linear, check_share(alpha),
    )  # fmt: skip


def read_start(problem: Problem, start: Any, *, exact: bool = True) -> Array:
    """Read a starting plan, by default the product; an ``exact`` one has the right marginals."""
    p, q, called = problem.p, problem.q, problem.arrays.called
    if abs(p.sum() - q.sum()) > 1e-6 * p.sum():
        raise InvalidInputError(
            f"`{called('p')}` and `{called('q')}` must have the same sum; got "
            f"{p.sum():.6g} and {q.sum():.6g}. Use a partial or an unbalanced problem."
        )
    if start is None:
        return product(p, q, float(p.sum()))
    plan = problem.arrays.read("G0", start, (len(p), len(q)))
    if not exact:
        return plan
    if not (meets(problem, plan.sum(1), p) and meets(problem, plan.sum(0), q)):
        raise InvalidInputError(
            f"`{called('G0')}` must have the marginals `{called('p')}` and `{called('q')}`."
        )
    return plan


def meets(problem: Problem, sums: Array, weights: Array) -> bool:
    """Whether sums of a starting plan are the weights, up to what the arrays given can hold."""
    rtol, atol = (1e-7, _MARGINALS) if problem.arrays.dtype.itemsize == 8 else (1e-4, 1e-6)
    return np.allclose(sums, weights, rtol, atol)


def value_of(
    problem: Problem,
    plan: Array,
    value: float,
    given: dict[str, Any],
    potentials: tuple[Array, Array] | None = None,
) -> Any:
    """Hand out a value with its derivatives at a plan; the potentials are those by weights."""
    derivatives: list[tuple[Any, Any]] = []
    if needs_gradients(*given.values()):
        derivatives += zip((given["C1"], given["C2"]), problem.slopes(plan), strict=True)
        if potentials is not None:
            f, g = potentials
            derivatives += [(given["p"], f - f.mean()), (given["q"], g - g.mean())]
        if problem.M is not None:
            by_alpha = problem.term.value(plan) - np.vdot(problem.M, plan)
            derivatives += [(given["M"], (1 - problem.alpha) * plan), (given["alpha"], by_alpha)]
    return problem.arrays.value(value, derivatives)


def without_gradients(function: str, *given: Any) -> None:
    """Refuse inputs that require gradients where the value would have none."""
    if needs_gradients(*given):
        raise UnsupportedError(
            f"torchgw.pot.gromov.{function} does not differentiate its plan, as "
            f"ot.gromov.{function} does by unrolling. Use "
            "torchgw.solve(..., differentiable='implicit'), or detach the inputs."
        )


def needs_gradients(*given: Any) -> bool:
    """Say whether any input, or any in a list of them, requires gradients."""
    return any(isinstance(value, Tensor) and value.requires_grad for value in _flat(given))


def _flat(given: Any) -> Iterator[Any]:
    for value in given:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


P = ParamSpec("P")


class Call(SimpleNamespace):
    """The arguments of a call, by POT's names, and the name of the function."""

    def get(self, name: str, default: Any = None) -> Any:
        """Find an argument that not every function has."""
        return getattr(self, name, default)

    def check_known(self, *known: str) -> None:
        """Warn of further keyword arguments that nothing reads; POT takes any and is silent."""
        for name in self.get("kwargs", {}):
            if name not in known:
                warn_user(
                    f"torchgw.pot.gromov.{self.function} does not read the argument {name!r}; "
                    f"further ones are {', '.join(known) or 'none'}.",
                    TorchGWWarning,
                )

    def problem(self, *, differentiable: bool = True) -> Problem:
        """Read tables, weights, linear cost and its weight."""
        given = self.C1, self.C2, self.p, self.get("q"), self.get("M"), self.get("alpha", 1.0)
        if not differentiable:
            without_gradients(self.function, *given)
        C1, C2, p, q, M, alpha = given
        start = None if isinstance(self.G0, str) else self.G0
        return read_problem(
            C1, C2, p, q, self.loss_fun, self.symmetric, M=M, alpha=alpha, also=(start,)
        )

    def answer(
        self,
        problem: Problem,
        plan: Array,
        name: str,
        log: dict[str, Any],
        *,
        value: float | None = None,
        potentials: tuple[Array, Array] | None = None,
        with_parts: bool = False,
    ) -> Any:
        """Hand out the plan, or in functions whose name ends in 2 the value with its derivatives.

        With ``log=True`` also the log, with the value under its name, which has an f before gw in a
        fused problem; beside a value the log has the plan and the parts of the value.
        """
        fused, valued = problem.M is not None, self.function.endswith("2")
        if not self.log and not valued:
            return problem.arrays.give(plan)
        with_parts = fused and (valued or with_parts)
        if value is None or with_parts:
            linear, quadratic = problem.parts(plan)
            value = linear + quadratic if value is None else value
        log = {**log, name.replace("gw", "fgw") if fused else name: np.float64(value)}
        if with_parts:
            log |= {"lin_loss": np.float64(linear), "quad_loss": np.float64(value - linear)}
        if not valued:
            return problem.arrays.give(plan), problem.arrays.give_all(log)
        given = {key: self.get(key) for key in ("C1", "C2", "p", "q", "M", "alpha")}
        found = value_of(problem, plan, float(value), given, potentials)
        return (found, problem.arrays.give_all({**log, "T": plan})) if self.log else found


def takes(
    answer: Callable[..., Any], *more: Any, **named: Any
) -> Callable[[Callable[P, Any]], Callable[P, Any]]:
    """Make a function of what is declared: its name, signature and docstring."""
    # Its body is `answer`, which gets the call, then the further arguments.

    def decorate(declared: Callable[P, Any]) -> Callable[P, Any]:
        signature = inspect.signature(declared)
        return _made(declared, signature, lambda call: answer(call, *more, **named))

    return decorate


def valued(function: Callable[P, Any], said: str = "", **defaults: Any) -> Callable[P, Any]:
    """Make the function whose name ends in 2, which takes the same but for some defaults."""
    signature = inspect.signature(function)
    taken = [
        one.replace(default=defaults.get(one.name, one.default))
        for one in signature.parameters.values()
    ]
    made = _made(function, signature.replace(parameters=taken), vars(function)["answer"])
    name = made.__name__ = made.__qualname__ = f"{function.__name__}2"
    made.__doc__ = f"Compute the value of :func:`{name[:-1]}`{said and ', ' + said}."
    return made


def _made(
    declared: Callable[P, Any], signature: inspect.Signature, answer: Callable[[Call], Any]
) -> Callable[P, Any]:
    @functools.wraps(declared)
    def called(*args: P.args, **kwargs: P.kwargs) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for name in bound.arguments.get("kwargs", {}):
            if name in OF_SOLVE:
                # POT takes any further argument, and a plan that breaks what is known is no answer
                raise InvalidTypeError(
                    f"{called.__name__}() has no argument {name!r}. {KNOWN_OF_PAIRS}"
                )
        given = {name: check_number(name, value) for name, value in bound.arguments.items()}
        return answer(Call(function=called.__name__, **given))

    vars(called).update(__signature__=signature, answer=answer)
    return called
