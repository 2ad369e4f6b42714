"""Plans of low rank, P = Q diag(1/g) R', by mirror descent on (Q, R, g), and where they start.

docs/algorithm.md, equations 29 to 32. All of it runs on logarithms: no step size overflows.
"""

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from torchgw._api import solve
from torchgw._boundary.arrays import as_weights, make_generator, resolve_device, without_tensors
from torchgw._boundary.checks import check_count, check_not_negative, reject_unknown
from torchgw._errors import (
    AmbiguityWarning,
    ConvergenceWarning,
    InvalidInputError,
    InvalidTypeError,
    NumericalError,
    SearchWarning,
    UnsupportedError,
    warn_user,
)
from torchgw._plans.contract import Plan
from torchgw._problem.given import Passed, with_area
from torchgw._problem.named import DistanceName, ScaleName
from torchgw._problem.problem import (
    FeatureMetric,
    Problem,
    check_alpha,
    check_features,
    is_fused,
    linear_cost,
)
from torchgw._problem.providers import DistanceOptions, build_providers
from torchgw._problem.signatures import SignatureName, is_signature, named_features
from torchgw._problem.table import check_options
from torchgw._results.base import Result
from torchgw._results.parts import stored
from torchgw._results.result import GWResult
from torchgw._search.optima import agreement
from torchgw._sinkhorn.problem import LEAST_EXPONENTS, block
from torchgw._tensors.machine import host_threads, small_on_one_thread
from torchgw._tensors.operations import EQUAL, NEWTON_STEPS, NOTHING
from torchgw._typing import Array, Marginals, Seed
from torchgw.distances.base import DistanceProvider
from torchgw.distances.precomputed import PrecomputedDistance

# Largest exponent of the first step, which changes an entry by a factor of at most exp(10). [L301]
_FIRST_STEP = 10.0
# Factors that a step size changes by, down when the value rises and up when it falls. [L301]
_SHRINK, _GROW = 0.5, 1.5
# Step size, relative to the largest, below which nothing more will come. [L301]
_SMALLEST_STEP = 1e-8
# Iterations over which the value must fall by ``tol``. [L301]
_WINDOW = 20
# The shortest Newton step of a projection. [L246, L301]
_SHORTEST = 1e-6
# A projection may miss its columns by this error. [L301]
_LARGEST_MISS = 1e-6


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


class _Measured(NamedTuple):
    """A factorisation with its values and the gradient of the objective."""

    point: Factorisation
    quadratic: float  # <L(P), P>
    linear: float  # <M, P>
    entropy: float  # -sum x (log x - 1) over Q, R and g, with its weight
    gradient: Factorisation

    def objective(self, alpha: float) -> float:
        return alpha * self.quadratic + (1 - alpha) * self.linear - self.entropy


def descend(
    problem: Problem, start: Factorisation, max_iter: int, tol: float, epsilon: float = 0.0
) -> tuple[_Measured, list[float], bool]:
    """Lower the objective, less ``epsilon`` times the entropy of Q, R and g, from a start."""
    # It ends once the objective falls by less than `tol` in 20 steps; one that raises it is undone.
    # Returns where it ends, the objective at each step that is kept, and whether it has converged.
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
    return current, history, settled


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
        slopes = (epsilon * part.clamp_min(LEAST_EXPONENTS[torch.float64]) for part in point)
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
    q, r = q.clamp_min(LEAST_EXPONENTS[torch.float64]), r.clamp_min(LEAST_EXPONENTS[torch.float64])
    rank = len(g)
    multipliers = torch.zeros(2 * rank, dtype=g.dtype, device=g.device)
    # x + c, y - c are the same point
    null = torch.cat([torch.ones_like(g), -torch.ones_like(g)])
    dual, parts = _dual(q, r, g, multipliers, marginals)
    for _ in range(NEWTON_STEPS):
        near, far, mass = parts
        sums = marginals.a @ near, marginals.b @ far
        slope = torch.cat([sums[0] - mass, sums[1] - mass])
        if float(slope.abs().sum()) <= EQUAL:
            break
        blocks = [
            total.diag() - (weight[:, None] * part).T @ part
            for total, weight, part in zip(sums, marginals, (near, far), strict=True)
        ]
        curvature = torch.block_diag(*blocks) + mass.diag().repeat(2, 2)
        curvature += torch.outer(null, null) * (curvature.trace() / rank**2)
        # groups that have died leave no curvature behind
        curvature.diagonal().add_(NOTHING * curvature.diagonal().mean())
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


