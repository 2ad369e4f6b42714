"""Conditional gradient steps (Frank-Wolfe): the one loop of them, and how it polishes a plan.

A path knows how its plan is stored and which linear problem bounds it; the loop chooses how far to
go, exactly, and when to end [1]_ [2]_. Polishing leads a plan to a vertex near it, without entropy.

References
----------
.. [1] M. Frank, P. Wolfe. An algorithm for quadratic programming. Naval Research Logistics
   Quarterly 1956.
.. [2] T. Vayer, L. Chapel, R. Flamary, R. Tavenard, N. Courty. Optimal transport for structured
   data with application on graphs. ICML 2019.
"""

import importlib.util
import math
import sys
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._errors import UnsupportedError
from torchgw._gradients.contract import Gradient
from torchgw._plans.contract import Plan
from torchgw._plans.given import StoredPlan
from torchgw._plans.transport import TransportPlan, round_to_marginals
from torchgw._problem.problem import MarginalRule, is_assignment
from torchgw._sinkhorn.exact import Array, LinearSolver, one_sided, partial_transport, transport
from torchgw._sinkhorn.problem import DenseCost
from torchgw._solve.step import confined
from torchgw._tensors.deadline import is_over
from torchgw._tensors.operations import EQUAL, NOTHING
from torchgw._typing import Marginals, Potentials


class Path(Protocol):
    """A plan on its way towards solutions of linear problems."""

    def begin(self) -> float:
        """Return the objective at the plan."""

    def look(self) -> tuple[float, float] | None:
        """Solve the linear problem at the plan; find the objective towards its solution.

        Along a share s of the way it changes by bend s^2 + slope s. None ends the steps.
        """

    def go(self, length: float) -> None:
        """Go a share of the way."""


class Descent(NamedTuple):
    """How steps ended."""

    value: float
    losses: list[float]  # the objective before each step and at the end
    converged: bool


def oracle(
    p: Array, q: Array, rule: MarginalRule | None, total: float | None = None
) -> LinearSolver:
    """Prepare the solver of linear problems between weights, whose second may be free."""
    # `total` is the sum of the weights of bounds where it is known without rounding.
    if rule is None:
        return transport(p, q)
    return one_sided(p) if rule.mass is None else partial_transport(p, q, rule.mass, total)


def best_length(bend: float, slope: float) -> float:
    """Minimise bend s^2 + slope s over [0, 1]."""
    if bend > 0:
        return min(1.0, max(0.0, -slope / (2 * bend)))
    return 1.0 if bend + slope < 0 else 0.0


def take_steps(
    path: Path,
    *,
    max_iter: int,
    tol_rel: float | None = None,
    tol_abs: float = 0.0,
    length_of: Callable[[float, float], float] = best_length,
    verbose: bool = False,
) -> Descent:
    """Take steps along a path, one at least, until the objective stays or the path ends."""
    # Without `tol_rel`, a share of the objective, only the path ends them.
    value = path.begin()
    losses, converged = [value], False
    for step in range(max(max_iter, 1)):
        ahead = path.look()
        if ahead is None:
            break
        bend, slope = ahead
        length = length_of(bend, slope)
        path.go(length)
        before, value = value, value + bend * length**2 + slope * length
        losses.append(value)
        moved = abs(value - before)
        if verbose:
            sys.stderr.write(f"{step + 1:5d}|{value:8e}|{moved:8e}\n")
        if tol_rel is not None:
            converged = moved == 0 or moved < tol_abs or moved < tol_rel * abs(value)
        if converged:
            break
    return Descent(value, losses, converged)


# Steps at most. [L347]
_STEPS = 100
# Once the linearised objective promises no more than a share, a vertex will do if it promises at
# least a share of what the last one did; only one that promises less has to be the best. Earlier
# steps choose among optima. [L1258]
_NEAR, _ENOUGH = 1e-5, 0.5
# Weight moves between the plans of a mean until this share of the gap is left, in so many moves of
# a step at most. [L1344]
_CORRECTED, _CORRECTIONS = 0.1, 1000
# Density that is given to entries of zero, because their logarithm has to exist. [L295]
_SMALLEST_DENSITY = 1e-250


# Scalings by which a plan on a support meets its marginals, at most, and the L1 error that is left.
# [L1374]
_SCALINGS, _SCALED = 500, 1e-13


