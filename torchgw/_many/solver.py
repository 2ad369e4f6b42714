"""Problems between listed spaces: sorted by size, solved by the engine, put back in order."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from torchgw._api import solve
from torchgw._batch.engine import ENDINGS, Ended, Rules, run
from torchgw._batch.packing import LARGEST, Packed, Stack, make_stack, pack, padded_sizes, repad
from torchgw._batch.relaxed import Relaxed
from torchgw._boundary.cache import content_key
from torchgw._errors import ConvergenceWarning
from torchgw._many.spaces import Space
from torchgw._search.starts import GUESS_EPSILON, distance_quantiles
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


class Kept(NamedTuple):
    """The plan of one problem."""

    number: int
    plan: Tensor  # (n, m) float64
    f: Tensor  # (n,) potentials of the cost without the terms of rows and columns alone
    g: Tensor  # (m,)


Keep = Callable[[Kept], None]


class Shelves:
    """Spaces packed by size, with the quantiles that starts of their problems are made from."""

    def __init__(self, spaces: Sequence[Space]) -> None:
        counts = np.array([len(space.table) for space in spaces], dtype=np.int64)
        for size in self._sort(spaces, counts):
            mine = [spaces[k] for k in (self.padded == size).nonzero()[0]]
            self.stacks[size] = pack(
                [space.table for space in mine], [space.weights for space in mine]
            )
            features = [space.features for space in mine]
            if features[0] is not None:
                self.features[size] = _padded(features, size)

    @classmethod
    def stacked(cls, sides: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Shelves:
        """Shelve zero-padded stacks (S, n, n), (S, n) of so many points (S,), one after another."""
        shelves = cls.__new__(cls)
        counts = [sizes.cpu().numpy() for _, _, sizes in sides]
        for size in shelves._sort(_Slices(sides), np.concatenate(counts)):
            parts = []
            for (tables, weights, sizes), used in zip(sides, counts, strict=True):
                mine = (padded_sizes(used) == size).nonzero()[0]
                index = torch.from_numpy(mine).to(tables.device)
                # a stack of one size is not copied
                whole = slice(None) if len(mine) == len(tables) else index
                missing = size - tables.shape[1]
                parts.append(
                    (
                        pad(tables[whole], (0, missing, 0, missing)),
                        pad(weights[whole], (0, missing)),
                        sizes[index],
                    )
                )
            shelves.stacks[size] = make_stack(*map(torch.cat, zip(*parts, strict=True)))
        return shelves

    def _sort(self, spaces: Sequence[Space], sizes: NDArray[np.int64]) -> list[int]:
        """Find the stack of each space, by its size, and its place there; list the stacks."""
        self.spaces, self.sizes, self.padded = spaces, sizes, padded_sizes(sizes)
        self.place = np.zeros_like(sizes)
        self.stacks: dict[int, Stack] = {}
        self.features: dict[int, Tensor] = {}
        self._signatures: dict[int, Tensor] = {}
        used: list[int] = np.unique(self.padded[self.padded > 0]).tolist()
        for size in used:
            mine = self.padded == size
            self.place[mine] = np.arange(mine.sum())
        return used

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


class Relaxations(NamedTuple):
    """How marginals of B problems are relaxed, if they are: by penalties or by bounds."""

    penalties: NDArray[np.float64] | None = None  # (B, 2) weights of both sides
    mass: NDArray[np.float64] | None = None  # (B,) share of the mass that is moved

    def used(self, count: int) -> NDArray[np.bool_]:
        """Tell which problems have relaxed marginals, (B,)."""
        if self.mass is not None:
            return np.asarray(self.mass < 1)
        if self.penalties is not None:
            return np.asarray(np.isfinite(self.penalties).any(1))
        return np.full(count, False)

    def repeated(self, count: int) -> Relaxations:
        """Repeat what holds for one problem for so many."""
        return Relaxations(*(None if part is None else part.repeat(count, 0) for part in self))

    def of(self, numbers: NDArray[np.int64], turned: NDArray[np.bool_]) -> Relaxations:
        """Take some problems, with their sides exchanged where they are ``turned``."""
        penalties, mass = (None if part is None else part[numbers] for part in self)
        if penalties is not None:
            penalties = np.where(turned[:, None], penalties[:, ::-1], penalties)
        return Relaxations(penalties, mass)

    def arguments(self, number: int) -> dict[str, Any]:
        """Make the arguments of one problem for :func:`torchgw.solve`."""
        penalties, mass = (None if part is None else part[number].tolist() for part in self)
        return {"unbalanced": penalties and tuple(penalties), "mass": mass}


@dataclass(frozen=True)
class Questions:
    """B problems between shelved spaces."""

    shelves: Shelves
    i: NDArray[np.int64]
    j: NDArray[np.int64]
    alpha: NDArray[np.float64]
    epsilon: NDArray[np.float64]  # NaN for "auto"
    # M of each problem, (n, m) float64; from a stack without its padding
    tables: Sequence[Tensor] | Tensor | None = None
    squared: bool = True  # whether distances of features are squared
    n_init: int = 1
    rules: Rules = field(default_factory=Rules)
    marginals: Relaxations = Relaxations()

    def __len__(self) -> int:
        """Count the problems."""
        return len(self.i)

    def some(self, numbers: Tensor) -> Questions:
        """Take some of the problems."""
        at, tables = numbers.numpy(), self.tables
        if isinstance(tables, Tensor):
            tables = tables[numbers.to(tables.device)]
        elif tables is not None:
            tables = [tables[number] for number in at]
        return replace(
            self, i=self.i[at], j=self.j[at], alpha=self.alpha[at], epsilon=self.epsilon[at],
            tables=tables, marginals=self.marginals.of(at, np.full(len(at), False)),
        )  # fmt: skip

    def key(self) -> str:
        """Hash everything that the answers depend on."""
        shelves, tables = self.shelves, self.tables
        large = (shelves.padded == 0).nonzero()[0]
        content: list[Any] = [part for stack in shelves.stacks.values() for part in stack[:2]]
        content += shelves.features.values()
        content += (part for number in large for part in shelves.spaces[number])
        content += tables if isinstance(tables, list) else [tables]
        for part in (shelves.sizes, self.i, self.j, self.alpha, self.epsilon, *self.marginals):
            content.append(None if part is None else torch.from_numpy(np.array(part)))
        return content_key("many", *content, self.squared, self.n_init, tuple(self.rules))

    def arguments(self, number: int) -> dict[str, Any]:
        """Make the arguments of one problem for :func:`torchgw.solve`."""
        source, target = (self.shelves.spaces[side[number]] for side in (self.i, self.j))
        linear = None if self.tables is None else self.tables[number]
        if linear is not None:
            linear = linear[: len(source.table), : len(target.table)]
        if source.features is not None and target.features is not None:
            linear = self.feature_costs(source.features, target.features)
        fused = {} if linear is None else {"M": linear, "alpha": float(self.alpha[number])}
        sides = {"D_X": source.table, "D_Y": target.table, "a": source.weights, "b": target.weights}
        return {**sides, **fused, **self.marginals.arguments(number)}

    def feature_costs(self, source: Tensor, target: Tensor) -> Tensor:
        """Compute M of features (..., n, d) and (..., m, d), by operations that go pair by pair."""
        cost = torch.cdist(source, target, compute_mode="donot_use_mm_for_euclid_dist")
        return cost.square_() if self.squared else cost


def solve_questions(asked: Questions, device: torch.device, keep: Keep | None = None) -> Numbers:
    """Solve all problems, each with the best of its starts."""
    found = Numbers.empty(len(asked), device)
    # the smaller side comes first, so that a problem and its mirror image share a group
    sizes = np.sort(asked.shelves.padded[np.stack([asked.i, asked.j])], axis=0)
    groups = sizes[0] * (LARGEST + 1) + sizes[1]
    # strict problems are solved apart, so that their bits do not depend on relaxed ones
    groups = 2 * groups + asked.marginals.used(len(asked))
    with torch.no_grad():
        for group in np.unique(groups).tolist():
            numbers = (groups == group).nonzero()[0]
            small, large = divmod(group // 2, LARGEST + 1)
            if not small:
                for number in numbers.tolist():
                    _solve_alone(asked, number, found, keep)
                continue
            with small_on_one_thread(1, 1, device):
                _solve_group(asked, (small, large), numbers, found, keep)
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


def _solve_group(
    asked: Questions,
    sizes: tuple[int, int],
    numbers: NDArray[np.int64],
    found: Numbers,
    keep: Keep | None,
) -> None:
    """Solve problems between spaces of two padded sizes."""
    shelves, starts = asked.shelves, asked.n_init
    device = found.objective.device
    first, second = asked.i[numbers], asked.j[numbers]
    turned = shelves.padded[first] != sizes[0]
    rows, columns = np.where(turned, second, first), np.where(turned, first, second)

    def spread(values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.repeat(values, starts, axis=0)).to(device)

    i, j = spread(shelves.place[rows]), spread(shelves.place[columns])
    kinds = torch.arange(starts, device=device).repeat(len(numbers))

    def table_costs(entries: Tensor) -> Tensor:
        assert asked.tables is not None
        cost = torch.zeros(len(entries), *sizes, dtype=torch.float64, device=device)
        if isinstance(asked.tables, Tensor):
            taken, swapped = asked.tables[spread(numbers)[entries]], spread(turned)[entries]
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
    relaxed = None
    if asked.marginals.used(len(asked))[numbers[0]]:
        held = asked.marginals.of(numbers, turned)
        relaxed = Relaxed(*(None if part is None else spread(part) for part in held))
    packed = Packed(
        *stacks, i, j, spread(asked.alpha[numbers]), spread(asked.epsilon[numbers]),
        torch.where(kinds == 0, 1.0, GUESS_EPSILON).double(), linear, begin if starts > 1 else None,
        relaxed,
    )  # fmt: skip
    best = [(math.inf, starts)] * len(numbers)

    def hand_over(ended: Ended) -> None:
        assert keep is not None
        for place, (entry, objective) in enumerate(
            zip(ended.number.tolist(), ended.objective.tolist(), strict=True)
        ):
            which, start = divmod(entry, starts)
            # of starts that end at the same objective the first one counts, whichever ends first
            if (objective, start) < best[which]:
                best[which] = objective, start
                n, m = shelves.sizes[rows[which]], shelves.sizes[columns[which]]
                plan, f, g = ended.plan[place, :n, :m], ended.f[place, :n], ended.g[place, :m]
                if turned[which]:
                    plan, f, g = plan.T, g, f
                keep(Kept(int(numbers[which]), plan.clone(), f.clone(), g.clone()))

    solved = run(packed, asked.rules, None if keep is None else hand_over)
    winner = solved.objective.view(-1, starts).argmin(1)
    taken = torch.arange(len(numbers), device=device) * starts + winner
    parts = (
        solved.value_quad, solved.value_linear, solved.objective, solved.marginal_error,
        solved.epsilon, torch.tensor(_STATUS_OF, device=device)[solved.ending], solved.n_iter,
    )  # fmt: skip
    found.put(torch.from_numpy(numbers).to(device), [part[taken] for part in parts])


def _solve_alone(asked: Questions, number: int, found: Numbers, keep: Keep | None) -> None:
    """Solve a problem that is too large for the engine."""
    epsilon = float(asked.epsilon[number])
    with warnings.catch_warnings():
        # one warning for all problems comes at the end
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
