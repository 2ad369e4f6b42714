"""The outer iteration of many problems: evaluate plans, decide, linearise at them, let them go."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchgw._batch import packing, worth
from torchgw._batch.sweep import BUDGET, DECAY, FAR, Relaxed, Settled, exact_rows
from torchgw._sinkhorn import annealing
from torchgw._sinkhorn.loop import MOST_RESTARTS
from torchgw._tensors.operations import few_on, sums_along, sums_of

# Column error and iterations of the first linear problem of a plan that begins at its target: it
# may be next to where it ends, and a plan that misses its marginals leads away. [L1313]
_BEGUN_TOLERANCE, _BEGUN_BUDGET = 1e-4, 512


@dataclass
class Pool:
    """Problems that are being solved; every tensor has a row for each."""

    number: Tensor  # int64, which problem; -1 where there is none
    cost: Tensor  # (A, n, m) where it was linearised
    point: Tensor  # (A, n, m) the plan that it was linearised at
    plan: Tensor  # (A, n, m) the present plan
    i: Tensor  # int64, which table of x
    j: Tensor  # int64, which table of y
    a: Tensor
    b: Tensor
    f: Tensor  # of the plan
    f_next: Tensor  # from which the next iterations go on
    g: Tensor
    alpha: Tensor
    target: Tensor  # epsilon to reach
    epsilon: Tensor  # of the linear problem
    tol: Tensor  # column error at which it ends
    budget: Tensor  # iterations that it may take
    spent: Tensor  # iterations that it has taken
    error: Tensor
    relaxation: Tensor
    restarts: Tensor
    last_error: Tensor  # error at the end of the linear problem before
    stuck: Tensor
    change: Tensor  # L1 change of the plan by the last outer iteration, zero where it is not known
    rate: Tensor  # change over the change before, zero where it is not known
    done: Tensor  # outer iterations
    inner: Tensor  # Sinkhorn iterations in all
    settling: Tensor  # -1 in the loop, then how it has ended
    linear: Tensor | None
    descent: worth.Descent
    # of all problems, not a row for each: x (S, n, n) and y (S, m, m)
    tables: tuple[Tensor, Tensor]
    # for relaxed marginals: `rho` and `mass` as in ``Relaxed``, the last step, and how much of a
    # step is taken
    rho: Tensor | None = None
    mass: Tensor | None = None
    step: Tensor | None = None
    share: Tensor | None = None
    # L1 change of the plans, and <cost, plan>, if the iterations have computed them
    told: tuple[Tensor, Tensor] | None = None
    # for proximal steps: epsilon at which plans are sharp
    sharp: Tensor | None = None

    def relaxed(self) -> Relaxed | None:
        """Tell which marginals the plans must have, if not all."""
        return None if self.share is None else Relaxed(self.rho, self.mass)

    def spaces(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Take the distances of some problems, (k, n, n) and (k, m, m)."""
        x, y = self.tables
        return packing.taken(x, self.i[places]), packing.taken(y, self.j[places])

    def numbers(self) -> Any:
        """Take what is one number of each problem, of the kind that few are computed by."""
        array, parts = few_on(self.cost.device).array, vars(self).items()
        tensors = {name: part for name, part in parts if isinstance(part, Tensor)}
        return SimpleNamespace(**{k: array(part) for k, part in tensors.items() if part.ndim == 1})

    def names(self) -> list[str]:
        """List the tensors that belong to problems."""
        names = [name for name, part in vars(self).items() if isinstance(part, Tensor)]
        return [name for name in names if name != "plan"]

    def put(self, places: Tensor, other: Pool) -> None:
        """Replace some problems by others."""
        for name in self.names():
            getattr(self, name)[places] = getattr(other, name)
        for mine, its in zip(self.descent.parts(), other.descent.parts(), strict=True):
            mine[places] = its

    def done_with(self) -> Tensor:
        """Tell which linear problems are solved, or given up, (A,) bool."""
        library, array, tensor = few_on(self.cost.device)
        parts = self.error, self.tol, self.restarts, self.spent, self.budget, self.number
        error, tol, restarts, spent, budget, number = map(array, parts)
        solved = (error <= tol) | (restarts >= MOST_RESTARTS)
        return tensor((number >= 0) & (solved | (spent >= budget) | ~library.isfinite(error)))

    def cut(self, places: Tensor) -> None:
        """Keep some problems only."""
        for name in self.names():
            setattr(self, name, getattr(self, name)[places])
        for name, part in vars(self.descent).items():
            setattr(self.descent, name, part[places])
        self.plan = torch.empty_like(self.cost)


