"""Problems between shelved spaces: grouped by size, solved by the engine, put back in order."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._api import solve
from torchgw._batch.engine import Solved, run
from torchgw._batch.packing import LARGEST, Packed, inside_of, natural_scale, repad
from torchgw._batch.sweep import Relaxed
from torchgw._batch.worth import ENDINGS, Ended, Rules, meets
from torchgw._boundary.checks import first_of
from torchgw._errors import ConvergenceWarning, SearchWarning, warn_user
from torchgw._many.polishing import sharpen
from torchgw._many.questions import Questions
from torchgw._many.search import (
    TOLD,
    TOLD_AT,
    Starts,
    ask_starts,
    compile_programs,
    congruent_plan,
    follow_maps,
    search,
    stack_of,
)
from torchgw._problem.limits import limits_of
from torchgw._problem.problem import Problem, check_marginal_rule
from torchgw._problem.table import Options
from torchgw._search.stack import Stack, descend, linear_solutions
from torchgw._sinkhorn.annealing import MET
from torchgw._sinkhorn.problem import DenseCost
from torchgw._solve.state import Status
from torchgw._starts.alternatives import AGREED, Ends
from torchgw._starts.chain import BETTER, GUESS_EPSILON
from torchgw._tensors.machine import small_on_one_thread
from torchgw._tensors.operations import EQUAL, straight, sums_of
from torchgw._tensors.ranks import Ranks
from torchgw._typing import Marginals
from torchgw.distances.precomputed import PrecomputedDistance

# The status that each code in ``Numbers.status`` stands for.
STATUSES = tuple(Status)
_STATUS_OF = [STATUSES.index(Status[name]) for name in ENDINGS]


# Entries of a plan times problems that are searched together, some 150 plans of each: 100 MB on a
# CPU, 5 GB on a GPU. [L1311]
_SEARCHED = {"cpu": 2**16, "cuda": 2**22}
# What ``doubtful`` says of a problem that was solved alone, and is in doubt.
ALONE = 2
# Outer and inner iterations of steps that are halved, at most: plans that go to and fro in the
# shortest ones did so for minutes. [L1450]
_DAMPED = 32, 128


class Numbers(NamedTuple):
    """Numbers of B problems, (B,) each."""

    value_quad: Tensor
    value_linear: Tensor
    objective: Tensor
    marginal_error: Tensor
    epsilon: Tensor
    ambiguity: Tensor  # NaN without a search
    status: Tensor  # int64, places in STATUSES
    n_iter: Tensor
    doubtful: Tensor  # int64, 1 where starts did not agree on an optimum, ALONE of a problem alone

    @classmethod
    def empty(cls, count: int, device: torch.device) -> Numbers:
        """Make room for the numbers of so many problems."""
        kinds = [torch.float64] * 6 + [torch.int64] * 3
        return cls(*(torch.zeros(count, dtype=kind, device=device) for kind in kinds))

    @classmethod
    def of_table(cls, table: Tensor) -> Numbers:
        """Take the numbers of B problems from a table, (B, 9)."""
        columns = [column.contiguous() for column in table.T]
        return cls._make([*columns[:6], *(column.long() for column in columns[6:])])

    def table(self) -> Tensor:
        """Make one table of the numbers, (B, 9) float64."""
        return torch.stack([part.double() for part in self], 1)

    def put(self, places: Tensor, found: Sequence[Tensor]) -> None:
        """Write the numbers of some problems."""
        for mine, its in zip(self, found, strict=True):
            mine[places] = its.to(mine)

    def put_one(self, place: int, found: Sequence[float]) -> None:
        """Write the numbers of one problem."""
        for mine, its in zip(self, found, strict=True):
            mine[place] = its

    def at(self, place: int) -> Sequence[float]:
        """Read the numbers of one problem."""
        return [part[place].item() for part in self]


def warn_of_failures(
    numbers: Numbers, what: str = "problems", name: Callable[[int], str] = str
) -> None:
    """Warn once of all problems that did not converge, and once of those in doubt."""
    # A warning begins with the same text however many they are, and names the first of them.

    def some(mask: Tensor) -> str:
        numbers = mask.nonzero()[:, 0].tolist()
        return f"{len(numbers):,} of {len(mask):,} ({first_of(list(map(name, numbers)))})"

    counts = torch.bincount(numbers.status, minlength=len(STATUSES)).tolist()
    failed = {
        status: count
        for status, count in zip(STATUSES, counts, strict=True)
        if count and not status.converged
    }
    if failed:
        most = max(failed, key=lambda status: failed[status])
        shown = ", ".join(f"{count} {status.name}" for status, count in failed.items())
        ended = torch.tensor([not status.converged for status in STATUSES], device="cpu")
        warn_user(
            f"Some {what} did not converge: {some(ended[numbers.status.cpu()])}; {shown}. "
            f"{most.advice}",
            ConvergenceWarning,
        )
    doubtful = numbers.doubtful > 0
    if bool(doubtful.any()):
        warn_user(
            f"Starts did not agree on an optimum of some {what}: {some(doubtful)}; there may be "
            "better ones. search='thorough' solves each as torchgw.solve does, which says why it "
            "doubts one.",
            SearchWarning,
        )


class Kept(NamedTuple):
    """The plan of one problem."""

    number: int
    plan: Tensor  # (n, m) float64
    f: Tensor  # (n,) potentials of the cost without the terms of rows and columns alone
    g: Tensor  # (m,)


Keep = Callable[[Kept], None]


def solve_questions(asked: Questions, device: torch.device, keep: Keep | None = None) -> Numbers:
    """Solve all problems, each with the best of its starts."""
    found = Numbers.empty(len(asked), device)
    # the smaller side comes first, so that a problem and its mirror image share a group
    sizes = np.sort(asked.shelves.padded[np.stack([asked.i, asked.j])], axis=0)
    groups = sizes[0] * (LARGEST + 1) + sizes[1]
    # strict problems are solved apart, so that their bits do not depend on relaxed ones
    for kind in (asked.wanted.relaxed(len(asked)), *asked.wanted.sharp(len(asked))):
        groups = 2 * groups + kind
    with torch.no_grad():
        for group in np.unique(groups).tolist():
            numbers = (groups == group).nonzero()[0]
            small, large = divmod(group // 8, LARGEST + 1)
            if not small or asked.search == "thorough":
                for number in numbers.tolist():
                    _solve_alone(asked, number, found, keep)
                continue
            with small_on_one_thread(1, 1, device):
                grouped = _Group(asked, (small, large), numbers, device)
                (_solve_and_polish if grouped.polish else _solve_group)(grouped, found, keep)
    return found


def solve_together(
    asked: Questions, ranks: Ranks, shapes: NDArray[np.int64], keep: Keep | None = None
) -> Numbers:
    """Solve a share of the problems, and get the others from other processes."""
    ranks.agree("the start of a hash of spaces and options", [int(asked.key()[:12], 16)])
    flat = [torch.empty(0, dtype=torch.float64, device=ranks.device)]

    def compute(mine: Tensor) -> Tensor:
        own: dict[int, Kept] = {}
        take = None if keep is None else lambda plan: own.update({plan.number: plan})
        found = solve_questions(asked.some(mine), ranks.device, take)
        flat.extend(part.reshape(-1) for k in sorted(own) for part in own[k][1:])
        return found.table()

    empty = Numbers.empty(0, ranks.device).table()
    numbers = Numbers.of_table(ranks.dealt(len(asked), compute, empty))
    if keep is not None:
        lengths = np.stack([shapes.prod(1), *shapes.T], 1)
        hands = [np.arange(rank, len(asked), ranks.size) for rank in range(ranks.size)]
        joined = ranks.gather(torch.cat(flat), [int(lengths[hand].sum()) for hand in hands])
        order = np.concatenate(hands)
        pieces = iter(joined.split(lengths[order].reshape(-1).tolist()))
        for number, plan, f, g in zip(order.tolist(), pieces, pieces, pieces, strict=True):
            keep(Kept(number, plan.view(*shapes[number].tolist()), f, g))
    return numbers


class _Group:
    """Problems between spaces of two padded sizes; an entry for each start of each problem."""

    def __init__(
        self,
        asked: Questions,
        sizes: tuple[int, int],
        numbers: NDArray[np.int64],
        device: torch.device,
    ) -> None:
        shelves = asked.shelves
        self.asked, self.sizes, self.numbers, self.device = asked, sizes, numbers, device
        # entries of a search are made when their starts are
        self.starts = asked.n_init or 1
        first, second = asked.i[numbers], asked.j[numbers]
        # problems whose sides are exchanged, so that the smaller one comes first
        self.turned = shelves.padded[first] != sizes[0]
        self.rows = np.where(self.turned, second, first)
        self.columns = np.where(self.turned, first, second)
        self.stacks = shelves.stacks[sizes[0]], shelves.stacks[sizes[1]]
        self.i, self.j = (self._spread(shelves.place[side]) for side in (self.rows, self.columns))
        self.kinds = torch.arange(self.starts, device=device).repeat(len(numbers))
        proximal, polish = asked.wanted.sharp(len(asked))
        self.proximal, self.polish = bool(proximal[numbers[0]]), bool(polish[numbers[0]])

    def _spread(self, values: NDArray[Any]) -> Tensor:
        """Give each entry the value of its problem."""
        return torch.from_numpy(np.repeat(values, self.starts, axis=0)).to(self.device)

    def packed(self) -> Packed:
        """Pack the entries for the engine."""
        asked, numbers, relaxed = self.asked, self.numbers, None
        linear = None
        if asked.tables is not None:
            linear = self._stacked_costs if isinstance(asked.tables, Tensor) else self._listed_costs
        elif self.sizes[0] in asked.shelves.features:
            linear = self._feature_costs
        if asked.wanted.relaxed(len(asked))[numbers[0]]:
            held = asked.wanted.of(numbers, self.turned)[:2]
            relaxed = Relaxed(*(None if part is None else self._spread(part) for part in held))
        return Packed(
            *self.stacks, self.i, self.j, self._spread(asked.alpha[numbers]),
            self._spread(asked.epsilon[numbers]),
            torch.where(self.kinds == 0, 1.0, GUESS_EPSILON).double(), linear,
            self._first_costs if self.starts > 1 else None, relaxed, self.proximal,
        )  # fmt: skip

    def blocks(self) -> Iterator[_Group]:
        """Take so many problems at a time that the plans of their search fit into little memory."""
        width = max(1, _SEARCHED[self.device.type] // (self.sizes[0] * self.sizes[1]))
        for begin in range(0, len(self.numbers), width):
            yield _Group(self.asked, self.sizes, self.numbers[begin : begin + width], self.device)

    def _no_costs(self, entries: Tensor) -> Tensor:
        return torch.zeros(len(entries), *self.sizes, dtype=torch.float64, device=self.device)

    def _stacked_costs(self, entries: Tensor) -> Tensor:
        """Take M of some entries from a stack."""
        assert isinstance(self.asked.tables, Tensor)
        cost = self._no_costs(entries)
        taken = self.asked.tables[self._spread(self.numbers)[entries]]
        swapped = self._spread(self.turned)[entries]
        used = self.stacks[0].sizes[self.i[entries]], self.stacks[1].sizes[self.j[entries]]
        for way, part in ((False, taken), (True, taken.mT)):
            here = (swapped == way).nonzero()[:, 0]
            rows = repad(part[here], self.sizes[0], used[0][here]).mT
            cost[here] = repad(rows, self.sizes[1], used[1][here]).mT
        return cost

    def _listed_costs(self, entries: Tensor) -> Tensor:
        """Take M of some entries from a list."""
        assert self.asked.tables is not None
        cost = self._no_costs(entries)
        for place, problem in enumerate((entries // self.starts).tolist()):
            table = self.asked.tables[self.numbers[problem]]
            table = table.T if self.turned[problem] else table
            cost[place, : table.shape[0], : table.shape[1]] = table
        return cost

    def _feature_costs(self, entries: Tensor) -> Tensor:
        """Compute M of some entries from features."""
        features, sides = self.asked.shelves.features, (self.i[entries], self.j[entries])
        cost = self.asked.feature_costs(
            *(features[size][side] for size, side in zip(self.sizes, sides, strict=True))
        )
        for size, stack, side, axis in zip(self.sizes, self.stacks, sides, (2, 1), strict=True):
            cost *= inside_of(size, stack.sizes[side]).unsqueeze(axis)
        return cost

    def _first_costs(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Compare quantiles of distances, as costs to begin with, and tell whose start that is."""
        signatures, kind = self.asked.shelves.signatures, self.kinds[entries]
        x, y = (
            signatures(self.sizes[0])[self.i[entries]],
            signatures(self.sizes[1])[self.j[entries]],
        )
        # every other start compares a mixture of the quantiles, and noise that is always the same
        generator = torch.Generator().manual_seed(0)
        mixing = torch.randn(
            self.starts, x.shape[2], dtype=x.dtype, device="cpu", generator=generator
        )
        mixing[1] = 1
        x, y = (part * mixing.to(self.device)[kind][:, None, :] for part in (x, y))
        return straight(x, y).square_(), kind > 0

    def problem(self, place: int, packed: Packed) -> Problem:
        """Make one problem as the engine sees it, without its padding."""
        spaces = self.asked.shelves.spaces
        source, target = (spaces[side[place]] for side in (self.rows, self.columns))
        n, m = len(source.table), len(target.table)
        linear = None
        if packed.linear is not None:
            linear = DenseCost(packed.linear(self.i.new_tensor([place]))[0, :n, :m])
        return Problem(
            PrecomputedDistance.unchecked(source.table),
            PrecomputedDistance.unchecked(target.table),
            Marginals(source.weights, target.weights), float(packed.alpha[place]), linear,
        )  # fmt: skip

    def rules(self) -> Rules:
        """Say when problems end."""
        rules = self.asked.rules
        if self.proximal and self.polish:
            rules = rules._replace(tol=max(rules.tol, MET))
        return rules

    def numbers_of(self, solved: Solved) -> Numbers:
        """Take numbers of the engine, as of problems without a search."""
        return Numbers(
            solved.value_quad, solved.value_linear, solved.objective, solved.marginal_error,
            solved.epsilon, torch.full_like(solved.objective, math.nan),
            torch.tensor(_STATUS_OF, device=self.device)[solved.ending], solved.n_iter,
            torch.zeros_like(solved.n_iter),
        )  # fmt: skip

    def plan(self, problem: int, ended: Ended, place: int) -> Kept:
        """Take a plan of the engine as that of a problem."""
        sizes = self.asked.shelves.sizes
        n, m = sizes[self.rows[problem]], sizes[self.columns[problem]]
        plan, f, g = ended.plan[place, :n, :m], ended.f[place, :n], ended.g[place, :m]
        if self.turned[problem]:
            plan, f, g = plan.T, g, f
        return Kept(int(self.numbers[problem]), plan.clone(), f.clone(), g.clone())


