"""The last linear problem of a solve, the numbers of its plan, and the status that it deserves."""

import math
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._gradients.contract import Coupling, Gradient, InFactors, QuadraticValue
from torchgw._gradients.dense import DenseGradient
from torchgw._gradients.relaxed import RelaxedGradient, normalise
from torchgw._plans.transport import TransportPlan
from torchgw._problem.given import are_copies
from torchgw._problem.limits import limits_of
from torchgw._problem.problem import (
    MarginalRule,
    ObjectiveTerms,
    Problem,
    best_mass,
    divergence,
    quadratic_divergence,
    relative_entropy,
)
from torchgw._sinkhorn.annealing import CONTRADICTION, MET, VALUE_PER_MARGINAL, VALUE_ROUNDING
from torchgw._sinkhorn.contract import PreparedProblem
from torchgw._sinkhorn.problem import Cost, DenseCost, FactoredCost, exp_, row_blocks
from torchgw._solve.state import RESOLVED, LoopState, Setting, Solved, Status
from torchgw._solve.step import check_finite, inner_tolerance, prepare, promised_error, solve_linear
from torchgw._tensors.deadline import is_over, last_phase
from torchgw._tensors.operations import inner_products
from torchgw._typing import Marginals, Potentials

# Iterations of the last linear problem at least. The error is a mean: with two levels, which take
# few iterations, single columns would keep large errors. [L189]
SETTLE_ITERATIONS = 3
# Iterations of the last linear problem that the numbers of its plan, and the result, take as long
# as. [L1593]
_NUMBERS = 4
# Column error of a plan at which a search has ended: so that twins of a problem have one objective.
# [L1453]
_OF_TWINS = 1e-11
# The status in place of another one, if the last linear problem is not solved.
_INNER_FAILED = {
    Status.CONVERGED: Status.INNER_LIMIT,
    Status.FLAT: Status.INNER_LIMIT,
    Status.STATIONARY: Status.INNER_LIMIT,
    Status.OUTER_LIMIT: Status.BOTH_LIMITS,
}


def settle(
    setting: Setting, state: LoopState, dtype: torch.dtype
) -> tuple[TransportPlan, LoopState]:
    """Solve the last linear problem to the full tolerance; return its plan and the final state."""
    # This is where a mixed-precision solve gets its float64 marginals. Where the loop ended with a
    # problem that is solved as well, its plan is the result.
    clock = perf_counter()
    options, anneal, start = setting.options, setting.anneal, state.start
    epsilon, solved = anneal.final(state.annealed), state.solved
    if solved is not None and (solved.cut or solved.plan.dtype == dtype):
        state = state._replace(coupling=solved.point)
    else:
        solved = None
    if solved is not None and not solved.cut:
        plan = solved.plan
    else:
        state = state._replace(solved=None)
        if solved is not None:
            problem, start = solved.plan.prepared.problem, solved.plan.potentials
            cost, epsilon = problem.cost.to(dtype), problem.epsilon
            prepared = setting.backend.prepare(problem._replace(cost=cost))
        else:
            if is_over():
                # a smaller epsilon would need iterations that there is no time for
                epsilon = anneal.reached(state.annealed)
                start = start if epsilon == anneal.final(state.annealed) else state.potentials
            cost = setting.gradient.linearise(state.coupling).seen(state.coupling.masses).to(dtype)
            prepared = prepare(setting, cost.dense() if setting.store else cost, epsilon)
        last_phase(_NUMBERS)
        inner = solve_linear(
            setting, prepared, start, max_iter=options.inner_max_iter,
            tol=_settled_tolerance(setting, epsilon), min_iter=SETTLE_ITERATIONS,
        )  # fmt: skip
        value = setting.gradient.dual_value(inner.potentials, state.coupling, epsilon)
        check_finite(float(value), inner.error, epsilon)
        setting.recorder.settle_iterations = inner.n_iters
        # an `inner_tol` that was passed has to be met; of the default the promised error is enough
        met = promised_error(setting) if options.inner_tol is None else 0.0
        if not inner.converged and is_over():
            state = state._replace(status=Status.STOPPED)
        elif not inner.converged and inner.error > met:
            state = state._replace(status=_INNER_FAILED.get(state.status, state.status))
        if setting.store and solved is None:
            prepared = prepare(setting, cost, epsilon)
        plan = TransportPlan.of(prepared, inner.potentials)
    potentials = _reach_unused(plan.prepared, plan.potentials)
    setting.recorder.time("settle", clock)
    return TransportPlan.of(plan.prepared, potentials), state


