"""Steps of large partial problems, between plans that have few entries."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_array

from torchgw._sinkhorn.exact import ExactTransport, Places
from torchgw.pot._arrays import Array
from torchgw.pot._quadratic import Quadratic

# A plan on some entries has to gain at least this share of the last gain. [L433, L740]
_ENOUGH = 0.1
# Linear problems are solved on so many entries a row. [L910]
_KEPT = 6
# Changes of an entry below this share of the largest entry are rounding. [L910]
_DUST = 1e-12


class Few(NamedTuple):
    """A plan, or a change of one, by its entries."""

    places: Places  # in the table of all entries, ascending
    values: Array

    def plus(self, other: Few, length: float) -> Few:
        """Add a multiple of another."""
        places, which = np.unique(np.append(self.places, other.places), return_inverse=True)
        values = np.bincount(which, np.append(self.values, length * other.values))
        kept = abs(values) > _DUST * abs(self.values).max()
        return Few(places[kept], values[kept])


class FewEntries:
    """A path along vertices of a partial problem.

    The last point of either side takes the mass that stays, and none goes from one to the other.
    One table holds the gradient less the last prices. A step changes few entries of the plan, so
    that one product of few rows gives the next table, whose least entries are those that the next
    linear problem is solved on.
    """

    potentials = None

    def __init__(self, term: Quadratic, weight: float, solver: ExactTransport) -> None:
        self.term, self.weight, self._solver = term, weight, solver
        _, _, h1, h2 = term.parts
        self._pairs = [(h1, h2)] if term.symmetric else [(h1, h2), (h1.T.copy(), h2.T.copy())]
        shape = len(solver.p), len(solver.q)
        self._rest, self._change = np.zeros(shape), np.zeros(shape)
        self._gain = np.inf

    @property
    def plan(self) -> Array:
        """The plan between the points."""
        whole = np.zeros(self._rest.shape)
        whole.reshape(-1)[self._here.places] = self._here.values
        return whole[:-1, :-1].copy()

    def stand(self, plan: Array) -> Array:
        """Go to a plan; return its gradient, without the two points that take the rest."""
        self._stand(_with_rest(plan, self._solver.p, self._solver.q))
        return self._rest[:-1, :-1]

    def _stand(self, here: Few) -> None:
        self._here = here
        self._turn(here)
        self._rest[:] = self._change
        self._largest = float(abs(self._rest).max())
        self._rest[-1, -1] = np.inf

    def expect(self, u: Array, v: Array, feasible: Array) -> None:
        """Go to a vertex near given prices, on cheap entries and those that a plan uses."""
        self._subtract(u, v)
        places = _with_rest(feasible, self._solver.p, self._solver.q).places
        found = self._solver.nearby(self._rest, places, self._worth, 0.0, -np.inf, _KEPT)
        self._stand(self._few(found.plan))
        self._subtract(u + found.u, v + found.v)

    def begin(self) -> float:
        """Return the value of the plan."""
        places, values = self._here
        # the quadratic term at a plan is half the product of the plan with its gradient
        return 0.5 * float(values @ self._change.reshape(-1)[places])

    def look(self) -> tuple[float, float]:
        """Solve the linear problem; find bend and slope of the objective towards its solution."""
        flat, (places, values) = self._rest.reshape(-1), self._here
        enough = _ENOUGH * self._gain
        reached = float(values @ flat[places])
        found = self._solver.nearby(self._rest, places, self._worth, reached, enough, _KEPT)
        self._gain, self._end = found.gain, self._few(found.plan)
        self._ahead = self._end.plus(self._here, -1.0)
        places, values = self._ahead
        slope = float(values @ flat[places])
        if found.left is not None:
            self._subtract(*found.left)
        self._turn(self._ahead)
        return 0.5 * float(values @ self._change.reshape(-1)[places]), slope

    def go(self, length: float) -> None:
        """Go a share of the way to the solution."""
        if length == 1:
            self._here = self._end
        else:
            self._here = self._here.plus(self._ahead, length)
            self._change *= length
        self._rest += self._change

    @property
    def _worth(self) -> tuple[float, float]:
        """A price of the whole plan, and the largest cost."""
        return self._largest * float(self._solver.p.sum()), self._largest

    def _few(self, plan: Any) -> Few:
        rows, columns = (part.astype(np.intp) for part in (plan.row, plan.col))
        places = rows * self._rest.shape[1] + columns
        order = places.argsort()
        return Few(places[order], plan.data[order])

    def _subtract(self, u: Array, v: Array) -> None:
        self._rest -= u[:, None]
        self._rest -= v

    def _turn(self, change: Few) -> None:
        """Compute by how much the gradient of the quadratic term changes with the plan."""
        f1, f2, _, _ = self.term.parts
        n, m = len(f1), len(f2)
        i, j = np.divmod(change.places, m + 1)
        real = (i < n) & (j < m)
        i, j, values = i[real], j[real], self.weight * change.values[real]
        rows, starts = np.unique(i, return_index=True)
        ends = np.append(starts, len(i))
        few = csr_array((values, j, ends), shape=(len(rows), m))
        sums = np.bincount(i, values, n), np.bincount(j, values, m)
        if self.term.symmetric:
            first, second = (2 * (f @ part) for f, part in zip((f1, f2), sums, strict=True))
        else:
            first, second = (f @ part + part @ f for f, part in zip((f1, f2), sums, strict=True))
        few *= -2 / len(self._pairs)
        left = [*(h1[rows] for h1, _ in self._pairs), first[None], np.ones((1, n))]
        right = [*(few @ h2 for _, h2 in self._pairs), np.ones((1, m)), second[None]]
        np.matmul(np.concatenate(left).T, np.concatenate(right), out=self._change[:-1, :-1])


def _with_rest(plan: Array, p: Array, q: Array) -> Few:
    """Add the mass that stays to a plan, as entries of the two further points."""
    whole = np.zeros((len(p), len(q)))
    whole[:-1, :-1] = plan
    whole[:-1, -1] = p[:-1] - plan.sum(1)
    whole[-1, :-1] = q[:-1] - plan.sum(0)
    places = np.flatnonzero(whole)
    return Few(places, whole.reshape(-1)[places])
