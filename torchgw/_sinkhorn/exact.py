"""Linear transport problems without regularisation, one after another between the same weights."""

import inspect
from typing import Any, NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

from torchgw._errors import NumericalError

Array = NDArray[np.float64]

# Problems with more points on both sides are solved on part of their entries: so many a row, and so
# many more where prices of a partial problem are wrong, told by every few rows; for some rounds, of
# some pivots of the simplex at most. [L408, L482, L518, L740, L820]
_LARGE = 150
_KEPT = 8
_EVERY = 16
_ROUNDS = 6
_PIVOTS = 1_000_000
# Share of the value that the prices of a partial problem may prove it to be off by. [L518]
_EXACT = 1e-11


class Vertex(NamedTuple):
    """A plan of least cost, and what proves it: dual potentials."""

    plan: Array  # (n, m)
    u: Array  # (n,)
    v: Array  # (m,)


class ExactTransport:
    """Solve by POT's network simplex if it is installed, otherwise by SciPy's HiGHS.

    Large problems after the first are solved on the entries that cost least beside the last prices,
    and on those that the prices found leave too cheap, until there are none [1]_.

    References
    ----------
    .. [1] B. Schmitzer. A sparse multiscale algorithm for dense optimal transport. Journal of
       Mathematical Imaging and Vision 2016.
    """

    def __init__(self, p: Array, q: Array) -> None:
        self.p, self.q = p, q
        try:
            from ot import emd
        except ImportError:
            emd = None
        self._emd: Any = emd
        # POT takes sparse costs since it takes these
        sparse = self.by_pot and "potentials_init" in inspect.signature(emd).parameters
        self.by_parts = sparse and min(len(p), len(q)) >= _LARGE
        self.last: Vertex | None = None
        self.short = False  # whether pivots ever ran out

    @property
    def by_pot(self) -> bool:
        """Whether POT's simplex is here."""
        return self._emd is not None

    def __call__(self, cost: Array, reached: float = -np.inf, enough: float = np.inf) -> Vertex:
        """Solve; a plan that gains half of the most on a value reached, or enough, will do."""
        if not self.by_pot:
            self.last = _by_scipy(self.p, self.q, cost)
        elif not self._on_parts(cost, reached, enough):
            # of negative costs the network simplex may say that there is no plan
            lowest = cost.min()
            self.on(cost - lowest if lowest else cost)
            assert self.last is not None
            self.last = self.last._replace(u=self.last.u + lowest)
        assert self.last is not None
        return self.last

    def _on_parts(self, cost: Array, reached: float, enough: float) -> bool:
        """Solve on some entries, unless these would be many or POT takes no sparse costs."""
        if self.last is None or not self.by_parts:
            return False
        plan, u, v = self.last
        # less the last prices costs ask for fewer pivots
        rest = cost - v
        rest -= u[:, None]
        used = (plan > 0) | (rest <= _cheap(rest))
        for _ in range(_ROUNDS):
            entries = np.divmod(np.flatnonzero(used), used.shape[1])
            few = rest[entries]
            few -= (least := few.min())
            self.on(scipy.sparse.coo_array((few, entries), cost.shape))
            more = self.last.u + least, self.last.v
            u, v = u + more[0], v + more[1]
            self.last = self.last._replace(u=u, v=v)
            value = float(self.p @ u + self.q @ v)
            if reached - value > enough:
                return True
            rest -= more[0][:, None]
            rest -= more[1]
            bounds = self.p @ rest.min(1).clip(max=0), self.q @ rest.min(0).clip(max=0)
            missed, lowest, wrong = -float(max(bounds)), cost.min(), -1e-12 * abs(cost).max()
            proven = missed <= _EXACT * (value - lowest * self.p.sum())
            if reached - value > missed or proven or rest.min() >= wrong:
                return True
            used |= rest < (min(wrong, _cheap(rest)) if reached > -np.inf else wrong)
        return False

    def on(self, cost: Any, pivots: int = _PIVOTS) -> tuple[Array, float]:
        """Solve by POT, on the entries of a sparse cost or on all; also return the value."""
        plan, log = self._emd(self.p, self.q, cost, numItermax=pivots, log=True)
        self.short |= log["warning"] is not None
        if not isinstance(plan, np.ndarray):
            plan = plan.toarray()
        self.last = Vertex(plan, log["u"], log["v"])
        return plan, float(log["cost"])


def _cheap(rest: Array) -> float:
    """Find what only the cheapest entries are below, from some of the rows."""
    few = rest[::_EVERY]
    place = few.size * _KEPT // min(rest.shape)
    return float(np.partition(few, place, axis=None)[place])


def _by_scipy(p: Array, q: Array, cost: Array) -> Vertex:
    n, m = cost.shape
    rows = scipy.sparse.kron(scipy.sparse.eye_array(n), np.ones((1, m)))
    columns = scipy.sparse.kron(np.ones((1, n)), scipy.sparse.eye_array(m))
    sums = scipy.sparse.vstack([rows, columns]).tocsr()
    found: Any = scipy.optimize.linprog(
        cost.ravel(), A_eq=sums, b_eq=np.append(p, q * (p.sum() / q.sum())), method="highs"
    )
    if found.x is None:
        raise NumericalError(f"The transport problem was not solved: {found.message}")
    prices = np.asarray(found.eqlin.marginals)
    return Vertex(found.x.reshape(n, m), prices[:n], prices[n:])
