"""The problem between all points, and the steps that move plans of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._errors import PerformanceWarning, warn_user
from torchgw._plans.transport import round_to_marginals
from torchgw._problem.limits import CPU, limits_of
from torchgw._sinkhorn.eager import BatchPlans, BatchSolver, solve_batch
from torchgw._starts.chain import (
    COMPARED_AT,
    FIRST,
    GUESS_EPSILON,
    INNER,
    LAST_INNER,
    LAST_OUTER,
    LAST_RELAXATION,
    QUICK,
    REFINE,
    REFINE_GRAPHS,
    REFINED,
    STEP,
    Chain,
    Kind,
    Ladder,
    kinds_of_chains,
    stacked,
)
from torchgw._starts.coarse import Coarsened, CoarseProblem, density, is_graph, side_by_side
from torchgw._starts.graphs import SparseProducts
from torchgw._tensors.cuda_graphs import Replayer
from torchgw._tensors.deadline import is_over
from torchgw._tensors.machine import slowness
from torchgw._tensors.operations import Call, call_directly, clone
from torchgw._typing import Marginals

# Growth of a pair of modes in an outer iteration below which it is left out. [L1171]
_GROWTH = 0.25


class Modes:
    """-4 alpha x P y by those eigenvectors u_i of x and v_j of y that can move a plan.

    Near the product plan, a change of it along u_i v_j' is multiplied by lambda_i mu_j /
    (epsilon |x| |y|) in an outer iteration, at epsilon as a share of the natural scale: a pair for
    which that is small dies out, and need not be computed.
    """

    def __init__(self, problem: CoarseProblem) -> None:
        self.shape = problem.base.shape
        # the largest eigenvalues first
        sides = [torch.linalg.eigh(side[0].float()) for side in (problem.x, problem.y)]
        order = [values.abs().argsort(descending=True) for values, _ in sides]
        values = [side[0][by] for side, by in zip(sides, order, strict=True)]
        self.vectors = [side[1][:, by] for side, by in zip(sides, order, strict=True)]
        self.factors = float(-4 * problem.alpha) * torch.outer(*values)
        x, y = (each.abs() / each.norm() for each in values)
        self.growth = x * y[0], y * x[0]
        # at each epsilon that was asked for
        self._ranks: dict[float, tuple[int, int] | None] = {}

    @classmethod
    def of(cls, problem: CoarseProblem) -> Modes | None:
        """Make them where products take long: on a CPU, of one symmetric table on either side."""
        # products of small matrices take less
        small = problem.base.numel() <= limits_of(problem.base.device).stacked
        on_cpu = problem.base.device.type == "cpu"
        return cls(problem) if on_cpu and len(problem.x) == 1 and not small else None

    def ranks(self, share: float) -> tuple[int, int] | None:
        """Count the modes of x and of y that matter at an epsilon; all if ``None``."""
        if share not in self._ranks:
            p, q = (int((growth > _GROWTH * share).sum()) for growth in self.growth)
            self._ranks[share] = (p, q) if self.work((p, q)) < self.work(None) else None
        return self._ranks[share]

    def work(self, ranks: tuple[int, int] | None) -> int:
        """Count the multiplications of a product with so many modes, or with the tables."""
        s, t = self.shape
        if ranks is None:
            return s * t * (s + t)
        p, q = ranks
        return 2 * min(p * t * (s + q), q * s * (t + p))

    def __call__(self, base: Tensor, plans: Tensor, share: float) -> Tensor | None:
        """Add the products at plans (B, s, t) to the base, unless they take less by the tables."""
        ranks = self.ranks(share)
        if ranks is None:
            return None
        p, q = ranks
        x, y = (
            table[:, :count].expand(len(plans), -1, -1)
            for table, count in zip(self.vectors, ranks, strict=True)
        )
        factors, own, (s, t) = self.factors[:p, :q], base.expand_as(plans), self.shape
        # the shorter products first
        if p * t * (s + q) <= q * s * (t + p):
            inner = torch.bmm(torch.bmm(x.mT, plans), y).mul_(factors)
            return torch.baddbmm(own, x, torch.bmm(inner, y.mT))
        inner = torch.bmm(x.mT, torch.bmm(plans, y)).mul_(factors)
        return torch.baddbmm(own, torch.bmm(x, inner), y.mT)


# Noise on the product plan of a chain that has no other start. [L323]
_FAINT = 0.1
# Outer iterations of a kick, and Sinkhorn iterations of each. [L323]
_KICKS, KICK_INNER = 5, 2
# Change of the plan (L1) below which a stage of a ladder is done. [L333]
_SETTLED = 2e-3
# Noise on the plans at each stage: exact products would keep equal what automorphisms of a graph
# make equal, and sharper plans cost less. [L336]
_STIR = 0.01
# What the rest of an outer iteration takes for each entry, in multiplications. [L1173]
_BESIDE = 300
# Outer iterations between looks at how far plans have moved, where they are CUDA graphs. [L1337]
_RECORDED = 4


# Seconds that chains to come may take without a warning, and that repairs may take; and seconds of
# one multiplication of an outer iteration on a CPU. [L549]
SOON, _MULTIPLICATION = 5.0, 2e-11


class _Tables(NamedTuple):
    """What all steps read; names of :class:`World`."""

    x: Tensor
    y: Tensor
    column: Tensor
    marginals: Marginals


class _Moving(NamedTuple):
    """Plans on their way down a ladder."""

    plans: Tensor  # (B, s, t)
    g: Tensor  # (B, 1, t) or (B, t)
    costs: Tensor | None = None  # (B, s, t), of the last step
    push: Tensor | None = None  # (B, s, t), what momentum repeats of it


class _Advanced(NamedTuple):
    """Plans after some outer iterations."""

    moving: _Moving
    changes: Tensor  # (iterations,) the largest change of a plan (L1) in each


class _Judged(NamedTuple):
    """Plans that have met their marginals, and their objectives and values, (2, B) float64."""

    plans: Tensor
    g: Tensor
    numbers: Tensor


def _end_early(chains: Sequence[Chain]) -> bool:
    """Whether the time is up and all chains have been judged, which a search compares them by."""
    return is_over() and all(math.isfinite(chain.objective) for chain in chains)


# Linearises at plans (B, s, t), from the tables and the base.
_CostsAt = Callable[[_Tables, Tensor, Tensor], Tensor]


class World:
    """The problem between all points in single precision, and the steps that move its plans.

    Steps run by ``call``, which may repeat what it has recorded of earlier ones.
    """

    def __init__(
        self, coarse: Coarsened, solver: BatchSolver = solve_batch, call: Call = call_directly
    ) -> None:
        problem = coarse.problem
        self.problem, self.scale, self.solver = problem, coarse.scale, solver
        self.marginals = Marginals(*(part.float() for part in problem.weights))
        self.base = problem.base.float()
        self.parts = len(problem.x)
        # centred tables: constants of rows and columns move no plan, and would cost digits
        self.x = (-4 * problem.alpha * problem.x).float()
        self.y = problem.y.float()
        self.column = problem.column.float()
        # where both tables are mostly zeros
        on_cpu = problem.source.table.device.type == "cpu"
        mostly = on_cpu and density(problem) <= CPU.edge_density
        self.sparse = SparseProducts(problem) if mostly else None
        self.modes = Modes.of(problem) if self.sparse is None else None
        entries, limits = self.base.numel(), limits_of(self.base.device)
        self.tiny = entries <= limits.tiny
        # chains that are advanced as one batch, and whether that is each alone
        self.batch, self.large = max(1, limits.together // entries), entries > limits.together
        self.refine = REFINE_GRAPHS if is_graph(problem) else REFINE
        self._tables = _Tables(self.x, self.y, self.column, self.marginals)
        self._call, self._looks_every = call_directly, 1
        # sums over edges read what no call is given
        if self.sparse is None and isinstance(call, Replayer):
            self._call, self._looks_every = call, _RECORDED
            self._tables = call.hold("tables", self._tables)

    def beside(self, linear: Tensor) -> World:
        """Return this world with a linear cost (s, t), or one for each plan, beside its own."""
        other = copy(self)
        other.base = self.base + linear
        return other

    def costs(self, plans: Tensor, share: float = 0.0) -> Tensor:
        """Linearise at plans (B, s, t), as exactly as a share of the natural scale asks for."""
        if self.sparse is not None:
            return self.sparse(self.base, plans)
        found = self.modes(self.base, plans, share) if self.modes is not None else None
        return found if found is not None else _products(self._tables, self.base, plans)

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
        return _products_of_rows(self._tables, self.base, plan, rows)

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
        plan, g = self.kick(kind.kick, plan, g, generator)
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
        self, kick: tuple[float, float], plan: Tensor, g: Tensor, generator: torch.Generator
    ) -> BatchPlans:
        """Linearise at random rows of a plan (s, t) a few times."""
        epsilon, share = kick
        count = max(2, round(share * len(plan)))
        drawn = [
            torch.randperm(len(plan), device=plan.device, generator=generator)[:count]
            for _ in range(_KICKS)
        ]
        step = partial(_kicked, self.solver)
        given = self._tables, self.base, plan, g, torch.stack(drawn), self._exactly(epsilon)
        found: BatchPlans = clone(self._call(f"kick {count}", step, *given, in_place=1))
        return found

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
            moving, epsilon = _Moving(plans * stir, g), self._exactly(share)
            left, last = ladder.outer, math.inf
            while left and not is_over():
                count = min(left, self._looks_every)
                moving, changes = self._advanced(moving, ladder, share, count, epsilon)
                left -= count
                for change in changes.tolist():
                    # a change that grows means that the plan leaves a saddle point, so the stage
                    # goes on
                    if change < min(_SETTLED, last):
                        left = 0
                        break
                    last = change
            plans, g = moving.plans, moving.g
            if is_over():
                break
        if _end_early(chains):
            return
        judged = self._judged(moving, ladder.step, stages[-1], 1, ladder.meeting)
        self._record(chains, judged, stages[-1] * self.scale, clock)

    def _advanced(
        self, moving: _Moving, ladder: Ladder, share: float, count: int, epsilon: Tensor
    ) -> _Advanced:
        """Take some outer iterations; also return how far each has moved the plans."""
        how = ladder.step, ladder.momentum, ladder.relaxation
        step = partial(_advance, self.solver, self._costs_at(share), how, count)
        fresh = moving.costs is None, moving.push is None
        name = f"advance {count} {how} {fresh} {moving.plans.shape} {self.base.shape}"
        given = self._tables, self.base, moving, epsilon
        found: _Advanced = self._call(name, step, *given, in_place=1)
        return found

    def _judged(
        self, moving: _Moving, step: float, share: float, times: int, inner: int
    ) -> _Judged:
        """Take some outer iterations in which plans meet their marginals, and judge the plans."""
        ways = self._costs_at(share), self._costs_at(0.0)
        meet = partial(_meet, self.solver, ways, step, times, inner)
        moving = moving._replace(push=None)
        fresh = moving.costs is None
        name = f"meet {step} {times} {inner} {fresh} {moving.plans.shape} {self.base.shape}"
        given = self._tables, self.base, moving, self._exactly(share), self.problem.constant
        found: _Judged = clone(self._call(name, meet, *given, in_place=1))
        return found

    def _costs_at(self, share: float) -> _CostsAt:
        """Choose how steps linearise, as exactly as a share of the natural scale asks for."""
        if self.sparse is None and self.modes is None:
            return _products
        return lambda tables, base, plans: self.costs(plans, share)

    def _exactly(self, share: float) -> Tensor:
        """Put an epsilon, in units of the cost, on the device, () float64."""
        return torch.full((), share * self.scale, dtype=torch.float64, device=self.base.device)

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
        if _end_early(chains):
            return
        clock = perf_counter()
        moving = _Moving(*stacked(chains))
        judged = self._judged(moving, STEP, epsilon / self.scale, LAST_OUTER, LAST_INNER)
        self._record(chains, judged, epsilon, clock, settled=True)

    def rounded(self, chains: list[Chain]) -> Tensor:
        """Round plans to their marginals, (k, s, t) float64."""
        return round_to_marginals(stacked(chains)[0].double(), *self.problem.weights)

    def seconds(self, numbers: range, low: float) -> float:
        """Model the time of chains on a CPU by dense products, the best of them to the target."""
        if self.base.device.type != "cpu" or self.sparse is not None:
            return 0.0
        level = max(low, COMPARED_AT)
        kinds = itertools.islice(kinds_of_chains(), numbers.start, numbers.stop)
        ladders = [(kind.ladder, level) for kind in kinds]
        ladders += [(self.refine, low)] * REFINED if low < level else []
        return sum(itertools.starmap(self.seconds_down, ladders))

    def seconds_down(self, ladder: Ladder, last: float) -> float:
        """Model the time of one chain down a ladder, if it is as long at each stage as it may."""
        return _MULTIPLICATION * ladder.outer * sum(map(self.work, ladder.stages(last)))

    def warn_if_long(self, count: int, low: float) -> bool:
        """Say what even the first chains take on a CPU, if that is long; return whether it is."""
        least = slowness() * self.seconds(range(len(FIRST)), low)
        if least <= SOON:
            return False
        most = least + slowness() * self.seconds(range(len(FIRST), count), low)
        warn_user(
            f"A few points do not represent these, and starts are followed on all of them: about "
            f"{least:.0f} s on this CPU if the first ones agree, up to {most:.0f} s if not. "
            "search='fast' leaves them out, and a start that is known (`init`) needs none.",
            PerformanceWarning,
        )
        return True

    def warn_if_more(self, count: int, low: float) -> None:
        """Say what the chains that follow the first ones take on a CPU, if that is long."""
        seconds = slowness() * self.seconds(range(len(FIRST), count), low)
        if seconds > SOON:
            warn_user(
                f"The first starts, followed on all points, did not agree, and up to "
                f"{count - len(FIRST)} more follow: about {seconds:.0f} s on this CPU. "
                "search='fast' leaves them out, and a start that is known (`init`) needs none.",
                PerformanceWarning,
            )

    def seconds_of_repair(self, ladder: Ladder) -> float:
        """Model the time of a repair on a CPU, which ends with a ladder's first stage."""
        return self.seconds_down(QUICK, ladder.start) + self.seconds_down(ladder, ladder.start)

    def repairs_within(self, ladder: Ladder, most: int) -> int:
        """Count the repairs that may be made in time."""
        if self.base.device.type != "cpu":
            return most
        return min(most, int(SOON / self.seconds_of_repair(ladder)))

    def _record(
        self,
        chains: list[Chain],
        judged: _Judged,
        epsilon: float,
        clock: float,
        *,
        settled: bool = False,
    ) -> None:
        """Record plans, their objectives and times; of settled plans only those that are better."""
        objectives, values = judged.numbers.tolist()
        seconds = (perf_counter() - clock) / len(chains)
        numbers = zip(chains, judged.plans, judged.g, objectives, values, strict=True)
        for chain, plan, potential, objective, value in numbers:
            chain.seconds += seconds
            chain.move(plan, potential, epsilon, objective, value, down=settled)