def _settled_tolerance(setting: Setting, epsilon: float) -> float:
    """Choose the column error of the settled plan."""
    options = setting.options
    rough = setting.anneal.goes_on and options.inner_tol is None
    exact = setting.anneal.shortened and options.inner_tol is None
    least = inner_tolerance(setting, epsilon, _OF_TWINS if exact else None)
    # what is polished then only matters for where points go that were not solved for
    return max(least, MET if rough else 0.0)


def leaves_saddle(
    setting: Setting, state: LoopState, plan: TransportPlan
) -> tuple[LoopState | None, Coupling | None]:
    """Look whether settling has led away from a saddle point; if so, from where to go on."""
    # Symmetry holds the iteration at a saddle point until rounding has grown: steps that looked
    # settled then grow by a factor in each iteration. Also returns the coupling of the settled
    # plan, if it was looked at.
    gradient, history = setting.gradient, setting.recorder.history
    plain = gradient.exact and not setting.anneal.proximal and state.solved is None
    if state.status is not Status.CONVERGED or not plain or state.done >= setting.options.max_iter:
        return None, None
    latest = gradient.update(plan, state.latest, setting.generator)
    before = max(history[-1].change, history[-1].marginal_error)
    before = max(before, inner_tolerance(setting, plan.epsilon))
    # as its marginals may miss what was asked for [L547]
    if float(latest.change(state.coupling)) <= CONTRADICTION * before:
        return None, latest
    return state._replace(coupling=latest, latest=latest, start=plan.potentials), latest


def _reach_unused(prepared: PreparedProblem, potentials: Potentials) -> Potentials:
    """Give points of zero weight the potentials of a half-step, so that they can be mapped."""
    a, b = prepared.problem.marginals
    if min(torch.stack([a.min(), b.min()]).tolist()) > 0:
        return potentials
    f, g = potentials
    return Potentials(
        torch.where(a > 0, f, prepared.softmin(g, axis=1)),
        torch.where(b > 0, g, prepared.softmin(f, axis=0)),
    )


# An estimated value within so many standard errors proves nothing. [L293]
_VALUE_NOISE = 6.0
# Share of the value of the product plan by which a plan may lie above a match that keeps all
# distances. [L470]
_ABOVE_A_COPY = 2e-3
# By how much an exact iteration may lower the objective: a share of it, and standard errors of the
# sampled cost. [L545]
_SHARE, ERRORS = 0.01, 3.0


class Evaluation(NamedTuple):
    """The numbers of a plan, computed from the plan itself."""

    masses: Marginals  # row and column sums, float64
    marginal_error: float  # larger of their L1 distances to the weights
    quadratic: QuadraticValue  # <L(P), P>
    linear: float  # <M, P>
    kl: float  # KL(P | a x b)
    mass: float = 1.0
    penalty: float = 0.0  # what relaxed marginals cost

    def value(self, alpha: float) -> float:
        """Compute what the plan costs, without entropy and penalty."""
        return alpha * self.quadratic.value + (1 - alpha) * self.linear

    def objective(self, alpha: float, epsilon: float) -> float:
        """Compute what is minimised."""
        return self.value(alpha) + self.penalty + epsilon * self.kl


class Resolution(NamedTuple):
    """What ``result.log["resolution"]`` says."""

    cells: tuple[int, int]  # numbers of cells of the source and of the target
    tolerance: float  # marginal error allowed
    marginal_error: float  # measured: mean of |mass / weight - 1| over points drawn by weight
    measured: int  # points of each side that it was measured at
    value_change: float | None  # of the value, as a share of it, since the cells before


