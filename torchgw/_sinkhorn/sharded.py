"""Linear problems whose rows are shared among processes, around any backend.

Each rank computes its pieces of the rows (:mod:`torchgw._tensors.ranks`) by the backend that it
would use alone, and all gather the whole. A half-step over the columns is one over the rows of the
transposed problem, of which each rank has pieces as well.
"""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from torchgw._sinkhorn.contract import Backend, Kernel, PreparedProblem, Sweeper
from torchgw._sinkhorn.eager import EagerProblem, StoredSweeper
from torchgw._sinkhorn.problem import DenseCost, EntropicPlan, LinearProblem
from torchgw._tensors.ranks import Ranks
from torchgw._typing import Potentials

# What a rank computes for one of its pieces of rows.
Compute = Callable[[PreparedProblem, slice], Tensor]


class ShardedBackend:
    """A backend that computes some of the rows, beside others that compute the rest."""

    def __init__(self, alone: Backend, ranks: Ranks) -> None:
        self.name = alone.name
        self.alone, self.ranks = alone, ranks

    def prepare(self, problem: LinearProblem) -> PreparedProblem:
        return ShardedProblem(problem, self)


class ShardedProblem(PreparedProblem):
    """A problem of which this rank computes some rows, and some columns."""

    backend: ShardedBackend

    def __init__(
        self,
        problem: LinearProblem,
        backend: ShardedBackend,
        turned: "ShardedProblem | None" = None,
    ) -> None:
        super().__init__(problem, backend)
        self._turned = turned
        self._alone: PreparedProblem = turned._alone.T if turned else backend.alone.prepare(problem)

    @property
    def T(self) -> "ShardedProblem":  # noqa: N802 - the name of every array library
        return self._turned or ShardedProblem(self.problem.T, self.backend, self)

    @cached_property
    def _rows(self) -> "_Share":
        return _Share(self._alone, self.backend.ranks)

    @cached_property
    def _columns(self) -> "_Share":
        return self._turned._rows if self._turned else _Share(self._alone.T, self.backend.ranks)

    def softmin(self, potential: Tensor, axis: int) -> Tensor:
        side = self._rows if axis == 1 else self._columns
        return side.gather(lambda part, _: part.softmin(potential, 1), potential.new_empty(0))

    def sweeper(self, start: Potentials) -> Sweeper:
        """Make sweeps that scale a kernel in pieces, or take one softmin after the other."""
        if isinstance(self._alone, EagerProblem) and isinstance(self.problem.cost, DenseCost):
            return StoredSweeper(self.problem, start, self.kernel(start))
        return super().sweeper(start)

    def kernel(self, start: Potentials) -> Kernel:
        """Store the pieces of a kernel that this rank reads, those of rows and of columns."""
        plan = self.plan(start)
        return Kernel(self._rows.kernel(plan), self._columns.kernel(plan.T))

    def apply(self, potentials: Potentials, values: Tensor) -> Tensor:
        f, g = potentials
        return self._rows.gather(
            lambda part, rows: part.apply(Potentials(f[rows], g), values), values[:0]
        )

    def dense(self, potentials: Potentials) -> Tensor:
        f, g = potentials
        cost = self.problem.cost
        empty = torch.empty(0, cost.shape[1], dtype=cost.dtype, device=cost.device)
        return self._rows.gather(lambda part, rows: part.dense(Potentials(f[rows], g)), empty)

    def topk(self, potentials: Potentials, k: int) -> tuple[Tensor, Tensor]:
        f, g = potentials
        found: list[Tensor] = []

        def values(part: PreparedProblem, rows: slice) -> Tensor:
            best, index = part.topk(Potentials(f[rows], g), k)
            found.append(index)
            return best

        cost = self.problem.cost
        empty = torch.empty(0, k, dtype=cost.dtype, device=cost.device)
        largest, places = self._rows.gather(values, empty), iter(found)
        return largest, self._rows.gather(lambda *_: next(places), empty.long())

    def draw(self, potentials: Potentials, rows: Tensor, generator: torch.Generator) -> Tensor:
        return self._alone.draw(potentials, rows, generator)


class _Share:
    """The pieces of the rows of one problem that this rank computes."""

    def __init__(self, whole: PreparedProblem, ranks: Ranks) -> None:
        self._ranks = ranks
        self._own, self._counts = ranks.cut(whole.problem.cost.shape[0])
        self._problems = [whole.rows(part) for part in self._own]

    def gather(self, compute: Compute, empty: Tensor) -> Tensor:
        """Compute own pieces, and join those of all ranks; ``empty`` is a result of no rows."""
        own = [compute(*pair) for pair in zip(self._problems, self._own, strict=True)]
        return self._ranks.gather(torch.cat([empty, *own]), self._counts)

    def kernel(self, plan: EntropicPlan) -> Callable[[Tensor], Tensor]:
        """Store the rows of a kernel that are this rank's, for products with vectors."""
        (f, g), a = plan.potentials, plan.marginals.a
        parts = [
            plan._replace(
                cost=plan.cost.rows(rows),
                potentials=Potentials(f[rows], g),
                marginals=plan.marginals._replace(a=a[rows]),
            ).density()
            for rows in self._own
        ]

        def product(vector: Tensor) -> Tensor:
            own = [torch.mv(part, vector) for part in parts]
            return self._ranks.gather(torch.cat([vector[:0], *own]), self._counts)

        return product
