"""Cutting planes for tables of few factors: the objective is concave in few numbers of a plan.

With G_X = sum_r sigma_r u_r u_r' and G_Y alike,

    F = constant + t - sum_k c_k z_k^2,   t = <L, P>,  z_k = u_k' P v_k,  c_k = 2 alpha sigma tau

Every linear problem gives a cut, t + w . z >= h(w), that all plans meet. A concave function is
least at a vertex of the polytope of all cuts. The linear problem of the objective linearised there
cuts the vertex off and gives a plan [1]_. Numbers with c_k < 0 count by a tangent, and those that
matter least where there are many by their secant in the range that sorting gives: both join t.

References
----------
.. [1] M. Ryner, J. Kronqvist, J. Karlsson. Globally solving the Gromov-Wasserstein problem for
   point clouds in low dimensional Euclidean spaces. NeurIPS 2023.
"""

from time import monotonic
from typing import Any, Protocol

import numpy as np
import scipy

from torchgw._certify.question import Factors
from torchgw._certify.tables import Bound
from torchgw._certify.vertices import Places, Polytope
from torchgw._problem.limits import CPU
from torchgw._sinkhorn.duals import Array, ProductCost, largest_pairing

# Numbers whose square is followed exactly: a polytope in ten dimensions has a hundred thousand
# vertices below the best value after a hundred cuts. And vertices at most, of a kilobyte each.
# [L1354, L1671]
ACTIVE = 9
_VERTICES = 600_000
# The part of the gap by which bounds end below the best value: it is met, not missed by rounding.
# A choice.
_INSIDE = 0.99
# Numbers whose squares together matter less than this share have a secant in any case. [L1354]
_NEGLIGIBLE = 1e-9
# The part of the gap that is left to secants. [L1376]
_SECANTS = 0.25
# Cuts are lowered by random shares of this part of the range of t, so that no vertex lies on more
# faces than there are dimensions. [L1354]
_LOWERED = 1e-9
# Times the gap by which a cut has to raise its vertex: less takes a better solver. [L1408]
_DEPTH = 1.25
# Relative gain that is worth another step from a plan to the next. [L1354]
_GAIN = 1e-9


class Objective(Protocol):
    """What cutting planes ask of a problem, whose plans are of a kind that it reads."""

    @property
    def a(self) -> Array: ...
    @property
    def b(self) -> Array: ...
    @property
    def alpha(self) -> float: ...
    @property
    def method(self) -> str: ...
    @property
    def factors(self) -> tuple[Factors, Factors]: ...
    @property
    def linear(self) -> ProductCost: ...
    @property
    def constant(self) -> float: ...
    @property
    def tables(self) -> dict[str, Array]: ...
    def value(self, plan: Any) -> float: ...


class Solver(Protocol):
    """What proves cuts: `Transport`, or prices without an exact solution."""

    prices: Array

    def reach(self, cost: ProductCost, floor: float, enough: float) -> tuple[Any, Array, float]: ...


