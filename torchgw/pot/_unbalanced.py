"""Unbalanced problems across spaces: two plans, of samples and of features, by turns.

With two tables of distances both plans are of points, and it is fused unbalanced Gromov-Wasserstein
(FUGW, the entropy of both together); with two data matrices it is unbalanced co-optimal transport
(UCOOT, the entropy of each).
"""

import sys
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import scipy
from scipy.special import logsumexp

from torchgw._errors import InvalidInputError
from torchgw.pot._arrays import Array, product
from torchgw.pot._quadratic import Transformed

Divergence = Literal["kl", "l2"]
Coupling = Literal["joint", "independent"]

# What POT adds to divisors. [L389]
_TINY = 1e-16


class Side(NamedTuple):
    """The weights and the linear cost of one of the two plans."""

    x: Array  # (n,)
    y: Array  # (m,)
    linear: Array | None  # (n, m)

    @property
    def reference(self) -> Array:
        """The product of the weights, (n, m)."""
        return product(self.x, self.y)


class Penalties(NamedTuple):
    """The weights of all terms but the costs."""

    rho_x: float
    rho_y: float
    epsilon_samples: float
    epsilon_features: float
    divergence: Divergence
    coupling: Coupling


class Unbalanced(NamedTuple):
    """The plans after the last turn."""

    samples: Array
    features: Array
    duals_samples: tuple[Array, Array] | None
    duals_features: tuple[Array, Array] | None
    errors: list[float]


def relative_entropy(mu: Array, nu: Array, *, mass: bool) -> float:
    """Compute KL(mu | nu), with the difference of their masses or without."""
    entropy = float(scipy.special.xlogy(mu, mu / nu).sum())
    return entropy + float(nu.sum() - mu.sum()) if mass else entropy


def to_product(
    plan: Array, a: Array, b: Array, rows: Array, columns: Array, divergence: str, *, mass: bool
) -> float:
    """Compute the divergence of a plan from a x b, without building that."""
    if divergence == "l2":
        squares = (plan**2).sum() + (a**2).sum() * (b**2).sum()
        return float(squares - 2 * a @ plan @ b) / 2
    entropy = scipy.special.xlogy(plan, plan).sum()
    entropy -= rows @ np.log(a) + columns @ np.log(b)
    return float(entropy - rows.sum() + a.sum() * b.sum() if mass else entropy)


def between_products(mu: Array, nu: Array, alpha: Array, beta: Array, divergence: str) -> float:
    """Compute the divergence of mu x nu from alpha x beta."""
    if divergence == "l2":
        squares = (mu**2).sum() * (nu**2).sum() + (alpha**2).sum() * (beta**2).sum()
        return float(squares - 2 * (alpha * mu).sum() * (beta * nu).sum()) / 2
    total = nu.sum() * relative_entropy(mu, alpha, mass=True)
    total += mu.sum() * relative_entropy(nu, beta, mass=True)
    return float(total + (mu.sum() - alpha.sum()) * (nu.sum() - beta.sum()))


def local_cost(
    parts: Transformed,
    plan: Array,
    side: Side,
    linear: Array | None,
    penalties: Penalties,
    epsilon: float,
) -> Array:
    """Compute the linear cost of one plan at the other, which has the weights of ``side``."""
    rho_x, rho_y, _, _, divergence, coupling = penalties
    rows, columns = plan.sum(1), plan.sum(0)
    cost: Array = (parts.f1 @ rows)[:, None] + parts.f2 @ columns - parts.h1 @ plan @ parts.h2.T
    if linear is not None:
        cost = cost + linear
    if divergence == "kl":
        for rho, marginal, weight in ((rho_x, rows, side.x), (rho_y, columns, side.y)):
            if np.isfinite(rho) and rho != 0:
                cost = cost + rho * relative_entropy(marginal, weight, mass=False)
        if coupling == "joint" and epsilon > 0:
            cost = cost + epsilon * to_product(
                plan, side.x, side.y, rows, columns, divergence, mass=False
            )
    return cost


def local_parameters(
    plan: Array, side: Side, penalties: Penalties, epsilon: float
) -> tuple[tuple[Array, Array, Array], tuple[float, float], float]:
    """Compute the weights, penalties and entropy that one plan has at the other."""
    rho_x, rho_y, _, _, divergence, coupling = penalties
    joint = coupling == "joint"
    if divergence == "kl":
        mass = float(plan.sum())
        weights = side.x, side.y, side.reference
        return weights, (rho_x * mass, rho_y * mass), mass * epsilon if joint else epsilon
    rows, columns = plan.sum(1), plan.sum(0)
    of_rows, of_columns = float(rows @ rows), float(columns @ columns)
    of_plan, reference = float((plan**2).sum()), side.reference
    weights = (
        side.x * (rows @ side.x / of_rows),
        side.y * (columns @ side.y / of_columns),
        reference * ((plan * reference).sum() / of_plan) if joint else reference,
    )
    return weights, (rho_x * of_rows, rho_y * of_columns), epsilon * of_plan if joint else epsilon