def evaluate(
    setting: Setting,
    plan: TransportPlan,
    epsilon: float,
    solved: Solved | None = None,
    coupling: Coupling | None = None,
) -> Evaluation:
    """Compute the numbers of a plan, whose coupling may be known; NumericalError if not finite."""
    gradient, linear_cost, generator = setting.gradient, setting.problem.linear, setting.generator
    factors = gradient.in_factors() if isinstance(plan.cost, FactoredCost) else None
    # with a linear cost it is not known which of the two terms rounding has moved, and a plan that
    # was cut misses its marginals by more than that
    plain = factors is not None and linear_cost is None and not is_over()
    plain = plain and plan.dtype == torch.float32
    if gradient.stores:
        # everything is computed from one matrix: on a GPU each operation takes as long as this
        products, stored = None, coupling
        if stored is None:
            stored = gradient.update(plan, None, generator)
        matrix = stored.vector().view(plan.shape)
        masses = Marginals(*(matrix.sum(axis, dtype=torch.float64) for axis in (1, 0)))
    else:
        stored = matrix = None
        products = _products(plan, linear_cost) if solved is None and not plain else None
        if products is not None:
            plan.remember(products.rows, plan.T @ torch.ones_like(products.rows))
        masses = Marginals(*plan.marginals())
    missing = [
        (mass - weight).abs().sum() for mass, weight in zip(masses, setting.marginals, strict=True)
    ]
    error = max(torch.stack(missing).tolist())
    if plain and error <= RESOLVED:
        assert factors is not None
        quadratic, kl = _without_rounding(setting, plan, factors)
        linear = 0.0
    elif solved is not None:
        quadratic = gradient.evaluate(plan, masses, generator, solved.coupling)
        linear = factored_linear(plan, linear_cost)
        # <C, P> from the couplings, without a product
        pairing = gradient.pairing(plan.cost, solved.point, solved.coupling)
        cost = pairing + (1 - setting.problem.alpha) * linear
        duals = [mass @ part.double() for mass, part in zip(masses, plan.potentials, strict=True)]
        kl = float((sum(duals) - cost) / plan.epsilon)
    else:
        quadratic = gradient.evaluate(plan, masses, generator, stored)
        kl, linear = _entropy_and_linear(plan, linear_cost, masses, matrix, products)
    for value in (quadratic.value, kl, linear):
        check_finite(value, error, epsilon)
    return Evaluation(masses, error, quadratic, linear, kl)


class _Products(NamedTuple):
    """What one product with a plan tells whose costs are in factors."""

    rows: Tensor  # sums of its rows, (n,)
    cross: float  # <left right', P> of the factors of its cost
    linear: float  # <M, P>


def _products(plan: TransportPlan, linear: Cost | None) -> _Products | None:
    """Multiply a plan by all that its numbers need; ``None`` if a cost is stored."""
    cost = plan.cost
    if not isinstance(cost, FactoredCost) or isinstance(linear, DenseCost):
        return None
    tables = [torch.ones_like(plan.weights.b)[:, None], cost.right.double()]
    if linear is not None:
        linear = linear.to(torch.float64)
        tables += [linear.right, linear.column[:, None]]
    images = (plan @ torch.cat(tables, dim=1)).split([part.shape[1] for part in tables], dim=1)
    rows = images[0][:, 0]
    moved = 0.0 if linear is None else moved_linear(linear, torch.cat(images[2:], dim=1), rows)
    return _Products(rows, float(_inner(cost.left, images[1])), moved)


def _without_rounding(
    setting: Setting, plan: TransportPlan, factors: InFactors
) -> tuple[QuadraticValue, float]:
    """Compute <L(P), P> and KL(P | a x b) of a float32 plan as if its marginals held."""
    # Rounding shifts each sum over a plan in its own way, and such a shift is multiplied by
    # potentials, which are hundreds of times as large as the value. So all numbers come from one
    # product, whose rows are given their weights. The excess of its columns changes the objective
    # by its product with g, which is taken off.
    problem, cost = setting.problem, plan.cost
    (a, b), (f, g) = plan.weights, (part.double() for part in plan.potentials)
    source, target = problem.source.factors(), problem.target.factors()
    assert isinstance(cost, FactoredCost)
    assert source is not None
    assert target is not None
    tables = [target.matrix, g[:, None], cost.right, cost.column[:, None]]
    table = torch.cat([part.to(plan.dtype) for part in tables], dim=1)
    means = weighted_means(plan, table)[0].split([part.shape[1] for part in tables], dim=1)
    images, potential, right, column = means
    columns = float(potential.sum(dtype=torch.float64))
    quadratic = setting.gradient.evaluate(
        plan, plan.weights, setting.generator, factors.encode(source.matrix, images)
    )
    quadratic = _without_excess(quadratic, columns - float(b @ g), problem.alpha)
    fixed = float(a @ cost.row.double() + column.sum(dtype=torch.float64))
    kl = (float(a @ f) + columns - fixed + float(_inner(cost.left, right))) / plan.epsilon
    return quadratic, kl


