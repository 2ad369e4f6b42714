"""A problem in standard form, which it shares with its twins: the same problem written differently.

Points without weight are left out, and points that see all others alike are put together, whose
mass a plan may divide as it likes. The others are in an order that their distances and weights
tell, of two sides the one with fewer points comes first, and distances are in a unit of their own,
rounded to single precision, so that moving or scaling points changes no bit. What is drawn for such
a problem, and every comparison of nearly equal numbers, is then the same for all twins.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from torchgw._plans.contract import Anchors
from torchgw._plans.given import PairPlan
from torchgw._problem.limits import limits_of
from torchgw._problem.problem import Problem, stored_matrix
from torchgw._sinkhorn.problem import DenseCost
from torchgw._starts.alternatives import Alternative, Search
from torchgw._starts.isometry import ROUNDING, find_copies, put_in_order, split
from torchgw._tensors.operations import EQUAL, NOTHING
from torchgw._typing import Marginals, Potentials
from torchgw.distances.base import DistanceProvider
from torchgw.distances.precomputed import DirectedDistance, PrecomputedDistance
from torchgw.distances.sampling import SpreadPoints, cut

# Binary digits that are kept of costs, relative, and of weights, absolute: far fewer than float64
# has, so that two numbers that differ by rounding are hardly ever told apart; and a number in whose
# sum with distances 30 digits of these are left. [L1331]
_DIGITS, _WEIGHT_DIGITS, _GRID = 24, 32, 1.5 * 2.0**22


_Part = TypeVar("_Part")


class _Origin(NamedTuple):
    """Which points of a given side those of the standard form stand for."""

    point: Tensor  # (s,) int64, one of them for each
    shares: Tensor | None  # (s, n), of the mass of each that is theirs; None for the one alone

    def to(self, device: torch.device) -> _Origin:
        """Move it to a device."""
        shares = None if self.shares is None else self.shares.to(device)
        return _Origin(self.point.to(device), shares)

    def spread(self, index: Tensor, plan: Tensor) -> tuple[Tensor, Tensor]:
        """Divide the rows of a plan (k, t) of some points; return the given points, and theirs."""
        if self.shares is None:
            return self.point[index], plan
        shares = self.shares[index]
        given = shares.sum(0).nonzero()[:, 0]
        return given, shares[:, given].T @ plan

    def gather(self, index: Tensor, plan: Tensor) -> Tensor:
        """Put the rows of a plan (k, t) of some given points together, (s, t)."""
        found = plan.new_zeros(len(self.point), plan.shape[1])
        if self.shares is None:
            mine, theirs = (self.point[:, None] == index).nonzero().T
            found[mine] = plan[theirs]
            return found
        shares = self.shares[:, index]
        return shares / shares.sum(0).clamp_min(torch.finfo(shares.dtype).tiny) @ plan

    def give(self, values: Tensor, n: int) -> Tensor | None:
        """Give values (s,) to the given points; ``None`` if some have none."""
        if self.shares is not None:
            known = self.shares.sum(0) > 0
            return values[self.shares.argmax(0)] if bool(known.all()) else None
        if len(self.point) != n:
            return None
        found = torch.empty_like(values)
        found[self.point] = values
        return found


class StandardForm(NamedTuple):
    """A problem in standard form, and how it comes from the problem as it was given."""

    problem: Problem
    origins: tuple[_Origin, _Origin]  # of its source and its target
    swapped: bool  # whether its source is the given target
    factor: float  # costs of the given problem over those of this one
    shape: tuple[int, int]  # of the given problem

    def epsilon(self, given: float) -> float:
        """Return an epsilon of the given problem in the unit of this one."""
        return float(
            _rounded(torch.tensor([given / self.factor], dtype=torch.float64, device="cpu"))
        )

    def lift(self, search: Search) -> Search:
        """Return what was found here as found for the problem as it was given."""
        drawn = [
            None if index is None else origin.point[index]
            for origin, index in zip(self.origins, search.points, strict=True)
        ]
        factor, potentials = self.factor, search.potentials
        return search._replace(
            alternatives=tuple(map(self.lift_optimum, search.alternatives)),
            trials=tuple(trial.scaled(factor) for trial in search.trials),
            points=self.turned(drawn[0], drawn[1]),
            potentials=None if potentials is None else self._potentials(potentials),
            few=None if search.few is None else self.lift(search.few),
            match=None if search.match is None else self._pairs(search.match),
        )

    def lower(self, found: Alternative) -> Alternative:
        """Return an optimum of the given problem as one of this, between all of its points."""
        plan = found.plan if isinstance(found.plan, Tensor) else torch.from_numpy(found.plan)
        sides = self.turned(found.source, found.target)
        plan = self.origins[0].gather(sides[0], plan.T if self.swapped else plan)
        plan = self.origins[1].gather(sides[1], plan.T).T.contiguous()
        source, target = (torch.arange(side, device=plan.device) for side in plan.shape)
        return replace(
            found, plan=plan, source=source, target=target, shape=(len(source), len(target)),
            value=found.value / self.factor,
        )  # fmt: skip

    def lift_optimum(self, found: Alternative) -> Alternative:
        """Return an optimum of this problem as one of the given one."""
        source, plan = self.origins[0].spread(found.source, found.plan)
        target, plan = self.origins[1].spread(found.target, plan.T)
        plan = plan if self.swapped else plan.T
        source, target = self.turned(source, target)
        return replace(
            found, plan=plan.contiguous(), source=source, target=target, shape=self.shape,
            value=self.factor * found.value,
        )  # fmt: skip

    def _pairs(self, plan: PairPlan) -> PairPlan:
        """Return pairs of points as pairs of given ones."""
        pairs = (origin.point[side] for origin, side in zip(self.origins, plan.pairs, strict=True))
        return PairPlan(Anchors(*self.turned(*pairs)), plan.mass, self.shape)

    def _potentials(self, potentials: Potentials) -> Potentials | None:
        """Return potentials of all points; those of points without weight are not known."""
        f, g = (
            origin.give(self.factor * part, n)
            for origin, part, n in zip(
                self.origins, potentials, self.turned(*self.shape), strict=True
            )
        )
        return None if f is None or g is None else Potentials(*self.turned(f, g))

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of points of its source and target."""
        return len(self.origins[0].point), len(self.origins[1].point)

    def given_points(
        self, source: SpreadPoints, target: SpreadPoints
    ) -> tuple[SpreadPoints, SpreadPoints]:
        """Name the given points that some points of its source and target stand for."""
        points = self.origins[0].point, self.origins[1].point
        device = source.indices.device
        return (
            source._replace(indices=points[0].to(device)[source.indices]),
            target._replace(indices=points[1].to(device)[target.indices]),
        )

    def turned(self, source: _Part, target: _Part) -> tuple[_Part, _Part]:
        """Put what belongs to the given sides in the order of its own, or back."""
        return (target, source) if self.swapped else (source, target)