def _solve_group(group: _Group, found: Numbers, keep: Keep | None) -> None:
    """Solve the problems of a group, by a search or from some starts."""
    if group.asked.n_init is not None:
        _solve_starts(group, found, keep)
        return
    small = math.prod(group.sizes) <= limits_of(group.device).tiny
    for block in group.blocks():
        (_search_block if small else _ask_block)(block, found, keep)


def _solve_starts(group: _Group, found: Numbers, keep: Keep | None) -> None:
    """Solve the problems of a group, and keep the best start of each."""
    starts, count, device = group.starts, len(group.numbers), group.device
    best = [(math.inf, starts)] * count

    def hand_over(ended: Ended) -> None:
        assert keep is not None
        for place, (entry, objective) in enumerate(
            zip(ended.number.tolist(), ended.objective.tolist(), strict=True)
        ):
            problem, start = divmod(entry, starts)
            # of starts that end at the same objective the first one counts, whichever ends
            # first; a lost number counts only where all starts have lost theirs
            rank = math.inf if math.isnan(objective) else objective, start
            if rank < best[problem]:
                best[problem] = rank
                keep(group.plan(problem, ended, place))

    solved = run(group.packed(), group.rules(), None if keep is None else hand_over)
    objectives = solved.objective.view(-1, starts)
    winner = objectives.where(~objectives.isnan(), math.inf).argmin(1)
    taken = torch.arange(count, device=device) * starts + winner
    numbers = Numbers(*(part[taken] for part in group.numbers_of(solved)))
    found.put(torch.from_numpy(group.numbers).to(device), numbers)


