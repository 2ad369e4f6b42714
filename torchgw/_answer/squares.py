"""Penalties by squares, by solves with penalties by entropy that have the same slope.

In place of KL(P1 x P1 | a x a) a side has |P1 x P1 - a x a|^2 / 2. At the masses of a plan this has
the slope of a penalty by entropy with other weights a: each solve gives the weights of the next,
until its masses stay (docs/algorithm.md, equation 45).
"""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.special import xlogy

from torchgw._answer.passes import ROUGHLY, solve_problem
from torchgw._errors import NumericalError
from torchgw._problem.problem import is_usable_sum
from torchgw._sinkhorn.annealing import WINDOW, Anderson
from torchgw._solve.evaluation import ERRORS
from torchgw._solve.pipeline import Asked, Outcome
from torchgw._solve.state import Recorder, Status, rounding
from torchgw._starts.alternatives import Search
from torchgw._tensors.operations import EQUAL, TINY
from torchgw._typing import Marginals, Potentials

# Solves at most; by which factor masses are extrapolated at most. [L1229]
_MOST, _FURTHEST = 120, 2.0


class _Stand(NamedTuple):
    """A penalty by entropy that stands for one by squares: its weight, and those of points."""

    rho: float
    weights: Tensor  # of any sum, (n,)


def solve_squares(asked: Asked, recorder: Recorder) -> Outcome:
    """Solve with penalties by squares."""
    problem, rule, options = asked.problem, asked.options.rule, asked.options
    assert rule is not None
    given = [weight * total for weight, total in zip(problem.marginals, rule.totals, strict=True)]
    stands = [_Stand(_steepness(*side), side[1]) for side in zip(rule.rho, given, strict=True)]
    point, far, mixer, firm = torch.cat(given), False, Anderson(), 1.0
    best: Outcome | None = None
    idle, last, stretch = 0, math.inf, 0.0
    search: Search | None = None
    for _ in range(_MOST):
        totals = [_usable(float(stand.weights.sum())) for stand in stands]
        weights = [stand.weights / total for stand, total in zip(stands, totals, strict=True)]
        penalties = replace(
            rule, rho=(stands[0].rho, stands[1].rho), totals=(totals[0], totals[1]), squares=False
        )
        outcome = solve_problem(
            asked._replace(
                problem=replace(problem, marginals=Marginals(*weights)),
                options=replace(options, rule=penalties),
            ),
            recorder,
        )
        # of the first penalties; the others begin where those ended
        search = search or outcome.search
        outcome = _as_asked(outcome, rule.rho, given, stands, problem.marginals)
        outcome = outcome._replace(search=search)
        ending, found = outcome.ending, torch.cat(outcome.ending.evaluation.masses)
        if ending.status is Status.STOPPED:
            return outcome
        if best is not None and _is_higher(outcome, best):
            # the step was too long: it was extrapolated, or the penalty is not steep enough
            firm, mixer = firm * (1 if far else 2), Anderson()
            point, far = torch.cat(best.ending.evaluation.masses), False
            last, stretch = math.inf, 0.0
        else:
            falls = best is None or _is_higher(best, outcome)
            idle = 0 if falls or outcome.noise is not None else idle + 1
            best, asked = outcome, asked._replace(init=ending.plan, made=())
            moved = float((found - point).abs().sum() / found.sum())
            tol = options.tol * (1 if outcome.noise is None else ROUGHLY)
            if moved <= max(tol, _rounding(outcome)):
                return best
            # masses that float32 cannot settle go on to move
            if idle == WINDOW and options.objective_tol > 0:
                return _with_status(best, Status.FLAT)
            # steps that grow lead away from a saddle point, along which longer ones do so sooner
            grows = moved > last and outcome.noise is None
            last, stretch = moved, 2 * stretch + 1 if grows else 0.0
            point = _mixed(mixer, point, found, stretch)
            far = point is not found
        options = replace(options, epsilon=ending.epsilon, n_init=None, told="all")
        stands = [
            _stand(rho, weight, mass, ending.epsilon, firm)
            for rho, weight, mass in zip(
                rule.rho, given, point.split([len(side) for side in given]), strict=True
            )
        ]
    assert best is not None
    return _with_status(best, Status.OUTER_LIMIT)


def _with_status(outcome: Outcome, status: Status) -> Outcome:
    """Say how the masses ended, where the last solve has converged."""
    if outcome.ending.status.converged:
        return outcome._replace(ending=outcome.ending._replace(status=status))
    return outcome