class _Side(NamedTuple):
    """One side on the host, its points in order."""

    table: Tensor  # (s, s) float64
    weights: Tensor  # (s,)
    origin: _Origin

    def taken(self, order: Tensor) -> _Side:
        """Take some points."""
        table = self.table.index_select(0, order).index_select(1, order)
        point, shares = self.origin
        origin = _Origin(point[order], None if shares is None else shares[order])
        return _Side(table, self.weights[order], origin)

    def together(self, copies: Tensor, n: int) -> _Side:
        """Put copies of points, of one number (s,), together; ``n`` points are given."""
        count, used = int(copies.max()) + 1, len(copies)
        least, most = self.weights.aminmax()
        if count in (1, used) or bool(most - least <= EQUAL * most):
            return self
        mass = self.weights.new_zeros(count).index_add_(0, copies, self.weights)
        every = torch.arange(used, device="cpu")
        first = every.new_full((count,), used).scatter_reduce_(0, copies, every, "amin")
        # as points of one weight, if they may be: there are matchings between these
        times = _multiples(mass, used)
        place = every[:count].repeat_interleave(times)
        weights = (mass / times)[place]
        # of the points in the order of their numbers
        order = copies.argsort(stable=True)
        mine, theirs = weights.cumsum(0), self.weights[order].cumsum(0)
        shares = weights.new_zeros(len(place), n)
        shares[:, self.origin.point[order]] = (
            torch.minimum(mine[:, None], theirs)
            - torch.maximum((mine - weights)[:, None], theirs - self.weights[order])
        ) / weights[:, None]
        shares = torch.where(shares > EQUAL, shares, 0)
        points = first[place]
        origin = _Origin(self.origin.point[points], shares / shares.sum(1, keepdim=True))
        return _Side(self.table[points[:, None], points], weights, origin)