# Points per side among which the start is found. [L250]
_COARSE_POINTS = 300
# Rounds in which medoids move. [L248]
_MEDOID_STEPS = 10
# Share of the start that is spread over all groups: a mirror step cannot leave zero. [L249]
_SPREAD = 1e-3
# How doubts of a start are told.
_BEGUN = "of the few points of each side that low-rank groups begin with"
_KNOWN = "Pass an `init` that you trust, such as the result of `torchgw.solve`."


@dataclass(frozen=True, repr=False, eq=False)
class LowRankResult(Result):
    """Outcome of :func:`torchgw.solve_low_rank`.

    Attributes
    ----------
    lazy_plan : LowRankPlan, shape (n, m)
    value, value_quad, value_linear, marginal_a, marginal_b, marginal_error, scale
        As of :class:`torchgw.GWResult`. The value is the objective, without entropy.
    converged : bool
        Whether the objective had stopped falling.
    history : tuple of float
        Objective at each step that lowered it, with entropy if there is an ``epsilon``.
    """

    lazy_plan: LowRankPlan
    value_quad: float
    value_linear: float
    marginal_a: Array
    marginal_b: Array
    marginal_error: float
    scale: tuple[float, float]
    converged: bool
    history: tuple[float, ...]

    @property
    def value(self) -> float:
        """The objective: value_quad + value_linear."""
        return self.value_quad + self.value_linear

    @property
    def rank(self) -> int:
        """The number of groups that points are joined by."""
        return len(self.lazy_plan.g)

    @property
    def plan(self) -> Any:
        """The (n, m) matrix, built on demand."""
        return self.lazy_plan.to_dense()

    def matching(self) -> NoReturn:
        """Refuse: groups of points are joined, and no point has a partner of its own."""
        raise UnsupportedError(
            "A plan of low rank joins groups of points, so it has no matching. Refine it first: "
            "torchgw.solve(..., init=result.plan).matching(), or lazy_plan.argmax()."
        )

    def _summary(self) -> tuple[str, dict[str, str], str]:
        n, m = self.lazy_plan.shape
        figures = {
            "rank": str(self.rank),
            "value": f"{self.value:.6g}",
            "marginal_error": f"{self.marginal_error:.2g}",
        }
        ended = "converged" if self.converged else "not converged"
        return f"{n} x {m}", figures, f"{ended} after {len(self.history)} steps"


