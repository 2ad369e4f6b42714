"""Problems between shelved spaces: grouped by size, solved by the engine, put back in order."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._api import solve
from torchgw._batch.engine import run
from torchgw._batch.packing import LARGEST, Packed, repad
from torchgw._batch.relaxed import Relaxed
from torchgw._batch.stopping import ENDINGS
from torchgw._batch.worth import Ended
from torchgw._errors import ConvergenceWarning, warn_user
from torchgw._many.polishing import sharpen
from torchgw._many.questions import Questions
from torchgw._search.starts import GUESS_EPSILON
from torchgw._solve.start import POLISH_TOLERANCE
from torchgw._solve.status import Status
from torchgw._tensors.ranks import Ranks
from torchgw._tensors.threads import small_on_one_thread

# The status that each code in ``Numbers.status`` stands for.
STATUSES = tuple(Status)
_STATUS_OF = [STATUSES.index(Status[name]) for name in ENDINGS]


class Numbers(NamedTuple):
    """Numbers of B problems, (B,) each."""

    value_quad: Tensor
    value_linear: Tensor
    objective: Tensor
    marginal_error: Tensor
    epsilon: Tensor
    status: Tensor  # int64, places in STATUSES
    n_iter: Tensor

    @classmethod
    def empty(cls, count: int, device: torch.device) -> Numbers:
        """Make room for the numbers of so many problems."""
        floats = [torch.zeros(count, dtype=torch.float64, device=device) for _ in range(5)]
        return cls(*floats, *(torch.zeros(count, dtype=torch.int64, device=device) for _ in "si"))

    @classmethod
    def of_table(cls, table: Tensor) -> Numbers:
        """Take the numbers of B problems from a table, (B, 7)."""
        columns = [column.contiguous() for column in table.T]
        return cls._make([*columns[:5], *(column.long() for column in columns[5:])])

    def table(self) -> Tensor:
        """Make one table of the numbers, (B, 7) float64."""
        return torch.stack([part.double() for part in self], 1)

    def put(self, places: Tensor, found: Sequence[Tensor]) -> None:
        """Write the numbers of some problems."""
        for mine, its in zip(self, found, strict=True):
            mine[places] = its.to(mine)

    def put_one(self, place: int, found: Sequence[float]) -> None:
        """Write the numbers of one problem."""
        for mine, its in zip(self, found, strict=True):
            mine[place] = its


def warn_of_failures(numbers: Numbers) -> None:
    """Warn once of all problems that did not converge."""
    counts = torch.bincount(numbers.status, minlength=len(STATUSES)).tolist()
    failed = {
        status: count
        for status, count in zip(STATUSES, counts, strict=True)
        if count and not status.converged
    }
    if failed:
        most = max(failed, key=lambda status: failed[status])
        shown = ", ".join(f"{count} {status.name}" for status, count in failed.items())
        warn_user(
            f"{sum(failed.values())} of {sum(counts)} problems did not converge ({shown}). "
            f"{most.advice}",
            ConvergenceWarning,
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
    proximal, polish = asked.sharpening.used(len(asked))
    for kind in (asked.marginals.used(len(asked)), proximal, polish):
        groups = 2 * groups + kind
    with torch.no_grad():
        for group in np.unique(groups).tolist():
            numbers = (groups == group).nonzero()[0]
            small, large = divmod(group // 8, LARGEST + 1)
            if not small:
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
        first, second = asked.i[numbers], asked.j[numbers]
        # problems whose sides are exchanged, so that the smaller one comes first
        self.turned = shelves.padded[first] != sizes[0]
        self.rows = np.where(self.turned, second, first)
        self.columns = np.where(self.turned, first, second)
        self.stacks = shelves.stacks[sizes[0]], shelves.stacks[sizes[1]]
        self.i, self.j = (self._spread(shelves.place[side]) for side in (self.rows, self.columns))
        self.kinds = torch.arange(asked.n_init, device=device).repeat(len(numbers))
        proximal, polish = asked.sharpening.used(len(asked))
        self.proximal, self.polish = bool(proximal[numbers[0]]), bool(polish[numbers[0]])

    def _spread(self, values: NDArray[Any]) -> Tensor:
        """Give each entry the value of its problem."""
        return torch.from_numpy(np.repeat(values, self.asked.n_init, axis=0)).to(self.device)

    def packed(self) -> Packed:
        """Pack the entries for the engine."""
        asked, numbers, relaxed = self.asked, self.numbers, None
        linear = None
        if asked.tables is not None:
            linear = self._stacked_costs if isinstance(asked.tables, Tensor) else self._listed_costs
        elif self.sizes[0] in asked.shelves.features:
            linear = self._feature_costs
        if asked.marginals.used(len(asked))[numbers[0]]:
            held = asked.marginals.of(numbers, self.turned)
            relaxed = Relaxed(*(None if part is None else self._spread(part) for part in held))
        return Packed(
            *self.stacks, self.i, self.j, self._spread(asked.alpha[numbers]),
            self._spread(asked.epsilon[numbers]),
            torch.where(self.kinds == 0, 1.0, GUESS_EPSILON).double(), linear,
            self._first_costs if asked.n_init > 1 else None, relaxed, self.proximal,
        )  # fmt: skip

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
        for place, problem in enumerate((entries // self.asked.n_init).tolist()):
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
            inside = torch.arange(size, device=self.device) < stack.sizes[side][:, None]
            cost *= inside.unsqueeze(axis)
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
        mixing = torch.randn(self.asked.n_init, x.shape[2], dtype=x.dtype, generator=generator)
        mixing[1] = 1
        x, y = (part * mixing.to(self.device)[kind][:, None, :] for part in (x, y))
        cost = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square_()
        return cost, kind > 0

    def plan(self, problem: int, ended: Ended, place: int) -> Kept:
        """Take a plan of the engine as that of a problem."""
        sizes = self.asked.shelves.sizes
        n, m = sizes[self.rows[problem]], sizes[self.columns[problem]]
        plan, f, g = ended.plan[place, :n, :m], ended.f[place, :n], ended.g[place, :m]
        if self.turned[problem]:
            plan, f, g = plan.T, g, f
        return Kept(int(self.numbers[problem]), plan.clone(), f.clone(), g.clone())


def _solve_group(group: _Group, found: Numbers, keep: Keep | None) -> None:
    """Solve the problems of a group, and keep the best start of each."""
    starts, count, device = group.asked.n_init, len(group.numbers), group.device
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

    rules = group.asked.rules
    if group.proximal and group.polish:
        rules = rules._replace(tol=max(rules.tol, POLISH_TOLERANCE))
    solved = run(group.packed(), rules, None if keep is None else hand_over)
    objectives = solved.objective.view(-1, starts)
    winner = objectives.where(~objectives.isnan(), math.inf).argmin(1)
    taken = torch.arange(count, device=device) * starts + winner
    parts = (
        solved.value_quad, solved.value_linear, solved.objective, solved.marginal_error,
        solved.epsilon, torch.tensor(_STATUS_OF, device=device)[solved.ending], solved.n_iter,
    )  # fmt: skip
    found.put(torch.from_numpy(group.numbers).to(device), [part[taken] for part in parts])


def _solve_and_polish(group: _Group, found: Numbers, keep: Keep | None) -> None:
    """Solve the problems of a group, and polish the plan of the best start of each."""
    kept: dict[int, Kept] = {}
    _solve_group(group, found, lambda plan: kept.update({plan.number: plan}))
    for number, plan in sorted(kept.items()):
        # a problem that has lost its numbers says so, and has no plan to polish
        if bool(plan.plan.isfinite().all()):
            sharp = sharpen(group.asked, number, plan.plan)
            values = (
                sharp.value_quad, sharp.value_linear, sharp.value_quad + sharp.value_linear,
                sharp.marginal_error, 0.0, STATUSES.index(sharp.status), int(found.n_iter[number]),
            )  # fmt: skip
            found.put_one(number, values)
            plan = plan._replace(plan=sharp.plan.to(plan.plan.device))
        if keep is not None:
            keep(plan)


def _solve_alone(asked: Questions, number: int, found: Numbers, keep: Keep | None) -> None:
    """Solve a problem that is too large for the engine."""
    epsilon = float(asked.epsilon[number])
    with warnings.catch_warnings():
        # one warning for all problems comes at the end
        warnings.simplefilter("ignore", ConvergenceWarning)
        result = solve(
            **asked.arguments(number),
            **asked.sharpening.arguments(number),
            epsilon="auto" if math.isnan(epsilon) else epsilon,
            n_init=asked.n_init,
            search="fast",
            random_state=0,
            **asked.rules._asdict(),
        )
    values = (
        result.value_quad, result.value_linear, result.report.objective, result.marginal_error,
        result.epsilon, STATUSES.index(result.status), result.n_iters,
    )  # fmt: skip
    found.put_one(number, values)
    if keep is not None:
        keep(Kept(number, result.lazy_plan.stored().double(), *result.lazy_plan.potentials))
