"""Cutting planes between more points than a table of distances holds, of few coordinates.

Linear problems are not solved. Prices of cells of near points, by Newton's method down to a small
epsilon, are extended to all points, iterated there some times, and raised by a c-transform in
float64: what they prove then is a cut. The entropic plan beside them, rounded, is the plan.
"""

import math
from time import monotonic
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchgw._certify.cuts import CuttingPlanes
from torchgw._certify.question import Moments, Points
from torchgw._plans.transport import RoundedPlan, TransportPlan, round_plan
from torchgw._sinkhorn.choose import choose_backend
from torchgw._sinkhorn.contract import PreparedProblem
from torchgw._sinkhorn.duals import Array, ProductCost
from torchgw._sinkhorn.problem import FactoredCost, LinearProblem
from torchgw._tensors.operations import EQUAL
from torchgw._typing import Marginals, Potentials

# Cells of a side, of five points at least, four times as many each time; the part of their epsilon
# at which all points are iterated, twice as often each time; and what a cut is short by then, as a
# share of the constant part of the objective: half of what it is to raise its vertex by at most.
# [L1741]
_CELLS, _LEVELS = 500, ((1.0, 2e-3), (1.0, 1e-4), (0.25, 0.0))
# Epsilon between cells as a share of the constant part divided by their number; Newton steps at
# each. [L1620, L1677]
_EPSILON, _STEPS = 1.5, 12
# What epsilon falls by between cells, from the least at which a half-step from the prices at hand
# leaves no more of the mass than this missing. [L1627, L1741]
_DECAY, _FAR = 4.0, 0.5
# A plan that is kept is of these shares of that epsilon in turn, after so many half-steps of each
# side; what the last leaves of the weights is moved so many times, at wider ones. [L1677]
_SHARP, _OFTEN, _WIDER = (0.5, 0.25), 40, 4
# Marginal error at which Newton's method ends, what is added to its diagonal, and half-steps before
# it. [L1620, L1622]
_SETTLED, _RIDGE, _NEAR = 1e-3, 1e-4, 3


class StreamedPlanes(CuttingPlanes):
    """The cuts of points, and the moments of the best plan so far."""

    def __init__(
        self,
        question: Points,
        plan: Moments,
        gap: float,
        device: torch.device,
        end: float = math.inf,
    ) -> None:
        self._sharp = (prices := Prices(question, device, end)).sharp
        super().__init__(question, plan, gap, prices, whole=True)
        # prices are as exact as the gap asks for
        self._depth = 1.0

    def _read(self, plan: Moments) -> tuple[float, Array]:
        return plan.t, plan.z.ravel()

    def _descend(self, z: Array | None) -> None:
        super()._descend(z)
        # and with less entropy
        value = np.inf
        while self.value < value - self._gap / 8 * abs(self.value):
            value = self.value
            self._see(self._sharp(self._cost(-2 * self._k * self._best[-1])))