class CuttingPlanes:
    """The cuts, the polytope that they leave, and the best plan so far."""

    def __init__(self, question: Objective, plan: Any, gap: float, solver: Solver) -> None:
        self.question, self._transport, self._gap = question, solver, gap
        (u, sigma), (v, tau) = question.factors
        self._left, self._right = np.repeat(u, v.shape[1], 1), np.tile(v, (1, u.shape[1]))
        self._c = c = 2 * question.alpha * np.outer(sigma, tau).ravel()
        low, high = self._ranges()
        self.plan, self.value = plan, question.value(plan)
        _, z = self._read(plan)
        matter = np.where(c > 0, c * (high - low) ** 2, 0)
        order = np.argsort(-matter)
        # what the secants of those from each on are below the squares at most
        missed = matter[order][::-1].cumsum()[::-1] / 4
        few = missed > _NEGLIGIBLE * matter.sum() + _SECANTS * gap * abs(self.value)
        self._active = np.sort(order[:ACTIVE][few[:ACTIVE]])
        passive = np.setdiff1d(np.arange(len(c)), self._active)
        self._slope = np.zeros_like(c)
        self._slope[passive] = np.where(c > 0, -c * (low + high), -2 * c * z)[passive]
        # where the tangents touch
        self._touched = z
        rest = np.where(c > 0, c * low * high, c * z**2)[passive].sum()
        self._constant = question.constant + float(rest)
        left, right, own = question.linear
        self._linear = ProductCost(
            np.hstack([left, self._left * self._slope]), np.hstack([right, self._right]), own
        )
        kept = self._active
        self._u, self._v, self._k = self._left[:, kept], self._right[:, kept], c[kept]
        self._low, self._width = low[kept], (high - low)[kept]
        self._depth = _DEPTH if len(kept) <= CPU.shallow_cuts else np.inf
        self._slopes: list[Array] = []
        self._potentials: list[Array] = []
        self._heights: list[float] = []
        self._prices: list[Array] = []
        self._generator = np.random.default_rng(0)
        self._polytope: Polytope | None = None
        self._cut(np.zeros(len(kept)))
        # plans above cost more than the best
        bend = float(self._k @ np.maximum(low**2, high**2)[kept])
        self._scale = max(self.value - self._constant + bend - self._heights[0], 0.0) or 1.0
        top = np.append(np.ones(len(kept)), 1 + _LOWERED)
        self._polytope = Polytope(np.zeros(len(top)), top, self._costs, self._most)
        self._cut(-self._k * (low + high)[kept])
        self._descend(z[kept])
        self.bound, self._lowest = self._least(z[kept])

    def _ranges(self) -> tuple[Array, Array]:
        """Compute the least and the largest z_k of all plans."""
        a, b = self.question.a, self.question.b
        pairs = list(zip(self._left.T, self._right.T, strict=True))
        low = [-largest_pairing(-u, a, v, b) for u, v in pairs]
        return np.array(low), np.array([largest_pairing(u, a, v, b) for u, v in pairs])

    def _read(self, plan: Any) -> tuple[float, Array]:
        """Compute t and z of a plan."""
        plan = scipy.sparse.coo_array(plan)
        z = np.einsum("ik,ik->k", self._left, plan @ self._right)
        return self.question.linear.of(plan), z

    def _cut(
        self,
        slope: Array,
        near: Places | None = None,
        floor: float = np.inf,
        enough: float = np.inf,
    ) -> Array | None:
        """Add the cut of a slope w, at a height that is ``enough`` or about the largest.

        The prices to begin with are a mean of those of the cuts ``near``, or those of the nearest.
        Return z of the plan there, if there is one, after the best has seen it.
        """
        cost = self._cost(slope)
        if self._slopes:
            away = (np.array(self._slopes) - slope) * self._width
            if near is None:
                near = (away**2).sum(1).argmin()[None]
            # a mean of slopes that is about this one
            sums = np.vstack(
                [away[near].T, np.full(len(near), np.abs(away[near]).max(initial=0.0) or 1.0)]
            )
            right = np.append(np.zeros(len(slope)), sums[-1, 0])
            shares = np.linalg.lstsq(sums, right)[0].clip(min=0)
            near_prices = np.array([self._prices[k] for k in near])
            self._transport.prices = shares @ near_prices / (shares.sum() or 1.0)
        plan, f, height = self._transport.reach(cost, floor, enough)
        if self._polytope is not None:
            height -= _LOWERED * self._scale * self._generator.random()
            normal = np.append(slope * self._width / self._scale, 1.0)
            raised = (height - slope @ self._low - self._heights[0]) / self._scale
            self._polytope.cut(normal, raised, self._most)
        self._slopes.append(slope)
        self._potentials.append(f)
        self._heights.append(height)
        self._prices.append(self._transport.prices)
        return None if plan is None else self._see(plan)

    def _cost(self, slope: Array) -> ProductCost:
        """Make the linear problem of a slope."""
        left, right, own = self._linear
        return ProductCost(np.hstack([left, self._u * slope]), np.hstack([right, self._v]), own)

    def _see(self, plan: Any) -> Array:
        """Keep a plan that costs less than the best, and return its z."""
        t, z = self._read(plan)
        value = self.question.constant + t - float(self._c @ z**2)
        if value < self.value:
            self.plan, self.value = plan.toarray(), value
        kept: Array = z[self._active]
        return kept

    def _descend(self, z: Array | None) -> None:
        """Follow the linearised objective from z as long as plans cost less."""
        before = np.inf
        while z is not None and self.value < before - _GAIN * abs(self.value):
            before = self.value
            z = self._cut(-2 * self._k * z)

    @property
    def _most(self) -> float:
        """What meets the gap: vertices that cost more do not matter."""
        return self.value - _INSIDE * self._gap * abs(self.value)

    def _costs(self, x: Array) -> Array:
        """Compute what points (N, D) of the polytope cost."""
        z = self._low + x[:, :-1] * self._width
        found: Array = self._constant + self._heights[0] + self._scale * x[:, -1] - z**2 @ self._k
        return found

    def _least(self, before: Array) -> tuple[float, Array]:
        """Find the vertex of least cost: the bound, and its z, or what was there before."""
        assert self._polytope is not None
        costs = self._polytope.costs
        if not (costs < self._most).any():
            return self._most, before
        place = int(costs.argmin())
        # its cuts; of those before there are the faces of the box, and the first is none of these
        cuts = self._polytope.faces[place] - 2 * len(self._k) - 1
        self._near = cuts[cuts > 0] if (cuts > 0).any() else None
        return float(costs[place]), self._low + self._polytope.vertices[place, :-1] * self._width

    def run(self, seconds: float) -> None:
        """Cut until no plan costs less than the best by more than the gap, or time is up."""
        end = monotonic() + seconds
        assert self._polytope is not None
        while self.bound < self._most and monotonic() < end:
            if len(self._polytope.costs) > _VERTICES:
                return
            before, vertex = self.value, self._lowest
            # t + w . z of the vertex; the largest height is above it by the gap at least
            floor = self.bound - self._constant - float(self._k @ vertex**2)
            enough = floor + self._depth * (self.value - self.bound)
            z = self._cut(-2 * self._k * vertex, self._near, floor, enough)
            if self.value < before:
                self._descend(z)
            self.bound, self._lowest = self._least(vertex)
            if (vertex == self._lowest).all():
                # rounding is all that is left
                return

    def proof(self) -> Bound:
        """Collect what proves the bound: the cuts and their potentials."""
        return Bound(self.question.method, min(self.bound, self.value), {
            **self.question.tables, "active": self._active, "touched": self._touched,
            "slopes": np.array(self._slopes), "heights": np.array(self._heights),
            "potentials": np.array(self._potentials),
        })  # fmt: skip