class Relaxed(NamedTuple):
    """Minimise <C, T> + epsilon D(T | c) + rho_x D(T1 | a) + rho_y D(T'1 | b) over one plan."""

    cost: Array  # C, (n, m)
    weights: tuple[Array, Array, Array]  # a, b and c, shapes (n,), (m,) and (n, m)
    rho: tuple[float, float]
    epsilon: float
    divergence: Divergence


def solve_linear(
    problem: Relaxed,
    start: Array,
    duals: tuple[Array, Array] | None,
    *,
    solver: str,
    max_iter: int,
    tol: float,
) -> tuple[Array, tuple[Array, Array] | None]:
    """Solve for one plan: by Sinkhorn, majorise and minimise (Chapel et al., 2021) or L-BFGS-B."""
    kl, entropy = problem.divergence == "kl", problem.epsilon != 0
    # the scalings of Sinkhorn's iterations are for KL
    if solver == "lbfgsb" or (solver.startswith("sinkhorn") and not kl and entropy):
        return _by_lbfgsb(problem, start, max_iter, tol), None
    if solver != "mm" and kl and entropy:
        return _by_sinkhorn(problem, duals, max_iter, tol)
    turn, plan = (_multiplicative_kl if kl else _multiplicative_l2)(problem), start
    for _ in range(max_iter):
        before, plan = plan, turn(plan)
        if np.linalg.norm(plan - before) < tol:
            break
    return plan, None


def _multiplicative_kl(problem: Relaxed) -> Callable[[Array], Array]:
    cost, (a, b, reference), rho, epsilon, _ = problem
    whole = epsilon + sum(rho)
    of_rows, of_columns, of_plan = rho[0] / whole, rho[1] / whole, epsilon / whole
    kernel = np.exp(-cost / whole) * a[:, None] ** of_rows * b**of_columns
    if of_plan > 0:
        kernel *= reference**of_plan

    def turn(plan: Array) -> Array:
        divisor = plan.sum(1)[:, None] ** of_rows * plan.sum(0) ** of_columns + _TINY
        found: Array = kernel * plan ** (of_rows + of_columns) / divisor
        return found

    return turn


def _multiplicative_l2(problem: Relaxed) -> Callable[[Array], Array]:
    cost, (a, b, reference), rho, epsilon, _ = problem
    pull = np.maximum(rho[0] * a[:, None] + rho[1] * b + epsilon * reference - cost, 0)

    def turn(plan: Array) -> Array:
        weight = rho[0] * plan.sum(1)[:, None] + rho[1] * plan.sum(0) + epsilon * plan
        found: Array = pull * plan / (weight + _TINY)
        return found

    return turn


def _by_sinkhorn(
    problem: Relaxed, duals: tuple[Array, Array] | None, max_iter: int, tol: float
) -> tuple[Array, tuple[Array, Array]]:
    """Iterate in logarithms; the duals are logarithms of scalings, as POT's are."""
    cost, (a, b, reference), rho, epsilon, _ = problem
    powers = [r / (r + epsilon) if np.isfinite(r) else 1.0 for r in rho]
    exponent = np.log(reference) - cost / epsilon
    u, v = duals if duals is not None else (np.zeros(len(a)), np.zeros(len(b)))
    for _ in range(max_iter):
        before = u, v
        u = powers[0] * (np.log(a) - logsumexp(exponent + v, axis=1))
        v = powers[1] * (np.log(b) - logsumexp(exponent + u[:, None], axis=0))
        if abs(u - before[0]).max() + abs(v - before[1]).max() < 2 * tol:
            break
    return np.exp(exponent + u[:, None] + v), (u, v)


def _by_lbfgsb(problem: Relaxed, start: Array, max_iter: int, tol: float) -> Array:
    cost, (a, b, reference), rho, epsilon, divergence = problem

    def term(mu: Array, nu: Array) -> tuple[float, Array]:
        if divergence == "l2":
            return float(((mu - nu) ** 2).sum()) / 2, mu - nu
        return relative_entropy(mu, nu, mass=True), np.log(mu / nu + _TINY)

    def objective(flat: Array) -> tuple[float, Array]:
        plan = flat.reshape(cost.shape)
        rows, row_slope = term(plan.sum(1), a)
        columns, column_slope = term(plan.sum(0), b)
        value = float(np.vdot(plan, cost)) + rho[0] * rows + rho[1] * columns
        slope = cost + rho[0] * row_slope[:, None] + rho[1] * column_slope
        if epsilon > 0:
            entropy, entropy_slope = term(plan, reference)
            value, slope = value + epsilon * entropy, slope + epsilon * entropy_slope
        return value, slope.ravel()

    found = scipy.optimize.minimize(
        objective,
        start.ravel(),
        method="L-BFGS-B",
        jac=True,
        bounds=scipy.optimize.Bounds(0, np.inf),
        tol=tol,
        options={"maxiter": max_iter},
    )
    result: Array = found.x.reshape(cost.shape)
    return result