# Flat indices and masses of the entries of a plan that are not zero.
_Entries = tuple[Tensor, Tensor]


class Polished(NamedTuple):
    """Where the steps ended."""

    steps: int
    stationary: bool
    gap: float  # what the linearised objective could still fall by; zero at a stationary point


def polish(
    gradient: Gradient,
    plan: TransportPlan,
    rule: MarginalRule | None,
    generator: torch.Generator,
    begun: Plan | None = None,
    support: Tensor | None = None,
) -> tuple[TransportPlan, Polished]:
    """Lead a plan to a stationary one of the objective without entropy."""
    # The plan keeps to a `support`. If the solve of a strict problem had `begun` at a plan that
    # costs less than what it has come to, lead that one instead.

    def cost_at(matrix: Tensor) -> Tensor:
        coupling = gradient.update(StoredPlan(matrix), None, generator)
        cost = gradient.linearise(coupling).seen(coupling.masses)
        if support is not None:
            cost = confined(cost, support, 0.0)
        return cost.dense().matrix.double()

    marginals, matrix, exact = plan.weights, plan.to_dense().double(), False
    if support is not None and rule is None:
        # what rounding to marginals spreads would leave the support
        scaled = scale_to_marginals(matrix, marginals)
        matrix = (
            _vertices(marginals, rule)(cost_at(matrix), -math.inf) if scaled is None else scaled
        )
        begun, exact = None, True
    matrix, polished = descend(matrix, marginals, rule, cost_at, exact=exact)
    if begun is not None and rule is None:
        first = round_to_marginals(
            torch.as_tensor(begun.to_dense(), device=matrix.device).to(matrix), *marginals
        )
        slopes = cost_at(matrix) + cost_at(first)
        # the objective is quadratic: twice its difference
        if float((slopes * (first - matrix)).sum()) < -EQUAL * float(slopes.abs().max()):
            matrix, polished = descend(first, marginals, rule, cost_at)
    return plan_of(matrix, marginals), polished


def plan_of(matrix: Tensor, marginals: Marginals) -> TransportPlan:
    """Make an operator of a plan (n, m), of cost -log P / (a x b) and epsilon one."""
    product = torch.outer(*marginals)
    density = torch.where(product > 0, matrix / product, 1.0).clamp_min(_SMALLEST_DENSITY)
    zero = Potentials(*map(torch.zeros_like, marginals))
    return TransportPlan(DenseCost(-density.log()), zero, marginals, 1.0)


def scale_to_marginals(matrix: Tensor, marginals: Marginals) -> Tensor | None:
    """Scale rows and columns of a plan until both marginals are met; ``None`` if that is slow."""
    a, b = marginals
    tiny = torch.finfo(matrix.dtype).tiny
    for _ in range(_SCALINGS):
        matrix = matrix * (b / matrix.sum(0).clamp_min(tiny))
        rows = matrix.sum(1)
        if float((rows - a).abs().sum()) <= _SCALED:
            return matrix
        matrix = matrix * (a / rows.clamp_min(tiny))[:, None]
    return None


def descend(
    matrix: Tensor,
    marginals: Marginals,
    rule: MarginalRule | None,
    cost_at: Callable[[Tensor], Tensor],
    *,
    exact: bool = False,
) -> tuple[Tensor, Polished]:
    """Run fully corrective conditional gradient steps from a plan (n, m)."""
    # ``cost_at`` is the gradient of the objective at a plan of mass one, (n, m) float64. An
    # ``exact`` plan has its marginals.
    # Both marginals of the plan that comes back are exact up to rounding; that of a relaxed problem
    # is normalised.
    if not exact:
        strict = rule is None
        matrix = round_to_marginals(matrix, *marginals) if strict else matrix / matrix.sum()
    path = _Path(matrix, marginals, rule, cost_at)
    take_steps(path, max_iter=_STEPS + 1)
    matrix, vertex = path.matrix, path.vertex
    if float((vertex - matrix).abs().sum()) <= EQUAL:
        # a weak entropy had left tiny entries beside a vertex
        matrix = vertex
    return matrix, Polished(path.steps, path.stationary, max(path.gap, 0.0))


