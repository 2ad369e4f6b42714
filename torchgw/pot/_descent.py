"""Conditional gradient steps on a dense problem, from the start that is given."""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np

from torchgw.pot._arrays import Array
from torchgw.pot._quadratic import Quadratic
from torchgw.pot._vertices import LinearSolver

# Decrease, over the slope, that Armijo's rule asks of a step. [L386]
_ARMIJO = 1e-4


class Descent(NamedTuple):
    """Where conditional gradient steps ended."""

    plan: Array  # (n, m)
    value: float
    losses: list[float]  # the objective before each step and at the end
    potentials: tuple[Array, Array] | None  # of the last linear problem
    converged: bool


def descend(
    term: Quadratic,
    weight: float,
    linear: Array | float,
    start: Array,
    solver: LinearSolver,
    *,
    max_iter: int,
    tol_rel: float,
    tol_abs: float,
    armijo: bool = False,
    limits: tuple[float | None, float | None] = (None, None),
    verbose: bool = False,
) -> Descent:
    """Minimise <M, T> + weight * quadratic(T) by conditional gradient (Frank-Wolfe) [1]_.

    Each step solves the linear problem of the gradient at T, and goes to the least value on the
    line to its solution, by the exact minimum of a quadratic function or by Armijo's rule. The
    gradient is linear in T, so that of the direction gives the line and the next gradient too.

    References
    ----------
    .. [1] T. Vayer, L. Chapel, R. Flamary, R. Tavenard, N. Courty. Optimal transport for structured
       data with application on graphs. ICML 2019.
    """
    plan = start
    slope = weight * term.gradient(plan)
    # a quadratic form is half its gradient
    value = float(np.sum(linear * plan)) + 0.5 * float(np.vdot(slope, plan))
    slope += linear
    losses = [value]
    converged = False
    for step in range(max(int(max_iter), 1)):
        found = solver(slope, float(np.vdot(slope, plan)))
        direction = found.plan - plan
        descent = float(np.vdot(slope, direction))
        change = term.gradient(direction)
        change *= weight
        bend = 0.5 * float(np.vdot(change, direction))
        length = _armijo(bend, descent) if armijo else best_step(bend, descent)
        if limits != (None, None):
            length = float(np.clip(length, *limits))
        # at the vertex entries are zero as they are there, without rounding
        plan = found.plan if length == 1 else plan + length * direction
        slope = slope + change if length == 1 else slope + length * change
        before, value = value, value + bend * length**2 + descent * length
        losses.append(value)
        moved = abs(value - before)
        if verbose:
            sys.stderr.write(f"{step + 1:5d}|{value:8e}|{moved:8e}\n")
        converged = moved == 0 or moved < tol_abs or moved < tol_rel * abs(value)
        if converged:
            break
    potentials = None if found.potentials is None else found.potentials()
    return Descent(plan, value, losses, potentials, converged)


def best_step(bend: float, slope: float) -> float:
    """Minimise bend s^2 + slope s over [0, 1]."""
    if bend > 0:
        return min(1.0, max(0.0, -slope / (2 * bend)))
    return 1.0 if bend + slope < 0 else 0.0


def _armijo(bend: float, slope: float) -> float:
    """Shorten a step of one until the value falls by a share of what the slope promises."""
    length = 1.0
    while bend * length**2 + slope * length > _ARMIJO * slope * length:
        # the minimum of the parabola, as bend is positive here
        length = -slope / (2 * bend)
        if length < 1e-12:
            return 0.0
    return length