def enter(problems: packing.Packed, numbers: Tensor) -> Pool:
    """Begin some problems: linearise at a x b, or take the cost that a start gives."""
    i, j = problems.i[numbers], problems.j[numbers]
    x, y = packing.taken(problems.x.tables, i), packing.taken(problems.y.tables, j)
    a, b = problems.x.weights[i], problems.y.weights[j]
    alpha = problems.alpha[numbers]
    linear, target, epsilon, relaxed = packing.units(problems, numbers)
    zero, count = torch.zeros_like(alpha), torch.zeros_like(i)
    point = a[:, :, None] * b[:, None, :]
    g = torch.zeros_like(b)
    chosen = None
    if problems.begin is not None:
        given, chosen = problems.begin(numbers)
        cost = given * alpha[:, None, None]
    if chosen is None or not bool(chosen.all()):
        noise = packing.start_noise(problems.shape, problems.device)
        product = packing.gradient(packing.cross_product(x, y, point * noise), alpha, None)
        cost = product if chosen is None else torch.where(chosen[:, None, None], cost, product)
    if linear is not None:
        cost += linear
    f_next = exact_rows(cost, b, g, epsilon)
    tol, budget = torch.full_like(alpha, annealing.ANNEALING_TOLERANCE), torch.full_like(i, BUDGET)
    if chosen is not None:
        begun = chosen & (epsilon <= target)
        tol[begun], budget[begun] = _BEGUN_TOLERANCE, _BEGUN_BUDGET
        # columns that no row prefers are beyond what exponents of a sweep are kept within
        g = torch.where(begun[:, None], exact_rows(cost.mT, a, f_next, epsilon), 0.0)
        f_next = exact_rows(cost, b, g, epsilon)
    free: dict[str, Any] = {}
    if problems.proximal:
        free["sharp"] = packing.AUTO_EPSILON * packing.natural_scale(problems, numbers, linear)
    if relaxed is not None:
        cost = packing.whole(cost, alpha, (x, y), (a, b))
        f_next = packing.first_rows(relaxed, cost, (a, b), g, epsilon)
        free = {**relaxed._asdict(), "step": torch.zeros_like(cost), "share": zero + 1}
    return Pool(
        number=numbers.clone(), cost=cost, point=point, plan=torch.empty_like(cost),
        i=i, j=j, a=a, b=b, f=torch.zeros_like(a), f_next=f_next, g=g,
        alpha=alpha, target=target, epsilon=epsilon, tol=tol,
        budget=budget, spent=count.clone(), error=zero + math.inf, relaxation=zero + 1,
        restarts=count.clone(), last_error=zero + math.inf, stuck=count.clone(),
        change=zero.clone(), rate=zero.clone(),
        done=count.clone(), inner=count.clone(), settling=count - 1, linear=linear,
        tables=(problems.x.tables, problems.y.tables),
        descent=worth.Descent(len(numbers), alpha), **free,
    )  # fmt: skip


# Share of the excess of the relaxation factor over one that is kept from one linear problem at the
# target to the next. [L392]
_KEPT_EXCESS = 0.9
# Column error, as a share of the change of the plan, up to which the change says how far the plan
# has to go. Then: rates at which changes may shrink if they are to be followed to their limit, and
# by how much two rates may differ. [L465]
_EXACT, _FASTEST, _SLOWEST, _STEADY = 0.1, 0.3, 0.97, 0.1