def _without_excess(quadratic: QuadraticValue, excess: float, alpha: float) -> QuadraticValue:
    """Take the excess of the masses off the value, each weighted by its potential."""
    return quadratic if alpha == 0 else quadratic._replace(value=quadratic.value - excess / alpha)


def weighted_means(plan: TransportPlan, values: Tensor) -> tuple[Tensor, Tensor]:
    """Compute plan @ values with rows scaled to their weights, and the factors of the rows."""
    sums = plan @ torch.cat([values, torch.ones_like(values[:, :1])], dim=1)
    # rows without weight have no mass; rounding may leave other rows without mass too
    share = torch.where(sums[:, -1] > 0, plan.weights.a / sums[:, -1], 0.0)
    return sums[:, :-1] * share[:, None].to(sums.dtype), share


def half_step(
    prepared: PreparedProblem, other: Tensor, table: Tensor
) -> tuple[TransportPlan, Tensor, Tensor]:
    """Give rows the potentials with which they have their weights, those of the cells known."""
    # Also returns what is read of that plan: its product with a table, (n, k), and the potentials
    # of the cells, by their masses in it, ().
    plan = TransportPlan.of(prepared, Potentials(prepared.softmin(other, axis=1), other))
    return plan, *_means(plan, table)


def _means(plan: TransportPlan, table: Tensor) -> tuple[Tensor, Tensor]:
    """Compute means of a table, and what the potentials of its columns add up to, ()."""
    # no second pass, over columns, for their masses
    last = plan.potentials.g.double()[:, None]
    means, _ = weighted_means(plan, torch.cat([table.double(), last], dim=1))
    return means[:, :-1], means[:, -1].sum()


def join_halves(
    small: TransportPlan,
    tables: tuple[Tensor, Tensor],
    couplings: tuple[Tensor, Tensor],
    moved: tuple[Tensor, Tensor],
) -> tuple[Tensor, float]:
    """Give the coupling, (r, s), of a plan of all points, and the excess of its masses."""
    # The plan is that between all points of the source and the cells of the target, and that
    # between the cells of the source and all points of the target, less the ``small`` one between
    # cells alone, which makes up for the blur within the cells. Of the first two are given the
    # couplings, (r, s) and (s, r), and what their cells' potentials add up to, of target and
    # source. ``tables`` are the factors of the cells, (cells, r) and (cells, s). The excess is
    # weighted by the potentials.
    x, y = tables
    (near, far), (of_target, of_source) = couplings, moved
    means, of_small = _means(small, y)
    # the excess of the cells, given rows with their weights; less the excess of the target that the
    # problem between cells has already, as it is solved to a tolerance only
    own = small.weights.a.double() @ small.potentials.f.double()
    excess = of_source - own + of_target - of_small
    return near + far.T - inner_products(x, means), float(excess)


def _inner(first: Tensor, second: Tensor) -> Tensor:
    """Compute the inner product of two tables in float64."""
    return torch.sum(first.double() * second.double())


def evaluate_extended(
    setting: Setting,
    small: TransportPlan,
    potentials: Potentials,
    excess: float,
    couplings: tuple[Coupling, Coupling],
    linear: float,
    error: float,
) -> Evaluation:
    """Compute the numbers of a plan that extends one of cells, without a pass over all pairs."""
    # `excess` is that of :func:`join_halves`. `couplings` are the one at which the cost of cells
    # is linearised, and that of the whole, in the form that the gradient takes; `linear` is its
    # <M, P>. `error` is the measured marginal error, and all points count with their weights.
    gradient, problem, weights = setting.gradient, setting.problem, setting.marginals
    epsilon = small.epsilon
    quadratic = gradient.evaluate(small, weights, setting.generator, couplings[1])
    quadratic = _without_excess(quadratic, excess, problem.alpha)
    cost = gradient.pairing(small.cost, *couplings) + (1 - problem.alpha) * linear
    duals = weights.a @ potentials.f.double() + weights.b @ potentials.g.double()
    kl = float((duals + excess - cost) / epsilon)
    for value in (quadratic.value, kl, linear):
        check_finite(value, error, epsilon)
    return Evaluation(weights, error, quadratic, linear, kl)