def _ask_block(group: _Group, found: Numbers, keep: Keep | None) -> None:
    """Solve some problems as without a search, and from where few starts of each lead."""
    packed, every = group.packed(), torch.arange(len(group.numbers), device=group.device)
    plain, stack = _solved(group, packed, every), stack_of(packed)
    told = ask_starts(stack, Starts(group.asked.shelves, group.sizes, group.i, group.j))
    problem = every.repeat_interleave(TOLD)
    first = torch.full_like(packed.first[problem], TOLD_AT)
    for place, number in enumerate(group.numbers.tolist()) if packed.relaxed else []:
        rule = check_marginal_rule(**group.asked.wanted.marginals(number))
        assert rule is not None
        for plan in congruent_plan(group.problem(place, packed), rule.share):
            told.plans[place, -1] = stack.padded(plan[None])[0]
    for mapped in follow_maps(stack, plain.ends.plan) if packed.relaxed else []:
        there = mapped.objectives.isfinite()
        told.plans[there, -1] = mapped.plans[there]
    begin = stack.beginning(problem, told.plans.flatten(0, 1))
    others = _solved(group, packed.again(problem, first, begin), problem)
    best = plain.beside(others)
    taken = _lowest(best, group.rules(), len(every))
    lowest = best.numbers.objective[taken, None]
    ends = others.numbers.objective.view(len(every), TOLD)
    agree = torch.cat([plain.numbers.objective[:, None], ends], 1) - lowest <= AGREED * lowest.abs()
    ambiguity, certain = torch.full_like(packed.alpha, math.nan), agree.all(1)
    if packed.relaxed is None:
        # of other masses strict starts know nothing
        ambiguity, certain = told.ambiguity, agree[:, 1] & told.clear
    _hand_over(group, packed, best.of(taken), ambiguity, ~certain, found, keep)