class _Reached(NamedTuple):
    """Plans that linear problems have led to, of mass one, and what they are worth."""

    spaces: tuple[Tensor, Tensor]  # (k, n, n) and (k, m, m)
    weights: tuple[Tensor, Tensor]
    alpha: Tensor  # (k,)
    epsilon: Tensor  # (k,) of the linear problem
    target: Tensor  # (k,) epsilon to reach
    f: Tensor  # (k, n) potentials of the plan
    g: Tensor  # (k, m)
    cost: Tensor  # (k, n, m) where it was linearised
    plan: Tensor  # (k, n, m)
    step: Tensor  # (k, n, m) from where the cost was linearised
    masses: tuple[Tensor, Tensor]  # row and column sums
    cross: Tensor  # (k, n, m) X P Y
    linear: Tensor | None  # (k, n, m)
    terms: worth.Terms
    change: Tensor  # (k,) L1 change from where the cost was linearised
    objective: Tensor  # (k,)
    relaxed: Relaxed | None
    total: Tensor | None  # (k,) the masses of relaxed plans before
    best: Settled | None  # those that they should have


class _Course(NamedTuple):
    """How outer loops go on, (k,) each, of the kind that few numbers are computed by."""

    error: Any  # of the linear problem
    solved: Any  # whether it is
    done: Any  # outer iterations
    stuck: Any  # linear problems in a row that did not get nearer
    at_target: Any
    settled: Any  # whether the plan has
    ending: Any  # place in ENDINGS, -1 where the loop goes on
    finished: Any  # whether the last linear problem is over, too
    settle: Any  # whether it is next


def advance(
    pool: Pool, places: Tensor, rules: worth.Rules
) -> tuple[worth.Found, worth.Ended] | None:
    """Linearise some problems again; return those that have ended, with their plans."""
    # tables of the whole pool are not copied
    at: Tensor | slice = slice(None) if len(places) == len(pool.number) else places
    reached = _reached(pool, at, places)
    few = few_on(places.device)
    now, numbers = pool.numbers(), few.array(places)
    with np.errstate(all="ignore"):
        course = _course(pool, now, numbers, reached, rules)
        _plan_ahead(pool, now, numbers, reached, course, rules)
        ahead = None
        if pool.sharp is None:
            change = few.array(reached.change)
            exact = course.at_target & (course.error <= _EXACT * change)
            ahead = few.tensor(
                _ahead(pool, now, numbers, change, reached.step, exact=exact, stay=course.settled)
            )
    _linearise(pool, at, places, reached, few.tensor(course.settle), ahead)
    if not course.finished.any():
        return None
    return _leave(pool, places, few.tensor(course.finished).nonzero()[:, 0], reached, course, rules)


def _reached(pool: Pool, at: Tensor | slice, places: Tensor) -> _Reached:
    """Evaluate the plans of some problems."""
    (x, y), plan, before = pool.spaces(places), pool.plan[at], pool.cost[at]
    alpha, epsilon, target = pool.alpha[places], pool.epsilon[places], pool.target[places]
    linear = None if pool.linear is None else pool.linear[at]
    a, b, f, g = pool.a[places], pool.b[places], pool.f[places], pool.g[places]
    relaxed, total, best = pool.relaxed(), None, None
    if relaxed is not None:
        relaxed, total = relaxed.of(places), sums_of(plan)
        plan = plan / total[:, None, None]
    cross = packing.cross_product(x, y, plan)
    p, q = plan.sum(2), plan.sum(1)
    terms = worth.Terms.of(x, y, (p, q), sums_of(cross * plan), alpha)
    if linear is not None:
        terms = terms._replace(linear=sums_of(linear * plan))
    step = plan - pool.point[at]
    if pool.told is None:
        change, spending = sums_of(step.abs()), sums_of(plan * before)
    else:
        change, spending = (part[at] for part in pool.told)
    # epsilon KL(plan | a x b), as plan = a b exp((f + g - cost) / epsilon)
    entropy = sums_along(f * p) + sums_along(g * q) - spending
    objective = terms.quadratic + terms.linear
    if pool.sharp is None:
        objective = objective + entropy
    if relaxed is not None:
        assert total is not None
        entropy = entropy / epsilon - total.log()
        best = relaxed.settle(*terms[:2], entropy, (p, q), (a, b), epsilon)
        objective = best.objective
        if linear is not None and relaxed.mass is None:
            # what grows with the mass alone, beside its square
            linear = linear / best.mass[:, None, None]
    return _Reached(
        (x, y), (a, b), alpha, epsilon, target, f, g, before, plan, step, (p, q), cross, linear,
        terms, change, objective, relaxed, total, best,
    )  # fmt: skip


