"""Linear problems of points in groups that do not mix: a problem of its own for each group.

Nothing between groups is read or computed: entries there are exactly zero, and a pass over the plan
takes the sum of the products of the sizes of groups in place of n m.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchgw._sinkhorn.contract import Backend, PreparedProblem
from torchgw._sinkhorn.problem import LinearProblem, block
from torchgw._typing import Indices, Marginals, Potentials


class Restriction(Protocol):
    """Which pairs of points may hold mass, where a table of all would be too large."""

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)."""

    def partners(self) -> Tensor:
        """Count the target points allowed for each source point, (n,) int64."""

    def total(self) -> int:
        """Count the pairs of points that may hold mass."""

    def work(self) -> float:
        """Count the pairs of points whose streaming takes as long as a pass over these."""

    def hold(self, pairs: Indices) -> Tensor:
        """Tell which pairs may hold mass, (k,) bool."""

    def at(self, kept: Indices) -> "Restriction":
        """Keep what is said of some points of both sides."""

    def rows(self, part: slice) -> "Restriction":
        """Keep what is said of some source points."""

    def prepare(self, problem: LinearProblem, backend: "RestrictedBackend") -> PreparedProblem:
        """Prepare a linear problem of which nothing else is read."""


class RestrictedBackend:
    """A backend that keeps to what a restriction allows, and leaves the rest to another one.

    Problems of another shape, such as those of new points, are not restricted.
    """

    def __init__(self, whole: Backend, restriction: Restriction) -> None:
        self.whole, self.restriction, self.name = whole, restriction, whole.name

    def prepare(self, problem: LinearProblem) -> PreparedProblem:
        """Prepare a linear problem."""
        if problem.cost.shape != self.restriction.shape:
            return self.whole.prepare(problem)
        return self.restriction.prepare(problem, self)

    def rows(self, part: slice) -> "RestrictedBackend":
        """Make the backend of some source points."""
        return RestrictedBackend(self.whole, self.restriction.rows(part))


class RestrictedProblem(PreparedProblem):
    """A problem of which some entries alone are read."""

    def __init__(self, problem: LinearProblem, backend: RestrictedBackend) -> None:
        super().__init__(problem, backend)
        self.restricted = backend

    def rows(self, part: slice) -> PreparedProblem:
        a, b = self.problem.marginals
        cut = self.problem._replace(
            cost=self.problem.cost.rows(part), marginals=Marginals(a[part], b)
        )
        return self.restricted.rows(part).prepare(cut)