@reject_unknown
def solve_low_rank(
    X: Any = None,
    Y: Any = None,
    *,
    rank: int,
    a: Any = None,
    b: Any = None,
    distances: DistanceName | DistanceProvider | tuple[Any, Any] = "auto",
    D_X: Any = None,
    D_Y: Any = None,
    M: Any = None,
    features: tuple[Any, Any] | SignatureName | str | None = None,
    feature_metric: FeatureMetric = "sqeuclidean",
    alpha: float | None = None,
    n_neighbors: int | None = None,
    n_landmarks: int | None = None,
    curvature: float | tuple[float, float] | None = None,
    scale: ScaleName | None = "auto",
    epsilon: float = 0.0,
    init: Any = None,
    max_iter: int = 500,
    tol: float = 1e-4,
    device: Any = None,
    random_state: Seed | None = None,
) -> LowRankResult:
    """Align two datasets by a plan of low rank, in time and memory linear in n + m.

    Minimises alpha <L(P), P> + (1 - alpha) <M, P> over P = Q diag(1/g) R' with ``rank`` groups: a
    coupling Q of the source with the groups, R of the target with them, and g the groups' masses.

    Parameters
    ----------
    X, Y, a, b, distances, D_X, D_Y, M, features, feature_metric, alpha, n_neighbors, n_landmarks, \
curvature, scale, device
        As in :func:`torchgw.solve`. Time is linear for distances with factors ("sqeuclidean",
        "cosine", "landmark") and for features in place of ``M``. ``distances="auto"`` is all pairs
        of up to 3,000 points on every device.
    rank : int
        Number of groups, at most the smaller of n and m.
    epsilon : float
        Weight of the entropy of Q, R and g, none by default; in units of the objective.
    init : GWResult or LowRankResult, optional
        Where to start; by default at a solve among 300 points of each side, whose groups the other
        points join.
    max_iter : int
        Mirror steps at most.
    tol : float
        Relative decrease of the objective over 20 steps at which to stop.
    random_state : int, torch.Generator, numpy.random.Generator, RandomState or None
        Draws the points of the default start.

    Returns
    -------
    LowRankResult

    Raises
    ------
    InvalidInputError, InvalidTypeError
        For input that cannot be used.

    Warns
    -----
    ConvergenceWarning
        If ``max_iter`` steps were not enough.
    SearchWarning
        If the match of a few points that the groups begin with may not be the best, or is one of
        several (:class:`AmbiguityWarning`).

    Notes
    -----
    The problem and its mirror descent are those of [1]_. Without ``epsilon`` the rank alone blurs
    the plan. docs/low-rank.md says when that is worth it.

    References
    ----------
    .. [1] M. Scetbon, G. Peyre, M. Cuturi. Linear-time Gromov Wasserstein distances using low rank
       couplings and costs. ICML 2022.

    Examples
    --------
    >>> import numpy as np, torchgw
    >>> X = np.random.default_rng(0).normal(size=(60, 3)) * [1, 2, 4]
    >>> result = torchgw.solve_low_rank(X, X[::-1], rank=5, distances="cosine", random_state=0)
    >>> result.lazy_plan
    LowRankPlan(shape=(60, 60), rank=5, cpu)
    """
    check_count("rank", rank)
    check_options(
        max_iter=max_iter, tol=tol, n_neighbors=n_neighbors, n_landmarks=n_landmarks, scale=scale,
        curvature=curvature,
    )  # fmt: skip
    check_not_negative("epsilon", epsilon)
    (X, a), (Y, b) = with_area("X", X, a), with_area("Y", Y, b)
    pair = check_features(named_features(features, (X, Y), (D_X, D_Y)), feature_metric)
    weight = check_alpha(alpha, fused=is_fused(M, pair), named=is_signature(features))
    where = resolve_device(device, X, Y, D_X, D_Y)
    generator, seed = make_generator(random_state, where)
    options = DistanceOptions(n_neighbors, n_landmarks, scale, "stitch", curvature=curvature)
    with torch.no_grad(), host_threads(where):
        judge = partial(agreement, device=where)
        passed = Passed("X", X, D_X, a), Passed("Y", Y, D_Y, b)
        sides = build_providers(passed, distances, options, where, judge=judge)
        source, target = (side.to(where, torch.float64) for side in sides.providers)
        marginals = Marginals(
            as_weights("a", a, source.n, where), as_weights("b", b, target.n, where)
        )
        linear = linear_cost(M, pair, feature_metric, (source.n, target.n), where)
        problem = Problem(source, target, marginals, weight, linear)
        if rank > min(source.n, target.n):
            raise InvalidInputError(
                f"`rank` must be at most the number of points of either side, "
                f"{min(source.n, target.n)}; got {rank}."
            )
        if init is None:
            start = _coarse_start(problem, rank, generator, seed)
        else:
            start = _given_start(init, problem, rank, generator)
        with small_on_one_thread(source.n, target.n, where):
            ended, history, converged = descend(problem, start, max_iter, tol, float(epsilon))
        plan = LowRankPlan(*(part.exp() for part in ended.point))
        masses = plan.marginals()
    if not converged:
        warn_user(
            f"The objective still fell after {max_iter} steps: raise `max_iter`, or loosen `tol`.",
            ConvergenceWarning,
        )
    errors = ((mass - weight).abs().sum() for mass, weight in zip(masses, marginals, strict=True))
    result = LowRankResult(
        lazy_plan=plan, value_quad=problem.alpha * ended.quadratic,
        value_linear=(1 - problem.alpha) * ended.linear, marginal_a=masses[0],
        marginal_b=masses[1], marginal_error=max(map(float, errors)),
        scale=(sides.origins[0].scale, sides.origins[1].scale), converged=converged,
        history=tuple(history),
    )  # fmt: skip
    in_numpy = without_tensors(X, Y, distances, D_X, D_Y, M, a, b, features)
    return result.in_numpy() if in_numpy else result


