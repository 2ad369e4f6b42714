"""The outer loop of many problems: each goes at its own pace, and makes room when it is done.

A tick is eight Sinkhorn iterations of every problem in the pool. Those whose linear problem is
solved linearise again, and those that have settled leave; their places go to the next in the queue.
Every number of a problem is computed from its own, by operations whose bits do not depend on how
many others there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._batch.newton import NEWTON_BELOW, newton_step
from torchgw._batch.packing import Packed, Stack, natural_scale
from torchgw._batch.products import products
from torchgw._batch.relaxed import Relaxed, Settled
from torchgw._batch.stopping import Descent
from torchgw._batch.sweep import (
    BUDGET,
    DECAY,
    INNER_SHARE,
    MET,
    TICK,
    exact_rows,
    next_relaxation,
    sweep,
)
from torchgw._batch.warm import ENDS, may_begin, on_chip
from torchgw._problem.marginals import STRICT
from torchgw._tensors.ahead import compile_together

# epsilon="auto" as a share of the natural scale. [L391]
_AUTO_EPSILON = 0.0025

# Entries of a plan times problems that are solved together: about what a core's cache holds, or
# what keeps a GPU busy. [L391]
_POOL_ENTRIES = {"cpu": 2**17, "cuda": 2**26}
# Entries of the plans that are solved in Triton together. [L533]
_TOGETHER = 2**27
# Code with which a Triton program ends when a number of its problem is no longer finite.
_LOST = ENDS.index("LOST")
# Devices, sizes and kinds of problems whose programs have been compiled, or are being.
_compiled: set[tuple[torch.device | int, ...]] = set()
# Problems of a pool at least: a product of matrices with a single one has other bits. [L391] [L395]
_FEWEST = 2
# Share of a pool that stands empty before it is filled again, or cut down. [L391]
_IDLE = 1 / 16
# Column error at which a linear problem ends while epsilon falls. [L391]
_ANNEALING_TOLERANCE = 1e-2
# Share of the excess of the relaxation factor over one that is kept from one linear problem at the
# target to the next. [L392]
_KEPT_EXCESS = 0.9
# How often the error may grow before what is left of it is taken for rounding, and errors that are
# too large for that. [L391]
_MOST_RESTARTS = 5
_MOST_ROUNDING = 1e-6
# A problem is given up after so many linear problems in a row that leave more than this share of
# the error. [L391]
_STUCK, _STUCK_SHARE = 10, 0.99
# Sinkhorn iterations on chip before the plan is made anew from its potentials. [L402]
_ON_CHIP = 256
# A plan may miss its columns by this multiple of the column error that was asked for. [L391]
_CONTRADICTION = 10
# By how much rounding, and the marginal error, may raise a value, as shares of the squares that it
# is the difference of. [L391]
_VALUE_ROUNDING = 1e-6
_VALUE_PER_MARGINAL = 4.0
# Column error, as a share of the change of the plan, up to which the change says how far the plan
# has to go. Then: rates at which changes may shrink if they are to be followed to their limit, by
# how much two rates may differ, and the change below which a plan counts as near its limit. [L465]
_EXACT, _FASTEST, _SLOWEST, _STEADY, _NEAR = 0.1, 0.3, 0.97, 0.1, 1e-2
# Shortest step of a relaxed plan, and by how much a step may be longer than the last one. [L690]
_SHORTEST, _LENGTHENING = 1 / 16, 1.2
# Relative size of the noise on the first plan. [L391]
_START_NOISE = 1e-6
# Relative change of the cost below which a plan is the product plan. [L980]
_STILL = 1e-9

# How a problem ends: names of the status, as codes.
ENDINGS = (
    "CONVERGED", "FLAT", "OUTER_LIMIT", "INNER_LIMIT", "BOTH_LIMITS", "IMPLAUSIBLE",
)  # fmt: skip
_CONVERGED, _FLAT, _OUTER, _INNER, _BOTH, _IMPLAUSIBLE = range(len(ENDINGS))


class Rules(NamedTuple):
    """When problems end; the options of a single solve."""

    max_iter: int = 500
    tol: float = 1e-5
    objective_tol: float = 1e-4
    inner_max_iter: int = 2000
    inner_tol: float = 5e-7


class Solved(NamedTuple):
    """Numbers of B problems, on their device."""

    value_quad: Tensor  # (B,) float64, alpha <L(P), P>
    value_linear: Tensor  # (B,) float64, (1 - alpha) <M, P>
    objective: Tensor  # (B,) float64, with the entropy
    marginal_error: Tensor  # (B,) float64
    epsilon: Tensor  # (B,) float64
    ending: Tensor  # (B,) int64, places in ENDINGS
    n_iter: Tensor  # (B,) int64, outer iterations
    inner_iterations: Tensor  # (B,) int64


class Ended(NamedTuple):
    """Plans of some problems that have ended."""

    number: Tensor  # (k,) int64, which problems
    plan: Tensor  # (k, n, m)
    f: Tensor  # (k, n) potentials of its cost, without terms of rows and columns alone
    g: Tensor  # (k, m)
    objective: Tensor  # (k,)


@dataclass
class _Pool:
    """Problems that are being solved; every tensor has a row for each."""

    number: Tensor  # int64, which problem; -1 where there is none
    cost: Tensor  # (A, n, m) where it was linearised
    point: Tensor  # (A, n, m) the plan that it was linearised at
    plan: Tensor  # (A, n, m) the present plan
    x: Tensor  # (A, n, n)
    y: Tensor  # (A, m, m)
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
    descent: Descent
    # for relaxed marginals: `rho` and `mass` as in ``Relaxed``, the last step, and how much of a
    # step is taken
    rho: Tensor | None = None
    mass: Tensor | None = None
    step: Tensor | None = None
    share: Tensor | None = None
    # L1 change of the plans, and <cost, plan>, if the iterations have computed them
    told: tuple[Tensor, Tensor] | None = None

    def relaxed(self) -> Relaxed | None:
        """Tell which marginals the plans must have, if not all."""
        return None if self.share is None else Relaxed(self.rho, self.mass)

    def names(self) -> list[str]:
        """List the tensors that belong to problems."""
        names = [name for name, part in vars(self).items() if isinstance(part, Tensor)]
        return [name for name in names if name != "plan"]

    def put(self, places: Tensor, other: _Pool) -> None:
        """Replace some problems by others."""
        for name in self.names():
            getattr(self, name)[places] = getattr(other, name)
        for mine, its in zip(self.descent.parts(), other.descent.parts(), strict=True):
            mine[places] = its

    def done_with(self) -> Tensor:
        """Tell which linear problems are solved, or given up, (A,) bool."""
        solved = (self.error <= self.tol) | (self.restarts >= _MOST_RESTARTS)
        over = solved | (self.spent >= self.budget) | ~self.error.isfinite()
        return (self.number >= 0) & over

    def cut(self, places: Tensor) -> None:
        """Keep some problems only."""
        for name in self.names():
            setattr(self, name, getattr(self, name)[places])
        for name, part in vars(self.descent).items():
            setattr(self.descent, name, part[places])
        self.plan = torch.empty_like(self.cost)


def run(problems: Packed, rules: Rules, keep: Callable[[Ended], None] | None = None) -> Solved:
    """Solve all problems; ``keep`` is handed plans as they end."""
    count, (n, m), device = len(problems), problems.shape, problems.device
    numbers = torch.zeros(5, count, dtype=torch.float64, device=device)
    counts = torch.zeros(3, count, dtype=torch.int64, device=device)
    if not count:
        return Solved(*numbers, *counts)

    def store(found: _Found, out: Ended) -> None:
        numbers[:, out.number], counts[:, out.number] = found.numbers, found.counts
        if keep is not None:
            keep(out)

    queue = torch.arange(count, device=device)
    if not may_begin(problems.shape, device):
        _run_queue(problems, rules, queue, store)
        return Solved(*numbers, *counts)
    solve = _solver_in_triton(problems, rules, store)
    # the engine begins anew where a program has lost a number, or has not left the product plan
    left = torch.cat([solve(chunk) for chunk in queue.split(max(1, _TOGETHER // (n * m)))])
    if len(left):
        _run_queue(problems, rules, left, store)
    return Solved(*numbers, *counts)


def _run_queue(
    problems: Packed,
    rules: Rules,
    queue: Tensor,
    store: Callable[[_Found, Ended], None],
) -> None:
    """Solve the problems of a queue."""
    n, m = problems.shape
    width = max(_FEWEST, min(len(queue), _POOL_ENTRIES[problems.device.type] // (n * m)))

    chip = problems.relaxed is None and on_chip(problems.shape, problems.device)
    solve = _solve_on_chip if chip else _tick
    pool, waiting = _enter(problems, queue[:width]), queue[width:]
    if len(pool.number) < _FEWEST:
        # the first problem a second time, to fill the pool; its numbers are not read
        pool = _enter(problems, queue[:1].expand(_FEWEST))
        pool.number[1:] = -1
    while True:
        done = solve(pool)
        ended = _advance(pool, done.nonzero()[:, 0], rules) if bool(done.any()) else None
        if ended is not None:
            store(*ended)
        idle = (pool.number < 0).nonzero()[:, 0]
        if len(waiting) and len(idle) >= _IDLE * width:
            new, waiting = waiting[: len(idle)], waiting[len(idle) :]
            pool.put(idle[: len(new)], _enter(problems, new))
        elif not len(waiting):
            busy = (pool.number >= 0).nonzero()[:, 0]
            if not len(busy):
                return
            if len(pool.number) > _FEWEST and len(busy) <= (1 - 4 * _IDLE) * len(pool.number):
                missing = max(0, _FEWEST - len(busy))
                pool.cut(torch.cat([busy, busy[:1].expand(missing)]))
                pool.number[len(busy) :] = -1


def _units(
    problems: Packed, numbers: Tensor
) -> tuple[Tensor | None, Tensor, Tensor, Relaxed | None]:
    """Compute (1 - alpha) M of some problems, their target and first epsilon, and penalties."""
    linear, relaxed = None, problems.relaxed and problems.relaxed.of(numbers)
    if problems.linear is not None:
        share = 1 - problems.alpha[numbers]
        linear = share[:, None, None] * problems.linear(numbers)
    target = problems.epsilon[numbers]
    if relaxed is not None and relaxed.mass is not None:
        # M is divided by the mass that is moved, as the plan is normalised
        mass = relaxed.mass
        linear, target = None if linear is None else linear / mass[:, None, None], target / mass
    scale = natural_scale(problems, numbers, linear)
    target = torch.where(target.isnan(), _AUTO_EPSILON * scale, target)
    if relaxed is not None and relaxed.rho is not None:
        heavy = relaxed.rho >= STRICT * scale[:, None]
        relaxed = relaxed._replace(rho=torch.where(heavy, torch.inf, relaxed.rho))
    return linear, target, (problems.first[numbers] * scale).maximum(target), relaxed


def _solver_in_triton(
    problems: Packed, rules: Rules, store: Callable[[_Found, Ended], None]
) -> Callable[[Tensor], Tensor]:
    """Make a function that solves problems by a program each, and returns those left unsolved."""
    from torchgw._batch.finish_triton import Finished, finish
    from torchgw._batch.relaxed_triton import Eased, ease
    from torchgw._batch.rough_triton import rough
    from torchgw._batch.settle_triton import settle
    from torchgw._batch.tile_triton import padded
    from torchgw._batch.worth_triton import Worth, worth

    (n, m), relaxed = problems.shape, problems.relaxed
    # programs hold powers of two
    rows, columns = (1 << (size - 1).bit_length() for size in (n, m))
    noise = padded(_noise(problems.shape, problems.device), rows, columns)
    fall = rules.objective_tol if rules.objective_tol > 0 else -math.inf

    def taken(side: Stack, used: Tensor, size: int) -> tuple[Tensor, Tensor]:
        return padded(side.tables[used], size, size), padded(side.weights[used], size)

    def tables(numbers: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
        """Take the tables and weights that some problems need, and where theirs are among them."""
        i, j = problems.i[numbers], problems.j[numbers]
        if problems.y is problems.x:
            # a space that is on both sides is kept once
            used, places = torch.cat([i, j]).unique(return_inverse=True)
            x = y = taken(problems.x, used, rows)
            # clones, as their addresses are aligned: then one compiled variant of each program is
            # enough
            i, j = (part.clone() for part in places.chunk(2))
        else:
            (used_x, i), (used_y, j) = (one.unique(return_inverse=True) for one in (i, j))
            x, y = taken(problems.x, used_x, rows), taken(problems.y, used_y, columns)
        return (x[0], y[0], x[1], y[1]), (i, j)

    def programs(
        numbers: Tensor,
    ) -> tuple[tuple[Tensor, Tensor], Tensor, Relaxed | None, Eased | Finished, Worth]:
        linear, target, first, some = _units(problems, numbers)
        linear = None if linear is None else padded(linear, rows, columns)
        double, index = tables(numbers)
        floats = {id(part): part.float() for part in double}
        single = tuple(floats[id(part)] for part in double)
        weights, alpha = (double[2][index[0]], double[3][index[1]]), problems.alpha[numbers]
        begin = None
        if problems.begin is not None:
            costs, chosen = problems.begin(numbers)
            begin = padded(costs, rows, columns), chosen
        begun = alpha, linear, begin, (target, first)
        limits = rules.max_iter, rules.inner_max_iter, rules.tol, rules.inner_tol
        made: Eased | Finished
        if some is None:
            warm = rough(single, index, *begun, noise, (rules.max_iter, fall))
            settle(
                double, single, index, alpha, linear, target, warm,
                (rules.max_iter, rules.tol, fall),
            )  # fmt: skip
            made = finish(double, index, alpha, linear, target, warm, (*limits, fall))
        else:
            made = ease(double, single, index, *begun, some, noise, limits)
        sums = worth(double, index, linear, made.plan, (made.f, made.g))
        return weights, target, some, made, sums

    def solve(numbers: Tensor) -> Tensor:
        alpha = problems.alpha[numbers]
        weights, target, some, made, sums = programs(numbers)
        terms = _Terms.of_sums(alpha, sums.crossed, sums.linear, sums.own)
        product = _Terms.of_sums(alpha, sums.product_crossed, sums.product_linear, sums.product_own)
        both, plan, f, unit, missing = (terms, product), made.plan, made.f, target, sums.missing
        if isinstance(made, Finished):
            objective = terms.quadratic + terms.linear + sums.potentials - made.spending
        else:
            assert some is not None
            masses = sums.masses[:, :rows], sums.masses[:, rows:]
            best = some.settle(*terms[:2], made.entropy, masses, weights, target)
            objective, missing = best.objective, best.violation
            both, plan, f, unit = _of_mass(some, best, both, plan, f, unit)
        found = _evaluate(
            both, missing, objective, unit, made.error, made.ended,
            made.error <= rules.inner_tol, (made.done, made.inner), rules,
        )  # fmt: skip
        ended = Ended(numbers, plan[:, :n, :m], f[:, :n], made.g[:, :m], objective)
        # float32 keeps the symmetry of spaces whose points all look alike: the engine breaks it
        pairs = (sums.crossed, sums.product_crossed), (sums.linear, sums.product_linear)
        still = [abs(here - there) <= _STILL * abs(there) for here, there in pairs]
        known = (made.ended != _LOST) & objective.isfinite() & ~(still[0] & still[1])
        over, left = known.nonzero()[:, 0], (~known).nonzero()[:, 0]
        if len(left):
            found = _Found(found.numbers[:, over], found.counts[:, over])
            ended = Ended(*(part[over] for part in ended))
        store(found, ended)
        return numbers[left]

    kind = (
        problems.device, rows, columns, problems.linear is None, problems.begin is None,
        relaxed is None, relaxed is None or relaxed.mass is None,
    )  # fmt: skip
    if kind not in _compiled:
        _compiled.add(kind)
        first_one = torch.zeros(1, dtype=torch.int64, device=problems.device)
        compile_together(problems.device, lambda: programs(first_one))
    return solve


def _gradient(cross: Tensor, alpha: Tensor, linear: Tensor | None) -> Tensor:
    """Compute the costs of plans from X P Y, which is overwritten."""
    cost = cross.mul_(-4 * alpha[:, None, None])
    return cost if linear is None else cost.add_(linear)


def _whole(
    cost: Tensor, alpha: Tensor, tables: tuple[Tensor, Tensor], masses: tuple[Tensor, Tensor]
) -> Tensor:
    """Add the terms of rows and of columns to costs, and subtract the mean of the whole."""
    rows, columns = (
        2 * alpha[:, None] * (table.square() * mass[:, None, :]).sum(2)
        for table, mass in zip(tables, masses, strict=True)
    )
    cost = cost + rows[:, :, None] + columns[:, None, :]
    p, q = masses
    return cost - ((cost * q[:, None, :]).sum(2) * p).sum(1)[:, None, None]


def _enter(problems: Packed, numbers: Tensor) -> _Pool:
    """Begin some problems: linearise at a x b, or take the cost that a start gives."""
    i, j = problems.i[numbers], problems.j[numbers]
    x, y = problems.x.tables[i], problems.y.tables[j]
    a, b = problems.x.weights[i], problems.y.weights[j]
    alpha = problems.alpha[numbers]
    linear, target, epsilon, relaxed = _units(problems, numbers)
    zero, whole = torch.zeros_like(alpha), torch.zeros_like(i)
    g, point = torch.zeros_like(b), a[:, :, None] * b[:, None, :]
    noise = _noise(problems.shape, problems.device)
    cost = _gradient(_cross(x, y, point * noise), alpha, None)
    if problems.begin is not None:
        given, chosen = problems.begin(numbers)
        cost = torch.where(chosen[:, None, None], given * alpha[:, None, None], cost)
    if linear is not None:
        cost += linear
    f_next, free = exact_rows(cost, b, g, epsilon), {}
    if relaxed is not None:
        cost = _whole(cost, alpha, (x, y), (a, b))
        f_next = _first_rows(relaxed, cost, (a, b), g, epsilon)
        free = {**relaxed._asdict(), "step": torch.zeros_like(cost), "share": zero + 1}
    return _Pool(
        number=numbers.clone(), cost=cost, point=point, plan=torch.empty_like(cost),
        x=x, y=y, a=a, b=b, f=torch.zeros_like(a), f_next=f_next, g=g,
        alpha=alpha, target=target, epsilon=epsilon, tol=zero + _ANNEALING_TOLERANCE,
        budget=whole + BUDGET, spent=whole.clone(), error=zero + math.inf, relaxation=zero + 1,
        restarts=whole.clone(), last_error=zero + math.inf, stuck=whole.clone(),
        change=zero.clone(), rate=zero.clone(),
        done=whole.clone(), inner=whole.clone(), settling=whole - 1, linear=linear,
        descent=Descent(len(numbers), alpha), **free,
    )  # fmt: skip


def _first_rows(
    relaxed: Relaxed | None, cost: Tensor, weights: tuple[Tensor, Tensor], g: Tensor, unit: Tensor
) -> Tensor:
    """Compute potentials of rows from which iterations go on from g, (k, n)."""
    a, rows = weights[0], exact_rows(cost, weights[1], g, unit)
    if relaxed is None:
        return rows
    rows_now, mass = (rows / unit[:, None])[:, None, :], a[:, None, :]
    return rows + unit[:, None] * relaxed.scaling(0, mass, mass, rows_now, unit)[:, 0].log()


def _noise(shape: tuple[int, int], device: torch.device) -> Tensor:
    """Make factors next to one, (n, m), which depend on the place of an entry alone."""
    # The product plan of two spaces whose points all look alike is a saddle point.
    generator = torch.Generator(device="cpu").manual_seed(0)
    noise = torch.randn(shape, dtype=torch.float64, generator=generator)
    return (1 + _START_NOISE * noise).to(device)


def _cross(x: Tensor, y: Tensor, plan: Tensor) -> Tensor:
    """Compute X P Y of some problems."""
    return products(products(x, plan), y)


def _tick(pool: _Pool) -> Tensor:
    """Iterate all problems once; tell which linear problems are done, (A,) bool."""
    made = sweep(
        pool.cost,
        (pool.a, pool.b),
        (pool.f_next, pool.g),
        pool.epsilon,
        pool.relaxation,
        pool.plan,
        pool.relaxed(),
    )
    pool.f, pool.f_next, pool.g = made.f, made.f_next, made.g
    previous, pool.error = pool.error, made.error
    pool.spent, pool.inner = pool.spent + TICK, pool.inner + TICK
    if pool.share is None:
        pool.restarts = pool.restarts + ((previous <= made.error) & (made.error < _MOST_ROUNDING))
    pool.relaxation = next_relaxation(pool.relaxation, made.error / previous)
    done = pool.done_with()
    if pool.share is not None:
        return done
    _step(pool, (~done & (pool.number >= 0) & (made.error <= NEWTON_BELOW)).nonzero()[:, 0])
    return done


def _step(pool: _Pool, places: Tensor) -> None:
    """Take short Newton steps of problems whose plans nearly have their marginals."""
    if not len(places):
        return
    # a product with a single problem would have other bits
    chosen = places if len(places) >= _FEWEST else places.expand(_FEWEST)
    at: Tensor | slice = slice(None) if len(places) == len(pool.number) else chosen
    made = newton_step(pool.plan[at], pool.a[chosen], pool.b[chosen])
    unit, few = pool.epsilon[places, None], slice(len(places))
    pool.g[places] += unit * made.columns[few]
    pool.f_next[places] = pool.f[places] + unit * made.rows[few]
    # the relaxation factor is fitted to errors of plain iterations, without Newton steps between
    pool.relaxation[places] = torch.where(made.taken[few], 1.0, pool.relaxation[places])


def _solve_on_chip(pool: _Pool) -> Tensor:
    """Iterate all problems until their linear problems are done; tell which are, (A,) bool."""
    from torchgw._batch.sweep_triton import Scaling, scale

    busy, unit = pool.number >= 0, pool.epsilon[:, None]
    s, t, exact = torch.ones_like(pool.a), torch.ones_like(pool.b), torch.ones_like(pool.a)
    pool.told = torch.zeros_like(pool.epsilon), torch.zeros_like(pool.epsilon)
    before = pool.spent.clone()
    given = Scaling(
        pool.cost, pool.point, pool.plan, pool.a, pool.b, pool.f_next, pool.g, pool.epsilon,
        s, t, exact, pool.relaxation, pool.error, pool.restarts, pool.spent, pool.budget, pool.tol,
        *pool.told,
    )  # fmt: skip
    scale(busy.nonzero()[:, 0], given, _ON_CHIP, _MOST_RESTARTS, _MOST_ROUNDING)
    pool.inner += pool.spent - before
    pool.f = pool.f_next + unit * exact.log()
    pool.f_next = pool.f_next + unit * s.log()
    pool.g = pool.g + unit * t.log()
    return pool.done_with()


class _Found(NamedTuple):
    """Numbers of problems that have ended, by their kind."""

    numbers: Tensor  # (5, k) float64
    counts: Tensor  # (3, k) int64


def _advance(pool: _Pool, places: Tensor, rules: Rules) -> tuple[_Found, Ended] | None:
    """Linearise some problems again; return those that have ended, with their plans."""
    # tables of the whole pool are not copied
    at: Tensor | slice = slice(None) if len(places) == len(pool.number) else places
    x, y, plan = pool.x[at], pool.y[at], pool.plan[at]
    alpha, target, epsilon = pool.alpha[places], pool.target[places], pool.epsilon[places]
    linear = None if pool.linear is None else pool.linear[at]
    error, settling = pool.error[places], pool.settling[places]
    a, b, f, g = pool.a[places], pool.b[places], pool.f[places], pool.g[places]
    relaxed = pool.relaxed()
    if relaxed is not None:
        relaxed, total = relaxed.of(places), plan.sum((1, 2))
        plan = plan / total[:, None, None]
    cross = _cross(x, y, plan)
    p, q = plan.sum(2), plan.sum(1)
    terms = _Terms.of(x, y, (p, q), (cross * plan).sum((1, 2)), alpha)
    if linear is not None:
        terms = terms._replace(linear=(linear * plan).sum((1, 2)))
    if pool.told is None:
        change = (plan - pool.point[at]).abs_().sum((1, 2))
        spending = (plan * pool.cost[at]).sum((1, 2))
    else:
        change, spending = (part[at] for part in pool.told)
    # epsilon KL(plan | a x b), as plan = a b exp((f + g - cost) / epsilon)
    entropy = (f * p).sum(1) + (g * q).sum(1) - spending
    objective = terms.quadratic + terms.linear + entropy
    if relaxed is not None:
        entropy = entropy / epsilon - total.log()
        best = relaxed.settle(*terms[:2], entropy, (p, q), (a, b), epsilon)
        objective = best.objective
        if linear is not None and relaxed.mass is None:
            # the linear term grows with the mass, all others with its square
            linear = linear / best.mass[:, None, None]

    # how the loop goes on
    at_target = epsilon <= target
    met = ~at_target | (error <= MET)
    done = pool.done[places] + (settling < 0)
    solved = error <= pool.tol[places]
    settled = at_target & (change <= rules.tol)
    flat = torch.zeros_like(at_target)
    falling = (at_target & (settling < 0)).nonzero()[:, 0]
    # relaxed plans pass saddle points, where their objective hardly falls
    if relaxed is None and len(falling) and rules.objective_tol > 0:
        flat[falling] = pool.descent.update(
            places[falling], objective[falling], change[falling], met[falling], rules.objective_tol
        )
    last = pool.last_error[places]
    spent = settled & (pool.budget[places] == rules.inner_max_iter) & ~solved
    stuck = torch.where(spent & (error > _STUCK_SHARE * last), pool.stuck[places] + 1, 0)
    ending = torch.full_like(settling, -1)
    ending[done >= rules.max_iter] = _OUTER
    ending[stuck >= _STUCK] = _INNER
    ending[flat] = _FLAT
    ending[settled & (error <= rules.tol)] = _CONVERGED
    ending[~error.isfinite()] = _INNER
    finished = settling >= 0
    settle = ~finished & (ending >= 0)

    # epsilon and point of the next linearisation
    following = (epsilon * DECAY).maximum(target)
    pool.epsilon[places] = torch.where(settle, epsilon.minimum(target), following)
    near = following <= target
    tol = torch.full_like(epsilon, _ANNEALING_TOLERANCE)
    tol[near] = INNER_SHARE * rules.tol
    tol[settle] = rules.inner_tol
    pool.tol[places] = tol
    budget = pool.budget[places]
    behind = (error > _ANNEALING_TOLERANCE) | (at_target & (error > change))
    budget = torch.where(behind, 2 * budget, budget)
    budget = torch.where(settled | settle, rules.inner_max_iter, budget)
    pool.budget[places] = budget.clamp(max=rules.inner_max_iter)
    cost, made = _gradient(cross, alpha, linear), plan
    if relaxed is not None:
        cost = _whole(cost, alpha, (x, y), (p, q))
    step, exact = plan - pool.point[at], at_target & (error <= _EXACT * change)
    ahead = _ahead(pool, places, change, step, exact=exact, stay=settled)
    plan = torch.add(plan, step.mul_(ahead[:, None, None]))
    cost = torch.add(cost, (cost - pool.cost[at]).mul_(ahead[:, None, None]))
    pool.f_next[places] = _first_rows(relaxed, cost, (a, b), g, pool.epsilon[places])
    if at is places:
        pool.cost[places], pool.point[places] = cost, plan
    else:
        pool.cost, pool.point, pool.plan = cost, plan, pool.point
    for name, value in {
        "spent": 0, "error": math.inf, "relaxation": torch.where(
            near, 1 + _KEPT_EXCESS * (pool.relaxation[places] - 1), 1.0
        ), "restarts": 0,
        "last_error": error, "stuck": stuck, "done": done,
        "settling": torch.where(settle, ending, settling),
    }.items():  # fmt: skip
        getattr(pool, name)[places] = value
    if not bool(finished.any()):
        return None
    over = finished.nonzero()[:, 0]
    x, y, a, b = x[over], y[over], a[over], b[over]
    means = ((x * a[:, None, :]).sum(2) * a).sum(1) * ((y * b[:, None, :]).sum(2) * b).sum(1)
    product = _Terms.of(x, y, (a, b), means, alpha[over])
    if linear is not None:
        costs = (linear[over] * a[:, :, None] * b[:, None, :]).sum((1, 2))
        product = product._replace(linear=costs)
    missing = (p[over] - a).abs().sum(1).maximum((q[over] - b).abs().sum(1))
    terms, f, unit = terms.of_places(over), f[over], epsilon[over]
    made = made[over]
    if relaxed is not None:
        best = Settled(*(part[over] for part in best))
        f, missing = f - (unit * total[over].log())[:, None], best.violation
        (terms, product), made, f, unit = _of_mass(relaxed, best, (terms, product), made, f, unit)
    where = places[over]
    found = _evaluate(
        (terms, product), missing, objective[over], unit, error[over],
        settling[over], solved[over], (done[over], pool.inner[where]), rules,
    )  # fmt: skip
    out = pool.number[where]
    pool.number[where] = -1
    return found, Ended(out, made, f, g[over], objective[over])


def _of_mass(
    relaxed: Relaxed,
    best: Settled,
    both: tuple[_Terms, _Terms],
    plan: Tensor,
    f: Tensor,
    unit: Tensor,
) -> tuple[tuple[_Terms, _Terms], Tensor, Tensor, Tensor]:
    """Multiply terms, normalised plans, potentials f and epsilons by the masses of the plans."""
    (terms, product), mass = both, best.mass
    linear_mass = mass.square() if relaxed.mass is not None else mass
    terms = _Terms(*(mass.square() * part for part in terms))._replace(
        linear=linear_mass * terms.linear
    )
    # a relaxed plan may be worth more than a x b: its penalty is less
    product = product._replace(quadratic=torch.full_like(mass, math.inf))
    f = f + (unit * mass.log())[:, None]
    unit = unit if relaxed.mass is None else unit * mass
    return (terms, product), mass[:, None, None] * plan, f, unit


def _evaluate(
    both: tuple[_Terms, _Terms],
    missing: Tensor,
    objective: Tensor,
    epsilon: Tensor,
    error: Tensor,
    ending: Tensor,
    solved: Tensor,
    counts: tuple[Tensor, Tensor],
    rules: Rules,
) -> _Found:
    """Compare plans that have ended with a x b; ``missing`` is what their marginals lack."""
    terms, product = both
    ended = _judge(ending, solved, missing, terms, product, rules)
    ended = torch.where(error.isfinite(), ended, _INNER)
    numbers = torch.stack([terms.quadratic, terms.linear, objective, missing, epsilon])
    return _Found(numbers, torch.stack([ended, *counts]))


def _ahead(
    pool: _Pool, places: Tensor, change: Tensor, step: Tensor, *, exact: Tensor, stay: Tensor
) -> Tensor:
    """Choose how far to lead plans on whose changes shrink by the same share each time, (k,)."""
    # The answer is in units of the last `step`. It is zero where plans `stay`, or where the change
    # is not `exact`: the marginals of a plan then say more of it. It is negative where relaxed
    # plans turn back.
    share = torch.ones_like(change)
    if pool.share is not None:
        assert pool.step is not None
        back = (step * pool.step[places]).sum((1, 2)) < 0
        share = pool.share[places]
        share = torch.where(back, share / 2, _LENGTHENING * share).clamp(_SHORTEST, 1.0)
        pool.step[places], pool.share[places] = step, share
    exact = exact & (share == 1)
    before, rate_before = pool.change[places], pool.rate[places]
    rate = torch.where(exact & (before > 0), change / before, 0.0)
    steady = (rate - rate_before).abs() <= _STEADY * rate_before
    steady &= (rate > _FASTEST) & (rate < _SLOWEST) & (change <= _NEAR) & ~stay
    pool.change[places] = torch.where(steady, 0.0, change)
    pool.rate[places] = torch.where(steady, 0.0, rate)
    return torch.where(stay, 0.0, torch.where(steady, rate / (1 - rate), share - 1))


class _Terms(NamedTuple):
    """What plans are worth, (k,) each."""

    quadratic: Tensor  # alpha <L(P), P>
    linear: Tensor  # (1 - alpha) <M, P>
    squares: Tensor  # sums of squares whose difference the quadratic term is

    @classmethod
    def of(
        cls, x: Tensor, y: Tensor, masses: tuple[Tensor, Tensor], crossed: Tensor, alpha: Tensor
    ) -> _Terms:
        """Evaluate plans of some masses, given <X P Y, P>, without linear costs."""
        own = _own(x, masses[0]) + _own(y, masses[1])
        return cls.of_sums(alpha, crossed, torch.zeros_like(alpha), own)

    @classmethod
    def of_sums(cls, alpha: Tensor, crossed: Tensor, linear: Tensor, own: Tensor) -> _Terms:
        """Evaluate plans by <X P Y, P>, linear terms, and sums of D_ij^2 over their masses."""
        return cls(alpha * own - 2 * alpha * crossed, linear, alpha * own)

    def of_places(self, places: Tensor) -> _Terms:
        """Take some of them."""
        return _Terms(*(part[places] for part in self))


def _own(table: Tensor, mass: Tensor) -> Tensor:
    """Compute sum_ij D_ij^2 p_i p_j."""
    return ((table.square() * mass[:, None, :]).sum(2) * mass).sum(1)


def _judge(
    ending: Tensor, solved: Tensor, missing: Tensor, found: _Terms, product: _Terms, rules: Rules
) -> Tensor:
    """Choose how problems end: by missed marginals, or a value above that of a x b."""
    failed = torch.where(ending == _OUTER, _BOTH, _INNER)
    ending = torch.where(solved, ending, failed)
    converged = ending <= _FLAT
    ending = torch.where(converged & (missing > _CONTRADICTION * rules.inner_tol), _INNER, ending)
    slack = (_VALUE_ROUNDING + _VALUE_PER_MARGINAL * missing) * product.squares
    value = found.quadratic + found.linear
    most = product.quadratic + product.linear
    most = most + slack + _VALUE_ROUNDING * product.linear.abs()
    bad = (found.quadratic < -slack) | (value > most)
    return torch.where((ending <= _FLAT) & bad, _IMPLAUSIBLE, ending)