def _course(pool: Pool, now: Any, at: Any, reached: _Reached, rules: worth.Rules) -> _Course:
    """Decide how the loops of some problems go on, or end."""
    library, as_array, _ = few_on(reached.epsilon.device)
    parts = reached.epsilon, reached.target, reached.change, reached.objective
    epsilon, target, change, objective = map(as_array, parts)
    error, settling = now.error[at], now.settling[at]
    at_target = epsilon <= target
    met = ~at_target | (error <= annealing.MET)
    done = now.done[at] + (settling < 0)
    solved = error <= now.tol[at]
    settled = at_target & (change <= rules.tol)
    flat = library.zeros_like(at_target)
    if pool.sharp is not None:
        settled &= epsilon <= now.sharp[at]
    falling = at_target & (settling < 0)
    # relaxed plans pass saddle points, where their objective hardly falls, and that of proximal
    # steps falls for long
    lasting = reached.relaxed is not None or pool.sharp is not None
    if not lasting and rules.objective_tol > 0 and bool(falling.any()):
        flat[falling] = pool.descent.update(
            at[falling], objective[falling], change[falling], met[falling], rules.objective_tol
        )
    spent = settled & (now.budget[at] == rules.inner_max_iter) & ~solved
    spent &= error > annealing.STUCK_SHARE * now.last_error[at]
    stuck = library.where(spent, now.stuck[at] + 1, 0)
    ending = library.full_like(settling, -1)
    ending[done >= rules.max_iter] = worth.OUTER
    ending[stuck >= annealing.STUCK] = worth.INNER
    ending[flat] = worth.FLAT
    ending[settled & (error <= rules.tol)] = worth.CONVERGED
    ending[~library.isfinite(error)] = worth.INNER
    finished = settling >= 0
    settle = ~finished & (ending >= 0)
    return _Course(error, solved, done, stuck, at_target, settled, ending, finished, settle)


def _plan_ahead(
    pool: Pool, now: Any, at: Any, reached: _Reached, course: _Course, rules: worth.Rules
) -> None:
    """Set what the next linear problems are to reach, and with how many iterations."""
    library, as_array, _ = few_on(pool.cost.device)
    where = library.where
    epsilon, target, change = map(as_array, (reached.epsilon, reached.target, reached.change))
    error, settle = course.error, course.settle
    following = library.maximum(epsilon * DECAY, target)
    if pool.sharp is not None:
        # the k-th proximal step: epsilon / k, at the mean of the costs so far
        following = where(course.at_target, target / (target / epsilon + 1), following)
    now.epsilon[at] = where(settle, library.minimum(epsilon, target), following)
    near = following <= target
    tol = library.full_like(epsilon, annealing.ANNEALING_TOLERANCE)
    tol = where(near, annealing.INNER_SHARE * rules.tol, tol)
    now.tol[at] = where(settle, rules.inner_tol, tol)
    budget = now.budget[at]
    behind = (error > annealing.ANNEALING_TOLERANCE) | (course.at_target & (error > change))
    if pool.share is not None:
        # plans that go to and fro in short steps miss their marginals by as much
        behind |= course.at_target & ~course.solved & (now.share[at] <= annealing.SHORT_STEP)
    budget = where(behind, 2 * budget, budget)
    budget = where(course.settled | settle, rules.inner_max_iter, budget)
    now.budget[at] = library.clip(budget, None, rules.inner_max_iter)
    now.relaxation[at] = where(near, 1 + _KEPT_EXCESS * (now.relaxation[at] - 1), 1.0)
    now.settling[at] = where(settle, course.ending, now.settling[at])
    now.last_error[at], now.stuck[at], now.done[at] = error, course.stuck, course.done
    now.spent[at], now.restarts[at], now.error[at] = 0, 0, math.inf