def _usable(total: float) -> float:
    """Return a sum of weights; refuse one whose squares overflow."""
    if not is_usable_sum(total):
        raise NumericalError(
            "A plan of least objective moves nothing here, as its cost outweighs the penalties: "
            "its masses fall from step to step. Raise `unbalanced`, or bring the costs nearer to "
            "zero."
        )
    return total


def _is_higher(outcome: Outcome, best: Outcome) -> bool:
    """Whether the objective of a plan is above that of another by more than their errors."""
    before, now = best.objective, outcome.objective
    errors = sum(one.ending.evaluation.quadratic.standard_error for one in (best, outcome))
    return now - before > max(EQUAL, _rounding(best)) * abs(before) + ERRORS * errors


def _rounding(outcome: Outcome) -> float:
    """Compute the rounding of the exponents of a plan."""
    plan = outcome.ending.plan
    return rounding(outcome.strategy.scale, plan.epsilon, plan.dtype)


def _mixed(mixer: Anderson, point: Tensor, found: Tensor, stretch: float) -> Tensor:
    """Extrapolate masses by Anderson's method or by so many steps, by not more than a factor."""
    # roots of masses: changes of their logarithms would all be those of points without mass
    root, image = point.sqrt(), found.sqrt()
    roots = mixer.next(root, image)
    if roots is image:
        if stretch == 0:
            return found
        roots = image + stretch * (image - root)
    return roots.clamp_min(0).square().clamp(found / _FURTHEST, found * _FURTHEST)


def _steepness(rho: float, masses: Tensor) -> float:
    """Choose the weight at which entropy is as curved as the squares at the largest mass."""
    if rho == 0 or math.isinf(rho):
        return rho
    return rho * float((masses**2).sum() * masses.max() / masses.sum())


def _stand(rho: float, weights: Tensor, masses: Tensor, epsilon: float, firm: float) -> _Stand:
    """Find the penalty by entropy that has the slope of the squares at some masses."""
    steep = firm * _steepness(rho, masses)
    if rho == 0 or math.isinf(rho):
        return _Stand(rho, weights)
    mass, whole = masses.sum(), 2 * steep + epsilon
    log_weights, log_masses = (part.clamp_min(TINY).log() for part in (weights, masses))
    squares = 2 * rho * ((masses**2).sum() * masses - (masses @ weights) * weights)
    slope = squares - epsilon * mass * log_weights
    own = 2 * steep * (masses @ log_masses)
    shift = epsilon * (masses @ log_weights)
    mean = (2 * own + shift - masses @ slope / mass) / (2 * whole)
    logarithm = (2 * steep * mass * log_masses - slope + own + shift - whole * mean) / mass
    return _Stand(steep, torch.where(weights > 0, (logarithm / whole).exp(), 0.0))


def _as_asked(
    outcome: Outcome,
    rhos: tuple[float, float],
    given: list[Tensor],
    stands: list[_Stand],
    weights: Marginals,
) -> Outcome:
    """Convert entropy and penalty of a plan to the weights that were given."""
    ending = outcome.ending
    found, plan, mass = ending.evaluation, ending.plan, ending.evaluation.mass
    penalty, moved = 0.0, 0.0
    for rho, weight, stand, masses in zip(rhos, given, stands, found.masses, strict=True):
        # the entropy is relative to the product of the given weights
        moved += float(xlogy(masses, stand.weights / weight.clamp_min(TINY)).sum())
        if math.isfinite(rho):
            # |m x m - a x a|^2 / 2, computed from m - a, as a large rho multiplies its rounding
            apart = masses - weight
            along, far = weight @ apart, apart @ apart
            penalty += rho * float(along**2 + far * (weight @ weight + far / 2 + 2 * along))
    sizes = [
        math.prod(float(part.sum()) for part in parts)
        for parts in (given, [stand.weights for stand in stands])
    ]
    kl = found.kl + mass * moved + (sizes[0] ** 2 - sizes[1] ** 2) / 2
    evaluation = found._replace(kl=kl, penalty=penalty)

    def shifted(pair: Potentials) -> Potentials:
        return Potentials(
            *(
                part + plan.epsilon * torch.where(one > 0, own / one, 1.0).log().to(part)
                for part, own, one in zip(pair, plan.weights, weights, strict=True)
            )
        )

    plan = plan.replaced(shifted(plan.potentials), weights, found.masses)
    return outcome._replace(
        ending=ending._replace(plan=plan, evaluation=evaluation),
        potentials=shifted(outcome.potentials),
    )
