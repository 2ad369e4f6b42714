"""Steps with entropy on dense problems, from the start that is given: linearise, solve, repeat.

Linear problems are those of the engine, ``_sinkhorn``; where steps have become nearly linear they
are extrapolated as those of its outer loop are. POT's start, its limits and its log are kept.
"""

import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from torchgw._sinkhorn.annealing import Anderson
from torchgw._sinkhorn.eager import EagerBackend
from torchgw._sinkhorn.loop import sinkhorn
from torchgw._sinkhorn.partial import partial_sinkhorn
from torchgw._sinkhorn.problem import STRICT, DenseCost, LinearProblem
from torchgw._solve.loop import StepLength
from torchgw._typing import Marginals, Potentials
from torchgw.pot._arrays import Array

# A linear problem is solved to this error of its marginals, as a share of the last change of the
# plan. [L388]
INEXACT = 1e-3
# Plain iterations before the loop of the engine, which takes longer to begin. [L1301]
_FEW = 20
# Change of a plan, as a share of its norm, below which steps are nearly linear in it. [L1301]
_LINEAR = 1e-3
# Steps in a row that lead back and are no shorter: plans go to and fro. [L2003]
_TURNS = 5


class Stop(NamedTuple):
    """When a loop over plans ends: by the Frobenius norm of a change, or after some iterations."""

    max_iter: int
    tol: float
    verbose: bool = False


class Ended(NamedTuple):
    """Where steps have ended."""

    plan: Array  # (n, m)
    told: list[float]  # change of the plan by each step; without entropy the objective around each
    # (n,) and (m,), of the last linear problem: with entropy the plan is exp((f + g - C) / epsilon)
    potentials: tuple[Array, Array] | None
    converged: bool


Slope = Callable[[Array], Array]  # the derivative of the objective at a plan


class Entropic:
    """Linear problems with entropy, one after the other, each from the potentials of the last.

    Marginals are met; or with a ``mass`` they are bounds, and the plan moves that much.
    """

    def __init__(
        self, p: Array, q: Array, epsilon: float, mass: float | None = None, most: int = 1000
    ) -> None:
        self.epsilon, self._mass, self._most = epsilon, mass, most
        if mass is None:
            # their sums may differ by rounding, which no iteration removes
            q = q * (p.sum() / q.sum())
        self._weights = p, q
        self._marginals = Marginals(*(torch.from_numpy(weight) for weight in (p, q)))
        self._potentials: Potentials | None = None
        # the entropy of POT is sum P log P, which is not relative to p x q, as that of the loops
        # is; that is the same only where marginals are met
        self._reference = None if mass is None else np.log(np.outer(p, q))
        self.converged = True  # whether the last problem is solved

    def __call__(self, cost: Array, tol: float) -> Array:
        """Return the logarithm of the density of the plan, relative to p x q."""
        if self._reference is not None:
            cost = cost + self.epsilon * self._reference
        if self._plain(cost, tol) if self._mass is None else self._within_bounds(cost, self._mass):
            return self._exponent(cost)
        table, start = DenseCost(torch.from_numpy(cost)), self._potentials
        problem = LinearProblem(table, self._marginals, self.epsilon, STRICT)
        prepared = EagerBackend().prepare(problem)
        if self._mass is None:
            found = sinkhorn(prepared, start, max_iter=self._most, tol=tol)
        else:
            found = partial_sinkhorn(prepared, start, mass=self._mass, max_iter=self._most, tol=tol)
        self._potentials, self.converged = found.potentials, found.converged
        return self._exponent(cost)

    def _within_bounds(self, cost: Array, mass: float) -> bool:
        """Find the plan of a mass without bounds; tell whether it keeps to them all the same."""
        p, q = self._weights
        least = cost.min()
        plan = p[:, None] * np.exp((least - cost) / self.epsilon) * q
        share = mass / plan.sum()
        plan *= share
        if (plan.sum(1) > p).any() or (plan.sum(0) > q).any():
            return False
        level = torch.full_like(self._marginals.a, least + self.epsilon * np.log(share))
        self._potentials = Potentials(level, torch.zeros_like(self._marginals.b))
        self.converged = True
        return True

    def _plain(self, cost: Array, tol: float) -> bool:
        """Run some plain iterations by one kernel; tell whether they have solved the problem."""
        p, q = self._weights
        before = self._potentials = self._potentials or Potentials(
            *map(torch.zeros_like, self._marginals)
        )
        kernel = self._exponent(cost)
        with np.errstate(all="ignore"):
            np.exp(kernel, out=kernel)
            u = np.ones_like(p)
            for _ in range(min(_FEW, self._most)):
                v = 1 / ((p * u) @ kernel)
                last, u = u, 1 / (kernel @ (q * v))
                self.converged = bool(abs(last / u - 1) @ p <= tol)
                if self.converged:
                    break
            moved = [torch.from_numpy(self.epsilon * np.log(scaling)) for scaling in (u, v)]
        if not all(bool(part.isfinite().all()) for part in moved):
            return False
        self._potentials = Potentials(*(a + b for a, b in zip(before, moved, strict=True)))
        return self.converged

    def _exponent(self, cost: Array) -> Array:
        found = cost / -self.epsilon
        if self._potentials is not None:
            f, g = (part.numpy() / self.epsilon for part in self._potentials)
            found += f[:, None]
            found += g
        return found

    def plan(self, exponent: Array) -> Array:
        """Return the plan of such a logarithm."""
        p, q = self._weights
        return p[:, None] * np.exp(exponent) * q

    @property
    def potentials(self) -> tuple[Array, Array]:
        """Those of the plan itself, exp((f + g - C) / epsilon)."""
        assert self._potentials is not None
        f, g = (potential.numpy() for potential in self._potentials)
        if self._reference is not None:
            return f, g
        of_p, of_q = (self.epsilon * np.log(weight) for weight in self._weights)
        return f + of_p, g + of_q

    def forget(self) -> None:
        """Begin the next problem without potentials."""
        self._potentials = None


