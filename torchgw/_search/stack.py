"""Plans of one small stored problem, followed side by side to where they end, in float64.

What a search has found is judged by what is minimised, at the target: plans that are on their way
there, or whose marginals are not met yet, say little of where they lead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchgw._batch import packing
from torchgw._batch.engine import run
from torchgw._batch.packing import LARGEST, Packed, make_stack, padded_sizes, repad
from torchgw._batch.relaxed import Relaxed
from torchgw._batch.stopping import Rules
from torchgw._batch.worth import Ended
from torchgw._plans.rounded import round_to_marginals
from torchgw._problem.marginals import MarginalRule
from torchgw._problem.problem import Problem
from torchgw._search.coarse import CoarseProblem

# When plans of a search have settled: their objectives are then within 1e-3 of where they end.
# [L1291]
_SETTLED = Rules(tol=1e-2, inner_tol=1e-3, objective_tol=1e-3, max_iter=16, inner_max_iter=96)


class Ends(NamedTuple):
    """Where plans have led, in the order in which they were given."""

    plans: Tensor  # (k, n, m) float64; of mass one but for relaxed problems
    objectives: Tensor  # (k,) with entropy, and with penalties; infinite where a number was lost
    values: Tensor  # (k,) without them


def can_stack(problem: Problem) -> bool:
    """Whether plans of all points can be followed side by side."""
    plain = problem.loss.is_square and not problem.directed
    return plain and max(problem.source.n, problem.target.n) <= LARGEST


@dataclass(frozen=True)
class Stack:
    """A stored problem of the square loss, on the host, of which many plans are followed at once.

    Launches would take longer than the work, and the outcome does not depend on the device.
    """

    tables: tuple[Tensor, Tensor]  # (n, n) and (m, m) float64
    weights: tuple[Tensor, Tensor]
    alpha: float
    linear: Tensor | None  # (n, m)
    rule: MarginalRule | None
    spaces: tuple[packing.Stack, packing.Stack]  # the same, padded

    @classmethod
    def of(cls, coarse: CoarseProblem, rule: MarginalRule | None = None) -> Stack:
        """Take the tables of a coarse problem."""
        sides = coarse.source, coarse.target
        tables = sides[0].table.cpu().double(), sides[1].table.cpu().double()
        weights = sides[0].weights.cpu().double(), sides[1].weights.cpu().double()
        linear = None if coarse.linear is None else coarse.linear.cpu().double()
        spaces = _padded(tables[0], weights[0]), _padded(tables[1], weights[1])
        return cls(tables, weights, float(coarse.alpha), linear, rule, spaces)

    def follow(self, plans: Tensor, epsilon: float, first: float = 0.0) -> Ends:
        """Follow plans (k, n, m) at an epsilon, units of the cost, until they settle.

        They are linearised as they are, whatever their marginals, and scaled to mass one. The
        ``first`` epsilon, a share of the natural scale, is larger where they are to be blurred.
        """
        count, (n, m) = len(plans), (len(part) for part in self.weights)
        x, y = self.spaces
        costs = self._pad(self._costs(plans.cpu().double()))
        linear = None if self.linear is None else self._pad(self.linear[None])
        nothing, every = torch.zeros(count, dtype=torch.int64), torch.ones(count, dtype=torch.bool)
        packed = Packed(
            x, y, nothing, nothing, torch.full((count,), self.alpha, dtype=torch.float64),
            torch.full((count,), epsilon, dtype=torch.float64),
            torch.full((count,), first, dtype=torch.float64),
            None if linear is None else lambda some: linear.expand(len(some), -1, -1),
            lambda some: (costs[some], every[some]), self._relaxed(count),
        )  # fmt: skip
        found = torch.empty(count, n, m, dtype=torch.float64)

        def keep(ended: Ended) -> None:
            found[ended.number] = ended.plan[:, :n, :m]

        with torch.no_grad():
            numbers = run(packed, _SETTLED, keep)
            if self.rule is not None:
                values = numbers.value_quad + numbers.value_linear
                return Ends(found, numbers.objective.nan_to_num(nan=torch.inf), values)
            # plans that miss their marginals have no objective to compare
            both = torch.stack([plans.cpu().double(), found])
            both = round_to_marginals(both / both.sum((2, 3), keepdim=True), *self.weights)
            objectives, values = (part.view(2, count) for part in self._worth(both, epsilon))
            # steps may lead away from a plan that cost less
            best, every = objectives.argmin(0), torch.arange(count)
            return Ends(both[best, every], objectives[best, every], values[best, every])

    def _worth(self, plans: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """Compute objectives and values of plans of exact marginals."""
        (x, y), (a, b) = self.tables, self.weights
        plans = plans.flatten(0, 1)
        own = a @ x.square() @ a + b @ y.square() @ b
        values = self.alpha * (own - 2 * (x @ plans @ y * plans).sum((1, 2)))
        if self.linear is not None:
            values = values + (1 - self.alpha) * (self.linear * plans).sum((1, 2))
        entropy = torch.special.xlogy(plans, plans / (a[:, None] * b)).sum((1, 2))
        return (values + epsilon * entropy).nan_to_num(nan=torch.inf), values

    def _costs(self, plans: Tensor) -> Tensor:
        """Linearise at plans, without what the engine adds."""
        (x, y), (a, b) = self.tables, self.weights
        plans = plans / plans.sum((1, 2), keepdim=True)
        costs = -4 * (x @ plans @ y)
        if self.rule is None:
            # constants of rows and of columns move no plan, and would swamp the rest
            costs = costs - (costs @ b)[:, :, None]
            return costs - (a @ costs)[:, None]
        # what plans of other marginals see of either side alone
        rows = 2 * (plans.sum(2) - a) @ x.square()
        columns = 2 * (plans.sum(1) - b) @ y.square()
        return costs + rows[:, :, None] + columns[:, None]

    def _pad(self, tables: Tensor) -> Tensor:
        """Pad tables (k, n, m) as the spaces are."""
        x, y = self.spaces
        wide = repad(tables, x.tables.shape[1], x.sizes.expand(len(tables)))
        return repad(wide.mT, y.tables.shape[1], y.sizes.expand(len(tables))).mT

    def _relaxed(self, count: int) -> Relaxed | None:
        """Tell the engine which marginals hold."""
        if self.rule is None:
            return None
        if self.rule.mass is not None:
            return Relaxed(None, torch.full((count,), self.rule.mass, dtype=torch.float64))
        rho = torch.tensor([self.rule.rho], dtype=torch.float64)
        return Relaxed(rho.expand(count, 2), None)


def _padded(table: Tensor, weights: Tensor) -> packing.Stack:
    """Pack one space as a stack of its own."""
    used = torch.tensor([len(table)])
    size = int(padded_sizes(np.array([len(table)]))[0])
    tables = repad(repad(table[None], size, used).mT, size, used)
    return make_stack(tables, repad(weights[None], size, used), used)
