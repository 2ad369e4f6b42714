"""The outer loop of many problems: each goes at its own pace, and makes room when it is done.

A tick is eight Sinkhorn iterations of every problem in the pool. Those whose linear problem is
solved linearise again, and those that have settled leave; their places go to the next in the queue.
Every number of a problem is computed from its own, by operations whose bits do not depend on how
many others there are.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchgw._batch.advance import Pool, advance, enter
from torchgw._batch.newton import newton_step
from torchgw._batch.packing import Packed, may_begin, on_chip
from torchgw._batch.sweep import TICK, next_relaxation, sweep
from torchgw._batch.worth import Ended, Found, Rules
from torchgw._sinkhorn.loop import MOST_RESTARTS, MOST_ROUNDING, NEWTON_BELOW
from torchgw._sinkhorn.partial import newton_on_bounds
from torchgw._tensors.deadline import is_over, patience
from torchgw._tensors.operations import few_on

# Entries of a plan times problems that are solved together: about what a core's cache holds, or
# what keeps a GPU busy. [L391]
POOL_ENTRIES = {"cpu": 2**17, "cuda": 2**26}
# Entries of the plans that are solved in Triton together. [L533]
_TOGETHER = 2**27
# Problems of a pool at least: a product of matrices with a single one has other bits. [L391] [L395]
FEWEST = 2
# Share of a pool that stands empty before it is filled again, or cut down. [L391]
_IDLE = 1 / 16
# Up to so many points a side, and after so many iterations of a linear problem of a partial plan,
# Newton's method goes on, one by one. [L1207]
_FEW, _SLOW = 64, 200
# Sinkhorn iterations on chip before the plan is made anew from its potentials. [L402]
_ON_CHIP = 256
# The same where Newton's method goes on from there. [L1883]
_BETWEEN = 32


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


def run(problems: Packed, rules: Rules, keep: Callable[[Ended], None] | None = None) -> Solved:
    """Solve all problems; ``keep`` is handed plans as they end."""
    count, (n, m), device = len(problems), problems.shape, problems.device
    numbers = torch.zeros(5, count, dtype=torch.float64, device=device)
    counts = torch.zeros(3, count, dtype=torch.int64, device=device)
    if not count:
        return Solved(*numbers, *counts)

    def store(found: Found, out: Ended) -> None:
        numbers[:, out.number], counts[:, out.number] = found.numbers, found.counts
        if keep is not None:
            keep(out)

    queue = torch.arange(count, device=device)
    if problems.proximal or not may_begin(problems.shape, device):
        _run_queue(problems, rules, queue, store)
        return Solved(*numbers, *counts)
    from torchgw._batch.programs_triton import Programs

    programs = Programs(problems, rules)
    # under a limit of time the engine does what programs cannot that are being compiled
    if not programs.compiled(patience()):
        _run_queue(problems, rules, queue, store)
        return Solved(*numbers, *counts)

    def solve(chunk: Tensor) -> Tensor:
        found, ended, left = programs.solve(chunk)
        store(found, ended)
        return left

    # the engine begins anew where a program has lost a number, or has not left the product plan
    waiting = torch.cat([solve(chunk) for chunk in queue.split(max(1, _TOGETHER // (n * m)))])
    if len(waiting):
        _run_queue(problems, rules, waiting, store)
    return Solved(*numbers, *counts)


def _run_queue(
    problems: Packed, rules: Rules, queue: Tensor, store: Callable[[Found, Ended], None]
) -> None:
    """Solve the problems of a queue."""
    n, m = problems.shape
    width = max(FEWEST, min(len(queue), POOL_ENTRIES[problems.device.type] // (n * m)))

    solve = _solve_on_chip if _is_on_chip(problems) else _tick
    pool, waiting = enter(problems, queue[:width]), queue[width:]
    if len(pool.number) < FEWEST:
        # the first problem a second time, to fill the pool; its numbers are not read
        pool = enter(problems, queue[:1].expand(FEWEST))
        pool.number[1:] = -1
    while True:
        done = solve(pool)
        if is_over():
            # as they are now
            done, rules = pool.number >= 0, rules._replace(max_iter=1)
        ended = advance(pool, done.nonzero()[:, 0], rules) if bool(done.any()) else None
        if ended is not None:
            store(*ended)
        idle = (pool.number < 0).nonzero()[:, 0]
        if len(waiting) and len(idle) >= _IDLE * width:
            new, waiting = waiting[: len(idle)], waiting[len(idle) :]
            pool.put(idle[: len(new)], enter(problems, new))
        elif not len(waiting):
            busy = (pool.number >= 0).nonzero()[:, 0]
            if not len(busy):
                return
            if len(pool.number) > FEWEST and len(busy) <= (1 - 4 * _IDLE) * len(pool.number):
                missing = max(0, FEWEST - len(busy))
                pool.cut(torch.cat([busy, busy[:1].expand(missing)]))
                pool.number[len(busy) :] = -1


def _is_on_chip(problems: Packed) -> bool:
    """Whether linear problems are iterated by one program each."""
    return problems.relaxed is None and on_chip(problems.shape, problems.device)


class Scaled(NamedTuple):
    """Solutions of k linear problems."""

    plan: Tensor  # (k, n, m)
    f: Tensor  # (k, n) potentials
    g: Tensor  # (k, m)


def solve_linear(problems: Packed, tol: float, most: int) -> Scaled:
    """Solve the linear problems that problems begin with, to a column error."""
    # one more, as a product with a single problem has other bits
    count, device = len(problems), problems.device
    pool = enter(problems, torch.arange(max(count, FEWEST), device=device).clamp(max=count - 1))
    found = Scaled(*map(torch.empty_like, (pool.cost, pool.a, pool.b)))
    pool.number = torch.arange(len(pool.number), device=device)
    pool.tol.fill_(tol), pool.budget.fill_(most)
    chip = _is_on_chip(problems)
    while len(pool.number):
        if chip:
            done = _solve_on_chip(pool, _BETWEEN)
            _step(pool, _near(pool, done))
        else:
            done = _tick(pool)
        for mine, its in zip(found, (pool.plan, pool.f, pool.g), strict=True):
            mine[pool.number[done]] = its[done]
        left = (~done).nonzero()[:, 0]
        if len(left) < len(done):
            pool.cut(left if len(left) != 1 else left.expand(FEWEST))
    return Scaled(*(part[:count] for part in found))


def _tick(pool: Pool) -> Tensor:
    """Iterate all problems once; tell which linear problems are done, (A,) bool."""
    made = sweep(
        pool.cost, (pool.a, pool.b), (pool.f_next, pool.g), pool.epsilon, pool.relaxation,
        pool.plan, pool.relaxed(),
    )  # fmt: skip
    pool.f, pool.f_next, pool.g = made.f, made.f_next, made.g
    library, as_array, as_tensor = few_on(pool.cost.device)
    previous, error = as_array(pool.error), as_array(made.error)
    pool.error = made.error
    pool.spent += TICK
    pool.inner += TICK
    with np.errstate(all="ignore"):
        if pool.share is None:
            restarts = as_array(pool.restarts)
            restarts += (previous <= error) & (error < MOST_ROUNDING[torch.float64])
        fitted = next_relaxation(as_array(pool.relaxation), error / previous, library)
    pool.relaxation = as_tensor(fitted)
    done = pool.done_with()
    if pool.share is None:
        _step(pool, _near(pool, done))
    elif pool.mass is not None and done.device.type == "cpu" and max(pool.cost.shape[1:]) <= _FEW:
        # after so many iterations, twice as many, four times as many
        tries = pool.spent // _SLOW
        due = (pool.spent % _SLOW == 0) & (tries > 0) & (tries & (tries - 1) == 0)
        _step_on_bounds(pool, _near(pool, done, due))
    return done


def _near(pool: Pool, done: Tensor, due: Tensor | bool = True) -> Tensor:
    """List the problems near the solution of their linear one, which is not reached yet."""
    return (~done & due & (pool.number >= 0) & (pool.error <= NEWTON_BELOW)).nonzero()[:, 0]


def _step(pool: Pool, places: Tensor) -> None:
    """Take short Newton steps of problems whose plans nearly have their marginals."""
    if not len(places):
        return
    # a product with a single problem would have other bits
    chosen = places if len(places) >= FEWEST else places.expand(FEWEST)
    at: Tensor | slice = slice(None) if len(places) == len(pool.number) else chosen
    made = newton_step(pool.plan[at], pool.a[chosen], pool.b[chosen])
    unit, few = pool.epsilon[places, None], slice(len(places))
    pool.g[places] += unit * made.columns[few]
    pool.f_next[places] = pool.f[places] + unit * made.rows[few]
    # the relaxation factor is fitted to errors of plain iterations, without Newton steps between
    pool.relaxation[places] = torch.where(made.taken[few], 1.0, pool.relaxation[places])


def _step_on_bounds(pool: Pool, places: Tensor) -> None:
    """Solve linear problems of partial plans by Newton's method, one by one."""
    assert pool.mass is not None
    for place in places.tolist():
        epsilon, mass, tol = (float(part[place]) for part in (pool.epsilon, pool.mass, pool.tol))
        a, b, f, g = (part[place].numpy() for part in (pool.a, pool.b, pool.f, pool.g))
        top = g[b > 0].max()
        potentials = (f + top) / epsilon, np.minimum(g - top, 0.0) / epsilon
        made = newton_on_bounds(pool.plan[place].numpy(), potentials, (a, b), mass, tol)
        pool.g[place] += epsilon * torch.from_numpy(made.columns)
        pool.f_next[place] = pool.f[place] + epsilon * torch.from_numpy(made.rows)
        pool.relaxation[place] = 1.0


def _solve_on_chip(pool: Pool, most: int = _ON_CHIP) -> Tensor:
    """Iterate all problems until their linear ones are done, or ``most`` times; tell which are."""
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
    scale(busy.nonzero()[:, 0], given, most, MOST_RESTARTS, MOST_ROUNDING[torch.float64])
    pool.inner += pool.spent - before
    pool.f = pool.f_next + unit * exact.log()
    pool.f_next = pool.f_next + unit * s.log()
    pool.g = pool.g + unit * t.log()
    return pool.done_with()