def _search_block(group: _Group, found: Numbers, keep: Keep | None) -> None:
    """Search some problems: solve them as without a search, and from the best plans of one."""
    packed, every = group.packed(), torch.arange(len(group.numbers), device=group.device)
    stack = stack_of(packed)
    compile_programs(packed, stack)
    plain = _solved(group, packed, every)
    starts = Starts(group.asked.shelves, group.sizes, group.i, group.j)
    searched = search(stack, starts, plain.ends.plan)
    problem, place = searched.nearly_best()
    lower, falling = descend(stack, problem, searched.members.plans[problem, place])
    others = _solved(group, _begun(packed, stack, problem, lower), problem)
    best = plain.beside(others)
    if not packed.proximal:
        left = _above(others.numbers, lower.objectives, stack.problems.epsilon[problem], EQUAL)
        if packed.relaxed is None and bool(left.any()):
            # steps that have led away from plans that cost less are halved as they turn back
            ends = Ends(*(part[left] for part in lower))
            begun = _begun(packed.damped(), stack, problem[left], ends)
            best = best.beside(_solved(group, begun, problem[left], group.rules().within(*_DAMPED)))
        if bool((left := left | ~_converged(others.numbers)).any()):
            best = best.beside(_standing(stack, others.of(left), lower, falling, left))
    best, doubtful = best.of(_lowest(best, group.rules(), len(every))), searched.doubtful
    if not packed.proximal:
        seen = searched.members.objectives[:, 0]
        doubtful = doubtful | _above(best.numbers, seen, stack.problems.epsilon, AGREED)
    _hand_over(group, packed, best, searched.ambiguity, doubtful, found, keep)


