"""Cutting planes for tables of few factors: the objective is concave in few numbers of a plan.

With G_X = sum_r sigma_r u_r u_r' and G_Y alike,

    F = constant + t - sum_k c_k z_k^2,   t = <L, P>,  z_k = u_k' P v_k,  c_k = 2 alpha sigma tau

Every linear problem gives a cut, t + w . z >= h(w), that all plans meet. A concave function is
least at a vertex of the polytope of all cuts. The linear problem of the objective linearised there
cuts the vertex off and gives a plan [1]_. Numbers with c_k < 0 count by a tangent, which joins t.
Not all others are followed: z_ij = |u_i| |v_j| R_ij, where the rows and the columns of R have
squares of sum one at most, as A^-1/2 P B^-1/2 is a contraction. With c_ij z_ij^2 = m_ij R_ij^2,

    sum_ij m_ij R_ij^2 <= sum_i p_i + sum_j q_j - sum_followed (p_i + q_j - m_ij) R_ij^2

for all p, q >= 0 with p_i + q_j >= m_ij where (i, j) is not followed: the long axes of flat clouds
that meet leave little to what lies across.

References
----------
.. [1] M. Ryner, J. Kronqvist, J. Karlsson. Globally solving the Gromov-Wasserstein problem for
   point clouds in low dimensional Euclidean spaces. NeurIPS 2023.
"""

from time import monotonic
from typing import Any

import numpy as np
import scipy

from torchgw._certify.question import Points, Question, check_none_below
from torchgw._certify.tables import Bound
from torchgw._certify.vertices import Places, Polytope
from torchgw._problem.limits import CPU
from torchgw._sinkhorn.duals import Array, ProductCost, largest_pairing
from torchgw._tensors.operations import EQUAL

# Numbers whose square is followed exactly: a polytope in ten dimensions has a hundred thousand
# vertices below the best value after a hundred cuts. And vertices at most, of a kilobyte each.
# [L1354, L1671]
ACTIVE = 9
_VERTICES = 600_000
# The part of the gap by which bounds end below the best value: it is met, not missed by rounding.
# A choice.
_INSIDE = 0.99
# The part of the gap that what is not followed may lose at the best plan. [L1676, L1740]
_UNFOLLOWED = 0.75
# Times the gap by which a cut has to raise its vertex: less takes a better solver. [L1408]
_DEPTH = 1.25
# Sizes of factors of which no mass is held. A choice.
_TINY = 1e-75


class CuttingPlanes:
    """The cuts, the polytope that they leave, and the best plan so far.

    What is not followed may lose a share of the gap at the plan that is given, and more at others:
    no bound is above what `run` has seen there. With ``whole`` as much as can be is followed. The
    ``solver`` is `Transport`, or has its `prices` and `reach` without an exact solution.
    """

    def __init__(
        self,
        question: Question | Points,
        plan: Any,
        gap: float,
        solver: Any,
        *,
        whole: bool = False,
    ) -> None:
        self.question, self._transport, self._gap = question, solver, gap
        (u, sigma), (v, tau) = question.factors
        self._left, self._right = np.repeat(u, v.shape[1], 1), np.tile(v, (1, u.shape[1]))
        self._c = c = 2 * question.alpha * np.outer(sigma, tau).ravel()
        # the least and the largest z_k of all plans
        pairs = list(zip(self._left.T, self._right.T, strict=True))
        high = np.array([largest_pairing(x, question.a, y, question.b) for x, y in pairs])
        low = np.array([-largest_pairing(-x, question.a, y, question.b) for x, y in pairs])
        self.plan, self.value = plan, question.value(plan)
        # what the objective of what is followed was at least, of all plans
        self._reached = np.inf
        t, z = self._read(plan)
        check_none_below(float(np.min([self.value, *z])), -np.inf, 0.0)
        sizes = np.outer(*(spread(*side) for side in ((u, question.a), (v, question.b))))
        lost = 0.0 if whole else _UNFOLLOWED * gap * abs(self.value)
        self._active, self._shares = _followed(
            c.reshape(sizes.shape) * sizes, z**2 / sizes.ravel(), lost
        )
        convex = c < 0
        self._slope = np.where(convex, -2 * c * z, 0.0)
        # where the tangents touch
        self._touched = z
        rest = float((c * z**2)[convex].sum()) - float(np.concatenate(self._shares).sum())
        self._constant = question.constant + rest
        left, right, own = question.linear
        self._linear = ProductCost(
            np.hstack([left, self._left * self._slope]), np.hstack([right, self._right]), own
        )
        kept = self._active
        given = np.add.outer(*self._shares).ravel() / sizes.ravel()
        self._u, self._v = self._left[:, kept], self._right[:, kept]
        self._k = (c - given)[kept].clip(min=0.0)
        # value, t and z of the best plan
        self._best = self.value, t + float(self._slope @ z), z[kept]
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
        top = np.append(np.ones(len(kept)), 1 + EQUAL)
        self._polytope = Polytope(np.zeros(len(top)), top, self._costs, self._most)
        self._cut(-self._k * (low + high)[kept])
        self._descend(z[kept])
        self.bound, self._lowest = self._least(z[kept])

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
            shares = np.linalg.lstsq(sums, right, rcond=None)[0].clip(min=0)
            near_prices = np.array([self._prices[k] for k in near])
            self._transport.prices = shares @ near_prices / (shares.sum() or 1.0)
        plan, f, height = self._transport.reach(cost, floor, enough)
        if self._polytope is not None:
            # by random shares: no vertex lies on more faces than there are dimensions
            height -= EQUAL * self._scale * self._generator.random()
            normal = np.append(slope * self._width / self._scale, 1.0)
            raised = (height - slope @ self._low - self._heights[0]) / self._scale
            self._polytope.cut(normal, raised, self._most)
        self._slopes.append(slope)
        self._potentials.append(f)
        self._heights.append(height)
        self._prices.append(self._transport.prices)
        self._check(*self._best)
        return None if plan is None else self._see(plan)

    def _cost(self, slope: Array) -> ProductCost:
        """Make the linear problem of a slope."""
        left, right, own = self._linear
        return ProductCost(np.hstack([left, self._u * slope]), np.hstack([right, self._v]), own)

    def _see(self, plan: Any) -> Array:
        """Keep a plan that costs less than the best, and return its z."""
        t, z = self._read(plan)
        value = self.question.constant + t - float(self._c @ z**2)
        kept: Array = z[self._active]
        seen = value, t + float(self._slope @ z), kept
        followed = self._check(*seen)
        if value < self.value:
            self.plan, self.value, self._best = plan, value, seen
        self._reached = min(self._reached, followed)
        return kept

    def _check(self, value: float, t: float, z: Array) -> float:
        """Refuse numbers that no plan has: outside of the box, below a cut, or of less value.

        Return the objective of what is followed.
        """
        high, followed = self._low + self._width, self._constant + t - float(self._k @ z**2)
        # what the objective changes by at most
        steep = 2 * self._k * np.maximum(np.abs(self._low), np.abs(high))
        above = [steep * (z - self._low), steep * (high - z), [value - followed]]
        above.append(t + np.array(self._slopes) @ z - self._heights)
        check_none_below(float(np.concatenate(above).min()), 0.0, self.question.rounding)
        return followed

    def _descend(self, z: Array | None) -> None:
        """Follow the linearised objective from z as long as plans cost less."""
        before = np.inf
        while z is not None and self.value < before - EQUAL * abs(self.value):
            before = self.value
            z = self._cut(-2 * self._k * z)

    @property
    def short(self) -> bool:
        """Whether the gap cannot be met unless more is followed."""
        return self._reached < self._most

    @property
    def _most(self) -> float:
        """What meets the gap: vertices that cost more do not matter."""
        return self.value - _INSIDE * self._gap * abs(self.value)

    @property
    def _enough(self) -> float:
        """Where bounds end."""
        return self._reached - self._gap * abs(self.value) / 2 if self.short else self._most

    def _costs(self, x: Array) -> Array:
        """Compute what points (N, D) of the polytope cost."""
        z = self._low + x[:, :-1] * self._width
        return self._constant + self._heights[0] + self._scale * x[:, -1] - z**2 @ self._k

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
        while self.bound < self._enough and monotonic() < end:
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
        return Bound(self.question.method, self.bound, {
            **self.question.tables, "active": self._active, "touched": self._touched,
            "rows": self._shares[0], "columns": self._shares[1], "slopes": np.array(self._slopes),
            "heights": np.array(self._heights), "potentials": np.array(self._potentials),
        })  # fmt: skip


