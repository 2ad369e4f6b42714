"""Functions with POT's signatures, and the arguments of a call by name."""

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ParamSpec

import numpy as np

from torchgw.pot._arrays import Array
from torchgw.pot.gromov._read import (
    Problem,
    check_known,
    check_number,
    read_problem,
    value_of,
    without_gradients,
)

P = ParamSpec("P")


class Call(SimpleNamespace):
    """The arguments of a call, by POT's names, and the name of the function."""

    def get(self, name: str, default: Any = None) -> Any:
        """Find an argument that not every function has."""
        return getattr(self, name, default)

    def check_known(self, *known: str) -> None:
        """Warn of further keyword arguments that nothing reads."""
        check_known(self.function, self.get("kwargs", {}), known)

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
    """Make a function of what is declared: its name, signature and docstring.

    Its body is ``answer``, which gets the call, then the further arguments.
    """

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
        given = {name: check_number(name, value) for name, value in bound.arguments.items()}
        return answer(Call(function=called.__name__, **given))

    vars(called).update(__signature__=signature, answer=answer)
    return called
