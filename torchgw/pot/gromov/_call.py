"""Functions with POT's signatures, each said in one line, and the arguments of a call by name."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from torchgw.pot._arrays import Array
from torchgw.pot.gromov._read import Problem, check_known, read_problem, value_of, without_gradients

__all__ = ["Call", "takes"]


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

        With ``log=True`` also what else is known: the value under its name, that of a fused problem
        with an f before gw; beside a value the plan and the parts of it.
        """
        fused, valued = problem.M is not None, self.function.endswith("2")
        linear, quadratic = problem.parts(plan)
        if value is None:
            value = linear + quadratic
        log = {**log, name.replace("gw", "fgw") if fused else name: np.float64(value)}
        if fused and (valued or with_parts):
            log |= {"lin_loss": np.float64(linear), "quad_loss": np.float64(value - linear)}
        given = {key: self.get(key) for key in ("C1", "C2", "p", "q", "M", "alpha")}
        if valued:
            log["T"] = plan
            found = value_of(problem, self.loss_fun, plan, float(value), given, potentials)
        else:
            found = problem.arrays.give(plan)
        return (found, problem.arrays.give_all(log)) if self.log else found


def takes(signature: str) -> Callable[[Callable[[Call], Any]], Callable[..., Any]]:
    """Give a function of a call POT's signature: names with their defaults, as POT writes them."""
    parsed = ast.parse(f"lambda {' '.join(signature.split())}: 0", mode="eval").body
    assert isinstance(parsed, ast.Lambda)
    names = [argument.arg for argument in parsed.args.args]
    defaults = [ast.literal_eval(default) for default in parsed.args.defaults]
    without = [inspect.Parameter.empty] * (len(names) - len(defaults))
    kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        inspect.Parameter(name, kind, default=default, annotation=Any)
        for name, default in zip(names, without + defaults, strict=True)
    ]
    if parsed.args.kwarg is not None:
        further: Any = inspect.Parameter.VAR_KEYWORD
        parameters.append(inspect.Parameter(parsed.args.kwarg.arg, further, annotation=Any))
    described = inspect.Signature(parameters, return_annotation=Any)

    def decorate(function: Callable[[Call], Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = described.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{function.__name__}() {error}") from None
            bound.apply_defaults()
            return function(Call(function=function.__name__, **bound.arguments))

        called.__signature__ = described  # type: ignore[attr-defined]
        return called

    return decorate
