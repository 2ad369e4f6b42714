"""Bounds for as many points of the plane as a GPU matches: ``certificates many --points 100000``.

Cutting planes as in ``torchgw._certify.cuts``, whose linear problems are not solved. Prices of
cells of near points, by entropic iterations from a large epsilon down, are extended to all points,
iterated there some times, and raised by a c-transform in float64: what they prove then is a cut.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from torchgw._certify import cuts
from torchgw._sinkhorn.choose import choose_backend
from torchgw._sinkhorn.contract import PreparedProblem
from torchgw._sinkhorn.duals import ProductCost
from torchgw._sinkhorn.loop import sinkhorn
from torchgw._sinkhorn.problem import FactoredCost, LinearProblem
from torchgw._typing import Marginals, Potentials

Array = np.ndarray
# Cells whose own optimum says where the best plan is; the epsilon of k cells, as a share of the
# constant part divided by k; iterations at each; the epsilon of the plan, as a share of it. [L1554]
_FEW, _EPSILON, _ITERATIONS, _LAST = 300, 1.2, 60, 3e-5
# Iterations of all points: four at that epsilon, then as many at half of it. Where a cut is no
# deeper, one half more, up to so many.
_OWN, _HALVES = 4, 5


def bound(name: str, X: Array, Y: Array, cells: int, gap: float, seconds: float) -> None:
    """Print the gap of a pair of clouds in the plane as it falls."""
    start, device = _clock(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    X, Y = (_normal(side) for side in (X, Y))
    few = _Question(X, Y, min(_FEW, cells // 2), device)
    planes = cuts.CuttingPlanes(few, np.outer(few.a, few.b), 1e-2)  # type: ignore[arg-type]
    planes.run(seconds / 10, 1e-2)
    z = 2 * few.x.T @ planes.plan @ few.y
    question = _Question(X, Y, cells, device)
    prices = _Prices(question, device)
    value, last = np.inf, prices.epsilon
    least = min(last, _LAST * question.constant)
    for epsilon in (last, last, least, least):
        found, other = prices.plan(z, epsilon, start + seconds / 2)
        print(f"   a plan of {found:.6f}, {_clock() - start:.1f} s", flush=True)
        if found < value:
            value, z = found, other
    made = _Cuts.of(question, prices, gap)
    for turn in (z, -z):
        made.add(turn.ravel()[made.active])
    met = [1e-1, 3e-2, 1e-2, 5e-3, 3e-3, 2e-3, 1e-3]
    made.value = value
    while made.left() > gap and _clock() - start < seconds:
        if not made.deeper():
            if len(prices.own) > _HALVES:
                break
            prices.own = [*prices.own[:-1], 2 * prices.own[-1], 2 * prices.own[-1]]
        while met and made.left() <= met[0]:
            print(f"   {met.pop(0):g}: {_clock() - start:.1f} s, {made.count} cuts", flush=True)
    share = made.left() * value / question.constant
    print(
        f"{name}, {len(X)} points, {cells} cells, {device}: value {value:.6f}, "
        f"{value / question.constant:.4f} of the constant; gap {made.left():.2e} of the value, "
        f"{share:.2e} of the constant; {made.count} cuts, {_clock() - start:.1f} s, of which cells "
        f"{prices.spent[0]:.1f}, iterations of points {prices.spent[1]:.1f}, c-transforms "
        f"{prices.spent[2]:.1f}",
        flush=True,
    )


def _clock() -> float:
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.monotonic()


def _normal(points: Array) -> Array:
    """Centre points (n, 2), of mean square one."""
    centred = points - points.mean(0)
    return np.asarray(centred / np.sqrt((centred**2).sum(1).mean()))


def _cells(points: Tensor, count: int) -> tuple[Array, Array, Array]:
    """Means (k, 2), mean squares (k,) and weights (k,) of cells."""
    chosen = torch.randperm(len(points), generator=torch.Generator().manual_seed(0))[:count]
    means = points[chosen.to(points.device)]
    for _ in range(25):
        label = torch.cat([torch.cdist(part, means).argmin(1) for part in points.split(8192)])
        size = torch.bincount(label, minlength=count).double()
        sums = torch.zeros_like(means).index_add_(0, label, points)
        means = torch.where(size[:, None] > 0, sums / size.clamp(min=1)[:, None], means)
    squares = torch.zeros_like(size).index_add_(0, label, points.square().sum(1))
    kept = size > 0
    found = means[kept], squares[kept] / size[kept], size[kept] / len(points)
    mean, square, weight = (part.cpu().numpy() for part in found)
    return mean, square, weight


class _Question:
    """What cutting planes ask of a problem: that of the cells, whose plans are plans of points."""

    allowed, alpha, M = None, 1.0, None

    def __init__(self, X: Array, Y: Array, count: int, device: torch.device) -> None:
        self.X, self.Y = (torch.from_numpy(side).to(device) for side in (X, Y))
        (self.x, self.xs, self.a), (self.y, self.ys, self.b) = (
            _cells(side, count) for side in (self.X, self.Y)
        )
        roots = np.sqrt(2)
        self.factors = (self.x * roots, -np.ones(2)), (self.y * roots, -np.ones(2))
        self.linear = ProductCost(-4 * self.xs[:, None], self.ys[:, None])
        squares = [(side**2).sum(1) for side in (X, Y)]
        self.constant = -4 * float(squares[0].mean() * squares[1].mean())
        for square, side in zip(squares, (X, Y), strict=True):
            spread = 2 * (square**2).mean() + 2 * square.mean() ** 2
            self.constant += float(spread + 4 * ((side.T @ side / len(side)) ** 2).sum())

    def value(self, plan: Array) -> float:
        """Evaluate a plan of cells."""
        t, z = -4 * self.xs @ plan @ self.ys, 2 * self.x.T @ plan @ self.y
        return self.constant + float(t - 2 * (z**2).sum())


class _Prices:
    """Prices of all points, and what they prove: in place of an exact transport."""

    def __init__(self, question: _Question, device: torch.device) -> None:
        self._question = q = question
        self.prices = np.zeros(len(q.b))
        self.epsilon, self.own = _EPSILON * q.constant / len(q.a), [_OWN, _OWN]
        self.slope = np.zeros((2, 2))
        self.spent = [0.0, 0.0, 0.0]
        self._dtype = torch.float32 if device.type == "cuda" else torch.float64
        self._backend = choose_backend("auto", device, self._dtype)
        cells = [torch.from_numpy(part).to(device) for part in (q.xs, q.x, q.ys, q.y)]
        self._cells = cells[0], cells[1], torch.column_stack(cells[2:])
        self._points = q.X.square().sum(1), q.X, torch.column_stack([q.Y.square().sum(1), q.Y])
        self._weights = [torch.from_numpy(part).to(device) for part in (q.a, q.b)]
        self._even = [torch.full_like(side[:, 0], 1 / len(side)) for side in (q.X, q.Y)]

    def _ready(
        self, left: Tensor, right: Tensor, a: Tensor, b: Tensor, epsilon: float
    ) -> PreparedProblem:
        cost = FactoredCost.of_products(-left.to(self._dtype), right.to(self._dtype))
        return self._backend.prepare(LinearProblem(cost, Marginals(a, b), epsilon))

    def _iterated(self, ready: PreparedProblem, g: Tensor, times: int) -> Tensor:
        g = g.to(self._dtype)
        for _ in range(times):
            g = ready.softmin_columns(ready.softmin_rows(g))
        return g.double()

    def _found(self, *, cold: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Factors (n, 3) and (m, 3) of the cost at the slope, and prices (m,) of all points."""
        slope = torch.from_numpy(self.slope).to(self._question.X)
        left, few = (
            torch.column_stack([-4 * side[0], 2 * side[1] @ slope])
            for side in (self._points, self._cells)
        )
        start, right, columns = _clock(), self._points[2], self._cells[2]
        g, level = torch.from_numpy(self.prices).to(left), self.epsilon * (256 if cold else 4)
        while level >= self.epsilon:
            g = self._iterated(self._ready(few, columns, *self._weights, level), g, _ITERATIONS)
            level /= 4
        self.prices = g.cpu().numpy()
        f = self._ready(few, columns, *self._weights, self.epsilon).softmin_rows(g.to(self._dtype))
        even = self._ready(few, right, self._weights[0], self._even[1], self.epsilon)
        g, between = even.softmin_columns(f).double(), _clock()
        for part, times in enumerate(self.own):
            ready = self._ready(left, right, *self._even, self.epsilon / 2**part)
            g = self._iterated(ready, g, times)
        self.spent[0] += between - start
        self.spent[1] += _clock() - between
        return left, right, g

    def reach(self, cost: ProductCost, floor: float, enough: float) -> tuple[None, None, float]:
        """Compute what prices prove of a slope: the c-transform, in float64."""
        left, right, g = self._found(cold=not np.isfinite(floor))
        start = _clock()
        rows = max(1, (2**25 if g.is_cuda else 2**18) // len(g))
        low, total = torch.full_like(g, torch.inf), 0.0
        for part in left.split(rows):
            block = torch.addmm(-g, part, right.T)
            f = block.amin(1)
            low = torch.minimum(low, (block - f[:, None]).amin(0))
            total += float(f.sum())
        self.spent[2] += _clock() - start
        return None, None, total / len(left) + float((g + low).mean())

    def plan(self, z: Array, epsilon: float, end: float) -> tuple[float, Array]:
        """Value and z (2, 2) of a plan of all points that costs about the least at z."""
        self.slope = -4 * z
        left, right, g = self._found(cold=True)
        a, b = self._even
        level = self.epsilon
        while True:
            ready = self._ready(left, right, a, b, level)
            done = sinkhorn(ready, ready.half_steps(g.to(self._dtype)), max_iter=200, tol=1e-6)
            g = ready.softmin_columns(done.potentials.f).double()
            if level <= epsilon or _clock() > end:
                break
            level = max(level / 2, epsilon)
        found = Potentials(done.potentials.f, g.to(self._dtype))
        sides = torch.column_stack([torch.ones_like(b), right])
        moved = ready.apply(found, sides.to(self._dtype)).double()
        # rows and columns that have too much are scaled down, and the rest is spread
        share = (a / moved[:, 0]).clamp(max=1)
        back = ready.T.apply(Potentials(found.g, found.f), share.to(self._dtype)[:, None])
        rows, columns = a - share * moved[:, 0], (b - back.double()[:, 0]).clamp(min=0)
        moved = moved * share[:, None]
        moved += torch.outer(rows, columns @ sides) / columns.sum().clamp(min=1e-300)
        t = -4 * float(self._points[0] @ moved[:, 1])
        other = (2 * self._question.X.T @ moved[:, 2:]).cpu().numpy()
        return self._question.constant + t - 2 * float((other**2).sum()), other


class _Cuts(cuts.CuttingPlanes):
    """Cutting planes of the cells, as high as prices of all points prove."""

    @classmethod
    def of(cls, question: _Question, prices: _Prices, gap: float) -> _Cuts:
        """Begin, with these prices for an exact transport."""
        before = cuts.Transport
        cuts.Transport = lambda *weights: prices  # type: ignore[assignment, misc]
        try:
            return cls(question, np.outer(question.a, question.b), gap)  # type: ignore[arg-type]
        finally:
            cuts.Transport = before  # type: ignore[misc]

    @property
    def active(self) -> Array:
        """The numbers that are followed."""
        return self._active

    @property
    def count(self) -> int:
        """How many cuts there are."""
        return len(self._slopes)

    def _cut(self, slope: Array, *others: object) -> Array | None:
        whole = self._slope.copy()
        whole[self._active] = slope
        self._transport.slope = whole.reshape(2, 2)  # type: ignore[attr-defined]
        return super()._cut(slope, *others)  # type: ignore[arg-type]

    def left(self) -> float:
        """Say how far the bound is from the value, as a share of it."""
        return (self.value - self.bound) / self.value

    def add(self, z: Array) -> None:
        """Cut where the objective is linearised at z."""
        self._cut(-2 * self._k * z, None, 0.0)
        self.bound, self._lowest = self._least()

    def deeper(self) -> bool:
        """Cut the lowest vertex, and say whether that cut it off."""
        vertex = self._lowest
        self._cut(-2 * self._k * vertex, self._near, 0.0)
        self.bound, self._lowest = self._least()
        return not (vertex == self._lowest).all()