def evaluate_relaxed(
    setting: Setting, plan: TransportPlan, rule: MarginalRule
) -> tuple[TransportPlan, Evaluation]:
    """Give a plan its best mass, and compute its numbers."""
    epsilon, weights, alpha = plan.epsilon, plan.weights, setting.problem.alpha
    normalised, (p, q), log_before = normalise(plan)
    before = float(log_before)
    check_finite(before, float(p.sum() + q.sum()), epsilon)
    quadratic = setting.gradient.evaluate(normalised, Marginals(p, q), setting.generator)
    kl, linear = _entropy_and_linear(normalised, setting.problem.linear, Marginals(p, q))
    source, target = relative_entropy(p, weights.a), relative_entropy(q, weights.b)
    # without a quadratic term penalties are those of unbalanced transport
    simple = alpha == 0 and rule.fixed_mass is None
    linear *= rule.unit
    growing = 0.0 if simple else (1 - alpha) * linear
    value = linear if simple else alpha * quadratic.value
    # the divergence of the normalised plan is taken from p x b, with its own row sums p
    terms = ObjectiveTerms(value, source, target, kl + source)
    mass = best_mass(terms, rule, epsilon, growing)
    check_finite(mass, before, epsilon)
    masses = Marginals(mass * p, mass * q)
    shifted = Potentials(plan.potentials.f + epsilon * (math.log(mass) - before), plan.potentials.g)
    sides = (source, mass, rule.totals[0]), (target, mass, rule.totals[1])
    penalty = sum(
        rho * (2 * divergence(*one) if simple else quadratic_divergence(*one))
        for rho, one in zip(rule.rho, sides, strict=True)
        if math.isfinite(rho) and rule.mass is None
    )
    if rule.mass is not None:
        kl = mass * (terms.whole + math.log(mass))
    else:
        whole = terms.whole, mass, math.prod(rule.totals)
        kl = divergence(*whole) if simple else quadratic_divergence(*whole) / 2
    return plan.replaced(shifted, weights, masses), Evaluation(
        masses, rule.violation(masses, weights),
        QuadraticValue(mass**2 * quadratic.value, mass**2 * quadratic.standard_error),
        mass * linear, kl, mass, penalty,
    )  # fmt: skip


def judge(
    status: Status,
    found: Evaluation,
    problem: Problem,
    gradient: Gradient,
    promised: float,
    *,
    constant: bool,
) -> Status:
    """Choose the status that a plan deserves, given the marginal error it may have."""
    # A value below zero, or above that of the product plan, is no useful answer: the product plan
    # costs nothing to find. This does not hold where the objective is `constant` but for rounding.
    if not status.converged:
        return status
    if found.marginal_error > promised:
        return Status.INNER_LIMIT
    if constant:
        return status
    alpha, product = problem.alpha, gradient.product
    # a marginal error may fall on the largest squared terms
    squares = gradient.squares()
    reach = max(squares, *torch.stack([gradient.row.max(), gradient.column.max()]).tolist())
    slack = VALUE_ROUNDING * squares
    slack += VALUE_PER_MARGINAL * found.marginal_error * reach
    if found.quadratic.standard_error > 0:
        slack += _VALUE_NOISE * alpha * found.quadratic.standard_error
    value = alpha * found.quadratic.value
    if value < -slack:
        return Status.IMPLAUSIBLE
    if product is None or problem.support is not None:
        # the product plan may not be allowed
        return status
    if problem.linear is not None:
        mean = (1 - alpha) * float(problem.linear.to(torch.float64).mean(*problem.marginals))
        product += mean
        value += (1 - alpha) * found.linear
        slack += VALUE_ROUNDING * abs(mean)
    return Status.IMPLAUSIBLE if value > product + slack else status


def misses_a_copy(problem: Problem, gradient: Gradient, found: Evaluation, epsilon: float) -> bool:
    """Whether the spaces are copies of each other, and a plan is worse than the match of these."""
    # The objective of that match is its entropy alone, the sum of -a log a at most. A plan with a
    # larger objective is not the best.
    product = gradient.product
    if problem.linear is not None or product is None or problem.alpha == 0 or problem.directed:
        return False
    a = problem.marginals.a
    entropy = -float(a @ a.clamp_min(torch.finfo(a.dtype).tiny).log())
    excess = problem.alpha * found.quadratic.value + epsilon * (found.kl - entropy)
    excess -= _VALUE_NOISE * problem.alpha * found.quadratic.standard_error
    return excess > _ABOVE_A_COPY * product and are_copies(problem)