class _Path:
    """A plan on its way to vertices V of the polytope of plans, and to means of them."""

    # A step goes to a minimum over all means of the plan at the start and of the vertices so far
    # [2]. Steps to V alone would turn to and fro for ever where the minimum lies between a few
    # vertices.
    # [2] B. von Hohenbalken. Simplicial decomposition in nonlinear programming algorithms.
    # Mathematical Programming 1977.

    vertex: Tensor  # of the last linear problem

    def __init__(
        self,
        matrix: Tensor,
        marginals: Marginals,
        rule: MarginalRule | None,
        cost_at: Callable[[Tensor], Tensor],
    ) -> None:
        self.matrix, self._cost_at, self._cost = matrix, cost_at, cost_at(matrix)
        self._mean = _Mean(matrix, self._cost)
        self._least = _vertices(marginals, rule)
        self.steps, self.stationary, self.gap = 0, False, math.inf

    def begin(self) -> float:
        """Start to count; what is above or below the start is of no use here."""
        return 0.0

    def look(self) -> tuple[float, float] | None:
        """Solve the linear problem; None at a stationary plan, and where steps or time are up."""
        cost, matrix = self._cost, self.matrix
        here = float((cost * matrix).sum())
        smallest = EQUAL * abs(here)
        near = self.gap <= _NEAR * abs(here)
        enough = here - max(_ENOUGH * self.gap, smallest) if near else -math.inf
        self.vertex = self._least(cost, enough)
        self._part = _nonzero(self.vertex)
        self.gap = here - float(_pairings(cost, [self._part])[0])
        self.stationary = self.gap <= smallest
        self._corrected = _CORRECTED * smallest
        if self.stationary or self.steps == _STEPS or is_over():
            return None
        # where the best mean lies is not told by the way to the vertex
        return 0.0, -self.gap

    def go(self, length: float) -> None:
        """Go to the best mean."""
        self.steps += 1
        there = self._cost_at(self.vertex)
        self._mean.add(self._part, self._cost, there)
        self._mean.descend(self._corrected)
        if self._mean.is_vertex:
            self.matrix, self._cost = self.vertex, there
        else:
            self.matrix = self._mean.plan()
            self._cost = self._cost_at(self.matrix)


class _Mean:
    """A plan as a mean of a few, and the objective of such means: w' H w / 2 + c' w."""

    def __init__(self, start: Tensor, cost: Tensor) -> None:
        self._shape = start.shape
        self._parts = [_nonzero(start)]
        self._weights = np.ones(1)
        # constants in H and c do not matter, as weights sum to one
        self._bends = self._against(cost, self._parts)[None]
        self._linear = np.zeros(1)

    @property
    def is_vertex(self) -> bool:
        """Whether all weight is on the part that was added last."""
        return len(self._parts) == 1

    def plan(self) -> Tensor:
        """Build the plan, (n, m)."""
        flat = self._parts[0][1].new_zeros(self._shape[0] * self._shape[1])
        for weight, (index, mass) in zip(self._weights, self._parts, strict=True):
            flat.index_add_(0, index, mass, alpha=float(weight))
        return flat.view(self._shape)

    def add(self, part: _Entries, cost: Tensor, cost_there: Tensor) -> None:
        """Add a vertex of no weight, given the costs at the plan and at the vertex."""
        *others, own = self._against(cost_there, [*self._parts, part])
        # <cost at the plan, vertex> is the derivative by the weight of the vertex
        slope = self._against(cost, [part])[0]
        linear = slope + self._weights @ (self._linear - others)
        row = np.array(others) - self._linear
        self._bends = np.block([[self._bends, row[:, None]], [row, own - linear]])
        self._linear = np.append(self._linear, linear)
        self._weights = np.append(self._weights, 0.0)
        self._parts.append(part)

    @staticmethod
    def _against(cost: Tensor, parts: list[_Entries]) -> Array:
        """Pair parts of mass one with a cost, up to a constant that is linear in its plan."""
        # that of relaxed plans is what their masses make it
        return _pairings(cost, parts) - float(cost[0, 0])

    def descend(self, tol: float) -> None:
        """Move weight until no derivative is below that of a part in use; drop empty ones."""
        # Derivatives of the parts in use are made equal, until one of these is empty; then the part
        # of the least derivative joins them. The objective falls each time, which ends it [2].
        bends, weights = self._bends, self._weights
        for _ in range(_CORRECTIONS):
            slopes = bends @ weights + self._linear
            used = weights > 0
            best, worst = slopes.argmin(), np.where(used, slopes, -np.inf).argmax()
            if slopes[worst] - slopes[best] <= tol:
                break
            if slopes[worst] - slopes[used].min() <= tol:
                used[best] = True
            step = np.zeros_like(weights)
            step[used] = _towards_least(bends[np.ix_(used, used)], slopes[used])
            if slopes @ step >= 0:
                # what is left of the derivatives is rounding in all directions together
                step[:] = 0.0
                step[best], step[worst] = 1.0, -1.0
            shrinking = np.flatnonzero(step < 0)
            shares = weights[shrinking] / -step[shrinking]
            most = shares.min()
            slope, bend = slopes @ step, step @ bends @ step
            length = most if -slope >= bend * most else -slope / bend
            weights += length * step
            if length == most:
                weights[shrinking[shares == most]] = 0.0
            np.maximum(weights, 0.0, out=weights)
        kept = np.flatnonzero(weights)
        self._bends = bends[np.ix_(kept, kept)]
        self._linear = self._linear[kept]
        self._weights = weights[kept] / weights[kept].sum()
        self._parts = [self._parts[part] for part in kept]


