"""Problems between listed spaces: sorted by size, solved by the engine, put back in order."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgw._api import solve
from torchgw._batch.engine import ENDINGS, Ended, Rules, run
from torchgw._batch.packing import LARGEST, Packed, Stack, make_stack, pack, padded_size, repad
from torchgw._errors import ConvergenceWarning
from torchgw._many.spaces import Space
from torchgw._search.starts import GUESS_EPSILON, distance_quantiles
from torchgw._solve.status import Status
from torchgw._tensors.threads import small_on_one_thread

__all__ = ["Kept", "Numbers", "Questions", "Shelves", "STATUSES", "solve_questions"]

# What a code of ``Numbers.status`` stands for.
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

    def put(self, places: Tensor, found: Sequence[Tensor]) -> None:
        """Write the numbers of some problems."""
        for mine, its in zip(self, found, strict=True):
            mine[places] = its.to(mine)


class Kept(NamedTuple):
    """The plan of one problem."""

    number: int
    plan: Tensor  # (n, m) float64
    f: Tensor  # (n,) potentials of the cost without the terms of rows and columns alone
    g: Tensor  # (m,)


Keep = Callable[[Kept], None]


class Shelves:
    """Spaces packed by size, and what starts of their problems are made from."""

    def __init__(self, spaces: Sequence[Space]) -> None:
        self.spaces: Sequence[Space] = spaces
        self.sizes = [len(space.table) for space in spaces]
        self.padded = [padded_size(n) if n <= LARGEST else 0 for n in self.sizes]
        self.place = [0] * len(spaces)
        self.stacks: dict[int, Stack] = {}
        self.features: dict[int, Tensor] = {}
        self._signatures: dict[int, Tensor] = {}
        for size in sorted(set(self.padded) - {0}):
            members = [k for k, padded in enumerate(self.padded) if padded == size]
            for place, k in enumerate(members):
                self.place[k] = place
            mine = [spaces[k] for k in members]
            self.stacks[size] = pack(
                [space.table for space in mine], [space.weights for space in mine]
            )
            features = [space.features for space in mine]
            if features[0] is not None:
                self.features[size] = _padded(features, size)

    @classmethod
    def stacked(cls, sides: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Shelves:
        """Shelve padded stacks, each (S, n, n), (S, n) and the points used (S,), one after another.

        Nothing is done space by space.
        """
        shelves = cls(())
        shelves.spaces = _Slices(sides)
        shelves.sizes = [n for _, _, sizes in sides for n in sizes.tolist()]
        shelves.padded = [padded_size(n) if n <= LARGEST else 0 for n in shelves.sizes]
        shelves.place = [0] * len(shelves.sizes)
        for size in sorted(set(shelves.padded) - {0}):
            parts, place, origin = [], 0, 0
            for tables, weights, sizes in sides:
                mine = [k for k in range(len(tables)) if shelves.padded[origin + k] == size]
                for k in mine:
                    shelves.place[origin + k] = place
                    place += 1
                origin += len(tables)
                index = torch.tensor(mine, dtype=torch.int64, device=tables.device)
                used = sizes[index]
                rows = repad(tables[index], size, used).mT
                parts.append((repad(rows, size, used), repad(weights[index], size, used), used))
            shelves.stacks[size] = make_stack(*map(torch.cat, zip(*parts, strict=True)))
        return shelves

    def signatures(self, size: int) -> Tensor:
        """Compute quantiles of the distances of each point, (S, n, q)."""
        if size not in self._signatures:
            tables, weights, sizes, _ = self.stacks[size]
            found = [
                distance_quantiles(table[:n, :n], weight[:n])
                for table, weight, n in zip(tables, weights, sizes.tolist(), strict=True)
            ]
            self._signatures[size] = _padded(found, size)
        return self._signatures[size]


class _Slices(Sequence[Space]):
    """Spaces of stacks, cut out when they are asked for."""

    def __init__(self, sides: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        self._sides = sides

    def __len__(self) -> int:
        return sum(len(tables) for tables, _, _ in self._sides)

    def __getitem__(self, place: Any) -> Any:
        for tables, weights, sizes in self._sides:
            if place < len(tables):
                n = int(sizes[place])
                return Space(tables[place, :n, :n], weights[place, :n])
            place -= len(tables)
        raise IndexError(place)


def _padded(parts: Sequence[Any], size: int) -> Tensor:
    """Stack tables (n, q) as (S, size, q)."""
    stacked: Tensor = parts[0].new_zeros(len(parts), size, parts[0].shape[1])
    for place, part in enumerate(parts):
        stacked[place, : len(part)] = part
    return stacked


@dataclass(frozen=True)
class Questions:
    """B problems between shelved spaces."""

    shelves: Shelves
    i: Sequence[int]
    j: Sequence[int]
    alpha: Sequence[float]
    epsilon: Sequence[float]  # NaN for "auto"
    # M of each problem, (n, m) float64; of a stack the parts in use
    tables: Sequence[Tensor] | Tensor | None = None
    squared: bool = True  # whether distances of features are squared
    n_init: int = 1
    rules: Rules = field(default_factory=Rules)

    def __len__(self) -> int:
        """Count the problems."""
        return len(self.i)

    def arguments(self, number: int) -> dict[str, Any]:
        """Make the arguments of one problem for :func:`torchgw.solve`."""
        source, target = (self.shelves.spaces[side[number]] for side in (self.i, self.j))
        linear = None if self.tables is None else self.tables[number]
        if linear is not None:
            linear = linear[: len(source.table), : len(target.table)]
        if source.features is not None and target.features is not None:
            linear = self.feature_costs(source.features, target.features)
        fused = {} if linear is None else {"M": linear, "alpha": self.alpha[number]}
        sides = {"D_X": source.table, "D_Y": target.table, "a": source.weights, "b": target.weights}
        return {**sides, **fused}

    def feature_costs(self, source: Tensor, target: Tensor) -> Tensor:
        """Compute M of features (..., n, d) and (..., m, d), by operations that go pair by pair."""
        cost = torch.cdist(source, target, compute_mode="donot_use_mm_for_euclid_dist")
        return cost.square_() if self.squared else cost


def solve_questions(asked: Questions, device: torch.device, keep: Keep | None = None) -> Numbers:
    """Solve all problems, each with the best of its starts."""
    found = Numbers.empty(len(asked), device)
    groups: dict[tuple[int, int], list[int]] = {}
    shelves = asked.shelves
    for number, (i, j) in enumerate(zip(asked.i, asked.j, strict=True)):
        sizes = shelves.padded[i], shelves.padded[j]
        # the smaller side first: a problem and its mirror image share a group
        groups.setdefault((min(sizes), max(sizes)), []).append(number)
    with torch.no_grad():
        for sizes, numbers in sorted(groups.items()):
            if 0 in sizes:
                for number in numbers:
                    _solve_alone(asked, number, found, keep)
                continue
            with small_on_one_thread(1, 1, device):
                _solve_group(asked, sizes, numbers, found, keep)
    return found


def _solve_group(
    asked: Questions, sizes: tuple[int, int], numbers: list[int], found: Numbers, keep: Keep | None
) -> None:
    """Solve problems between spaces of two padded sizes."""
    shelves, starts = asked.shelves, asked.n_init
    device = found.objective.device
    turned = [shelves.padded[asked.i[number]] != sizes[0] for number in numbers]
    rows = [asked.j[k] if turn else asked.i[k] for k, turn in zip(numbers, turned, strict=True)]
    columns = [asked.i[k] if turn else asked.j[k] for k, turn in zip(numbers, turned, strict=True)]

    def spread(values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device).repeat_interleave(starts)

    i = spread([shelves.place[k] for k in rows], torch.int64)
    j = spread([shelves.place[k] for k in columns], torch.int64)
    kinds = torch.arange(starts, device=device).repeat(len(numbers))

    def table_costs(entries: Tensor) -> Tensor:
        assert asked.tables is not None
        cost = torch.zeros(len(entries), *sizes, dtype=torch.float64, device=device)
        if isinstance(asked.tables, Tensor):
            chosen = torch.tensor(numbers, device=device)[entries // starts]
            taken, swapped = asked.tables[chosen], torch.tensor(turned, device=device)
            swapped = swapped[entries // starts]
            used = stacks[0].sizes[i[entries]], stacks[1].sizes[j[entries]]
            for way, part in ((False, taken), (True, taken.mT)):
                here = (swapped == way).nonzero()[:, 0]
                rows = repad(part[here], sizes[0], used[0][here]).mT
                cost[here] = repad(rows, sizes[1], used[1][here]).mT
            return cost
        for place, entry in enumerate((entries // starts).tolist()):
            table = asked.tables[numbers[entry]]
            table = table.T if turned[entry] else table
            cost[place, : table.shape[0], : table.shape[1]] = table
        return cost

    def feature_costs(entries: Tensor) -> Tensor:
        x, y = shelves.features[sizes[0]][i[entries]], shelves.features[sizes[1]][j[entries]]
        cost = asked.feature_costs(x, y)
        for size, stack, at, axis in zip(sizes, stacks, (i, j), (2, 1), strict=True):
            inside = torch.arange(size, device=device) < stack.sizes[at[entries]][:, None]
            cost *= inside.unsqueeze(axis)
        return cost

    def begin(entries: Tensor) -> tuple[Tensor, Tensor]:
        x, y = (
            shelves.signatures(size)[at[entries]] for size, at in zip(sizes, (i, j), strict=True)
        )
        kind = kinds[entries]
        # every other start compares a mixture of the quantiles, and noise that is always the same
        generator = torch.Generator().manual_seed(0)
        mixing = torch.randn(starts, x.shape[2], dtype=x.dtype, generator=generator).to(device)
        mixing[1] = 1
        x, y = (part * mixing[kind][:, None, :] for part in (x, y))
        cost = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square_()
        return cost, kind > 0

    stacks = shelves.stacks[sizes[0]], shelves.stacks[sizes[1]]
    linear = None
    if asked.tables is not None:
        linear = table_costs
    elif sizes[0] in shelves.features:
        linear = feature_costs
    first = torch.where(kinds == 0, 1.0, GUESS_EPSILON).double()
    packed = Packed(
        *stacks, i, j,
        spread([asked.alpha[k] for k in numbers], torch.float64),
        spread([asked.epsilon[k] for k in numbers], torch.float64),
        first, linear, begin if starts > 1 else None,
    )  # fmt: skip
    best = [(math.inf, starts)] * len(numbers)

    def hand_over(ended: Ended) -> None:
        assert keep is not None
        for place, (entry, objective) in enumerate(
            zip(ended.number.tolist(), ended.objective.tolist(), strict=True)
        ):
            which, start = divmod(entry, starts)
            # of starts that come to the same the first counts, whichever ends first
            if (objective, start) < best[which]:
                best[which] = objective, start
                n, m = shelves.sizes[rows[which]], shelves.sizes[columns[which]]
                plan, f, g = ended.plan[place, :n, :m], ended.f[place, :n], ended.g[place, :m]
                if turned[which]:
                    plan, f, g = plan.T, g, f
                keep(Kept(numbers[which], plan.clone(), f.clone(), g.clone()))

    solved = run(packed, asked.rules, None if keep is None else hand_over)
    winner = solved.objective.view(-1, starts).argmin(1)
    taken = torch.arange(len(numbers), device=device) * starts + winner
    parts = (
        solved.value_quad, solved.value_linear, solved.objective, solved.marginal_error,
        solved.epsilon, torch.tensor(_STATUS_OF, device=device)[solved.ending], solved.n_iter,
    )  # fmt: skip
    found.put(torch.tensor(numbers, device=device), [part[taken] for part in parts])


def _solve_alone(asked: Questions, number: int, found: Numbers, keep: Keep | None) -> None:
    """Solve a problem that is too large for the engine."""
    epsilon = asked.epsilon[number]
    with warnings.catch_warnings():
        # said once, of all problems
        warnings.simplefilter("ignore", ConvergenceWarning)
        result = solve(
            **asked.arguments(number),
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
    found.put(torch.tensor([number]), [torch.tensor([value]) for value in values])
    if keep is not None:
        keep(Kept(number, result.lazy_plan.stored().double(), *result.lazy_plan.potentials))
