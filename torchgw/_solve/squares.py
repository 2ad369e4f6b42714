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

from torchgw._sinkhorn.anderson import Anderson
from torchgw._solve.outcome import Asked, Outcome
from torchgw._solve.passes import solve_problem
from torchgw._solve.state import Recorder
from torchgw._solve.status import Status
from torchgw._typing import Marginals, Potentials

# Solves at most; by how many times `tol` masses may still move where the cost is sampled; masses
# below the last number are zero. [L823]
_MOST, _ROUGHLY, _LEAST = 60, 100, 1e-300


class _Stand(NamedTuple):
    """A penalty by entropy that stands for one by squares: its weight, and those of points."""

    rho: float
    weights: Tensor  # of any sum, (n,)


def solve_squares(asked: Asked, recorder: Recorder) -> Outcome:
    """Solve with penalties by squares."""
    problem, rule = asked.problem, asked.options.rule
    assert rule is not None
    given = [weight * total for weight, total in zip(problem.marginals, rule.totals, strict=True)]
    stands = [_Stand(_steepness(*side), side[1]) for side in zip(rule.rho, given, strict=True)]
    point, mixer, firm, last, options = torch.cat(given), Anderson(), 1.0, math.inf, asked.options
    for _ in range(_MOST):
        totals = [float(stand.weights.sum()) for stand in stands]
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
        ending, solved, found = outcome.ending, stands, torch.cat(outcome.ending.evaluation.masses)
        moved = float((found - point).abs().sum() / found.sum())
        settled = moved <= (1 if outcome.noise is None else _ROUGHLY) * options.tol
        if settled or not ending.status.converged:
            break
        # if masses swing to and fro, the penalty is made steeper
        firm, last = firm * (2 if moved > 2 * last else 1), moved
        options = replace(options, epsilon=ending.epsilon, n_init=None, told="all")
        asked = asked._replace(init=ending.plan, made=())
        point = mixer.next(*(part.clamp_min(_LEAST).log() for part in (point, found))).exp()
        stands = [
            _stand(rho, weight, mass, ending.epsilon, firm)
            for rho, weight, mass in zip(
                rule.rho, given, point.split([len(side) for side in given]), strict=True
            )
        ]
    stands = solved
    if not settled and ending.status.converged:
        ending = ending._replace(status=Status.OUTER_LIMIT)
    return _as_asked(outcome._replace(ending=ending), rule.rho, given, stands, problem.marginals)


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
    log_weights, log_masses = (part.clamp_min(_LEAST).log() for part in (weights, masses))
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
        moved += float(xlogy(masses, stand.weights / weight.clamp_min(_LEAST)).sum())
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
