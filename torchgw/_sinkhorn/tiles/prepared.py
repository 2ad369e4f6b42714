"""Linear problems of which only the tiles that matter are computed."""

from abc import abstractmethod

import torch
from torch import Tensor

from torchgw._sinkhorn.contract import Backend, PreparedProblem, Sweeper
from torchgw._sinkhorn.problem import STRICT, LinearProblem
from torchgw._sinkhorn.tiles.bounds import skipped_share
from torchgw._sinkhorn.tiles.sweeper import Engine, TwoLevelSweeper
from torchgw._sinkhorn.tiles.tiling import Tiling
from torchgw._tensors.ranks import Ranks
from torchgw._typing import Potentials


class TiledBackend:
    """A backend that skips tiles of costs that a tiling fits, and leaves others to ``whole``."""

    def __init__(
        self, whole: Backend, kind: "type[TiledProblem]", tiling: Tiling, ranks: Ranks | None = None
    ) -> None:
        self.name = whole.name
        self.ranks, self.whole, self.kind, self.tiling = ranks, whole, kind, tiling

    @property
    def T(self) -> "TiledBackend":  # noqa: N802 - the name of every array library
        return TiledBackend(self.whole, self.kind, self.tiling.T, self.ranks)

    def prepare(self, problem: LinearProblem) -> PreparedProblem:
        if self.tiling.fits(problem.cost):
            return self.kind(problem, self)
        return self.whole.prepare(problem)


class TiledProblem(PreparedProblem):
    """A problem in blocks of points, of which tiles are skipped."""

    # Sweeps choose tiles once for many passes. A single pass chooses its own where that pays; the
    # others go over all tiles, by the problem that whole has prepared.

    backend: TiledBackend

    def __init__(self, problem: LinearProblem, backend: TiledBackend) -> None:
        super().__init__(problem, backend)
        self.tiling = backend.tiling
        self.whole = backend.whole.prepare(problem)

    @property
    def T(self) -> "TiledProblem":  # noqa: N802 - the name of every array library
        return type(self)(self.problem.T, self.backend.T)

    @property
    def two_level(self) -> bool:
        """Whether the next sweep has two levels; they know strict marginals only."""
        if self._sweeper is None:
            return self.problem.tau == STRICT
        return self._sweeper.two_level

    def sweeper(self, start: Potentials) -> Sweeper:
        """Make sweeps over the tiles that matter near ``start``; relaxed ones over all tiles."""
        if self.problem.tau != STRICT:
            return self.whole.sweeper(start)
        return TwoLevelSweeper(self._engine(start), self.problem, self._all_tiles)

    def softmin(self, potential: Tensor, axis: int) -> Tensor:
        if not self.tiling.pays():
            return self.whole.softmin(potential, axis)
        turned = self if axis == 1 else self.T
        return turned._conditional()._softmin(potential)

    def apply(self, potentials: Potentials, values: Tensor) -> Tensor:
        if not self.tiling.pays():
            return self.whole.apply(potentials, values)
        return self._apply(potentials, values)

    def dense(self, potentials: Potentials) -> Tensor:
        """Build the plan as a matrix, shape (n, m), which no tile can be left out of."""
        return self.whole.dense(potentials)

    def topk(self, potentials: Potentials, k: int) -> tuple[Tensor, Tensor]:
        # A row whose k-th entry is not larger than what a skipped tile may hold is searched as a
        # whole.
        if not self.tiling.pays():
            return self.whole.topk(potentials, k)
        cost, (a, b), epsilon, _ = self.problem
        values, index = self._conditional()._topk(potentials, k)
        least = skipped_share(cost.dtype) * float(b.max())
        unsure = (values[:, -1] <= least).nonzero()[:, 0]
        if len(unsure):
            part = self.problem.conditional._replace(cost=cost.rows(unsure))
            part = part._replace(marginals=part.marginals._replace(a=part.marginals.a[unsure]))
            f, g = potentials
            found = self.backend.whole.prepare(part).topk(Potentials(f[unsure], g), k)
            values[unsure], index[unsure] = found[0].to(values.dtype), found[1]
        return values * a.to(values.dtype)[:, None], index

    def draw(self, potentials: Potentials, rows: Tensor, generator: torch.Generator) -> Tensor:
        # The rows may be of few blocks, and each list is for a whole block: it may save less than
        # its other rows cost.
        return self.whole.draw(potentials, rows, generator)

    def _conditional(self) -> "TiledProblem":
        """Take the problem with rows of mass one each."""
        return type(self)(self.problem.conditional, self.backend)

    def _all_tiles(self, start: Potentials) -> Sweeper:
        """Make sweeps over all tiles."""
        return self.whole.sweeper(start)

    @abstractmethod
    def _engine(self, start: Potentials) -> Engine:
        """Make an engine, whose tiles are chosen near ``start``."""

    @abstractmethod
    def _softmin(self, g: Tensor) -> Tensor:
        """Compute the softmin of each row over the tiles that matter."""

    @abstractmethod
    def _apply(self, potentials: Potentials, values: Tensor) -> Tensor:
        """Compute plan @ values over the tiles that matter."""

    @abstractmethod
    def _topk(self, potentials: Potentials, k: int) -> tuple[Tensor, Tensor]:
        """Find the k largest entries of each row in the tiles that matter."""