def _hand_over(
    group: _Group,
    packed: Packed,
    best: _Solves,
    ambiguity: Tensor,
    doubtful: Tensor,
    found: Numbers,
    keep: Keep | None,
) -> None:
    """Write the best solve of each problem; none that costs nothing is in doubt."""
    doubtful = doubtful & ~_cost_nothing(best.numbers, packed, best.problem)
    numbers = best.numbers._replace(ambiguity=ambiguity, doubtful=doubtful.long())
    found.put(torch.from_numpy(group.numbers).to(group.device), numbers)
    if keep is not None:
        for number in range(len(doubtful)):
            keep(group.plan(number, best.ends, number))


class _Solves(NamedTuple):
    """Solves of some problems."""

    numbers: Numbers
    ends: Ended  # plans, in the same order
    problem: Tensor  # (k,) int64, which problem of the group each is of

    def of(self, some: Tensor) -> _Solves:
        """Take some of them."""
        numbers, ends = ([part[some] for part in parts] for parts in self[:2])
        return _Solves(Numbers(*numbers), Ended(*ends), self.problem[some])

    def beside(self, other: _Solves) -> _Solves:
        """Add other solves."""
        numbers = zip(self.numbers, other.numbers, strict=True)
        ends = zip(self.ends, other.ends, strict=True)
        return _Solves(
            Numbers(*map(torch.cat, numbers)),
            Ended(*map(torch.cat, ends)),
            torch.cat([self.problem, other.problem]),
        )