class Blocks(NamedTuple):
    """Groups of points of both sides, (n,) and (m,) int64 numbers from zero."""

    source: Tensor
    target: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)."""
        return len(self.source), len(self.target)

    @property
    def T(self) -> "Blocks":  # noqa: N802 - the name of every array library
        """The groups with source and target exchanged."""
        return Blocks(self.target, self.source)

    def members(self) -> list[tuple[Tensor, Tensor]]:
        """List the rows and the columns of each group that has both."""
        count = 1 + int(max(side.max() for side in self))
        parts = []
        for side in self:
            sizes = torch.bincount(side, minlength=count).tolist()
            parts.append(side.argsort(stable=True).split(sizes))
        return [(rows, columns) for rows, columns in zip(*parts, strict=True)
                if len(rows) and len(columns)]  # fmt: skip

    def partners(self) -> Tensor:
        """Count the target points in the group of each source point, (n,) int64."""
        count = 1 + int(max(side.max() for side in self))
        return torch.bincount(self.target, minlength=count)[self.source]

    def total(self) -> int:
        """Count the pairs of one group."""
        return int(self.partners().sum())

    def work(self) -> float:
        """Count the same: they are streamed."""
        return float(self.total())

    def hold(self, pairs: Indices) -> Tensor:
        """Tell which pairs are of one group, (k,) bool."""
        return self.source[pairs.source] == self.target[pairs.target]

    def at(self, kept: Indices) -> "Blocks":
        """Keep some points of both sides."""
        return Blocks(self.source[kept.source], self.target[kept.target])

    def rows(self, part: slice) -> "Blocks":
        """Keep some source points."""
        return Blocks(self.source[part], self.target)

    def prepare(self, problem: LinearProblem, backend: RestrictedBackend) -> PreparedProblem:
        """Prepare the problems of all groups."""
        return BlockProblem(problem, backend)


class BlockProblem(RestrictedProblem):
    """The problems of groups, as one."""

    def __init__(self, problem: LinearProblem, backend: RestrictedBackend) -> None:
        super().__init__(problem, backend)
        assert isinstance(backend.restriction, Blocks)
        self.blocks = backend.restriction
        (a, b), cost = problem.marginals, problem.cost
        self.members = self.blocks.members()
        self.parts = [
            backend.whole.prepare(
                problem._replace(
                    cost=block(cost, rows, columns), marginals=Marginals(a[rows], b[columns])
                )
            )
            for rows, columns in self.members
        ]

    @property
    def T(self) -> PreparedProblem:
        return RestrictedBackend(self.restricted.whole, self.blocks.T).prepare(self.problem.T)

    def split(self, potentials: Potentials) -> Iterator[tuple[PreparedProblem, Potentials]]:
        """Go through the problems of groups, with their potentials."""
        f, g = potentials
        for part, (rows, columns) in zip(self.parts, self.members, strict=True):
            yield part, Potentials(f[rows], g[columns])

    def joined(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        """Put values of the source points (axis 0) or target points (axis 1) of groups together."""
        whole = parts[0].new_zeros((self.problem.cost.shape[axis], *parts[0].shape[1:]))
        for members, part in zip(self.members, parts, strict=True):
            whole[members[axis]] = part
        return whole

    def softmin(self, potential: Tensor, axis: int) -> Tensor:
        """Compute half-steps within groups."""
        found = [
            part.softmin(potential[members[axis]], axis)
            for part, members in zip(self.parts, self.members, strict=True)
        ]
        return self.joined(found, 1 - axis)

    def apply(self, potentials: Potentials, values: Tensor) -> Tensor:
        found = [
            part.apply(at, values[columns])
            for (part, at), (_, columns) in zip(self.split(potentials), self.members, strict=True)
        ]
        return self.joined(found, 0)

    def block(self, potentials: Potentials, index: Tensor | slice) -> Tensor:
        """Compute rows of the plan, (s, m)."""
        n, m = self.problem.cost.shape
        if isinstance(index, slice):
            index = torch.arange(*index.indices(n), device=potentials.f.device)
        found = torch.zeros(
            len(index), m, dtype=self.problem.cost.dtype, device=potentials.f.device
        )
        for (part, at), columns, here, place in self._holding(potentials, index):
            found[here[:, None], columns] = part.block(at, place)
        return found

    def _holding(
        self, potentials: Potentials, index: Tensor
    ) -> Iterator[tuple[tuple[PreparedProblem, Potentials], Tensor, Tensor, Tensor]]:
        """Go through groups that hold some rows: their columns, which rows, and places of these."""
        place = torch.full((len(potentials.f),), -1, device=index.device)
        for one, (rows, columns) in zip(self.split(potentials), self.members, strict=True):
            place.fill_(-1)
            place[rows] = torch.arange(len(rows), device=index.device)
            here = (place[index] >= 0).nonzero()[:, 0]
            if len(here):
                yield one, columns, here, place[index[here]]

    def dense(self, potentials: Potentials) -> Tensor:
        return self.block(potentials, slice(None))

    def topk(self, potentials: Potentials, k: int) -> tuple[Tensor, Tensor]:
        (n, m), dtype = self.problem.cost.shape, self.problem.cost.dtype
        device = potentials.f.device
        values = torch.zeros(n, k, dtype=dtype, device=device)
        # zeros of small groups are those of the first columns of others
        places = torch.arange(k, device=device).repeat(n, 1)
        for (part, at), (rows, columns) in zip(self.split(potentials), self.members, strict=True):
            few = min(k, len(columns))
            best, where = part.topk(at, few)
            inside = torch.zeros(m, dtype=torch.bool, device=device)
            inside[columns] = True
            rest = (~inside).nonzero()[: k - few, 0]
            values[rows, :few] = best
            places[rows] = torch.cat([columns[where], rest.expand(len(rows), -1)], dim=1)
        return values, places

    def draw(self, potentials: Potentials, rows: Tensor, generator: torch.Generator) -> Tensor:
        drawn = torch.zeros_like(rows)
        for (part, at), columns, here, place in self._holding(potentials, rows):
            drawn[here] = columns[part.draw(at, place, generator)]
        return drawn
