"""The problem that is certified, in float64 on the host, and its parts of one row and one column.

With D_X = r 1' + 1 r' + G_X and D_Y = s 1' + 1 s' + G_Y the objective of a balanced plan is

    F(P) = constant + <L, P> - 2 alpha tr(G_X P G_Y P')
    L = (1 - alpha) M - 4 alpha (r s' + r (G_Y b)' + (G_X a) s')

for any r and s: those that centre the tables are chosen here.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from torchgw._errors import NumericalError
from torchgw._sinkhorn.duals import Array, ProductCost
from torchgw._tensors.operations import EQUAL, NOTHING

# Sums of squares of whole distances up to which values are told apart; what rounding is then, in
# units of what they differ by. [L1377]
_WHOLE, _SLACK = 1e9, 1e-5


class Factors(NamedTuple):
    """G = sum_r signs_r vectors_r vectors_r' of one side."""

    vectors: Array  # (n, d), the largest first
    signs: Array  # (d,)


@dataclass(frozen=True)
class Question:
    """Two tables of distances, weights of sum one, a linear cost, and where plans may hold mass."""

    D_X: Array  # (n, n)
    D_Y: Array  # (m, m)
    a: Array  # (n,)
    b: Array  # (m,)
    alpha: float
    M: Array | None  # (n, m)
    # points (n, d) whose inner products G is, times the sign -1 and a factor, where they are known
    points: tuple[Array | None, Array | None] = (None, None)
    # the pairs that may hold mass (n, m); None: all
    allowed: NDArray[np.bool_] | None = None

    # the name of its cutting planes
    method: str = "cutting planes"

    @property
    def tables(self) -> dict[str, Array]:
        """What a proof by cutting planes says of the tables."""
        (r, s), ((u, sigma), (v, tau)) = self.rows, self.factors
        return {"r": r, "s": s, "u": u, "v": v, "sigma": sigma, "tau": tau}

    @property
    def shape(self) -> tuple[int, int]:
        """Points of both sides."""
        return len(self.a), len(self.b)

    @property
    def is_assignment(self) -> bool:
        """Whether there are as many points on both sides, all of one weight."""
        a, b = self.a, self.b
        return len(a) == len(b) and bool((a == a[0]).all() and (b == b[0]).all())

    @property
    def is_symmetric(self) -> bool:
        """Whether no table is directed."""
        return all(bool((table == table.T).all()) for table in (self.D_X, self.D_Y))

    @cached_property
    def rows(self) -> tuple[Array, Array]:
        """The vectors r (n,) and s (m,) that centre symmetric tables."""
        sides = ((self.D_X, self.a), (self.D_Y, self.b))
        made = [table @ weight - weight @ table @ weight / 2 for table, weight in sides]
        return made[0], made[1]

    @cached_property
    def centred(self) -> tuple[Array, Array]:
        """G_X (n, n) and G_Y (m, m)."""
        pairs = zip((self.D_X, self.D_Y), self.rows, strict=True)
        x, y = (table - row[:, None] - row for table, row in pairs)
        return x, y

    @cached_property
    def factors(self) -> tuple[Factors, Factors]:
        """Eigenvectors of G_X and G_Y, each times the root of its eigenvalue."""
        x, y = (
            _eigenvectors(table) if points is None else _axes(points, weight)
            for table, points, weight in zip(
                self.centred, self.points, (self.a, self.b), strict=True
            )
        )
        return x, y

    @property
    def products(self) -> int:
        """How many products of factors the objective depends on."""
        return math.prod(len(side.signs) for side in self.factors)

    @property
    def is_concave(self) -> bool:
        """Whether all factors of both sides have one sign, so that some matching is best."""
        if not self.is_symmetric:
            return False
        signs = np.concatenate([side.signs for side in self.factors])
        return len(set(signs.tolist())) <= 1

    @cached_property
    def constant(self) -> float:
        """The part of the objective that no plan changes."""
        squares = self.a @ self.D_X**2 @ self.a + self.b @ self.D_Y**2 @ self.b
        r, s = self.rows
        return self.alpha * float(squares - 4 * (self.a @ r) * (self.b @ s))

    @cached_property
    def linear(self) -> ProductCost:
        """L, (n, m)."""
        (r, s), (x, y) = self.rows, self.centred
        left, right = np.column_stack([r, x @ self.a]), np.column_stack([s + y @ self.b, s])
        own = None if self.M is None else (1 - self.alpha) * self.M
        return ProductCost(-4 * self.alpha * left, right, own)

    @cached_property
    def rounding(self) -> float:
        """What values and bounds may be off by: gaps below it are none."""
        squares = self.a @ self.D_X**2 @ self.a + self.b @ self.D_Y**2 @ self.b
        own = 0.0
        if self.M is not None:
            open_ = self.M if self.allowed is None else self.M[self.allowed]
            own = float(np.abs(open_).max())
        return NOTHING * (self.alpha * float(squares) + (1 - self.alpha) * own)

    def attainable(self, bound: float) -> float:
        """Raise a bound of matchings to a value that one can have, where distances are whole."""
        x, y, n = self.D_X, self.D_Y, len(self.a)
        total = float((x**2).sum() + (y**2).sum())
        whole = all(bool((part == part.round()).all()) for part in (x, y))
        free = self.M is None and self.allowed is None
        if not free or self.alpha == 0 or not whole or total > _WHOLE:
            return bound
        # n^2 F / alpha = total - 2 <D_X, D_Y of partners>, where pairs count twice
        step = 4 if self.is_symmetric and not (x.diagonal().any() and y.diagonal().any()) else 2
        most = math.floor((total - bound * n**2 / self.alpha) / step + _SLACK)
        return max(bound, self.alpha * (total - step * most) / n**2)

    def slope(self, plan: Array) -> Array:
        """Linearise the objective at a plan (n, m), but for terms of rows and columns alone."""
        cross = self.D_X @ plan @ self.D_Y.T + self.D_X.T @ plan @ self.D_Y
        own = 0.0 if self.M is None else (1 - self.alpha) * self.M
        return own - 2 * self.alpha * cross

    def value(self, plan: Array) -> float:
        """Evaluate the objective of a plan (n, m)."""
        cross = float(np.einsum("ij,ij->", self.D_X @ plan @ self.D_Y.T, plan))
        squares = plan.sum(1) @ self.D_X**2 @ plan.sum(1) + plan.sum(0) @ self.D_Y**2 @ plan.sum(0)
        own = 0.0 if self.M is None else (1 - self.alpha) * float((self.M * plan).sum())
        return own + self.alpha * (float(squares) - 2 * cross)


