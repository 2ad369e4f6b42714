"""Linear problems of which only the tiles that matter are computed, by a sweep of two levels.

A half-step over the rows and one over the columns settle differences between near points; scaling
whole blocks of rows (:func:`block_scaling`) settles those between far ones;
Anderson's method removes what slow modes are left.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from torchgw._sinkhorn.annealing import Anderson
from torchgw._sinkhorn.contract import Backend, PreparedProblem, Sweep, Sweeper
from torchgw._sinkhorn.problem import STRICT, LinearProblem, checked
from torchgw._sinkhorn.tiles.tiling import Cut, Tiling, skipped_share
from torchgw._tensors.operations import EQUAL, both, greater
from torchgw._tensors.ranks import Ranks
from torchgw._typing import Potentials

# Largest log-scaling of a block at which an iteration is linear enough to extrapolate. [L208]
_LINEAR = 2.0
# The second level is given up after so many rises of the error: where blocks hold many clusters, or
# points have hardly a partner, scaling whole blocks does not help, and over-relaxation does. [L214]
_MOST_RISES = 2
# Blocks of a side above which neighbours are joined: a step solves as many equations. [L290]
MOST_BLOCKS = 512
# Newton steps at most; and the length of a step after which convergence, being quadratic, has made
# the rest negligible beside the change of the next iteration. [L207]
_STEPS = 25
_LAST_STEP = 0.05
# Longest step of a log-scaling, in which the quadratic model can be trusted. [L207]
_LONGEST = 1.0


class Engine(Protocol):
    """Half-steps over chosen tiles, by potentials u and v as exponents in a unit of its own."""

    slack: float  # how far u and v may rise together before the tiles are no longer right
    used: Tensor  # bool, of the shape of v: which columns have mass

    @property
    def u(self) -> Tensor:
        """Potentials of the rows."""

    @property
    def v(self) -> Tensor:
        """Potentials of the columns."""

    def begin(self, start: Potentials) -> None:
        """Go to some potentials."""

    def choose(self) -> None:
        """Choose the tiles that matter near u and v."""

    def rise(self, v: Tensor) -> Tensor:
        """Tell how far u and some potentials of the columns have risen since the choice, ()."""

    def update_rows(self) -> None:
        """Take the half-step from v to u."""

    def update_columns(self) -> tuple[Tensor, Tensor]:
        """Take the half-step from u, whose sums are kept by block of rows; v before and after."""

    def usable(self) -> Tensor:
        """Tell whether the last half-steps have neither over- nor underflowed, ()."""

    def masses(self) -> tuple[Tensor, Tensor, Tensor]:
        """Add up the plan by blocks: mass of each tile, of each block of rows and of columns."""

    def scale_rows(self, scaling: Tensor) -> Tensor:
        """Add log-scalings of blocks to u; return the columns' half-step from there."""

    def move_columns(self, v: Tensor) -> None:
        """Set v."""

    def f(self, u: Tensor) -> Tensor:
        """Turn potentials of the rows into cost units and the order of the points, (n,)."""

    def g(self, v: Tensor) -> Tensor:
        """Turn potentials of the columns into cost units and the order of the points, (m,)."""


class TwoLevelSweeper:
    """Runs iterations over tiles, each followed by a scaling of whole blocks."""

    # Where that stops getting better, or brings less for its price, it goes on with one level over
    # all tiles.

    def __init__(
        self,
        make_engine: Callable[[Potentials], Engine],
        problem: LinearProblem,
        tiling: Tiling,
        all_tiles: Callable[[Potentials], Sweeper],
        start: Potentials,
    ) -> None:
        self._problem, self._tiling, self._all_tiles = problem, tiling, all_tiles
        self._acceleration = Anderson()
        self._error, self._rises = 2.0, 0
        self._plain: Sweeper | None = None
        self._lists = tiling.made
        if tiling.two_levels_pay():
            self._engine = make_engine(start)
        else:
            self._plain = all_tiles(start)

    @property
    def two_level(self) -> bool:
        """Whether blocks are still scaled."""
        return self._plain is None

    def __call__(self, start: Potentials, count: int, relaxation: float = 1.0) -> Sweep:
        """Run a sweep, without relaxation as long as there are two levels."""
        two, one = self._tiling.tallies
        if self._plain is not None:
            sweep = self._plain(start, count, relaxation)
            one.add(count, self._gain(sweep))
            return sweep
        engine, steps = self._engine, 0
        engine.begin(start)
        ok = torch.ones((), dtype=torch.bool, device=start.f.device)
        for _ in range(count):
            if engine.rise(engine.v) > engine.slack:
                engine.choose()
            engine.update_rows()
            if engine.slack < float(engine.rise(engine.v)) < math.inf:
                # these sums are over too few tiles, so that their potentials are too large, and the
                # choice by them keeps enough tiles
                engine.choose()
                engine.update_rows()
            u = engine.u.clone()
            v, v_next = engine.update_columns()
            enough = engine.rise(greater(v, v_next)) <= engine.slack
            ok = both(ok, both(engine.usable(), enough))
            scaling, taken = block_scaling(*engine.masses())
            steps += taken
            scaled = engine.scale_rows(scaling)
            if scaling.abs().max() > _LINEAR:
                self._acceleration = Anderson()
                engine.move_columns(scaled)
            else:
                point, followed = (torch.where(engine.used, x, 0.0) for x in (v, scaled))
                ahead = self._acceleration.next(point, followed)
                engine.move_columns(torch.where(engine.used, ahead, scaled))
        g, g_next = engine.g(v), engine.g(v_next)
        check = checked(ok, g, g_next, self._problem.marginals.b, self._problem.epsilon)
        state = Potentials(engine.f(engine.u), engine.g(engine.v))
        sweep = Sweep(engine.f(u), g, g_next, state, check)
        gain, tiling = self._gain(sweep), self._tiling
        lists, self._lists = tiling.made - self._lists, tiling.made
        two.add(count * tiling.share + tiling.price(start.f.device.type, lists, steps), gain)
        self._rises += gain <= 0
        if self._rises >= _MOST_RISES or not tiling.two_levels_pay():
            self._plain = self._all_tiles(state)
        return sweep

    def _gain(self, sweep: Sweep) -> float:
        """Tell the logarithm of the error before a sweep over the one that it leaves."""
        before, self._error = self._error, float(sweep.check[1])
        return math.log(before / self._error) if before and self._error else math.inf