def _products(tables: _Tables, base: Tensor, plans: Tensor) -> Tensor:
    """Linearise at plans (B, s, t)."""
    left = side_by_side(tables.x.flatten(0, 1) @ plans, len(tables.x))
    count = len(plans)
    y = tables.y.flatten(0, 1).expand(count, -1, -1)
    return torch.baddbmm(base.expand(count, -1, -1), left, y)


def _products_of_rows(tables: _Tables, base: Tensor, plan: Tensor, rows: Tensor) -> Tensor:
    """Linearise at some rows of a plan (s, t), scaled to mass one."""
    some = plan[rows] / plan[rows].sum()
    near = tables.x[:, :, rows]
    # the mean distances of these points differ from those of all, which breaks the symmetry
    means = (near @ some.sum(1))[:, :, None] * tables.column[:, None, :]
    return (near @ (some @ tables.y) + means).sum(0) + base


def _kicked(
    solve: BatchSolver,
    tables: _Tables,
    base: Tensor,
    plan: Tensor,
    g: Tensor,
    drawn: Tensor,
    epsilon: Tensor,
) -> BatchPlans:
    """Linearise at some rows of a plan (s, t), at others of what follows, and so on."""
    each = epsilon.float().expand(1)
    for rows in drawn:
        cost = _products_of_rows(tables, base, plan, rows)[None]
        plans, g = solve(cost, tables.marginals, g[None], each, KICK_INNER, 1.0)
        plan, g = plans[0], g[0]
    return BatchPlans(plan, g)


