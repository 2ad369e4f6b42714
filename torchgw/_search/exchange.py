"""Matchings of few points, improved by exchanges of partners.

Where both sides have as many points of equal weight and epsilon is small, plans are nearly
matchings, and the best ones lie next to matchings that no exchange of two partners improves. Tabu
search [1] makes the exchange that costs least, even where that is more than none, and does not undo
it for a while. It finds optima that no plan comes to that follows epsilon down. A matching of many
points is improved by plain exchanges (``_results/rounding.py``).

[1] E. Taillard. Robust taboo search for the quadratic assignment problem. Parallel Computing 1991.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._problem.limits import limits_of
from torchgw._search.coarse import CoarseProblem, cross_terms

Array = NDArray[Any]

# Independent groups of random starts, and starts of each and of what is known. [L1274]
_GROUPS, _STARTS = 4, 8
# Exchanges of a start for each point at least and at most, and entries of tables that all may look
# at. [L1274]
_LEAST, _EXCHANGES, _LOOKED_AT = 10, 40, 4e7
# Groups that agree end the search, and so do so many exchanges for each point after the last that
# helped any group. [L1274]
_AGREEING, _PATIENCE = 3, 16
# Matchings that are returned at most. [L1274]
_FOLLOWED = 8
# For how many exchanges for each point one is not undone, at least and at most. [L1274]
_TENURE = 0.9, 1.1
# Share of the largest change of an exchange that is rounding, which adds up in single precision;
# and relative difference up to which weights are equal. A choice. [L1274]
_ROUNDING, _EQUAL = 1e-5, 1e-9


def can_exchange(problem: CoarseProblem) -> bool:
    """Whether both sides have as many points, not too many, and all of one weight."""
    a, b = problem.source.weights, problem.target.weights
    if not len(a) == len(b) <= limits_of(a.device).exchanged_points:
        return False
    return bool((torch.cat([a, b]) * len(a) - 1).abs().max() <= _EQUAL)


def best_matchings(problem: CoarseProblem, plans: Tensor) -> tuple[Tensor, bool]:
    """Find the best matchings (k, n), and tell whether independent groups of starts agree.

    One group begins at the best of some plans (k, n, n), the first of them; the others at random.
    """
    from scipy.optimize import linear_sum_assignment

    n, generator = len(problem.base), np.random.default_rng(0)
    known = [linear_sum_assignment(plan.cpu(), maximize=True)[1] for plan in plans[:_STARTS]]
    drawn = generator.random((_GROUPS * _STARTS + _STARTS - len(known), n)).argsort(1)
    search = _Search(problem, np.concatenate([*([row] for row in known), drawn]), generator)
    most = min(_EXCHANGES * n, int(_LOOKED_AT / (len(search.partners) * n * n)))
    best, last, alike = math.inf, 0, False
    while search.done < most and not (alike and search.done >= _LEAST * n):
        search.exchange()
        values = search.least.reshape(-1, _STARTS).min(1)
        if values.sum() < best:
            best, last = values.sum(), search.done
        elif search.done - last > _PATIENCE * n:
            break
        alike = np.sort(values[1:])[_AGREEING - 1] - values.min() <= search.rounding
    partners, places = np.unique(search.best, axis=0, return_index=True)
    kept = search.least[places].argsort()[:_FOLLOWED]
    return torch.from_numpy(partners[kept]).to(problem.base.device), bool(alike)


class _Search:
    """Exchanges of B starts side by side, on the host."""

    # Rows of tables are points, and so are columns, each in place of its partner. With P the
    # matching over n, an exchange of the partners p and q of two points i and j adds
    # (e_i - e_j) (e_q - e_p)' / n to it.

    def __init__(
        self, problem: CoarseProblem, partners: Array, generator: np.random.Generator
    ) -> None:
        parts = (problem.x, problem.y, problem.base)
        x, y, base = (part.detach().double().cpu() for part in parts)
        count, n = partners.shape
        self.partners = partners
        self.generator, self.starts, self.done = generator, np.arange(count), 0
        factor = -4 * float(problem.alpha)
        places = torch.from_numpy(partners)
        plans = torch.zeros(count, n, n, dtype=base.dtype, device=places.device).scatter_(
            2, places[:, :, None], 1 / n
        )
        costs = base + factor * cross_terms(x, plans, y)
        self.value = ((plans * (base + costs)).sum((1, 2)) / 2).numpy()
        self.least, self.best = self.value.copy(), partners.copy()
        # steps are found in single precision, in half the time
        self.x, self.y, costs = x.float().numpy(), y.float().numpy(), costs.float() / n
        self.costs = np.take_along_axis(costs.numpy(), partners[:, None, :], 2)
        self.step = np.float32(factor / n**2)
        # what an exchange adds besides: (x_ii + x_jj - x_ij - x_ji) times the same of y at partners
        self.own_x = self.step / 2 * _apart(self.x)
        self.own_y = _apart(self.y)[:, partners[:, :, None], partners[:, None, :]]
        # when a point may have a partner again
        self.until = np.zeros_like(self.costs)
        # no exchange changes the value by more
        own = np.abs(self.own_x).max() * np.abs(self.own_y).max()
        self.most = 4 * np.abs(self.costs).max() + own
        self.rounding = _ROUNDING * self.most

    def exchange(self) -> None:
        """Exchange two partners of each start."""
        starts, n = self.starts, self.partners.shape[1]
        own = np.diagonal(self.costs, axis1=1, axis2=2)
        rise = self.costs + self.costs.swapaxes(1, 2)
        rise -= own[:, :, None]
        rise -= own[:, None, :]
        for x, y in zip(self.own_x, self.own_y, strict=True):
            rise += x * y
        rise[:, np.arange(n), np.arange(n)] = np.inf
        flat = rise.reshape(len(starts), -1)
        tabu = np.minimum(self.until, self.until.swapaxes(1, 2))
        tabu -= self.done
        # the exchanges that have to wait longest come last
        np.maximum(tabu, 0, out=tabu)
        tabu *= self.most
        tabu += rise
        place, least = tabu.reshape(flat.shape).argmin(1), flat.argmin(1)
        # one that has to wait is made where it leads below all before
        enough = self.least - self.rounding
        place = np.where(self.value + flat[starts, least] < enough, least, place)
        self.value += flat[starts, place]
        self._exchange(*np.divmod(place, n))
        better = (self.value < enough).nonzero()[0]
        self.least[better], self.best[better] = self.value[better], self.partners[better]
        self.done += 1

    def _exchange(self, i: Array, j: Array) -> None:
        """Exchange the partners of points i and j, (B,) each."""
        starts, n = self.starts, self.partners.shape[1]
        p, q = self.partners[starts, i], self.partners[starts, j]
        waits = self.done + n * self.generator.uniform(*_TENURE, (2, len(starts)))
        self.until[starts, i, i], self.until[starts, j, j] = waits
        self.partners[starts, i], self.partners[starts, j] = q, p
        for table in (self.costs, self.until, *self.own_y):
            _swap_columns(table, starts, i, j)
        for own in self.own_y:
            _swap_columns(own.swapaxes(1, 2), starts, i, j)
        for x, y in zip(self.x, self.y, strict=True):
            row = self.step * (x[:, i] - x[:, j]).T
            column = np.take_along_axis(y[q] - y[p], self.partners, 1)
            self.costs += row[:, :, None] * column[:, None, :]


def _apart(tables: Array) -> Array:
    """Compute x_ii + x_jj - x_ij - x_ji of tables (r, n, n)."""
    own = np.diagonal(tables, axis1=1, axis2=2)
    found: Array = own[:, :, None] + own[:, None, :] - tables - tables.swapaxes(1, 2)
    return found


def _swap_columns(tables: Array, starts: Array, i: Array, j: Array) -> None:
    """Exchange the columns i and j (B,) of tables (B, n, n)."""
    tables[starts, :, i], tables[starts, :, j] = tables[starts, :, j], tables[starts, :, i]
