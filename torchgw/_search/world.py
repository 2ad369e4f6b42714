"""The problem between all points, and the steps that move plans of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor

from torchgw._plans.transport import round_to_marginals
from torchgw._search.chain import Chain, Climbed, Trial, stacked
from torchgw._search.coarse import Coarsened, side_by_side
from torchgw._search.graphs import SparseProducts, is_graph
from torchgw._search.kinds import (
    LAST_INNER,
    LAST_RELAXATION,
    QUICK,
    REFINE,
    REFINE_GRAPHS,
    STEP,
    Kind,
    Ladder,
)
from torchgw._search.modes import Modes
from torchgw._search.starts import GUESS_EPSILON
from torchgw._sinkhorn.batch import BatchSolver, solve_batch
from torchgw._tensors.deadline import is_over
from torchgw._typing import Marginals

# Noise on the product plan of a chain that has no other start. [L323]
_FAINT = 0.1
# Outer iterations of a kick, and Sinkhorn iterations of each. [L323]
_KICKS, KICK_INNER = 5, 2
# Change of the plan (L1) below which a stage of a ladder is done. [L333]
_SETTLED = 2e-3
# Sinkhorn iterations of an outer iteration on a ladder. [L323]
INNER = 5
# Outer iterations in which plans meet their marginals at the target. [L333]
_LAST = 5
# Noise on the plans at each stage: exact products would keep equal what automorphisms of a graph
# make equal, and sharper plans cost less. [L336]
_STIR = 0.01
# Plans of so few entries: guesses are also compared as they are, without descending first, and
# chains that agree do not end the rounds. To be surer takes little here. [L661]
_TINY = 2**10
# Entries of plans that advance together: a CPU does best with what its cache holds. [L333]
_TOGETHER = {"cpu": 2**17, "cuda": 2**28}
# The same for the rest of an outer iteration, for each entry. [L1173]
_BESIDE = 300


class World:
    """The problem between all points in single precision, and the steps that move its plans."""

    def __init__(self, coarse: Coarsened, solver: BatchSolver = solve_batch) -> None:
        problem = coarse.problem
        self.problem, self.scale, self.solver = problem, coarse.scale, solver
        self.marginals = Marginals(problem.source.weights.float(), problem.target.weights.float())
        self.base = problem.base.float()
        self.parts = len(problem.x)
        # centred tables: constants of rows and columns move no plan, and would cost digits
        self.x = (-4 * problem.alpha * problem.x).float()
        self.y = problem.y.float()
        self.column = problem.column.float()
        self.sparse = SparseProducts.of(problem)
        self.modes = Modes.of(problem) if self.sparse is None else None
        self.tiny = self.base.numel() <= _TINY
        # chains that are advanced as one batch
        self.batch = max(1, _TOGETHER[self.base.device.type] // self.base.numel())
        self.refine = REFINE_GRAPHS if is_graph(problem) else REFINE

    def beside(self, linear: Tensor) -> World:
        """Return this world with a linear cost (s, t), or one for each plan, beside its own."""
        other = copy(self)
        other.base = self.base + linear
        return other

    @property
    def large(self) -> bool:
        """Whether each chain is advanced alone."""
        return self.base.numel() > _TOGETHER[self.base.device.type]

    def costs(self, plans: Tensor, share: float = 0.0) -> Tensor:
        """Linearise at plans (B, s, t), as exactly as a share of the natural scale asks for."""
        if self.sparse is not None:
            return self.sparse(self.base, plans)
        found = self.modes(self.base, plans, share) if self.modes is not None else None
        if found is not None:
            return found
        left = side_by_side(self.x.flatten(0, 1) @ plans, self.parts)
        count = len(plans)
        y = self.y.flatten(0, 1).expand(count, -1, -1)
        return torch.baddbmm(self.base.expand(count, -1, -1), left, y)

    def work(self, share: float) -> float:
        """Count the multiplications that an outer iteration takes as long as."""
        n, m = self.base.shape
        if self.sparse is not None:
            # sums of few rows take little beside the rest
            return _BESIDE * n * m
        least = n * m * (n + m) if self.modes is None else self.modes.work(self.modes.ranks(share))
        return least + _BESIDE * n * m

    def costs_at_rows(self, plan: Tensor, rows: Tensor) -> Tensor:
        """Linearise at some rows of a plan (s, t), scaled to mass one."""
        some = plan[rows] / plan[rows].sum()
        near = self.x[:, :, rows]
        # the mean distances of these points differ from those of all, which breaks the symmetry
        means = (near @ some.sum(1))[:, :, None] * self.column[:, None, :]
        return (near @ (some @ self.y) + means).sum(0) + self.base

    def begin(self, kind: Kind, number: int) -> Chain:
        """Break the symmetry of the product plan."""
        clock = perf_counter()
        a, b = self.marginals
        generator = torch.Generator(device=a.device).manual_seed(number)
        plan, g = torch.outer(a, b), torch.zeros_like(b)[None]
        if kind.kick is None:
            noise = torch.randn(plan.shape, device=a.device, generator=generator)
            plan = plan * (1 + _FAINT * noise).clamp_(0.01)
            plan = plan / plan.sum()
            return Chain(kind, number, plan, g, seconds=perf_counter() - clock)
        plan, g = self.kick(kind.kick, plan, g, _KICKS, generator)
        return Chain(kind, number, plan, g, seconds=perf_counter() - clock)

    def oppose(self, chain: Chain) -> Chain:
        """Begin on the other side of the product plan, where symmetry breaks the other way."""
        clock = perf_counter()
        costs = 2 * self.base - self.costs(chain.plan[None])
        start = torch.zeros_like(chain.g)[None]
        plans, g = self.solve(costs, start, QUICK.start * self.scale, INNER)
        kind = chain.kind._replace(name=f"opposite of {chain.kind.name}", ladder=QUICK)
        return Chain(kind, chain.number, plans[0], g[0], seconds=perf_counter() - clock)

    def costs_anywhere(self, plans: Tensor, share: float = 0.0) -> Tensor:
        """Linearise at tables (B, s, t) of other marginals, scaled to mass one."""
        plans = plans / plans.sum((1, 2), keepdim=True)
        # as in costs_at_rows()
        means = torch.einsum("pij,bj->bpi", self.x, plans.sum(2))
        return self.costs(plans, share) + torch.einsum("bpi,pj->bij", means, self.column)

    def kick(
        self,
        kick: tuple[float, float],
        plan: Tensor,
        g: Tensor,
        times: int,
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor]:
        """Linearise at random rows of a plan (s, t) a few times."""
        epsilon, share = kick
        count = max(2, round(share * len(plan)))
        for _ in range(times):
            rows = torch.randperm(len(plan), device=plan.device, generator=generator)[:count]
            cost = self.costs_at_rows(plan, rows)[None]
            plans, g = self.solve(cost, g[None], epsilon * self.scale, KICK_INNER)
            plan, g = plans[0], g[0]
        return plan, g

    def take(self, name: str, plan: Tensor) -> Chain:
        """Make a chain of a plan that was found by other means."""
        return Chain(
            Kind(name, self.refine), None, plan.float(), torch.zeros_like(plan[:1]).float()
        )

    def lift(self, name: str, plan: Tensor, rows: Tensor) -> Chain:
        """Make a chain of a plan that has some rows alone."""
        chain = self.take(name, plan)
        costs = self.costs_at_rows(chain.plan, rows)[None]
        start = torch.zeros_like(chain.g)[None]
        plans, g = self.solve(costs, start, GUESS_EPSILON * self.scale, LAST_INNER)
        chain.plan, chain.g = plans[0], g[0]
        return chain

    def solve(
        self, costs: Tensor, g: Tensor, epsilon: float, iterations: int, relaxation: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Run Sinkhorn iterations of linear problems (B, s, t)."""
        each = costs.new_full((len(costs),), epsilon)
        plans, g = self.solver(costs, self.marginals, g, each, iterations, relaxation)
        return plans, g

    def together(self, chains: list[Chain]) -> Iterator[list[Chain]]:
        """Divide chains into those that are advanced as one batch."""
        for start in range(0, len(chains), self.batch):
            yield chains[start : start + self.batch]

    def descend(self, chains: list[Chain], ladder: Ladder, last: float) -> None:
        """Take chains down a ladder to an epsilon, until their plans have settled at each stage."""
        for some in self.together(chains):
            self._descend(some, ladder, ladder.stages(last))

    def _descend(self, chains: list[Chain], ladder: Ladder, stages: Sequence[float]) -> None:
        """Take one batch down the ladder."""
        clock = perf_counter()
        plans, g = stacked(chains)
        # each chain has noise of its own: chains that agree are to be independent
        seed = chains[0].number or 0
        generator = torch.Generator(device=plans.device).manual_seed(seed)
        stir = torch.randn(plans.shape, device=plans.device, generator=generator)
        stir = stir.mul_(_STIR).add_(1).clamp_(0.5)
        for share in stages:
            plans = plans * stir
            last = math.inf
            costs = push = None
            for _ in range(ladder.outer):
                if is_over():
                    return
                before = plans
                if costs is None or not ladder.momentum:
                    costs = self.step(costs, plans, ladder.step, share)
                else:
                    way = self.costs(plans, share).sub_(costs).mul_(ladder.step)
                    push = way if push is None else push.mul_(ladder.momentum).add_(way)
                    costs.add_(push)
                plans, g = self.solve(costs, g, share * self.scale, INNER, ladder.relaxation)
                change = float((plans - before).abs_().sum((1, 2)).amax())
                # a change that grows means that the plan leaves a saddle point, so the stage goes
                # on
                if change < min(_SETTLED, last):
                    break
                last = change
        epsilon = stages[-1] * self.scale
        costs = self.step(costs, plans, ladder.step, stages[-1])
        plans, g = self.solve(costs, g, epsilon, ladder.meeting, LAST_RELAXATION)
        self._record(chains, plans, g, epsilon, clock)

    def step(self, costs: Tensor | None, plans: Tensor, step: float, share: float = 0.0) -> Tensor:
        """Linearise at plans, or go from the last costs a step towards that."""
        new = self.costs(plans, share)
        return new if costs is None or step == 1 else costs.lerp_(new, step)

    def settle(self, chains: list[Chain], share: float) -> None:
        """Meet the marginals at the target."""
        for some in self.together(chains):
            self._settle(some, share * self.scale)

    def finish(self, chains: list[Chain], last: float) -> None:
        """Take chains down to the target, and meet the marginals there."""
        self.descend(chains, self.refine, last)
        self.settle(chains, last)

    def rest(self, chains: list[Chain], ladder: Ladder) -> None:
        """Follow chains for long at the epsilon that they are at; keep what is lower."""
        before = [replace(chain) for chain in chains]
        self.descend(chains, ladder, ladder.start)
        self.settle(chains, ladder.start)
        for chain, old in zip(chains, before, strict=True):
            chain.move(old.plan, old.g, old.epsilon, old.objective, old.value, down=True)

    def _settle(self, chains: list[Chain], epsilon: float) -> None:
        """Settle one batch."""
        clock = perf_counter()
        plans, g = stacked(chains)
        costs = None
        for _ in range(_LAST):
            costs = self.step(costs, plans, STEP, epsilon / self.scale)
            plans, g = self.solve(costs, g, epsilon, LAST_INNER, LAST_RELAXATION)
        self._record(chains, plans, g, epsilon, clock, settled=True)

    def rounded(self, chains: list[Chain]) -> Tensor:
        """Round plans to their marginals, (k, s, t) float64."""
        weights = self.problem.source.weights, self.problem.target.weights
        return round_to_marginals(stacked(chains)[0].double(), *weights)

    def report(
        self,
        chains: Sequence[Chain],
        left: Sequence[Trial] = (),
        *,
        agreed: bool,
        met: bool = False,
        alone: bool = False,
    ) -> Climbed:
        """Report chains that were followed to the end, and trials of those left behind."""
        best = sorted(chains, key=lambda chain: chain.objective)
        trials = (*(chain.trial("refined") for chain in best), *left)
        return Climbed(self.rounded(best), trials, agreed, met, best[0].g[0], alone)

    def _record(
        self,
        chains: list[Chain],
        plans: Tensor,
        g: Tensor,
        epsilon: float,
        clock: float,
        *,
        settled: bool = False,
    ) -> None:
        """Record plans, their objectives and times; of settled plans only those that are better."""
        # plans that miss their marginals have no objective to compare
        exact = round_to_marginals(plans, *self.marginals)
        costs = self.costs(exact).add_(self.base)
        values = self.problem.constant + 0.5 * _total(costs.mul_(exact))
        a, b = self.marginals
        entropy = _total(torch.special.xlogy(exact, exact / (a[:, None] * b)))
        objectives = (values + epsilon * entropy).nan_to_num(nan=torch.inf).tolist()
        seconds = (perf_counter() - clock) / len(chains)
        numbers = zip(chains, plans, g, objectives, values.tolist(), strict=True)
        for chain, plan, potential, objective, value in numbers:
            chain.seconds += seconds
            chain.move(plan, potential, epsilon, objective, value, down=settled)


def _total(tables: Tensor) -> Tensor:
    """Sum matrices (B, s, t) in float64."""
    return tables.sum(2).sum(1, dtype=torch.float64)
