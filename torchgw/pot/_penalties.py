"""Plans whose marginals are held by penalties: fused unbalanced Gromov-Wasserstein, one plan.

The objective is that of POT: the quadratic term and the linear cost, rho D(mu x mu | a x a) for
both marginals mu, and epsilon D(P x P | Q x Q) with Q = a x b, where D is KL or half of a square.
Linear problems at a plan are solved with entropy by scaling, otherwise by multiplicative steps.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
from scipy.special import xlogy

from torchgw._errors import InvalidInputError
from torchgw._problem.marginals import MarginalRule
from torchgw.pot._arrays import Array
from torchgw.pot._mirror import INEXACT, Entropic, Mirrored, Stop, iterate
from torchgw.pot.gromov._read import Problem

Divergence = Literal["kl", "l2"]

# What POT adds to divisors. [L389]
_TINY = 1e-16
# Multiplicative steps of a linear problem, and the change at which they end: those of POT. [L389]
_STEPS, _STAYS = 500, 1e-7


class Penalties(NamedTuple):
    """The weights of the penalties of both marginals and of the plan, and their kind."""

    rho: tuple[float, float]
    epsilon: float
    divergence: Divergence

    @property
    def tau(self) -> tuple[float, float]:
        """The factors of half-steps; a rule counts twice the weights of linear penalties."""
        return MarginalRule(self.rho).tau(2 * self.epsilon)


def solve(problem: Problem, penalties: Penalties, start: Array, stop: Stop) -> Mirrored:
    """Solve the linear problem at the last plan, until the plan stays."""
    # Its solution is scaled to the mean of both masses (Sejourne, Vialard, Peyre, NeurIPS 2021).
    rho, epsilon, divergence = penalties
    p, q = problem.p, problem.q
    reference = np.outer(p, q)
    scaling = divergence == "kl" and epsilon > 0
    solver = Entropic(p, q, epsilon, tau=penalties.tau) if scaling else None

    def step(plan: Array, error: float, before: Array) -> Array:
        # one that was extrapolated may have gone beyond zero
        plan = np.maximum(plan, 0.0)
        cost, mass = problem.slope(plan) / 2, float(plan.sum())
        if divergence == "l2":
            linear = _Linear.squared(cost, plan, (p, q, reference), penalties)
            found = _repeat(linear.step_l2(), before)
        else:
            seen = (rho[0], plan.sum(1), p), (rho[1], plan.sum(0), q), (epsilon, plan, reference)
            cost += sum(weight * entropy(*pair) for weight, *pair in seen if 0 < weight < np.inf)
            if solver is not None:
                solver.epsilon = mass * epsilon
                found = solver.plan(solver(cost, INEXACT * min(error, 1.0)))
            else:
                weights = mass * rho[0], mass * rho[1], 0.0
                found = _repeat(_Linear(cost, (p, q, reference), weights).step_kl(), before)
        return np.asarray(found * (mass / found.sum()) ** 0.5)

    other = start

    def turn(plan: Array, error: float) -> Array:
        """Take two steps, each from where the step before the last one ended, as POT does."""
        nonlocal other
        other = step(plan, error, other)
        return step(other, error, plan)

    with np.errstate(all="ignore"):
        if solver is not None:
            # POT's changes are sums over all entries
            close = stop._replace(tol=stop.tol / start.size**0.5)
            found = iterate(
                lambda plan, error: step(plan, error, plan), start, close, extrapolate=True
            )
        else:
            found = iterate(turn, start, stop)
            # the two plans of a turn may differ
            plans = sorted(
                (found.plan, other),
                key=lambda plan: sum(problem.parts(plan)) + penalty(problem, penalties, plan),
            )
            found = found._replace(plan=plans[0])
    if not np.isfinite(found.plan).all():
        raise InvalidInputError(
            "The plan is not finite: the weights of the penalties or of the regularisation are too "
            "large or too small for the costs. Adjust `unbalanced` and `reg`."
        )
    return found


class _Linear(NamedTuple):
    """Minimise <C, T> + the penalties of the marginals and of T itself, over one plan T."""

    cost: Array  # (n, m)
    wanted: tuple[Array, Array, Array]  # what marginals and plan are compared with
    weights: tuple[float, float, float]

    @classmethod
    def squared(
        cls, cost: Array, plan: Array, wanted: tuple[Array, ...], penalties: Penalties
    ) -> "_Linear":
        """Squared penalties of products with a plan are penalties of other weights."""
        seen = plan.sum(1), plan.sum(0), plan
        squares = [float((part**2).sum()) for part in seen]
        first, second, third = (
            part * (float((own * part).sum()) / square)
            for own, part, square in zip(seen, wanted, squares, strict=True)
        )
        given = *penalties.rho, penalties.epsilon
        weights = [weight * square for weight, square in zip(given, squares, strict=True)]
        return cls(cost, (first, second, third), (weights[0], weights[1], weights[2]))

    def step_kl(self) -> Callable[[Array], Array]:
        """Majorise and minimise (L. Chapel et al., NeurIPS 2021)."""
        (a, b, _), whole = self.wanted, sum(self.weights)
        of_rows, of_columns, _ = (weight / whole for weight in self.weights)
        kernel = np.exp(-self.cost / whole) * a[:, None] ** of_rows * b**of_columns

        def step(plan: Array) -> Array:
            divisor = plan.sum(1)[:, None] ** of_rows * plan.sum(0) ** of_columns + _TINY
            return np.asarray(kernel * plan ** (of_rows + of_columns) / divisor)

        return step

    def step_l2(self) -> Callable[[Array], Array]:
        """Do the same with squares."""
        (a, b, reference), (x, y, z) = self.wanted, self.weights
        pull = np.maximum(x * a[:, None] + y * b + z * reference - self.cost, 0)

        def step(plan: Array) -> Array:
            weight = x * plan.sum(1)[:, None] + y * plan.sum(0) + z * plan
            return np.asarray(pull * plan / (weight + _TINY))

        return step


def _repeat(step: Callable[[Array], Array], plan: Array) -> Array:
    for _ in range(_STEPS):
        before, plan = plan, step(plan)
        if np.linalg.norm(plan - before) < _STAYS:
            break
    return plan


def linear(
    problem: Problem, penalties: Penalties, start: Array, stop: Stop
) -> tuple[Array, float, bool]:
    """Solve unbalanced transport: find the plan, the value, and whether it stays."""
    # Its entropy is sum P log P - P, its penalties are those of the marginals themselves.
    cost, (p, q), (rho, epsilon, divergence) = problem.M, (problem.p, problem.q), penalties
    assert cost is not None
    if divergence == "kl" and epsilon:
        solver = Entropic(p, q, epsilon, most=max(stop.max_iter, 1000), tau=penalties.tau)
        # entropy is a divergence from a table of ones, up to a constant
        plan = solver.plan(solver(cost + epsilon * np.log(np.outer(p, q)), stop.tol))
        converged = solver.converged
    else:
        ones = np.ones_like(cost)
        problem_of_plan = _Linear(cost, (p, q, ones), (*rho, epsilon))
        step = problem_of_plan.step_kl() if divergence == "kl" else problem_of_plan.step_l2()
        found = iterate(
            lambda plan, _: step(plan), start, stop._replace(max_iter=max(stop.max_iter, 1000))
        )
        plan, converged = found.plan, found.converged
    value = float(np.vdot(cost, plan))
    for weight, sums, wanted in zip(rho, (plan.sum(1), plan.sum(0)), (p, q), strict=True):
        if divergence == "kl":
            value += weight * (entropy(sums, wanted) + wanted.sum() - sums.sum())
        else:
            value += weight * float(((sums - wanted) ** 2).sum()) / 2
    return plan, value + epsilon * float(xlogy(plan, plan).sum() - plan.sum()), converged


def entropy(mu: Array, nu: Array) -> float:
    """Compute sum mu log(mu / nu), where nothing is compared with nothing."""
    ratio = np.divide(mu, nu, out=np.ones_like(mu), where=nu > 0)
    return float(xlogy(mu, ratio).sum())


def penalty(problem: Problem, penalties: Penalties, plan: Array) -> float:
    """Compute what the penalties add to the value of a plan."""
    p, q = problem.p, problem.q
    seen = (plan.sum(1), p), (plan.sum(0), q), (plan, np.outer(p, q))
    weights = *penalties.rho, penalties.epsilon
    divergence = _of_squares if penalties.divergence == "l2" else _of_products
    return sum(
        weight * divergence(*pair)
        for weight, pair in zip(weights, seen, strict=True)
        if 0 < weight < np.inf
    )


def _of_products(mu: Array, nu: Array) -> float:
    """Compute KL(mu x mu | nu x nu)."""
    mass, total = float(mu.sum()), float(nu.sum())
    return 2 * mass * entropy(mu, nu) + total**2 - mass**2


def _of_squares(mu: Array, nu: Array) -> float:
    """Compute half the square of mu x mu - nu x nu."""
    return float((mu**2).sum() ** 2 + (nu**2).sum() ** 2 - 2 * (mu * nu).sum() ** 2) / 2


def weight_slopes(problem: Problem, penalties: Penalties, plan: Array) -> list[Array]:
    """Differentiate the value at a plan with KL penalties by both weights."""
    mass, sides = float(plan.sum()), ((problem.p, problem.q), (problem.q, problem.p))
    found = []
    for weight, sums, (own, other) in zip(
        penalties.rho, (plan.sum(1), plan.sum(0)), sides, strict=True
    ):
        ratio = sums / own
        slope = weight * (own.sum() - mass * ratio)
        slope += penalties.epsilon * (own.sum() * other.sum() ** 2 - mass * ratio)
        found.append(2 * slope)
    return found