def across_spaces(
    parts: Transformed,
    samples: Side,
    features: Side,
    penalties: Penalties,
    starts: tuple[Array, Array],
    duals: tuple[tuple[Array, Array] | None, tuple[Array, Array] | None],
    *,
    solver: str,
    rescale: bool,
    max_iter: int,
    tol: float,
    inner_max_iter: int,
    inner_tol: float,
    verbose: bool,
) -> Unbalanced:
    """Solve for plans of features and samples by turns (Thual, NeurIPS 2022; Tran, AAAI 2023)."""
    plan, other = starts
    duals_samples, duals_features = duals
    of_samples, of_features = penalties.epsilon_samples, penalties.epsilon_features
    errors: list[float] = []
    transposed = Transformed(*(part.T for part in parts))

    def turn(
        cost: Array,
        side: Side,
        epsilon: float,
        at: Array,
        own: Array,
        dual: tuple[Array, Array] | None,
    ) -> tuple[Array, tuple[Array, Array] | None]:
        # squared penalties are taken at the plan itself, as in POT
        seen = at if penalties.divergence == "kl" else own
        parameters = local_parameters(seen, side, penalties, epsilon)
        problem = Relaxed(cost, *parameters, penalties.divergence)
        limits: Any = {"solver": solver, "max_iter": inner_max_iter, "tol": inner_tol}
        solved, dual = solve_linear(problem, own, dual, **limits)
        if rescale:
            solved = solved * np.sqrt(at.sum() / solved.sum())
        return solved, dual

    with np.errstate(all="ignore"):
        for step in range(max_iter):
            before = plan
            cost = local_cost(transposed, plan, samples, features.linear, penalties, of_samples)
            other, duals_features = turn(cost, features, of_features, plan, other, duals_features)
            cost = local_cost(parts, other, features, samples.linear, penalties, of_features)
            plan, duals_samples = turn(cost, samples, of_samples, other, plan, duals_samples)
            errors.append(float(abs(plan - before).sum()))
            if verbose:
                sys.stderr.write(f"{step + 1:5d}|{errors[-1]:8e}|\n")
            if not errors[-1] >= tol:
                break
    if not (np.isfinite(plan).all() and np.isfinite(other).all()):
        raise InvalidInputError(
            "The plans are not finite: the weights of the penalties or of the regularisation are "
            "too large or too small for the costs. Adjust `reg_marginals` and `epsilon`, which "
            "solve_gromov calls `unbalanced` and `reg`."
        )
    return Unbalanced(plan, other, duals_samples, duals_features, errors)


def cost_of(parts: Transformed, plan: Array, other: Array) -> float:
    """Compute sum L(X_ik, Y_jl) P_ij Q_kl."""
    rows = plan.sum(1) @ parts.f1 @ other.sum(1)
    columns = plan.sum(0) @ parts.f2 @ other.sum(0)
    return float(rows + columns - np.vdot(parts.h1 @ other @ parts.h2.T, plan))


def total_cost(
    quadratic: float, samples: Side, features: Side, plan: Array, other: Array, penalties: Penalties
) -> float:
    """Compute the objective, given its quadratic term."""
    divergence = penalties.divergence
    value = quadratic
    for part, side in ((plan, samples), (other, features)):
        if side.linear is not None:
            value += float((part * side.linear).sum())
    for axis, rho in ((1, penalties.rho_x), (0, penalties.rho_y)):
        if np.isfinite(rho) and rho != 0:
            weights = (samples.x, features.x) if axis else (samples.y, features.y)
            value += rho * between_products(plan.sum(axis), other.sum(axis), *weights, divergence)
    if penalties.coupling == "joint":
        if penalties.epsilon_samples != 0:
            references = samples.reference, features.reference
            entropy = between_products(plan, other, *references, divergence)
            value += penalties.epsilon_samples * entropy
        return value
    for part, side, epsilon in (
        (plan, samples, penalties.epsilon_samples),
        (other, features, penalties.epsilon_features),
    ):
        if epsilon != 0:
            value += epsilon * to_product(
                part, side.x, side.y, part.sum(1), part.sum(0), divergence, mass=True
            )
    return value


def slopes_of(
    samples: Side, features: Side, plan: Array, other: Array, penalties: Penalties
) -> list[Array]:
    """Differentiate by weights at fixed plans: samples of both sides, then features of both."""
    joint = penalties.coupling == "joint"
    by_weights = []
    for own, side, mate, mate_side, epsilon in (
        (plan, samples, other, features, penalties.epsilon_samples),
        (other, features, plan, samples, penalties.epsilon_features),
    ):
        if joint:
            epsilon = penalties.epsilon_samples
        for axis, rho in ((1, penalties.rho_x), (0, penalties.rho_y)):
            weight, opposite = (side.x, side.y) if axis else (side.y, side.x)
            mates = mate_side.x if axis else mate_side.y
            ratio = own.sum(axis) / weight
            slope = np.zeros_like(weight)
            if np.isfinite(rho):
                slope += rho * (mates.sum() - mate.sum() * ratio)
            if joint:
                whole = mate_side.x.sum() * mate_side.y.sum() * opposite.sum()
                slope += epsilon * (whole - mate.sum() * ratio)
            else:
                slope += epsilon * (opposite.sum() - ratio)
            by_weights.append(slope)
    return by_weights