def _multiples(mass: Tensor, most: int) -> Tensor:
    """Divide masses of total one into as many equal ones as there may be; into one each if none."""
    times = mass * torch.arange(1, most + 1, device=mass.device)[:, None]
    off = (times - times.round()).abs().amax(1)
    fitting = ((off <= EQUAL * most) & (times.round().amin(1) > 0)).nonzero()[:, 0]
    if len(fitting) == 0:
        return torch.ones_like(mass, dtype=torch.int64)
    return times[fitting[-1]].round().long()


def put_in_standard_form(problem: Problem) -> StandardForm | None:
    """Put a problem in standard form; ``None`` if it is large, or distances are costly."""
    providers = problem.sides
    # its tables are stored for that
    if max(side.n for side in providers) > limits_of(problem.source.device).ordered_points:
        return None
    if not all(side.cheap_columns and len(side.relations()) == 1 for side in providers):
        return None
    if min(int((weights > 0).sum()) for weights in problem.marginals) == 1:
        # there is but one plan
        return None
    with torch.no_grad():
        return _standard(problem)


def _standard(problem: Problem) -> StandardForm:
    given = list(zip(problem.sides, problem.marginals, strict=True))
    sides = [_used(*side) for side in given]
    whole = None if problem.linear is None else problem.linear.dense().matrix
    whole = None if whole is None else whole.detach().cpu().double()
    linear = None if whole is None else _taken(whole, sides)
    costs = ([], []) if linear is None else ([linear], [linear.T])
    sides = [
        side.together(find_copies([side.table, *cost]), provider.n)
        for side, cost, (provider, _) in zip(sides, costs, given, strict=True)
    ]
    linear = None if whole is None else _taken(whole, sides)
    support = None if problem.support is None else _taken(problem.support.cpu(), sides)
    orders = [
        put_in_order(side.table, _classes(key))
        for side, key in zip(
            sides, _profiles(sides, linear, directed=problem.directed), strict=True
        )
    ]
    sides = [side.taken(order) for side, order in zip(sides, orders, strict=True)]
    # |x - y|^p is the same from either side, and has a unit
    power = problem.loss.order
    unit = 1.0 if power is None else _unit(sides)
    factor = 1.0 if power is None else unit**power
    if linear is not None:
        linear = _rounded(linear[orders[0][:, None], orders[1]] / factor)
    if support is not None:
        support = support[orders[0][:, None], orders[1]]
    swapped = power is not None and _comes_first(sides[1], sides[0])
    if swapped:
        sides.reverse()
        linear = None if linear is None else linear.T.contiguous()
        support = None if support is None else support.T.contiguous()
    device = problem.source.device
    kind = DirectedDistance if problem.directed else PrecomputedDistance
    round_ = _rounded if power is None else _on_grid
    source, target = (kind.unchecked(round_(side.table / unit).to(device)) for side in sides)
    standard = replace(
        problem,
        source=source,
        target=target,
        marginals=Marginals(*(_rounded_weights(side.weights).to(device) for side in sides)),
        linear=None if linear is None else DenseCost(linear.to(device)),
        support=None if support is None else support.to(device),
    )
    origins = (sides[0].origin.to(device), sides[1].origin.to(device))
    return StandardForm(standard, origins, swapped, factor, problem.shape)


