"""Functions with POT's signatures, each in one line, and the arguments of a call by name."""

import ast
import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

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
        found = value_of(problem, self.loss_fun, plan, float(value), given, potentials)
        return (found, problem.arrays.give_all({**log, "T": plan})) if self.log else found


def takes(
    signature: str | inspect.Signature,
) -> Callable[[Callable[[Call], Any]], Callable[..., Any]]:
    """Give a function of a call POT's signature: names with their defaults, as POT writes them."""
    taken = signature
    if isinstance(taken, str):
        taken = inspect.Signature([_parameter(text.strip()) for text in taken.split(",")])

    def decorate(function: Callable[[Call], Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            bound = taken.bind(*args, **kwargs)
            bound.apply_defaults()
            given = {name: check_number(name, value) for name, value in bound.arguments.items()}
            return function(Call(function=function.__name__, **given))

        called.__signature__ = taken  # type: ignore[attr-defined]
        return called

    return decorate


def valued(
    function: Callable[..., Any], said: str = "", signature: str | None = None
) -> Callable[..., Any]:
    """Make the function whose name ends in 2; its signature is that of the other by default."""
    text = f"Compute the value of :func:`{function.__name__}`{said and ', ' + said}."
    return _like(function, f"{function.__name__}2", text, signature or inspect.signature(function))


def fused(function: Callable[..., Any], signature: str, said: str = "") -> Callable[..., Any]:
    """Make the function of fused problems, whose log has names with an f before gw."""
    name = function.__name__.replace("gromov", "fused_gromov")
    head = f"Do what :func:`{function.__name__}` does with a linear cost, as ``ot.gromov.{name}``."
    rest = inspect.getdoc(function).partition("\n\n")[2]  # type: ignore[union-attr]
    parts = filter(None, (head, said, rest.replace("gw_dist", "fgw_dist")))
    return _like(function, name, "\n\n".join(parts), signature)


def _like(
    function: Callable[..., Any], name: str, text: str, signature: str | inspect.Signature
) -> Callable[..., Any]:
    """Make a function that does what another does, under a name, docstring and signature."""
    found = inspect.unwrap(function)

    def other(call: Call) -> Any:
        return found(call)

    other.__module__, other.__name__, other.__qualname__ = found.__module__, name, name
    other.__doc__ = text
    return takes(signature)(other)


def _parameter(text: str) -> inspect.Parameter:
    """Read ``name``, ``name=default`` or ``**name``; a default is a plain value, without commas."""
    if text.startswith("**"):
        return inspect.Parameter(text[2:], inspect.Parameter.VAR_KEYWORD)
    name, given, value = text.partition("=")
    default = ast.literal_eval(value) if given else inspect.Parameter.empty
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
