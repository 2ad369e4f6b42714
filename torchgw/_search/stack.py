"""Plans of small stored problems, followed side by side to where they end, in float64.

What a search has found is judged by what is minimised, at the target: plans that are on their way
there, or whose marginals are not met yet, say little of where they lead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from torchgw._batch import packing
from torchgw._batch.engine import Scaled, run, solve_linear
from torchgw._batch.packing import (
    LARGEST,
    Packed,
    cross_product,
    make_stack,
    may_begin,
    padded_sizes,
    repad,
    taken,
    units,
)
from torchgw._batch.sweep import Relaxed
from torchgw._batch.worth import Ended, Rules, Terms
from torchgw._plans.transport import round_to_marginals
from torchgw._problem.losses import SQUARE, Loss
from torchgw._problem.problem import MarginalRule, Problem
from torchgw._starts.alternatives import Ends
from torchgw._starts.chain import SAME
from torchgw._starts.coarse import CoarseProblem
from torchgw._tensors.operations import EQUAL, clone, sums_of

# When plans of a search have settled: their objectives are then within 1e-3 of where they end.
# [L1291]
_SETTLED = Rules(tol=1e-2, inner_tol=1e-3, objective_tol=SAME, max_iter=16, inner_max_iter=96)

# The same where relaxed plans keep to a support, on which they creep. [L1540]
_CREPT = _SETTLED._replace(tol=1e-3, inner_tol=1e-4, max_iter=32)

_HOST = torch.device("cpu")

# Costs with which some problems begin, and which of them do.
Begin = Callable[[Tensor], tuple[Tensor, Tensor]]


def can_stack(problem: Problem, *, strict: bool = False) -> bool:
    """Whether plans of all points can be followed side by side.

    Of strict marginals every loss whose cross term is a product is the square one of other tables.
    """
    alike = problem.loss.cross is not None and not problem.directed if strict else problem.plain
    return alike and max(problem.shape) <= LARGEST


@dataclass(frozen=True)
class Stack:
    """B stored problems of the square loss, of which many plans are followed at once.

    ``problems.epsilon`` is the target, in units of the cost. Plans have the padded sizes of the
    spaces. The bits of a plan's end do not depend on what else is followed.
    """

    problems: Packed
    share: float = 1.0  # natural scale of the cost over that of its table, which may have prices
    rules: Rules = _SETTLED  # when plans have settled
    offset: Tensor | float = 0.0  # what values are above those of the square loss of the tables

    @classmethod
    def of(
        cls,
        coarse: CoarseProblem,
        epsilon: float,
        rule: MarginalRule | None = None,
        device: torch.device = _HOST,
        scale: float | None = None,
        loss: Loss = SQUARE,
    ) -> Stack:
        """Stack a coarse problem alone, on a device; its ``scale`` is told where it has prices."""
        host = device.type == "cpu"
        x, y = (
            _padded(table.to(device), side.weights.to(device), narrow=host)
            for table, side in zip(_tables_of(coarse, loss), coarse.sides, strict=True)
        )
        first, linear, relaxed = torch.zeros(1, dtype=torch.int64, device=device), None, None
        if coarse.linear is not None:
            table = coarse.linear.to(device).double()[None]
            table = repad(repad(table, x.tables.shape[1], x.sizes).mT, y.tables.shape[1], y.sizes)
            linear = _rows_of(table.mT)
        if rule is not None and rule.mass is not None:
            relaxed = Relaxed(None, torch.tensor([rule.mass], dtype=torch.float64, device=device))
        elif rule is not None:
            relaxed = Relaxed(torch.tensor([rule.rho], dtype=torch.float64, device=device), None)
        alpha, target, zero = (
            torch.tensor([float(part)], dtype=torch.float64, device=device)
            for part in (coarse.alpha, epsilon, 0.0)
        )
        packed = Packed(x, y, first, first, alpha, target, zero, linear, None, relaxed)
        stack = cls(packed)
        if not loss.is_square:
            plan = torch.outer(*coarse.weights)[None].double()
            own = stack.judged(first, stack.padded(plan.to(device))).values
            stack = replace(stack, offset=coarse.value(plan).to(own) - own)
        if scale is None or linear is None:
            return stack
        table = (1 - alpha)[:, None, None] * linear(first)
        share = scale / float(packing.natural_scale(packed, first, table))
        return replace(stack, share=share, rules=_SETTLED if relaxed is None else _CREPT)

    def padded(self, plans: Tensor) -> Tensor:
        """Pad plans (k, n, m) of a problem that is alone."""
        n, m = self.problems.shape
        wide = torch.zeros(len(plans), n, m, dtype=torch.float64, device=self.problems.device)
        wide[:, : plans.shape[1], : plans.shape[2]] = plans
        return wide

    def runs_at_once(self) -> bool:
        """Whether plans are followed by programs that need not be compiled first."""
        if not may_begin(self.problems.shape, self.problems.device):
            return False
        from torchgw._batch.programs_triton import Programs

        return Programs(self.begun(), self.rules).known()

    def begun(self) -> Packed:
        """Make a problem that begins with costs, as those do whose plans are followed."""
        problems = self.problems
        one = torch.zeros(1, dtype=torch.int64, device=problems.device)
        begin = self.beginning(one, self.padded(problems.alpha.new_ones(1, 1, 1)))
        return problems.again(one, problems.first[:1], begin)

    def follow(self, which: Tensor, plans: Tensor, first: float | Tensor = 0.0) -> Ends:
        """Follow plans (k, n, m) of problems (k,) to the target, until they settle.

        They are linearised as they are, whatever their marginals, and scaled to mass one. The
        ``first`` epsilon, a share of the natural scale, is larger where they are to be blurred.
        """
        blurred = torch.ones_like(self.problems.first[which]) * (first * self.share)
        return self.settle(which, blurred, self.beginning(which, plans), plans)

    def beginning(self, which: Tensor, plans: Tensor) -> Begin:
        """Make the costs with which problems (k,) begin at plans (k, n, m)."""
        every = torch.ones_like(which, dtype=torch.bool)
        return lambda some: (self._costs(which[some], plans[some]), every[some])

    def settle(
        self, which: Tensor, first: Tensor, begin: Begin, before: Tensor | None = None
    ) -> Ends:
        """Solve problems (k,) from the costs that they ``begin`` with, until their plans settle.

        A plan ``before`` (k, n, m) is returned in place of where it has led if it costs less.
        """
        problems = self.problems
        packed = problems.again(which, first, begin)
        shape = len(which), *problems.shape
        found = torch.empty(shape, dtype=torch.float64, device=problems.device)

        def keep(ended: Ended) -> None:
            found[ended.number] = ended.plan

        # calls take less than where a graph may be recorded, and nothing leaves but copies
        with torch.inference_mode():
            run(packed, self.rules, keep)
            # plans that miss their marginals have no objective to compare
            ends = self.judged(which, found)
            # steps may lead away from a plan that cost less
            if before is not None:
                ends = ends.lower(self.judged(which, before))
        return clone(ends)

    def judged(self, which: Tensor, plans: Tensor) -> Ends:
        """Round plans (k, n, m) of problems (k,) to their marginals, and evaluate them."""
        (x, y), (a, b) = self.tables(which), self.weights(which)
        linear, epsilon, _, relaxed = units(self.problems, which)
        plans = plans / sums_of(plans)[:, None, None]
        if relaxed is None:
            plans = round_to_marginals(plans, a, b)
        else:
            plans = relaxed.rounded(plans, (a, b))
        masses = plans.sum(2), plans.sum(1)
        crossed = sums_of(cross_product(x, y, plans) * plans)
        terms = Terms.of(x, y, masses, crossed, self.problems.alpha[which])
        if linear is not None:
            terms = terms._replace(linear=sums_of(linear * plans))
        product = (a[:, :, None] * b[:, None, :]).clamp_min(torch.finfo(plans.dtype).tiny)
        entropy = sums_of(torch.special.xlogy(plans, plans / product))
        values = terms.quadratic + terms.linear + self.offset
        objectives = values + epsilon * entropy
        if relaxed is not None:
            best = relaxed.settle(*terms[:2], entropy, masses, (a, b), epsilon)
            terms = terms.of_mass(relaxed, best.mass)
            plans, values = best.mass[:, None, None] * plans, terms.quadratic + terms.linear
            objectives = best.objective.where(best.violation.isfinite(), torch.inf)
        return Ends(plans, objectives.nan_to_num(nan=torch.inf, posinf=torch.inf), values)

    def _costs(self, which: Tensor, plans: Tensor) -> Tensor:
        """Linearise at plans, without what the engine adds."""
        (x, y), (a, b) = self.tables(which), self.weights(which)
        plans = plans / sums_of(plans)[:, None, None]
        costs = -4 * cross_product(x, y, plans)
        if self.problems.relaxed is None:
            # constants of rows and of columns move no plan, and would swamp the rest
            costs = costs - (costs * b[:, None, :]).sum(2, keepdim=True)
            return costs - (costs * a[:, :, None]).sum(1, keepdim=True)
        # what plans of other marginals see of either side alone
        sides = zip((x, y), (plans.sum(2) - a, plans.sum(1) - b), strict=True)
        rows, columns = (2 * (table.square() * off[:, None, :]).sum(2) for table, off in sides)
        costs = costs + rows[:, :, None] + columns[:, None, :]
        if self.problems.linear is None or self.problems.relaxed.mass is not None:
            return costs
        # a linear cost grows with the mass alone, and the others with its square
        mass, alpha = sums_of(self.judged(which, plans).plans), self.problems.alpha[which]
        share = (1 - alpha) / alpha * (1 / mass - 1)
        return costs + share[:, None, None] * self.problems.linear(which)

    def descend(self, which: Tensor, plans: Tensor) -> Ends:
        """Lead plans (k, n, m) of problems (k,) down until they stay."""
        return descend(self, which, plans)[0]

    def rows(self, which: Tensor) -> Tensor:
        """Count the rows of plans that belong to points, (k,)."""
        return self.problems.x.sizes[self.problems.i[which]]

    def tables(self, which: Tensor) -> tuple[Tensor, Tensor]:
        """Take the distances of both sides."""
        x, y, i, j = self.problems.x, self.problems.y, self.problems.i, self.problems.j
        return taken(x.tables, i[which]), taken(y.tables, j[which])

    def weights(self, which: Tensor) -> tuple[Tensor, Tensor]:
        """Take the weights of both sides."""
        x, y, i, j = self.problems.x, self.problems.y, self.problems.i, self.problems.j
        return x.weights[i[which]], y.weights[j[which]]


def _rows_of(table: Tensor) -> Callable[[Tensor], Tensor]:
    """Make a function that takes some of the linear costs (B, n, m)."""
    return lambda some: table[some]


def _tables_of(coarse: CoarseProblem, loss: Loss) -> list[Tensor]:
    """Return the tables (s, s) and (t, t) of whose square loss a loss is, up to a constant."""
    if loss.is_square:
        return [side.table for side in coarse.sides]
    assert loss.cross is not None
    tables = list[Tensor]()
    for cross, side in zip(loss.cross, coarse.sides, strict=True):
        table = cross(side.table.double())
        tables.append(table - side.weights @ table @ side.weights)
    # tables of one size leave the least constant
    ratio = float(tables[1].norm() / tables[0].norm())
    root = math.sqrt(ratio) if 0 < ratio < math.inf else 1.0
    return [tables[0] * root, tables[1] / root]


def _padded(table: Tensor, weights: Tensor, *, narrow: bool) -> packing.Stack:
    """Pack one space as a stack of its own."""
    table, weights = table.double(), weights.double()
    used = torch.tensor([len(table)], device=table.device)
    size = int(padded_sizes(np.array([len(table)]), narrow=narrow)[0])
    tables = repad(repad(table[None], size, used).mT, size, used)
    return make_stack(tables, repad(weights[None], size, used), used)


# Neighbourhoods of points of either side between which plans begin. [L1342, L1496]
_BALLS = 16


def neighbourhoods(stack: Stack, every: Tensor) -> Tensor:
    """Make plans (B, k, n, m) of relaxed problems between what surrounds points of either side.

    As much as moves: what two spaces share lies together in both.
    """
    problems = stack.problems
    assert problems.relaxed is not None
    share = torch.full_like(problems.alpha, 0.5)
    if problems.relaxed.mass is not None:
        share = problems.relaxed.mass
    generator, near = torch.Generator("cpu").manual_seed(0), []
    for side, at in ((problems.x, problems.i), (problems.y, problems.j)):
        drawn = torch.rand(_BALLS, device="cpu", generator=generator, dtype=torch.float64)
        centre = (drawn.to(every.device) * side.sizes[at, None]).long()
        rows = side.tables[at[:, None], centre]
        weights = side.weights[at][:, None, :].expand_as(rows)
        order = rows.where(weights > 0, torch.inf).argsort(dim=2, stable=True)
        ordered = weights.gather(2, order)
        # rounding of the sums decides nothing
        inside = ordered.cumsum(2) - ordered < share[:, None, None] - EQUAL
        near.append(torch.zeros_like(rows).scatter_(2, order, ordered * inside))
    return near[0][:, :, :, None] * near[1][:, :, None, :]


# Shares of a step that are tried, and steps at most. [L1313]
_SHARES, _STEPS = (1.0, 0.5, 0.2, 0.08, 0.03, 0.01), 32
# So many steps like the last one may be left of a path that falls at the target. [L1291, L1958]
STEPS_LEFT = 10
# Iterations of a linear problem at most; and the error of its columns at which it is solved, as a
# share of the objective by which this has to fall for another step. [L1313]
_ITERATIONS, _SOLVED = 1024, 1e-6


def descend(stack: Stack, which: Tensor, plans: Tensor) -> tuple[Ends, Tensor]:
    """Lead plans (k, n, m) of problems (k,) down until they stay; tell which still fall.

    The fixed-point iteration may step over the optimum that it begins near: towards the solution of
    the linear problem at a plan the objective falls at first, but not always all the way.
    """
    lowest = stack.judged(which, plans)
    live, falling = torch.arange(len(which), device=which.device), torch.ones_like(which).bool()
    least = torch.full_like(stack.problems.first, torch.inf)
    for _ in range(_STEPS):
        if not len(live):
            break
        mine, before = which[live], Ends(*(part[live] for part in lowest))
        here, there = (
            plans / sums_of(plans)[:, None, None]
            for plans in (before.plans, linear_solutions(stack, mine, before.plans).plan)
        )
        best = before
        for share in _SHARES:
            best = best.lower(stack.judged(mine, torch.lerp(here, there, share)))
        for part, found in zip(lowest, best, strict=True):
            part[live] = found
        fall = before.objectives - best.objectives
        falling[live] = fall > _SOLVED * before.objectives.abs()
        # those that will not be the lowest of their problem, and tell it from others, are left
        least = least.scatter_reduce(0, which, lowest.objectives, "amin")
        above = (lowest.objectives - least[which])[live]
        gap = torch.where(above > 0, above + SAME * least[which[live]].abs(), 0.0)
        live = live[falling[live] & (gap <= STEPS_LEFT * fall)]
    return lowest, falling


def linear_solutions(stack: Stack, which: Tensor, plans: Tensor) -> Scaled:
    """Solve the linear problems at plans (k, n, m) of problems (k,)."""
    first = torch.zeros_like(stack.problems.first[which])
    begun = stack.problems.again(which, first, stack.beginning(which, plans))
    return solve_linear(begun, _SOLVED, _ITERATIONS)
