"""Estimates for any loss, from pairs of points that are drawn from plans."""

import sys
from collections.abc import Callable
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import scipy

from torchgw._errors import InvalidInputError, InvalidTypeError
from torchgw._tensors.sparse import in_rows
from torchgw.pot._arrays import Array, Arrays, generator
from torchgw.pot._mirror import Entropic
from torchgw.pot._vertices import transport
from torchgw.pot.gromov._call import Call, takes
from torchgw.pot.gromov._read import check_share, without_gradients

# How many steps without a change end the sampled solver, and what counts as one: as in POT. [L389]
_QUIET, _CHANGE = 100, 1e-19


@takes(
    """C1, C2, p, q, loss_fun, T, nb_samples_p=None, nb_samples_q=None, std=True,
    random_state=None"""
)
def GW_distance_estimation(call: Call) -> Any:
    """Estimate the loss of a plan, as ``ot.gromov.GW_distance_estimation``.

    Returns
    -------
    gw : float
    std : float, only with ``std=True``
        Standard deviation of the estimate.
    """
    spaces = _read(call)
    plan = call.T if scipy.sparse.issparse(call.T) else spaces.arrays.read("T", call.T)
    mean, deviation = _estimate(
        spaces, plan, call.nb_samples_p, call.nb_samples_q, call.std, generator(call.random_state)
    )
    give = spaces.arrays.give
    return (give(mean), give(deviation)) if call.std else give(mean)


@takes(
    """C1, C2, p, q, loss_fun, alpha=1, max_iter=100, threshold_plan=0, log=False, verbose=False,
    random_state=None"""
)
def pointwise_gromov_wasserstein(call: Call) -> Any:
    """Match the distances of drawn pairs, as ``ot.gromov.pointwise_gromov_wasserstein``.

    Returns
    -------
    T : sparse array of shape (n, m), or sparse tensor
    log : dict, only with ``log=True``
        ``gw_dist_estimated`` and ``gw_dist_std``.
    """
    spaces, step = _read(call), check_share(call.alpha)
    random = generator(call.random_state)
    n, m = len(spaces.p), len(spaces.q)

    def matched(i: int, j: int) -> Any:
        return _in_order(spaces.C1[i], spaces.C2[j], spaces.p, spaces.q)

    plan = matched(int(random.choice(n, p=spaces.p)), int(random.choice(m, p=spaces.q)))
    best, least = plan, np.inf
    for turn in range(call.max_iter):
        i = int(random.choice(n, p=spaces.p))
        row = plan[[i], :].toarray().ravel()
        new = matched(i, int(random.choice(m, p=row / row.sum())))
        if step == 1:
            plan = new
        else:
            plan = ((1 - step) * plan + step * new).tocsr()
            plan.data[plan.data <= call.threshold_plan] = 0
            plan.eliminate_zeros()
        if turn % 10 == 0 or turn == call.max_iter - 1:
            value, _ = _estimate(spaces, plan, None, None, False, random)
            if value < least:
                best, least = plan, value
            if call.verbose:
                sys.stderr.write(f"{turn:5d}|{least:8e}|\n")
    return _answer(spaces, best, call.log, random)


