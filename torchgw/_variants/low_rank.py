"""Plans of low rank, P = Q diag(1/g) R', by mirror descent on (Q, R, g).

docs/algorithm.md, equations 29 to 32. Neither the plan nor its cost is ever stored, so an iteration
is linear in n + m. All of it runs on logarithms, so that no step size overflows.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._errors import NumericalError
from torchgw._plans.contract import Plan
from torchgw._problem.problem import Problem
from torchgw._results.parts import stored
from torchgw._typing import Marginals

# Largest exponent of the first step, which changes an entry by a factor of at most exp(10). [L301]
_FIRST_STEP = 10.0
# Factors that a step size changes by, down when the value rises and up when it falls. [L301]
_SHRINK, _GROW = 0.5, 1.5
# Step size, relative to the largest, below which nothing more will come. [L301]
_SMALLEST_STEP = 1e-8
# Iterations over which the value must fall by ``tol``. [L301]
_WINDOW = 20
# Column error of a projection, its Newton steps, and the shortest of those. [L246, L301]
_PROJECTION_TOLERANCE = 1e-9
_NEWTON_STEPS = 30
_SHORTEST = 1e-6
# A projection may miss its columns by this error. [L301]
_LARGEST_MISS = 1e-6
# Ridge: the share of the mean curvature that is added to all curvatures. [L301]
_RIDGE = 1e-12
# Logarithms below this are as good as zero. [L301]
_LEAST_LOGARITHM = -600.0


class Factorisation(NamedTuple):
    """Logarithms of Q (n, r), R (m, r) and g (r,); the columns of Q and of R have the sums g."""

    q: Tensor
    r: Tensor
    g: Tensor


@stored
@dataclass(frozen=True, repr=False, eq=False)
class LowRankPlan(Plan):
    """P = Q diag(1/g) R', shape (n, m), of rank r.

    Attributes
    ----------
    Q, R : Tensor, shapes (n, r) and (m, r)
        Couplings of the source and of the target with r groups.
    g : Tensor, shape (r,)
        Mass of the groups.
    """

    Q: Tensor
    R: Tensor
    g: Tensor

    _unmapped = (
        "of weight zero are in no group of this plan, so they are mapped nowhere. Leave them out."
    )

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.Q), len(self.R)

    def _like(self) -> Tensor:
        return self.Q

    @property
    def T(self) -> "LowRankPlan":
        return LowRankPlan(self.R, self.Q, self.g).giving(self.in_numpy)

    def __repr__(self) -> str:
        """Say what the plan is."""
        return f"LowRankPlan(shape={self.shape}, rank={len(self.g)}, {self.Q.device})"

    def _product(self, table: Tensor) -> Tensor:
        table = table.to(self.dtype)
        return self.Q @ ((self.R.T @ table) / self.g[:, None])

    def _block(self, index: Tensor | slice) -> Tensor:
        return (self.Q[index] / self.g) @ self.R.T


@dataclass(frozen=True)
class Outcome:
    """The end of a descent."""

    plan: Factorisation
    quadratic: float  # <L(P), P>
    linear: float  # <M, P>
    converged: bool
    history: tuple[float, ...]  # objective at each accepted iteration, with entropy


class _Measured(NamedTuple):
    """A factorisation with its values and the gradient of the objective."""

    point: Factorisation
    quadratic: float
    linear: float
    entropy: float  # -sum x (log x - 1) over Q, R and g, with its weight
    gradient: Factorisation

    def objective(self, alpha: float) -> float:
        return alpha * self.quadratic + (1 - alpha) * self.linear - self.entropy


def descend(
    problem: Problem, start: Factorisation, max_iter: int, tol: float, epsilon: float = 0.0
) -> Outcome:
    """Lower the objective, less ``epsilon`` times the entropy of Q, R and g, from a start."""
    # It ends once the objective falls by less than `tol` in 20 steps; one that raises it is undone.
    marginals = problem.marginals
    a, b = marginals
    squares = problem.source.mean_square(a) @ a + problem.target.mean_square(b) @ b
    alpha, constant = problem.alpha, float(squares)
    feasible = project(start, marginals)
    if feasible is None:
        raise NumericalError(
            "The start could not be projected onto the marginals. Drop points whose weights are "
            "negligible, or pass another `init`."
        )
    current = _measure(problem, feasible, constant, epsilon)
    history = [current.objective(alpha)]
    size, settled = 1.0, False
    for _ in range(max_iter):
        point = _step(current, marginals, size)
        trial = None if point is None else _measure(problem, point, constant, epsilon)
        if trial is None or not trial.objective(alpha) < history[-1]:
            size *= _SHRINK
            settled = size < _SMALLEST_STEP
        else:
            current = trial
            history.append(trial.objective(alpha))
            size *= _GROW
            past = history[max(0, len(history) - 1 - _WINDOW)]
            settled = len(history) > _WINDOW and past - history[-1] <= tol * abs(past)
        if settled:
            break
    return Outcome(current.point, current.quadratic, current.linear, settled, tuple(history))


def _measure(
    problem: Problem, point: Factorisation, constant: float, epsilon: float = 0.0
) -> _Measured:
    """Compute the objective and its gradients in Q, R and g, equation 30."""
    # columns as distributions: Q diag(1/g), which is bounded however small a group is
    near, far = (point.q - point.g).exp(), (point.r - point.g).exp()
    measured_x, measured_y = problem.source.apply(near), problem.target.apply(far)
    inner_x, inner_y = near.T @ measured_x, far.T @ measured_y
    g = point.g.exp()
    quadratic = constant - 2 * float((inner_x * g * (inner_y * g).T).sum())
    factor = -4 * problem.alpha
    gradient_q = factor * (measured_x * g) @ inner_y
    gradient_r = factor * (measured_y * g) @ inner_x
    omega = factor * ((inner_x * g) * inner_y.T).sum(1)
    linear = 0.0
    if problem.linear is not None:
        share = 1 - problem.alpha
        there = problem.linear.apply(far)
        back = problem.linear.transpose().apply(near)
        linear = float((point.q.exp() * there).sum())
        gradient_q = gradient_q + share * there
        gradient_r = gradient_r + share * back
        omega = omega + share * (near * there).sum(0)
    gradient, entropy = Factorisation(gradient_q, gradient_r, -omega), 0.0
    if epsilon:
        masses = [part.exp() for part in point]
        entropy = epsilon * sum(float((torch.special.entr(x) + x).sum()) for x in masses)
        slopes = (epsilon * part.clamp_min(_LEAST_LOGARITHM) for part in point)
        gradient = Factorisation(*map(torch.add, gradient, slopes))
    return _Measured(point, quadratic, linear, entropy, gradient)


def _step(current: _Measured, marginals: Marginals, size: float) -> Factorisation | None:
    """Take a mirror step whose largest exponent is 10 times ``size``, and project it."""
    gradient = current.gradient
    # a constant in a row changes nothing, as the sum of the row is restored afterwards
    parts = [part - part.mean(-1, keepdim=True) for part in gradient[:2]]
    parts.append(gradient.g - gradient.g.mean())
    largest = max(float(part.abs().max()) for part in parts)
    step = size * _FIRST_STEP / largest if largest > 0 else 0.0
    moved = (point - step * part for point, part in zip(current.point, parts, strict=True))
    return project(Factorisation(*moved), marginals)


def project(point: Factorisation, marginals: Marginals) -> Factorisation | None:
    """Project onto the marginals in relative entropy; ``None`` if rounding does not allow it."""
    # Given multipliers x and y of the conditions that the columns of Q and of R have the sums g,
    # the rest is explicit: a row of Q is a_i times a softmax, and g is a product. What remains is
    # to minimise the smooth convex dual of equation 32 in 2 r unknowns, by Newton's method.
    q, r, g = point
    # points of weight zero would make -inf minus -inf
    q, r = q.clamp_min(_LEAST_LOGARITHM), r.clamp_min(_LEAST_LOGARITHM)
    rank = len(g)
    multipliers = torch.zeros(2 * rank, dtype=g.dtype, device=g.device)
    # x + c, y - c are the same point
    null = torch.cat([torch.ones_like(g), -torch.ones_like(g)])
    dual, parts = _dual(q, r, g, multipliers, marginals)
    for _ in range(_NEWTON_STEPS):
        near, far, mass = parts
        sums = marginals.a @ near, marginals.b @ far
        slope = torch.cat([sums[0] - mass, sums[1] - mass])
        if float(slope.abs().sum()) <= _PROJECTION_TOLERANCE:
            break
        blocks = [
            total.diag() - (weight[:, None] * part).T @ part
            for total, weight, part in zip(sums, marginals, (near, far), strict=True)
        ]
        curvature = torch.block_diag(*blocks) + mass.diag().repeat(2, 2)
        curvature += torch.outer(null, null) * (curvature.trace() / rank**2)
        # groups that have died leave no curvature behind
        curvature.diagonal().add_(_RIDGE * curvature.diagonal().mean())
        direction = torch.linalg.solve(curvature, slope)
        decrease, length = float(direction @ slope), 1.0
        while length > _SHORTEST:
            trial, trial_parts = _dual(q, r, g, multipliers - length * direction, marginals)
            if trial <= dual - 1e-4 * length * decrease:
                break
            length /= 2
        else:
            break
        multipliers, dual, parts = multipliers - length * direction, trial, trial_parts
    near, far, mass = parts
    missed = (marginals.a @ near - mass).abs().sum() + (marginals.b @ far - mass).abs().sum()
    if not float(missed) <= _LARGEST_MISS:
        return None
    return Factorisation(
        marginals.log_a[:, None] + near.log(), marginals.log_b[:, None] + far.log(), mass.log()
    )


def _dual(
    q: Tensor, r: Tensor, g: Tensor, multipliers: Tensor, marginals: Marginals
) -> tuple[float, tuple[Tensor, Tensor, Tensor]]:
    """Compute the dual function, the softmax of the rows of Q and of R, and g."""
    x, y = multipliers.chunk(2)
    q, r = q + x, r + y
    mass = (g - x - y).exp()
    value = marginals.a @ torch.logsumexp(q, 1) + marginals.b @ torch.logsumexp(r, 1) + mass.sum()
    return float(value), (torch.softmax(q, 1), torch.softmax(r, 1), mass)