def _entropy_and_linear(
    plan: TransportPlan,
    linear_cost: Cost | None,
    masses: Marginals,
    matrix: Tensor | None = None,
    products: _Products | None = None,
) -> tuple[float, float]:
    """Compute KL(P | a x b) and <M, P>."""
    # P_ij / (a_i b_j) is the exponential alone, so the divergence is sum_ij P_ij log of that, taken
    # block by block; and for a cost in factors (<p, f> + <q, g> - <C, P>) / epsilon.
    products = products or _products(plan, linear_cost)
    if products is not None:
        assert isinstance(plan.cost, FactoredCost)
        sides = zip(masses, plan.potentials, (plan.cost.row, plan.cost.column), strict=True)
        duals = sum(float(mass @ (part.double() - own)) for mass, part, own in sides)
        return (duals + products.cross) / plan.epsilon, products.linear
    a, b = plan.weights
    kl = linear = 0.0
    if matrix is not None and linear_cost is None:
        product = torch.outer(a, b).to(plan.dtype)
        tiny = torch.finfo(plan.dtype).tiny
        logarithm = (matrix / product.clamp_min_(tiny)).clamp_min_(tiny).log_()
        return float(logarithm.mul_(matrix).sum(dtype=torch.float64)), 0.0
    f, g = plan.weights.mask(plan.potentials, plan.dtype)
    for rows in row_blocks(plan.cost):
        density = exp_(plan.cost.rows(rows).exponent(f[rows], g, plan.epsilon))
        block = density * a[rows, None].to(plan.dtype) * b.to(plan.dtype)
        # 0 log 0 is 0, for entries that no mass uses
        kl += float(torch.special.xlogy(block, density).sum(dtype=torch.float64))
        if isinstance(linear_cost, DenseCost):
            linear += float((block * linear_cost.matrix[rows]).sum(dtype=torch.float64))
    if isinstance(linear_cost, FactoredCost):
        linear = factored_linear(plan, linear_cost)
    return kl, linear


def factored_linear(plan: TransportPlan, linear: Cost | None) -> float:
    """Compute <M, P> from one product with the plan."""
    if linear is None:
        return 0.0
    assert isinstance(linear, FactoredCost)
    linear = linear.to(torch.float64)
    ones = torch.ones_like(linear.column[:, None])
    sums = plan @ torch.cat([linear.right, linear.column[:, None], ones], dim=1)
    return moved_linear(linear, sums[:, :-1], sums[:, -1])


def moved_linear(linear: FactoredCost, images: Tensor, masses: Tensor) -> float:
    """Compute <M, P> from the row sums of P and its product with M's right factors and column."""
    left, _, row, _ = linear.to(torch.float64)
    return float((images[:, -1] + masses * row).sum() - (images[:, :-1] * left).sum())


def falls_further(
    setting: Setting, plan: TransportPlan, found: Evaluation, coupling: Coupling, mass: float
) -> bool:
    """Whether an exact iteration lowers the objective by more than STATIONARY allows."""
    # `found` are the numbers of the plan, `coupling` is where the sampled cost was taken, and
    # `mass` is that of a partial plan. The answer is no where an exact cost would take long.
    problem = setting.problem
    limits, products = limits_of(plan.device), problem.loss.cross is not None
    if setting.gradient.exact or not limits.checks(*plan.shape, products=products):
        return False
    if problem.restriction is not None:
        # an exact cost would be a table of all entries
        return False
    base = DenseGradient(problem)
    gradient: Gradient = base if setting.rule is None else RelaxedGradient(base, problem)
    exact = replace(setting, gradient=gradient, store=True, dtype=torch.float64)
    here = gradient.update(plan, None, setting.generator)
    cost = gradient.linearise(here).seen(here.masses).dense().to(torch.float64)
    prepared = prepare(exact, cost, plan.epsilon)
    tol, most = inner_tolerance(exact, plan.epsilon), setting.options.inner_max_iter
    inner = solve_linear(exact, prepared, None, max_iter=most, tol=tol)
    following = TransportPlan.of(prepared, inner.potentials)
    if setting.rule is None:
        there = evaluate(exact, following, plan.epsilon)
    else:
        there = evaluate_relaxed(exact, following, setting.rule)[1]
    before, after = (one.objective(problem.alpha, plan.epsilon * mass) for one in (found, there))
    noise = setting.gradient.noise(coupling)
    error = noise.standard_error if noise is not None else 0.0
    missed = found.marginal_error + there.marginal_error
    slack = (RESOLVED + missed) * gradient.squares()
    return before - after > _SHARE * abs(before) + ERRORS * error + slack