def _solved(group: _Group, packed: Packed, problem: Tensor, rules: Rules | None = None) -> _Solves:
    """Solve entries of a group, by its rules or others, and keep all plans."""
    (n, m), count = packed.shape, len(packed)
    kept = Ended(
        torch.arange(count, device=group.device),
        *(packed.x.tables.new_zeros(count, *shape) for shape in ((n, m), (n,), (m,), ())),
    )

    def keep(ended: Ended) -> None:
        for mine, its in zip(kept, ended, strict=True):
            mine[ended.number] = its

    return _Solves(group.numbers_of(run(packed, rules or group.rules(), keep)), kept, problem)


def _cost_nothing(numbers: Numbers, packed: Packed, every: Tensor) -> Tensor:
    """Tell which plans keep all distances and marginals up to rounding: no plan costs less."""
    if packed.linear is not None:
        return torch.zeros_like(numbers.status, dtype=torch.bool)
    kept = _converged(numbers)
    if packed.relaxed is not None and packed.relaxed.rho is not None:
        # a penalty may have been paid
        rho = packed.relaxed.rho
        kept = kept & ((rho == 0) | rho.isinf()).all(1)
    return kept & (numbers.value_quad <= EQUAL * natural_scale(packed, every, None))


def _standing(
    stack: Stack, others: _Solves, lower: Ends, falling: Tensor, chosen: Tensor
) -> _Solves:
    """Take plans of a search that are chosen as answers, in place of solves from there."""
    lower, problem = Ends(*(part[chosen] for part in lower)), others.problem
    linear = torch.zeros_like(lower.values)
    if stack.problems.linear is not None:
        share = 1 - stack.problems.alpha[problem]
        linear = share * sums_of(stack.problems.linear(problem) * lower.plans)
    limit, flat = map(STATUSES.index, (Status.OUTER_LIMIT, Status.FLAT))
    status = torch.where(falling[chosen], limit, flat)
    numbers = others.numbers._replace(
        value_quad=lower.values - linear, value_linear=linear, objective=lower.objectives,
        marginal_error=torch.zeros_like(linear), status=status,
    )  # fmt: skip
    ends = Ended(
        others.ends.number, *linear_solutions(stack, problem, lower.plans), lower.objectives
    )
    return _Solves(numbers, ends._replace(plan=lower.plans), problem)