def _linearise(
    pool: Pool,
    at: Tensor | slice,
    places: Tensor,
    reached: _Reached,
    settle: Tensor,
    ahead: Tensor | None,
) -> None:
    """Linearise at plans, or ahead of those that are known to go on."""
    plan, alpha, relaxed = reached.plan, reached.alpha, reached.relaxed
    cost = packing.gradient(reached.cross, alpha, reached.linear)
    if relaxed is not None:
        cost = packing.whole(cost, alpha, reached.spaces, reached.masses)
    unit = pool.epsilon[places]
    if ahead is None:
        # proximal steps go back to the mean of costs, of which this is one, unless they are over
        ahead = torch.where(settle, 0.0, (unit / reached.target).clamp(max=1)) - 1
    if bool(ahead.any()):
        by = ahead[:, None, None]
        cost = torch.add(cost, (cost - reached.cost).mul_(by))
        plan = plan if pool.sharp is not None else torch.add(plan, reached.step.mul_(by))
    pool.f_next[places] = packing.first_rows(relaxed, cost, reached.weights, reached.g, unit)
    if at is places:
        pool.cost[places], pool.point[places] = cost, plan
    else:
        pool.cost, pool.point, pool.plan = cost, plan, pool.point


def _ahead(
    pool: Pool, now: Any, at: Any, change: Any, step: Tensor, *, exact: Any, stay: Any
) -> Any:
    """Choose how far to lead plans on whose changes shrink by the same share each time, (k,)."""
    # The answer is in units of the last `step`. It is zero where plans `stay`, or where the change
    # is not `exact`: the marginals of a plan then say more of it. It is negative where relaxed
    # plans turn back: steps are halved until they do not, however short. Between two vertices that
    # is when they are about epsilon over the range of the cost, and longer ones go to and fro.
    library, as_array, as_tensor = few_on(step.device)
    where, share = library.where, 1.0
    if pool.share is not None:
        assert pool.step is not None
        places = as_tensor(at)
        back = as_array(sums_of(step * pool.step[places])) < 0
        share = now.share[at]
        share = library.clip(where(back, share / 2, annealing.LENGTHENING * share), None, 1.0)
        pool.step[places], now.share[at] = step, share
        exact = exact & (share == 1)
    before, rate_before = now.change[at], now.rate[at]
    rate = where(exact & (before > 0), change / before, 0.0)
    steady = abs(rate - rate_before) <= _STEADY * rate_before
    steady &= (rate > _FASTEST) & (rate < _SLOWEST) & (change <= FAR) & ~stay
    now.change[at], now.rate[at] = where(steady, 0.0, change), where(steady, 0.0, rate)
    return where(stay, 0.0, where(steady, rate / (1 - rate), share - 1))


def _leave(
    pool: Pool, places: Tensor, over: Tensor, reached: _Reached, course: _Course, rules: worth.Rules
) -> tuple[worth.Found, worth.Ended]:
    """Hand over the plans of problems that have ended, and make room."""
    (x, y), (a, b) = pool.spaces(places[over]), (part[over] for part in reached.weights)
    means = worth.mean_of(x, a) * worth.mean_of(y, b)
    product = worth.Terms.of(x, y, (a, b), means, reached.alpha[over])
    if reached.linear is not None:
        costs = sums_of(reached.linear[over] * a[:, :, None] * b[:, None, :])
        product = product._replace(linear=costs)
    p, q = reached.masses
    missing = sums_along((p[over] - a).abs()).maximum(sums_along((q[over] - b).abs()))
    terms = worth.Terms(*(part[over] for part in reached.terms))
    both, f, unit = (terms, product), reached.f[over], reached.epsilon[over]
    plan, relaxed = reached.plan[over], reached.relaxed
    if relaxed is not None:
        assert reached.best is not None
        assert reached.total is not None
        best = Settled(*(part[over] for part in reached.best))
        f, missing = f - (unit * reached.total[over].log())[:, None], best.violation
        both, plan, f, unit = worth.of_mass(relaxed, best, both, plan, f, unit)
    where, objective = places[over], reached.objective[over]
    error, solved, done = map(
        few_on(over.device).tensor, (course.error, course.solved, course.done)
    )
    finish = worth.Finish(
        error[over], pool.settling[where], solved[over], done[over], pool.inner[where]
    )
    found = worth.found_numbers(both, missing, objective, unit, finish, rules)
    out = pool.number[where]
    pool.number[where] = -1
    return found, worth.Ended(out, plan, f, reached.g[over], objective)