@takes(
    """C1, C2, p, q, loss_fun, nb_samples_grad=100, epsilon=1, max_iter=500, log=False,
    verbose=False, random_state=None"""
)
def sampled_gromov_wasserstein(call: Call) -> Any:
    """Follow sampled gradients, as ``ot.gromov.sampled_gromov_wasserstein``.

    Returns
    -------
    T : array of shape (n, m)
    log : dict, only with ``log=True``
        ``gw_dist_estimated`` and ``gw_dist_std``.
    """
    spaces = _read(call)
    random = generator(call.random_state)
    n, m = len(spaces.p), len(spaces.q)
    if isinstance(call.nb_samples_grad, Integral):
        drawn_pairs = int(call.nb_samples_grad)
        rows, columns = min(drawn_pairs, n), max(drawn_pairs // n, 1)
    else:
        rows, columns = call.nb_samples_grad
    symmetric = all(np.allclose(C, C.T, rtol=1e-10, atol=1e-10) for C in (spaces.C1, spaces.C2))
    plan, solver, quiet = np.outer(spaces.p, spaces.q), transport(spaces.p, spaces.q), 0
    for turn in range(call.max_iter):
        cost = np.zeros((n, m))
        for i in random.choice(n, size=rows, p=spaces.p, replace=False):
            drawn = random.choice(m, size=columns, p=plan[i] / plan[i].sum(), replace=False)
            turned = not symmetric and random.rand() > 0.5
            ours, theirs = spaces.C1[i], spaces.C2[drawn]
            if turned:
                ours, theirs = spaces.C1[:, i], spaces.C2[:, drawn].T
            cost += spaces.loss(ours[None, :, None], theirs[:, None, :]).mean(0)
        largest = cost.max()
        if largest == 0:
            continue
        cost /= largest
        if call.epsilon > 0:
            cost -= call.epsilon * np.log(np.clip(plan, 1e-87, 1))
            linear = Entropic(spaces.p, spaces.q, call.epsilon)
            new = linear.plan(linear(cost, 1e-9))
        else:
            new = solver(cost).plan
        change = float(((plan - new) ** 2).mean())
        quiet = quiet + 1 if change <= _CHANGE else 0
        if call.verbose and turn % 10 == 0:
            sys.stderr.write(f"{turn:5d}|{change:8e}|\n")
        plan = new
        if quiet > _QUIET:
            break
    return _answer(spaces, plan, call.log, random)


class _Spaces(NamedTuple):
    """Two tables with weights, and a loss."""

    arrays: Arrays
    C1: Array
    C2: Array
    p: Array
    q: Array
    given: Callable[[Any, Any], Any]

    def loss(self, x: Array, y: Array) -> Array:
        """Evaluate the loss on arrays of the kind that the tables were."""
        return np.asarray(self.arrays.read("loss_fun", self.given(*map(self.arrays.give, (x, y)))))


def _read(call: Call) -> _Spaces:
    given = call.C1, call.C2, call.p, call.q
    without_gradients(call.function, *given)
    arrays = Arrays(*given)
    first, second = arrays.table("C1", call.C1), arrays.table("C2", call.C2)
    weights = arrays.weights("p", call.p, len(first)), arrays.weights("q", call.q, len(second))
    if not callable(call.loss_fun):
        raise InvalidTypeError(
            f"`loss_fun` must be a function of two arrays here; got {call.loss_fun!r}."
        )
    for name, weight in zip("pq", weights, strict=True):
        if abs(weight.sum() - 1) > 1e-4:
            raise InvalidInputError(
                f"`{name}` must sum to 1, as points are drawn by it; got {weight.sum():.6g}."
            )
    p, q = (weight / weight.sum() for weight in weights)
    return _Spaces(arrays, first, second, p, q, call.loss_fun)


def _estimate(
    spaces: _Spaces, plan: Any, rows: int | None, columns: int | None, std: bool, random: Any
) -> tuple[float, float]:
    _, C1, C2, p, q, _ = spaces
    if len(p) < len(q):
        C1, C2, p, q, plan = C2, C1, q, p, plan.T
    n, sparse = len(p), scipy.sparse.issparse(plan)
    if rows is None:
        rows = min(int(5 * (n * np.log(n)) ** 0.5), n) if sparse else n
    rows, columns = min(rows, n), max(columns or 1, 2 if std else 1)
    if sparse:
        plan = plan.tocsr()
    first, second = (random.choice(n, size=rows, p=p, replace=False) for _ in range(2))
    partners = np.zeros((2, rows, columns), dtype=int)
    for place in range(rows):
        for side, points in enumerate((first, second)):
            row = plan[[points[place]], :].toarray().ravel() if sparse else plan[points[place]]
            partners[side, place] = random.choice(len(q), size=columns, p=row / row.sum())
    values = np.stack(
        [
            spaces.loss(C1[np.ix_(first, second)], C2[np.ix_(partners[0][:, k], partners[1][:, k])])
            for k in range(columns)
        ],
        axis=2,
    )
    deviation = float(np.sqrt((values.std(2) ** 2).sum())) / rows**2
    return float(values.mean()), deviation


def _in_order(x: Array, y: Array, p: Array, q: Array) -> Any:
    """Match sorted numbers to sorted numbers: the optimal plan on a line, sparse."""
    first, second = x.argsort(), y.argsort()
    ends = np.cumsum(p[first]), np.cumsum(q[second])
    cuts = np.union1d(*ends)
    mass = np.diff(cuts, prepend=0.0)
    middle = cuts - mass / 2
    rows = np.minimum(np.searchsorted(ends[0], middle), len(x) - 1)
    columns = np.minimum(np.searchsorted(ends[1], middle), len(y) - 1)
    plan = scipy.sparse.coo_array((mass, (first[rows], second[columns])), (len(x), len(y)))
    return plan.tocsr()


def _answer(spaces: _Spaces, plan: Any, log: bool, random: Any) -> Any:
    give = spaces.arrays.give
    result = plan
    if not scipy.sparse.issparse(plan):
        result = give(plan)
    elif spaces.arrays.device is not None:
        result = in_rows(give(plan.toarray()))
    if not log:
        return result
    mean, deviation = _estimate(spaces, plan, None, None, True, random)
    return result, {"gw_dist_estimated": give(mean), "gw_dist_std": give(deviation)}