def block_scaling(masses: Tensor, row_mass: Tensor, column_mass: Tensor) -> tuple[Tensor, int]:
    """Find log-scalings x, (k,), so that some diag(e^x) M diag(e^y) has the given marginals.

    The number of Newton's steps taken comes with them.
    """
    # By a few Newton steps in y on the dual, which is concave; x is eliminated. M (k, l) is the
    # mass of the plan in each tile; blocks without mass are not scaled. All of it is float64, in
    # natural logarithms.
    blocks = len(row_mass)
    height, width = (math.ceil(size / MOST_BLOCKS) for size in masses.shape)
    row_mass, column_mass = grouped(row_mass, height), grouped(column_mass, width)
    masses = grouped(grouped(masses, height).T, width).T
    negative_inverse = _ratio(torch.full_like(row_mass, -1.0), row_mass)
    y = torch.zeros_like(column_mass)
    steps = 0
    for steps in range(1, _STEPS + 1):  # noqa: B007 - their number is returned
        scaled = masses * y.exp()
        scaled = scaled * _ratio(row_mass, scaled.sum(1))[:, None]
        columns = scaled.sum(0)
        hessian = scaled.T @ (scaled * negative_inverse[:, None])
        # blocks without mass on either side are left out
        used = both(columns > 0, column_mass > 0)
        # parts that share less mass are not scaled against each other
        hessian.diagonal().add_(torch.where(used, (1 + EQUAL) * columns, 1.0))
        step, _ = torch.linalg.solve_ex(hessian, torch.where(used, column_mass - columns, 0.0))
        step = step - column_mass @ step / column_mass.sum()
        longest = float(step.abs().max())
        # the plan is far from its marginals; the next iteration comes closer without this step
        if not math.isfinite(longest):
            break
        y = y + step * min(1.0, _LONGEST / longest) if longest > 0 else y
        if not longest > _LAST_STEP:
            break
    x = _ratio(row_mass, masses @ y.exp()).log().nan_to_num(neginf=0.0)
    return x.repeat_interleave(height)[:blocks], steps


def grouped(values: Tensor, size: int) -> Tensor:
    """Add up groups of ``size`` neighbours along the first axis; the last may be smaller."""
    if size == 1:
        return values
    groups = math.ceil(len(values) / size)
    full = values.new_zeros(groups * size, *values.shape[1:])
    full[: len(values)] = values
    found: Tensor = full.unflatten(0, (groups, size)).sum(1)
    return found


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """Divide, zero where nothing is below."""
    return torch.where(below > 0, above / below, 0.0)


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
    engines: tuple[Any, Any]  # of one process, and of ranks together

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
            return self.problem.tau == STRICT and self.tiling.two_levels_pay()
        return self._sweeper.two_level

    def sweeper(self, start: Potentials) -> Sweeper:
        """Make sweeps over the tiles that matter near ``start``; relaxed ones over all tiles."""
        if self.problem.tau != STRICT:
            return self.whole.sweeper(start)
        return TwoLevelSweeper(self._engine, self.problem, self.tiling, self._all_tiles, start)

    def softmin(self, potential: Tensor, axis: int) -> Tensor:
        if not self.tiling.pays(self.problem.cost):
            return self.whole.softmin(potential, axis)
        turned = self if axis == 1 else self.T
        return turned._conditional()._softmin(potential)

    def apply(self, potentials: Potentials, values: Tensor) -> Tensor:
        if not self.tiling.pays(self.problem.cost):
            return self.whole.apply(potentials, values)
        return self._apply(potentials, values)

    def dense(self, potentials: Potentials) -> Tensor:
        """Build the plan as a matrix, shape (n, m), which no tile can be left out of."""
        return self.whole.dense(potentials)

    def topk(self, potentials: Potentials, k: int) -> tuple[Tensor, Tensor]:
        # A row whose k-th entry is not larger than what a skipped tile may hold is searched as a
        # whole.
        if not self.tiling.pays(self.problem.cost):
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

    def cut(self, lists: Any) -> Cut:
        """Choose which blocks of rows of the lists, or of a walk over them, are computed here."""
        return Cut(self.backend.ranks, lists.start, self.problem.cost.shape[0], lists.width)

    def _engine(self, start: Potentials) -> Engine:
        """Make an engine, whose tiles are chosen near ``start``."""
        (alone, shared), ranks = self.engines, self.backend.ranks
        made: Engine = alone(self, start) if ranks is None else shared(self, start, ranks)
        return made

    @abstractmethod
    def _softmin(self, g: Tensor) -> Tensor:
        """Compute the softmin of each row over the tiles that matter."""

    @abstractmethod
    def _apply(self, potentials: Potentials, values: Tensor) -> Tensor:
        """Compute plan @ values over the tiles that matter."""

    @abstractmethod
    def _topk(self, potentials: Potentials, k: int) -> tuple[Tensor, Tensor]:
        """Find the k largest entries of each row in the tiles that matter."""