class Moments(NamedTuple):
    """What the objective depends on of a plan: t = <L, P> and z = U' P V, (d, e)."""

    t: float
    z: Array


@dataclass(frozen=True)
class Points:
    """What `Question` is of tables: squared Euclidean distances of points, and their weights."""

    X: Array  # (n, d)
    Y: Array  # (m, e)
    a: Array
    b: Array
    alpha: float = 1.0

    method: str = "cutting planes of points"

    @cached_property
    def sides(self) -> tuple[tuple[Array, Array, Array], ...]:
        """Points in their principal axes, these axes as columns, and squares of their lengths."""
        found = []
        for points, weight in ((self.X, self.a), (self.Y, self.b)):
            centred = points - weight @ points
            axes = np.linalg.eigh((centred.T * weight) @ centred)[1][:, ::-1]
            found.append((centred @ axes, axes, (centred**2).sum(1)))
        return tuple(found)

    @property
    def tables(self) -> dict[str, Array]:
        """What a proof says of the points."""
        return {"axes_x": self.sides[0][1], "axes_y": self.sides[1][1]}

    @cached_property
    def factors(self) -> tuple[Factors, Factors]:
        """The factors of -2 <x, x'> on both sides."""
        x, y = (Factors(np.sqrt(2) * side, -np.ones(side.shape[1])) for side, _, _ in self.sides)
        return x, y

    @cached_property
    def linear(self) -> ProductCost:
        """L = -4 alpha |x|^2 |y|^2."""
        (_, _, x), (_, _, y) = self.sides
        return ProductCost(-4 * self.alpha * x[:, None], y[:, None])

    @cached_property
    def constant(self) -> float:
        """The part of the objective that no plan changes."""
        total, spread = 0.0, 1.0
        for (points, _, square), weight in zip(self.sides, (self.a, self.b), strict=True):
            mean = float(weight @ square)
            total += float(2 * weight @ square**2 + 2 * mean**2)
            total += 4 * float((((points.T * weight) @ points) ** 2).sum())
            spread *= mean
        return self.alpha * (total - 4 * spread)

    @property
    def rounding(self) -> float:
        """What values may be off by: plans are read in float64, from potentials in float32."""
        return EQUAL * self.constant

    def value(self, plan: Moments) -> float:
        """Evaluate the objective of a plan."""
        return self.constant + plan.t - 2 * self.alpha * float((plan.z**2).sum())

    def read(self, plan: Any) -> Moments:
        """Read a plan of exact weights, an operator."""
        right = np.hstack([self.linear.right, self.factors[1].vectors])
        moved = (plan @ torch.from_numpy(right).to(plan.device)).double().cpu().numpy()
        t = float(np.einsum("ij,ij->", self.linear.left, moved[:, :1]))
        return Moments(t, self.factors[0].vectors.T @ moved[:, 1:])


def check_none_below(number: float, least: float, rounding: float) -> None:
    """Refuse a number of a plan that is less than what is proven of all plans, or none at all."""
    if not number >= least - rounding:
        raise NumericalError(
            f"A plan costs {least - number:.3g} less than what is proven of all plans, where "
            f"rounding is {rounding:.1g}: one of the two is wrong, so that nothing is certified. "
            "Please report it, with the data."
        )


class Incumbent:
    """The best plan so far, and how plans that are seen are led to better ones nearby."""

    def __init__(self, question: Question, plan: Array, improve: Callable[[Array], Array]) -> None:
        self._question, self._improve = question, improve
        self.plan, self.value = plan, question.value(plan)

    def within(self, gap: float, bound: float) -> bool:
        """Whether no plan is better by more than a share of the value, or than rounding."""
        return self.value - bound <= gap * abs(self.value) + self._question.rounding

    def see(self, plan: Array) -> None:
        """Keep what a plan (n, m) leads to, if that costs less."""
        for found in (plan, self._improve(plan)):
            value = self._question.value(found)
            if value < self.value:
                self.plan, self.value = found, value


def _axes(points: Array, weights: Array) -> Factors:
    """Turn centred points to their principal axes."""
    centred = points - weights @ points
    _, sizes, turned = np.linalg.svd(centred, full_matrices=False)
    kept = sizes > NOTHING * sizes[:1]
    return Factors(centred @ turned[kept].T, np.full(int(kept.sum()), -1.0))


def _eigenvectors(table: Array) -> Factors:
    values, vectors = np.linalg.eigh((table + table.T) / 2)
    order = np.argsort(-np.abs(values))
    values, vectors = values[order], vectors[:, order]
    kept = np.abs(values) > NOTHING * np.abs(values[:1])
    return Factors(vectors[:, kept] * np.sqrt(np.abs(values[kept])), np.sign(values[kept]))