def _coarse_start(
    problem: Problem, rank: int, generator: torch.Generator, seed: int
) -> Factorisation:
    """Solve among a few points; the others join the group of the nearest of them."""
    near, tables, masses = [], [], []
    for side, weight in zip((problem.source, problem.target), problem.marginals, strict=True):
        index, nearest = _cover(side, weight, rank, generator)
        near.append((index, nearest))
        table = side.columns(index)[index]
        tables.append(PrecomputedDistance(((table + table.T) / 2).clamp_min(0)))
        mass = torch.zeros_like(weight[index]).index_add_(0, nearest, weight)
        masses.append(mass / mass.sum())
    linear = None
    if problem.linear is not None:
        linear = block(problem.linear, near[0][0], near[1][0]).dense().matrix
    with warnings.catch_warnings():
        # a start need not be accurate; what is doubted of it is said below
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", SearchWarning)
        coarse = solve(
            D_X=tables[0], D_Y=tables[1], a=masses[0], b=masses[1], M=linear,
            alpha=problem.alpha if linear is not None else None, random_state=seed, tol=1e-3,
        )  # fmt: skip
    if coarse.is_ambiguous:
        warn_user(f"Another match {_BEGUN} costs nearly the same. {_KNOWN}", AmbiguityWarning)
    elif coarse.doubt:
        warn_user(f"There may be a better match {_BEGUN}. {_KNOWN}", SearchWarning)
    groups = _groups(tables[0].matrix(), masses[0], rank)
    indicator = torch.nn.functional.one_hot(groups, rank).double()
    conditional = coarse.lazy_plan.T.barycentric(indicator)
    return _spread(indicator[near[0][1]], conditional[near[1][1]], problem.marginals)


def _given_start(
    init: Any, problem: Problem, rank: int, generator: torch.Generator
) -> Factorisation:
    """Group the source, and let the target follow a given plan."""
    if not isinstance(init, (GWResult, LowRankResult)):
        raise InvalidTypeError(
            f"`init` must be a GWResult or a LowRankResult; got {type(init).__name__}."
        )
    plan = init.lazy_plan
    if plan.shape != problem.shape:
        raise InvalidInputError(
            f"`init` must have a plan of shape {problem.shape}; got {plan.shape}."
        )
    if isinstance(plan, LowRankPlan) and len(plan.g) == rank:
        parts = (part.to(problem.source.device, torch.float64) for part in (plan.Q, plan.R, plan.g))
        return Factorisation(*(part.log() for part in parts))
    index, nearest = _cover(problem.source, problem.marginals.a, rank, generator)
    table = problem.source.columns(index)[index]
    groups = _groups(table, torch.bincount(nearest, minlength=len(index)).double(), rank)
    indicator = torch.nn.functional.one_hot(groups[nearest], rank).double()
    shares = (plan.T @ indicator).to(indicator.device)
    mass = shares.sum(1, keepdim=True)
    # a point that gets no mass may join any group
    return _spread(indicator, torch.where(mass > 0, shares / mass, 1 / rank), problem.marginals)


def _spread(near: Tensor, far: Tensor, marginals: Marginals) -> Factorisation:
    """Make a factorisation of the groups that points of both sides belong to, (n, r), (m, r)."""
    g = marginals.a @ near
    g = (1 - _SPREAD) * g + _SPREAD / len(g)
    parts = [
        weight[:, None] * ((1 - _SPREAD) * part + _SPREAD * g)
        for weight, part in zip(marginals, (near, far), strict=True)
    ]
    return Factorisation(parts[0].log(), parts[1].log(), g.log())


def _cover(
    side: DistanceProvider, weights: Tensor, rank: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw points, and find for every point the position of the nearest one drawn."""
    count = min(max(_COARSE_POINTS, 2 * rank), int((weights > 0).sum()))
    drawn = torch.multinomial(weights, count, generator=generator)
    best = torch.full_like(weights, torch.inf)
    nearest = torch.zeros_like(weights, dtype=torch.int64)
    for start, some in zip(range(0, len(drawn), 64), drawn.split(64), strict=True):
        value, place = side.columns(some).min(dim=1)
        closer = value < best
        best = torch.where(closer, value, best)
        nearest = torch.where(closer, start + place, nearest)
    # approximate distances of a point to itself need not be the smallest
    nearest[drawn] = torch.arange(len(drawn), device=drawn.device)
    return drawn, nearest


def _groups(table: Tensor | None, masses: Tensor, rank: int) -> Tensor:
    """Group points around medoids, at first farthest points; give the group of each point."""
    assert table is not None
    centres = [int(masses.argmax())]
    closest = table[centres[0]].clone()
    while len(centres) < rank:
        centres.append(int(closest.argmax()))
        closest = torch.minimum(closest, table[centres[-1]])
    medoids = torch.tensor(centres, device=table.device)
    groups = table[medoids].argmin(0)
    for _ in range(_MEDOID_STEPS):
        member = torch.nn.functional.one_hot(groups, rank).bool()
        total = table.square() @ (masses[:, None] * member)
        best = total.masked_fill(~member, torch.inf).argmin(0)
        medoids = torch.where(member.any(0), best, medoids)
        groups = table[medoids].argmin(0)
    return groups