def mirror(slope: Slope, start: Array, solver: Entropic, stop: Stop, inner_tol: float) -> Ended:
    """Alternate the gradient and the linear problem (Peyre, Cuturi, Solomon, ICML 2016)."""

    def step(plan: Array, error: float) -> Array:
        return solver.plan(solver(slope(plan), max(inner_tol, INEXACT * min(error, 1.0))))

    return iterate(step, start, stop, extrapolate=True)._replace(potentials=solver.potentials)


def proximal(
    slope: Slope,
    start: Array,
    p: Array,
    q: Array,
    epsilon: float,
    stop: Stop,
    inner_max_iter: int,
    inner_tol: float,
) -> Ended:
    """Take steps whose entropy is relative to the last plan (Xu, Luo, Carin, ICML 2019)."""
    solver, logarithm = Entropic(p, q, epsilon, most=inner_max_iter), _log(start / np.outer(p, q))

    def step(plan: Array, error: float) -> Array:
        nonlocal logarithm
        # the logarithm has the last potentials in it
        solver.forget()
        cost = slope(plan) - epsilon * logarithm
        logarithm = solver(cost, max(inner_tol, INEXACT * min(error, 1.0)))
        return solver.plan(logarithm)

    return iterate(step, start, stop)._replace(potentials=solver.potentials)


def iterate(
    step: Callable[[Array, float], Array], point: Array, stop: Stop, *, extrapolate: bool = False
) -> Ended:
    """Repeat a step until the plan stays; a step gets the last change, at first infinity."""
    # Where steps only depend on the plan they may go less far than to the plan that a step finds,
    # once plans go to and fro, or further, where steps are nearly linear. Shortened before, some
    # would lead to other optima than POT's.
    errors, plan, converged, turns = [np.inf], point, False, 0
    length, further, direction = StepLength(), Anderson(), np.zeros_like(point)
    for _ in range(int(stop.max_iter)):
        plan = step(point, errors[-1])
        last, direction = direction, plan - point
        errors.append(float(np.linalg.norm(direction)))
        if turns < _TURNS:
            back = float((direction * last).sum()) < 0 and errors[-1] >= errors[-2]
            turns = turns + 1 if back else 0
        if stop.verbose:
            sys.stderr.write(f"{len(errors) - 2:5d}|{errors[-1]:8e}\n")
        converged = errors[-1] <= stop.tol
        if converged:
            break
        if extrapolate and errors[-1] < _LINEAR * np.linalg.norm(plan):
            point = further.next(torch.from_numpy(point), torch.from_numpy(plan)).numpy()
        elif extrapolate and turns == _TURNS:
            point = point + length.next(torch.from_numpy(direction)) * direction
        else:
            point = plan
    return Ended(plan, errors[1:], None, converged)


def _log(plan: Array) -> Array:
    """Take the logarithm of a plan, of which entries may be zero."""
    with np.errstate(divide="ignore"):
        return np.log(plan)
