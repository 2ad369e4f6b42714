"""``alpha="auto"``: distances and the linear cost are to count alike at the match, not before it.

Both costs have units of their own, and how much each tells of a pair is known where points are
matched: by what is left of it there. The weight at which both leave as much makes the plan a
stationary point of the product of both costs, in which no unit is left. From a weight the plan is
found, and from the plan the next weight; the product falls until they agree. There are two
starts: pairs at random, between which both costs count alike, and the match of distances alone.
The one that ends at the lower product is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgw._answer.passes import solve_problem
from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw._problem.limits import CPU
from torchgw._problem.problem import Problem
from torchgw._sinkhorn.problem import DenseCost
from torchgw._solve.pipeline import Asked, Outcome
from torchgw._solve.state import Recorder, Status
from torchgw._starts.alternatives import Search
from torchgw._tensors.deadline import is_over
from torchgw._tensors.operations import distinct

# The product of both costs has to fall by this factor for another solve. [L1467]
_FALLS = 0.95

Way = Callable[[Asked, Recorder], Outcome]


class _End(NamedTuple):
    """Where solves from one start have led."""

    asked: Asked
    outcome: Outcome
    product: float


def is_chosen(alpha: Any, *, fused: bool, named: bool, mass: Any) -> bool:
    """Whether the weight is to be chosen: as asked, or where a part of the mass is moved."""
    asked = isinstance(alpha, str) and alpha == "auto"
    if asked and not fused:
        raise InvalidInputError(
            "alpha='auto' weighs a linear cost, and none was given. Pass `M` or `features`."
        )
    return asked or (alpha is None and fused and not named and mass is not None)


def check_chosen(**given: Any) -> None:
    """Refuse what does not go with a weight that several solves find."""
    for name, value in given.items():
        if value is not None:
            raise UnsupportedError(
                "alpha='auto', which is the default with `mass` and a linear cost, takes several "
                f"solves, and `{name}` is for one. Pass a number as `alpha`."
            )


def alike(problem: Problem) -> float:
    """Compute the weight at which both costs count alike between pairs at random."""
    n, m = problem.shape
    generator, count = torch.Generator("cpu").manual_seed(0), min(CPU.looked_at, max(n, m))
    source, target = (
        torch.randint(size, (count,), generator=generator, device="cpu").to(problem.source.device)
        for size in (n, m)
    )
    even = problem.marginals.a.new_full((count,), 1 / count)
    return _weight(problem, _costs(problem, source, target, even))


def solve_balanced(asked: Asked, recorder: Recorder, way: Way) -> Outcome:
    """Solve at the weight at which both costs count alike at the match."""
    problem, options = asked.problem, asked.options
    rule = options.rule
    # where the mass is chosen too the weight is found at the one that is tried first
    best = _descended(asked)
    if asked.init is None and options.n_init is None and not is_over():
        apart = asked._replace(problem=replace(problem, alpha=1.0, linear=None))
        alone = solve_problem(apart.again(), Recorder())
        best = min(best, _descended(_at_match(asked, alone)), key=lambda end: end.product)
    outcome = best.outcome
    if rule is not None and rule.chosen:
        weighed = asked._replace(problem=best.asked.problem)
        outcome = way(weighed.again(outcome.plan), Recorder())
        overlap, search = outcome.overlap, outcome.search
        if overlap is not None and overlap.chosen < 1 and not is_over():
            # of another mass both costs are others
            there = replace(options, rule=replace(rule, mass=overlap.chosen))
            outcome = _descended(_at_match(weighed._replace(options=there), outcome)).outcome
            outcome = outcome._replace(overlap=overlap, search=search)
    recorder.history, recorder.timings = outcome.recorder.history, outcome.recorder.timings
    return outcome._replace(recorder=recorder)


def _descended(asked: Asked) -> _End:
    """Solve at one weight after the other, until the product of both costs falls no more."""
    best: _End | None = None
    search = Search((), math.nan)
    while True:
        outcome = solve_problem(asked, Recorder())
        if best is None and outcome.search is not None:
            # optima that were listed are those of another weight
            search = search._replace(doubt=outcome.search.doubt)
        quadratic, linear = _costs_at(asked.problem, outcome)
        product = quadratic * linear
        if best is not None and product > _FALLS * best.product:
            return best
        best = _End(asked, outcome._replace(search=search), product)
        if product == 0 or outcome.ending.status is Status.STOPPED or is_over():
            return best
        asked = _at_match(asked, outcome)


def _at_match(asked: Asked, found: Outcome) -> Asked:
    """Ask for a solve from a plan, at the weight at which both costs count alike there."""
    weight = _weight(asked.problem, _costs_at(asked.problem, found))
    return asked._replace(problem=replace(asked.problem, alpha=weight)).again(found.plan)


def _weight(problem: Problem, costs: tuple[float, float]) -> float:
    """Compute the weight at which costs count alike; that of the problem where one is nothing."""
    quadratic, linear = costs
    return linear / (quadratic + linear) if min(costs) > 0 else problem.alpha


def _costs_at(problem: Problem, found: Outcome) -> tuple[float, float]:
    """Measure both costs where each point goes to its likeliest partner, as plans are blurred."""
    plan = found.ending.plan.giving(in_numpy=False)
    mass = plan.marginals()[0]
    source = mass.nonzero()[:, 0]
    most = CPU.looked_at
    if len(source) > most:
        generator = torch.Generator("cpu").manual_seed(0)
        source = source[distinct(len(source), most, generator).to(source.device)]
    share = mass[source] * (mass.sum() / mass[source].sum())
    return _costs(problem, source, plan.argmax()[source], share)


def _costs(problem: Problem, source: Tensor, target: Tensor, mass: Tensor) -> tuple[float, float]:
    """Measure both costs of pairs (k,) that hold a mass (k,) each."""
    x, y = (
        side.columns(index)[index].double()
        for side, index in ((problem.source, source), (problem.target, target))
    )
    assert problem.linear is not None
    each = problem.linear.at(source, target)
    if isinstance(problem.linear, DenseCost):
        # costs above the least one, or above zero: with a mass that is given a sum moves no plan
        each = each - problem.linear.matrix.min().clamp(max=0)
    quadratic = float(mass @ problem.loss(x, y) @ mass)
    return max(0.0, quadratic), max(0.0, float(mass @ each.double()))