class Prices:
    """Prices of all points, and what they prove: `Transport` without an exact solution.

    After ``end`` none are made sharper.
    """

    def __init__(self, question: Points, device: torch.device, end: float = math.inf) -> None:
        self._question, self._device, self._end = question, device, end
        self.prices = np.zeros(len(question.b))
        self._dtype = torch.float32 if device.type == "cuda" else torch.float64
        self._backend = choose_backend("auto", device, self._dtype)
        self._weights = Marginals(*(self._on(part) for part in (question.a, question.b)))
        most = len(question.a) // 5, len(question.b) // 5
        few = {
            max(2, min(_CELLS * 4**turn, *most)): (turn, *rest) for turn, rest in enumerate(_LEVELS)
        }
        self._levels = [self._level(question, count, *rest) for count, rest in sorted(few.items())]

    def _level(self, question: Points, count: int, turn: int, share: float, lost: float) -> "Level":
        """Put the points of both sides into so many cells each."""
        x, y = (
            _cells(self._on(side[0]), weight, count)
            for side, weight in zip(question.sides, self._weights, strict=True)
        )
        size = question.constant
        epsilon = _EPSILON * size / max(len(x.mass), len(y.mass))
        return Level(x, y, epsilon, share * epsilon, 2**turn, lost * size)

    def _on(self, array: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def reach(
        self, cost: ProductCost, floor: float, enough: float
    ) -> tuple[Moments | None, Array, float]:
        """Compute what prices prove of a cost, a c-transform in float64.

        They are exact to a part of what ``enough`` is above ``floor``, if both are finite. A plan
        beside them costs too much to be the best: it is read for an infinite ``floor`` alone.
        """
        left, right = self._factors(cost)
        ready, g = self._near(left, right, math.inf if math.isinf(floor) else enough - floor)
        plan = None
        if math.isinf(floor):
            rounded = self._rounded(left, right, self._weights, g, ready.problem.epsilon)
            plan = self._question.read(rounded)
        f, g, height = self._lifted(left, right, g.double(), ready.softmin_rows(g).double())
        self.prices = g.cpu().numpy()
        return plan, f.cpu().numpy(), height

    def sharp(self, cost: ProductCost) -> Moments:
        """Find a plan of nearly the least cost.

        What a plan of small epsilon leaves of the weights is moved by wider ones.
        """
        left, right = self._factors(cost)
        ready, g = self._near(left, right, 0.0)
        (a, b), moved, epsilon = self._weights, [], _SHARP[-1] * ready.problem.epsilon
        for share in _SHARP[:-1]:
            ready = self._ready(left, right, self._weights, share * ready.problem.epsilon)
            g = self._iterated(ready, g)
        for turn in range(_WIDER):
            width = _DECAY**turn * epsilon
            ready = self._ready(left, right, Marginals(a, b), width)
            g = self._iterated(ready, g)
            rounded = self._rounded(left, right, Marginals(a, b), g, width)
            moved.append(self._question.read(rounded if turn == _WIDER - 1 else rounded.scaled))
            a, b = rounded.row, rounded.column * rounded.row.sum()
        return Moments(sum(part.t for part in moved), np.sum([part.z for part in moved], axis=0))

    def _rounded(
        self, left: Tensor, right: Tensor, weights: Marginals, g: Tensor, epsilon: float
    ) -> RoundedPlan:
        """Make a plan of prices exact, in float64: values of copies are small differences."""
        cost, g = FactoredCost.of_products(-left, right), g.double()
        ready = self._backend.prepare(LinearProblem(cost, weights, epsilon))
        return round_plan(TransportPlan.of(ready, Potentials(ready.softmin_rows(g), g)), *weights)

    def _iterated(self, ready: PreparedProblem, g: Tensor, times: int = _OFTEN) -> Tensor:
        """Iterate some times, or until time is up."""
        for _ in range(times):
            if monotonic() > self._end:
                break
            g = ready.softmin_columns(ready.softmin_rows(g))
        return g

    def _near(self, left: Tensor, right: Tensor, asked: float) -> tuple[PreparedProblem, Tensor]:
        """Solve between cells that are fine enough, and iterate all points some times."""
        g = self._on(self.prices)
        for level in self._levels:
            g = self._of_cells(level, left, right, g)
            if level.lost <= asked / 2 or monotonic() > self._end:
                break
        ready = self._ready(left, right, self._weights, level.near)
        return ready, self._iterated(ready, g.to(self._dtype), level.times)

    def _factors(self, cost: ProductCost) -> tuple[Tensor, Tensor]:
        """Add the columns on the left that meet the same on the right."""
        kept: dict[bytes, Array] = {}
        columns = []
        for left, right in zip(cost.left.T, cost.right.T, strict=True):
            if right.tobytes() not in kept:
                columns.append(right)
            kept[right.tobytes()] = kept.get(right.tobytes(), 0.0) + left
        return self._on(np.column_stack(list(kept.values()))), self._on(np.column_stack(columns))

    def _ready(
        self, left: Tensor, right: Tensor, weights: Marginals, epsilon: float
    ) -> PreparedProblem:
        cost = FactoredCost.of_products(-left.to(self._dtype), right.to(self._dtype))
        return self._backend.prepare(LinearProblem(cost, weights, epsilon))

    def _of_cells(self, level: "Level", left: Tensor, right: Tensor, g: Tensor) -> Tensor:
        """Solve between cells, from prices of all points, and extend theirs to all points, (m,)."""
        x, y, epsilon, *_ = level
        few, columns = x.means(left, self._weights.a), y.means(right, self._weights.b)
        cost, g = few @ columns.T, y.means(g[:, None].double(), self._weights.b)[:, 0]
        reached, most = epsilon, float(cost.max() - cost.min()) / _DECAY
        while reached < most and _missing(cost, x.mass, y.mass, g, reached) > _FAR:
            reached *= _DECAY
        f, g = _newton(cost, x.mass, y.mass, g, reached)
        while reached > epsilon and monotonic() <= self._end:
            reached = max(reached / _DECAY, epsilon)
            f, g = _newton(cost, x.mass, y.mass, g, reached)
        ready = self._ready(few, right, Marginals(x.mass, self._weights.b), epsilon)
        return ready.softmin_columns(f.to(self._dtype))

    def _lifted(
        self, left: Tensor, right: Tensor, g: Tensor, soft: Tensor
    ) -> tuple[Tensor, Tensor, float]:
        """Raise prices (m,) as far as they go beside potentials f (n,), made of theirs.

        These are halfway between what the prices leave and what they leave with entropy, which
        is nearer to what the prices of columns would leave. At so small an epsilon half-steps find
        least entries, up to epsilon log n, in float64.
        """
        even = Marginals(*(torch.full_like(part, 1 / len(part)) for part in self._weights))
        epsilon = EQUAL * self._question.constant
        ready = self._backend.prepare(
            LinearProblem(FactoredCost.of_products(-left, right), even, epsilon)
        )
        f = (ready.softmin_rows(g) + soft) / 2
        g = ready.softmin_columns(f) - epsilon * math.log(len(f))
        return f, g, float(self._weights.a @ f + self._weights.b @ g)


class Cells(NamedTuple):
    """Groups of near points: the number of each point (n,), and the weights of groups (k,)."""

    label: Tensor
    mass: Tensor

    def means(self, values: Tensor, weights: Tensor) -> Tensor:
        """Average values (n, c) over cells, (k, c)."""
        shape = len(self.mass), values.shape[1]
        sums = torch.zeros(shape, dtype=values.dtype, device=values.device)
        return sums.index_add_(0, self.label, values * weights[:, None]) / self.mass[:, None]


class Level(NamedTuple):
    """Cells of both sides, their epsilon, that of all points, how often, and what cuts lose."""

    x: Cells
    y: Cells
    epsilon: float
    near: float
    times: int
    lost: float


def _cells(points: Tensor, weights: Tensor, count: int) -> Cells:
    """Put points (n, d) into cells."""
    generator = torch.Generator("cpu").manual_seed(0)
    chosen = torch.randperm(len(points), generator=generator, device="cpu")[:count]
    means = points[chosen.to(points.device)]
    for _ in range(25):
        label = torch.cat([torch.cdist(part, means).argmin(1) for part in points.split(8192)])
        label = label.unique(return_inverse=True)[1]
        mass = torch.zeros(int(label.max()) + 1, dtype=points.dtype, device=points.device)
        found = Cells(label, mass.index_add_(0, label, weights))
        means = found.means(points, weights)
    return found


def _rows(cost: Tensor, b: Tensor, g: Tensor, epsilon: float) -> Tensor:
    return -epsilon * torch.logsumexp((g - cost) / epsilon + b.log(), 1)


def _missing(cost: Tensor, a: Tensor, b: Tensor, g: Tensor, epsilon: float) -> float:
    """Sum what the rows lack, or have too much, once prices (l,) have followed them."""
    f = _rows(cost, b, g, epsilon)
    share = (f - _rows(cost, b, _rows(cost.T, a, f, epsilon), epsilon)) / epsilon
    return float(a @ (share.exp() - 1).abs())


def _newton(cost: Tensor, a: Tensor, b: Tensor, g: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Raise the entropic dual of a stored cost (k, l) by Newton's method in the prices g (l,).

    Some half-steps come first: far away they lead nearer.
    """

    def rows(g: Tensor) -> tuple[Tensor, float]:
        f = _rows(cost, b, g, epsilon)
        return f, float(a @ f + b @ g)

    for _ in range(_NEAR):
        g = _rows(cost.T, a, _rows(cost, b, g, epsilon), epsilon)
    f, value = rows(g)
    for _ in range(_STEPS):
        share = torch.exp((f[:, None] + g - cost) / epsilon) * b
        mass = a @ share
        missing = b - mass
        if float(missing.abs().sum()) < _SETTLED:
            break
        curvature = torch.diag(mass + _RIDGE * b) - (share.T * a) @ share + torch.outer(b, b)
        factor = torch.linalg.cholesky_ex(curvature)[0]
        step, size = epsilon * torch.cholesky_solve(missing[:, None], factor)[:, 0], 1.0
        other = rows(g + step)
        while other[1] <= value and size > 1e-3:
            size /= 2
            other = rows(g + size * step)
        if other[1] <= value:
            # far away half-steps lead nearer
            g = _rows(cost.T, a, f, epsilon)
            other, size = rows(g), 0.0
        g, (f, value) = g + size * step, other
    return f, g