def spread(u: Array, weights: Array) -> Array:
    """Find sizes (d,) with |U x|^2 of weights A at most sum_i sizes_i x_i^2, for factors (n, d)."""
    gram = (u.T * weights) @ u
    size = gram.diagonal().clip(min=_TINY)
    together = np.linalg.eigvalsh(gram / np.sqrt(np.outer(size, size)))
    return size * together.max(initial=1.0)


def _followed(m: Array, squares: Array, lost: float) -> tuple[Any, tuple[Array, Array]]:
    """Choose what is followed, (k,), and p (d,) and q (e,) for the others.

    Of the largest m (d, e) those are left out, one by one, without which the bound at R with these
    ``squares`` (d e,) is short by ``lost`` at most.
    """
    large = np.argsort(-m.ravel())[:ACTIVE]
    kept = large[m.ravel()[large] > 0]
    loss, shares = _shares(m, squares, kept)
    lost = max(loss, lost + EQUAL * float(m.clip(min=0).sum()))
    while len(kept):
        tries = [_shares(m, squares, np.delete(kept, k)) for k in range(len(kept))]
        k = int(np.argmin([loss for loss, _ in tries]))
        if tries[k][0] > lost:
            break
        kept, shares = np.delete(kept, k), tries[k][1]
    return np.sort(kept), shares


def _shares(m: Array, squares: Array, kept: Places) -> tuple[float, tuple[Array, Array]]:
    """Find p and q of the least loss at R with these squares, a linear problem, and that loss."""
    d, e = m.shape
    rest = m.ravel().clip(min=0)
    rest[kept] = 0
    # p_i + q_j is no less than the rest, nor than what it takes off the numbers that are followed
    rows = np.zeros((d * e, d + e + len(kept)))
    rows[:, :d] = -np.repeat(np.eye(d), e, 0)
    rows[:, d : d + e] = -np.tile(np.eye(e), (d, 1))
    rows[kept, d + e + np.arange(len(kept))] = 1
    costs, unit = np.concatenate([np.ones(d + e), -squares[kept]]), float(np.abs(m).max())
    most = [(0, None)] * (d + e) + [(0, each) for each in m.ravel()[kept] / unit]
    found = unit * scipy.optimize.linprog(costs, rows, -rest / unit, bounds=most).x
    p, q = found[:d], found[d : d + e]
    p = p + (rest.reshape(d, e) - p[:, None] - q).max(1).clip(min=0)
    off = np.minimum(np.add.outer(p, q).ravel(), m.ravel())[kept] @ squares[kept]
    return float(p.sum() + q.sum() - off - rest @ squares), (p, q)