def _begun(packed: Packed, stack: Stack, problem: Tensor, ends: Ends) -> Packed:
    """Ask for solves of problems (k,) from plans (k, n, m)."""
    first = torch.zeros_like(packed.first[problem])
    return packed.again(problem, first, stack.beginning(problem, ends.plans))


def _above(numbers: Numbers, lower: Tensor, epsilon: Tensor, share: float) -> Tensor:
    """Tell which solves have ended above plans at an epsilon by more than a share, (k,)."""
    above = ~(numbers.objective <= lower + share * lower.abs())
    # plans were compared at no smaller epsilon than a least one
    return above & (epsilon <= (1 + EQUAL) * numbers.epsilon)


def _converged(numbers: Numbers) -> Tensor:
    """Tell which solves have converged, (k,)."""
    converged = [status.converged for status in STATUSES]
    return torch.tensor(converged, device=numbers.status.device)[numbers.status]


def _lowest(solves: _Solves, rules: Rules, count: int) -> Tensor:
    """Find the solve of each of ``count`` problems that has ended lowest."""
    # Of those within rounding of it, one that has converged; the first of equals.
    numbers, problem = solves.numbers, solves.problem
    # what misses its marginals may have any objective
    sound = meets(numbers.marginal_error, rules) & numbers.objective.isfinite()
    sound &= numbers.status != STATUSES.index(Status.IMPLAUSIBLE)
    objective = numbers.objective.nan_to_num(nan=math.inf, posinf=math.inf)
    least = torch.full((count,), math.inf, dtype=objective.dtype, device=objective.device)
    least = least.scatter_reduce(0, problem, objective.where(sound, math.inf), "amin")[problem]
    near = sound & (objective <= least + BETTER * least.abs())
    rank = 3 - sound.long() - near.long() - (near & _converged(numbers)).long()
    order = objective.argsort(stable=True)
    order = order[rank[order].argsort(stable=True)]
    order = order[problem[order].argsort(stable=True)]
    return order[torch.searchsorted(problem[order], torch.arange(count, device=problem.device))]


def _solve_and_polish(group: _Group, found: Numbers, keep: Keep | None) -> None:
    """Solve the problems of a group, and polish the plan of the best start of each."""
    kept: dict[int, Kept] = {}
    _solve_group(group, found, lambda plan: kept.update({plan.number: plan}))
    for number, plan in sorted(kept.items()):
        # a problem that has lost its numbers says so, and has no plan to polish
        if bool(plan.plan.isfinite().all()):
            sharp = sharpen(group.asked, number, plan.plan)
            *_, ambiguity, _, n_iter, doubtful = found.at(number)
            values = (
                sharp.value_quad, sharp.value_linear, sharp.value_quad + sharp.value_linear,
                sharp.marginal_error, 0.0, ambiguity, STATUSES.index(sharp.status), n_iter,
                doubtful,
            )  # fmt: skip
            found.put_one(number, values)
            plan = plan._replace(plan=sharp.plan.to(plan.plan.device))
        if keep is not None:
            keep(plan)


def _solve_alone(asked: Questions, number: int, found: Numbers, keep: Keep | None) -> None:
    """Solve a problem that is too large for the engine, or searched as a single one is."""
    epsilon, searched = float(asked.epsilon[number]), asked.n_init is None
    with warnings.catch_warnings():
        # one warning for all problems comes at the end
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", SearchWarning)
        result = solve(
            **asked.arguments(number), **asked.wanted.sharpness(number),
            epsilon="auto" if math.isnan(epsilon) else epsilon,
            n_init=asked.n_init, search="auto" if searched else "fast", random_state=0,
            options=Options(**asked.rules._asdict()),
        )  # fmt: skip
    doubtful = (ALONE if searched else 1) if result.doubt else 0
    values = (
        result.value_quad, result.value_linear, result.report.objective, result.marginal_error,
        result.epsilon, result.ambiguity, STATUSES.index(result.status), result.n_iters,
        doubtful,
    )  # fmt: skip
    found.put_one(number, values)
    if keep is not None:
        keep(Kept(number, result.lazy_plan.stored().double(), *result.lazy_plan.potentials))