def _advance(
    solve: BatchSolver,
    costs_at: _CostsAt,
    how: tuple[float, float, float],
    count: int,
    tables: _Tables,
    base: Tensor,
    moving: _Moving,
    epsilon: Tensor,
) -> _Advanced:
    """Take some outer iterations, by a step, momentum and over-relaxation."""
    step, momentum, relaxation = how
    plans, g, costs, push = moving
    each, changes = epsilon.to(plans.dtype).expand(len(plans)), list[Tensor]()
    for _ in range(count):
        before, new = plans, costs_at(tables, base, plans)
        if costs is None or not momentum:
            costs = _towards(costs, new, step)
        else:
            way = new.sub_(costs).mul_(step)
            push = way if push is None else push.mul_(momentum).add_(way)
            costs.add_(push)
        plans, g = solve(costs, tables.marginals, g, each, INNER, relaxation)
        changes.append((plans - before).abs_().sum((1, 2)).amax())
    return _Advanced(_Moving(plans, g, costs, push), torch.stack(changes))


def _meet(
    solve: BatchSolver,
    ways: tuple[_CostsAt, _CostsAt],  # for steps, and to judge
    step: float,
    times: int,
    inner: int,
    tables: _Tables,
    base: Tensor,
    moving: _Moving,
    epsilon: Tensor,
    constant: Tensor,
) -> _Judged:
    """Take some outer iterations in which plans meet their marginals, and judge them."""
    plans, g, costs, _ = moving
    costs_at, exactly_at = ways
    each = epsilon.to(plans.dtype).expand(len(plans))
    for _ in range(times):
        costs = _towards(costs, costs_at(tables, base, plans), step)
        plans, g = solve(costs, tables.marginals, g, each, inner, LAST_RELAXATION)
    # plans that miss their marginals have no objective to compare
    exact = round_to_marginals(plans, *tables.marginals)
    own = exactly_at(tables, base, exact).add_(base)
    values = constant + 0.5 * _total(own.mul_(exact))
    a, b = tables.marginals
    entropy = _total(torch.special.xlogy(exact, exact / (a[:, None] * b)))
    objectives = (values + epsilon * entropy).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return _Judged(plans, g, torch.stack([objectives, values]))


def _towards(costs: Tensor | None, new: Tensor, step: float) -> Tensor:
    """Go from the last costs, if there are any, a step towards new ones."""
    return new if costs is None or step == 1 else costs.lerp_(new, step)


def _total(tables: Tensor) -> Tensor:
    """Sum matrices (B, s, t) in float64."""
    return tables.sum(2).sum(1, dtype=torch.float64)