def _towards_least(bends: Array, slopes: Array) -> Array:
    """Choose where weights of sum zero go to the least w' bends w / 2 + slopes w."""
    # Where the objective does not bend upwards, down its slope.
    corner = np.eye(len(slopes))
    corner[:, 0] = 1.0
    # directions of sum zero
    basis = np.linalg.qr(corner)[0][:, 1:]
    values, vectors = np.linalg.eigh(basis.T @ bends @ basis)
    along = vectors.T @ (basis.T @ slopes)
    flat = values <= NOTHING * np.abs(values).max()
    down = np.where(flat, along, 0.0)
    if np.abs(down).max() <= NOTHING * np.abs(along).max():
        down = np.where(flat, 0.0, along / np.where(flat, 1.0, values))
    step: Array = -(basis @ (vectors @ down))
    return step


def _nonzero(plan: Tensor) -> _Entries:
    """List the entries of a plan that are not zero."""
    flat = plan.flatten()
    index = flat.nonzero()[:, 0]
    return index, flat[index]


def _pairings(cost: Tensor, parts: list[_Entries]) -> NDArray[np.float64]:
    """Compute <cost, part> of each part."""
    flat = cost.flatten()
    return torch.stack([flat[index] @ mass for index, mass in parts]).cpu().numpy()


def check_polish(marginals: Marginals, rule: MarginalRule | None) -> None:
    """Refuse a general linear problem without POT."""
    if not can_polish(marginals, rule):
        raise UnsupportedError(
            "`polish=True` solves an assignment problem for equal weights and n = m; others need "
            "POT's exact solver, which is not installed: pip install pot. Or pass polish=False."
        )


def can_polish(marginals: Marginals, rule: MarginalRule | None) -> bool:
    """Whether linear problems are solved soon: SciPy's solver of general ones takes minutes."""
    free = rule is not None and rule.mass is None
    simple = free or (rule is None and is_assignment(marginals))
    return simple or importlib.util.find_spec("ot") is not None


# Finds the plan of mass one and least linear cost, or one whose value is below a number.
_Vertices = Callable[[Tensor, float], Tensor]


def _vertices(marginals: Marginals, rule: MarginalRule | None) -> _Vertices:
    """Make the solver of linearised problems."""
    if rule is not None and rule.mass is None:
        strict = rule.rho.index(math.inf)
        return lambda cost, below: _one_sided_vertex(cost, marginals, strict)
    a, b = (weight.cpu().numpy() for weight in marginals)
    solve = oracle(a, b / b.sum() * a.sum() if rule is None else b, rule, total=1.0)

    def vertex(cost: Tensor, below: float) -> Tensor:
        plan = solve(cost.cpu().numpy(), below=below).plan
        return torch.from_numpy(plan if rule is None else plan / plan.sum()).to(cost)

    return vertex


def _one_sided_vertex(cost: Tensor, marginals: Marginals, strict: int) -> Tensor:
    """Send every point of the strict side to its cheapest partner, on its device."""
    weight = marginals[strict].to(cost)
    other = cost.argmin(1 - strict, keepdim=True)
    return torch.zeros_like(cost).scatter_(1 - strict, other, weight.unsqueeze(1 - strict))