def _used(provider: DistanceProvider, weights: Tensor) -> _Side:
    """Read the distances of the points that have a weight."""
    table = (
        provider.relations()[0].columns(torch.arange(provider.n, device=provider.device))
        if provider.directed
        else stored_matrix(provider)
    )
    weights = cut(weights.detach().cpu())
    side = _Side(
        table.detach().cpu().double(),
        weights,
        _Origin(torch.arange(len(weights), device="cpu"), None),
    )
    return side if bool(weights.all()) else side.taken(weights.nonzero()[:, 0])


def _taken(linear: Tensor, sides: list[_Side]) -> Tensor:
    return linear[sides[0].origin.point[:, None], sides[1].origin.point]


def _profiles(sides: list[_Side], linear: Tensor | None, *, directed: bool) -> list[list[Tensor]]:
    """Compute numbers of each point that do not depend on the order of the others."""
    found = []
    for side in sides:
        table, weights = side.table, side.weights
        square = table * table
        size = (weights @ square @ weights).sqrt()
        rows = [table @ weights, square @ weights]
        if directed:
            rows += [weights @ table, weights @ square]
        near = square.div_(-(size * size).clamp_min(torch.finfo(size.dtype).tiny)).exp_()
        rows += [near @ weights, near.mul_(near) @ weights]
        found.append([weights, table.diagonal(), *rows])
    if linear is not None:
        for key, table, side in zip(found, (linear, linear.T), sides[::-1], strict=True):
            key += [table @ side.weights, table.square() @ side.weights]
    return found


def _classes(keys: list[Tensor]) -> Tensor:
    """Put points into classes by such numbers."""
    classes = torch.zeros_like(keys[0], dtype=torch.int64)
    for key in keys:
        classes = split(classes, key, ROUNDING * float(key.abs().max()))
    return classes


def _unit(sides: list[_Side]) -> float:
    """Compute the unit of both sides: their root mean square distance."""
    squares = [float(side.weights @ side.table.square() @ side.weights) for side in sides]
    return math.sqrt(sum(squares) / len(squares)) or 1.0


def _comes_first(one: _Side, other: _Side) -> bool:
    """Whether a side has fewer points or, of as many, is the smaller in some other way."""
    if len(one.weights) != len(other.weights):
        return len(one.weights) < len(other.weights)
    for mine, theirs in zip(_sizes(one), _sizes(other), strict=True):
        if abs(mine - theirs) > ROUNDING * max(abs(mine), abs(theirs)):
            return mine < theirs
    return False


def _sizes(side: _Side) -> list[float]:
    table, weights = side.table, side.weights
    rows = table @ weights
    numbers = weights @ table.square() @ weights, weights @ rows, weights @ rows.square()
    return [float(number) for number in (*numbers, weights @ weights)]


def _on_grid(distances: Tensor) -> Tensor:
    """Round distances whose unit is their size to a grid."""
    return distances.add_(_GRID).sub_(_GRID)


def _rounded(numbers: Tensor) -> Tensor:
    """Round numbers to some binary digits of their own; what is next to nothing is nothing."""
    mantissa, exponent = torch.frexp(numbers)
    kept = ((mantissa * 2.0**_DIGITS).round() / 2.0**_DIGITS).ldexp(exponent)
    return torch.where(kept.abs() > NOTHING * numbers.abs().max(), kept, 0.0)


def _rounded_weights(weights: Tensor) -> Tensor:
    """Round weights to some binary digits of one, their total."""
    rounded = (weights * 2.0**_WEIGHT_DIGITS).round().clamp_min(1)
    return rounded / rounded.sum()
