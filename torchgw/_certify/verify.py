"""The bound of a proof, derived again from the data in NumPy: no code is shared with its maker.

Each method is a function of a few lines. What is bounded, for plans P of weights a and b:

    F(P) = alpha sum_ijkl (D_X[i, k] - D_Y[j, l])^2 P_ij P_kl + (1 - alpha) <M, P>
"""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchgw._errors import InvalidInputError

if TYPE_CHECKING:
    from torchgw._certify.certificate import Proof

Array = NDArray[np.float64]

# Roundings that a bound may be off by, for each point, in units of the largest cost. [L1356]
_ROUNDINGS = 16
# Eigenvalues of the wrong sign that are rounding, as a share of the largest. [L1356]
_SIGN = 1e-12
# Data that were written and read again lose digits: a claim may be higher than what follows from
# them by this share of the largest cost. The bound that is returned is what follows. [L1356]
_DIGITS = 1e-10
# Sums of squares of whole distances up to which values are told apart; what rounding is then, in
# units of what they differ by. [L1377]
_WHOLE, _SLACK = 1e9, 1e-5
# The method that needs points, not tables.
_POINTS = "cutting planes of points"
# What a cut or a factor may be off by, as a share of the largest cost: it is taken off. A rotation,
# and entries and vertices that are computed together. Choices.
_MISSED, _TURNED, _TOGETHER, _AT_ONCE = 1e-6, 1e-12, 2**17, 2**7
# In units of a box around all plans: what cuts are lowered by at most, and slacks and costs that
# are rounding. And numbers that cuts may have. Choices.
_LOWERED, _ROUNDED, _NEAR, _DIMENSIONS = 1e-11, 1e-15, 1e-12, 16
# How far apart slopes are at least in these units, one after the other where vertices are lost in
# rounding: fewer cuts prove less, about as much less as this. [L1707]
_APART = (0.0, 1e-7, 1e-6, 1e-5)
# Sizes of factors of which no mass is held. A choice.
_TINY = 1e-75
# Points of a group at most; groups that are read first. [L1625, L1673]
_GROUP, _FIRST = 64, 4


class Verified(NamedTuple):
    """A lower bound that has been derived again.

    Attributes
    ----------
    lower_bound : float
        The value that no plan (no matching, if the proof says so) goes below.
    rounding : float
        What the bound may be off by, as the arithmetic was in float64.
    """

    lower_bound: float
    rounding: float


@dataclass(frozen=True)
class _Data:
    D_X: Array
    D_Y: Array
    a: Array
    b: Array
    M: Array  # (1 - alpha) M
    alpha: float
    size: float  # the largest cost
    matchings: bool  # whether these alone compete
    claim: float  # no more is derived of cutting planes

    @cached_property
    def exchanged(self) -> bool:
        """Whether some matching is the best: these compete alone, or the objective is concave."""
        a, b = self.a, self.b
        equal = len(a) == len(b) and np.ptp(a) == 0 == np.ptp(b)
        _check(equal or not self.matchings, "is about matchings, and the weights are not equal.")
        return equal and (self.matchings or _is_concave(self))


def _check(holds: Any, what: str) -> None:
    if not holds:
        raise InvalidInputError(f"`proof` {what}")


def verify(
    proof: Proof,
    X: Any = None,
    Y: Any = None,
    *,
    D_X: Any = None,
    D_Y: Any = None,
    a: Any = None,
    b: Any = None,
    M: Any = None,
    allowed: Any = None,
) -> Verified:
    """Derive the lower bound of a proof again, from the data and its dual potentials.

    Nothing of what made the proof runs: NumPy in float64, a function of some lines for each method.

    Parameters
    ----------
    proof : Proof
        ``certificate.proof``.
    X, Y : array-like, shapes (n, d) and (m, e), optional
        The points that were matched.
    D_X, D_Y : array-like, shapes (n, n) and (m, m), optional
        The distances instead, where X or Y was no array of points with a metric.
    a, b : array-like, shapes (n,) and (m,), optional
        Weights, if the solve had any.
    M : array-like, shape (n, m), optional
        Linear cost, if the solve had one; that of features as a table. ``inf``: not allowed.
    allowed : array-like of bool, shape (n, m), optional
        The pairs that might hold mass, if the solve was told.

    Returns
    -------
    Verified
        ``lower_bound`` and ``rounding``.

    Raises
    ------
    InvalidInputError
        If a number of the proof was changed, if the proof does not hold for the data, or if these
        do not fit it.

    Examples
    --------
    >>> import numpy as np, torchgw
    >>> X = np.random.default_rng(0).normal(size=(30, 2))
    >>> result = torchgw.solve(X, X[::-1], distances="sqeuclidean", random_state=0)
    >>> proof = result.certify().proof
    >>> float(abs(torchgw.verify(proof, X, X[::-1]).lower_bound - proof.value)) < 1e-9
    True
    """
    kind = type(proof).__name__
    _check(hasattr(proof, "digest"), f"is none, but a {kind}. Pass `result.certify().proof`.")
    _check(
        proof.digest == _digest(proof),
        "is not as it was made: its numbers do not have its digest. Use the original, or "
        "`result.certify()` again.",
    )
    numbers = all(np.isfinite(array).all() for array in proof.arrays.values())
    _check(numbers and np.isfinite(proof.value), "has numbers that are not finite.")
    known = ", ".join([*_METHODS, _POINTS])
    _check(proof.method in [*_METHODS, _POINTS], f"is by {proof.method!r:.40}; known: {known}.")
    if proof.method == _POINTS:
        _check(M is None and allowed is None, "is about problems without `M` and `allowed`.")
        bound, own, size = _of_points(proof, X, Y, a, b)
        return _verified(proof, bound, own, size)
    x, y = (
        _table(name, points, table, metric) * scale
        for name, points, table, metric, scale in zip(
            "XY", (X, Y), (D_X, D_Y), proof.metrics, proof.scale, strict=True
        )
    )
    n, m = len(x), len(y)
    first, second = _weights(a, n), _weights(b, m)
    linear = np.zeros((n, m)) if M is None else np.asarray(M, dtype=float)
    if allowed is not None:
        linear = np.where(np.asarray(allowed, dtype=bool), linear, np.inf)
    closed = linear == np.inf
    linear = np.where(closed, np.inf, (1 - proof.alpha) * np.where(closed, 0.0, linear))
    if (linear.shape, first.shape, second.shape) != ((n, m), (n,), (m,)):
        raise InvalidInputError(
            f"`a`, `b`, `M` and `allowed` need shapes ({n},), ({m},), twice ({n}, {m}); "
            f"got {first.shape}, {second.shape} and {linear.shape}."
        )
    size = proof.alpha * float(np.abs(x).max() + np.abs(y).max()) ** 2
    size += float(np.abs(linear[linear < np.inf]).max())
    data = _Data(x, y, first, second, linear, proof.alpha, size, proof.matchings, proof.value)
    bound, own = _METHODS[proof.method](data, proof.arrays)
    if not linear.any() and (data.D_X % 1 == 0).all() and (data.D_Y % 1 == 0).all():
        bound = _attainable(bound, data)
    return _verified(proof, bound, own, (n + m) * size)


def _verified(proof: Proof, bound: float, own: float, size: float) -> Verified:
    """Compare a bound with what is claimed; ``size`` is the largest cost times the points."""
    rounding = own + _ROUNDINGS * np.finfo(float).eps * size
    _check(
        proof.value <= bound + rounding + _DIGITS * size,
        f"does not hold for these data: it claims {proof.value:.9g}, and {bound:.9g} is what "
        "follows. Pass the data, weights and linear cost that were solved.",
    )
    return Verified(float(min(bound, proof.value)), float(rounding))


def _digest(proof: Proof) -> str:
    made = hashlib.sha256(
        json.dumps(
            [proof.method, proof.value, proof.matchings, proof.alpha, [*proof.metrics],
             [*proof.scale]]
        ).encode()
    )  # fmt: skip
    for name, array in sorted(proof.arrays.items()):
        made.update(f"{name} {array.dtype} {array.shape}".encode())
        made.update(np.ascontiguousarray(array).tobytes())
    return made.hexdigest()


def _table(name: str, points: Any, table: Any, metric: str | None) -> Array:
    """Compute the distances of a side by their definition."""
    if metric is None or table is not None:
        if table is None:
            raise InvalidInputError(
                f"`D_{name}` is needed: the distances of {name} were not a metric of points. Pass "
                "the table of distances that were compared."
            )
        return np.asarray(table, dtype=float)
    if points is None:
        raise InvalidInputError(f"`{name}` is needed: pass the points that were matched.")
    x = np.asarray(points, dtype=float)
    if metric == "correlation":
        x = x - x.mean(1, keepdims=True)
    if metric in ("cosine", "correlation"):
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
    squares: Array = np.array([((x - row) ** 2).sum(1) for row in x])
    if metric == "euclidean":
        return np.sqrt(squares)
    return squares if metric == "sqeuclidean" else squares / 2


def _weights(given: Any, size: int) -> Array:
    weights = np.ones(size) if given is None else np.asarray(given, dtype=float)
    return weights / weights.sum()


def _proven(f: Array, low: Array, data: _Data) -> float:
    """Bound a linear cost by f and g = low, where f_i + g_j <= cost_ij."""
    used = data.b > 0
    return float(data.a @ f + data.b[used] @ low[used])


def _least(own: Array, f: Array, data: _Data, moved: Any = None, v: Any = None) -> float:
    """Bound <own + moved v', P> by f and the g that goes with it, some rows at a time."""
    left, right = -f[:, None], np.ones((1, len(data.b)))
    if moved is not None:
        left, right = np.hstack([moved, left]), np.vstack([v.T, right])
    low, rows = np.full(len(data.b), np.inf), max(1, _TOGETHER // len(data.b))
    for start in range(0, len(left), rows):
        part = slice(start, start + rows)
        np.minimum(low, (left[part] @ right + own[part]).min(0), out=low)
    return _proven(f, low, data)


def _groups(points: Array) -> list[NDArray[np.int64]]:
    """Halve points (n, d) along their widest axis until groups are small."""
    groups = [np.arange(len(points))]
    while max(map(len, groups)) > _GROUP:
        halves = []
        for group in groups:
            values = points[group, np.ptp(points[group], axis=0).argmax()]
            halves += np.array_split(group[np.argsort(values)], 2)
        groups = halves
    return groups


def _least_near(left: Array, right: Array, f: Array, groups: Any, data: _Data) -> float:
    """Do the same for left right', where groups of rows that are far from a column are left out.

    Between a group of rows and one of columns, of means l and r, no entry is below the least of
    the rows at r, plus l' (column - r), less the largest distances from both means multiplied.
    """
    order, starts = np.concatenate(groups[0]), np.cumsum([0, *map(len, groups[0])])
    means = np.array([left[group].mean(0) for group in groups[0]])
    away = np.repeat(means, np.diff(starts), axis=0) - left[order]
    far = np.sqrt(np.maximum.reduceat((away**2).sum(1), starts[:-1]))
    rows, low = np.column_stack([left, -f])[order], np.empty(len(right))
    right = np.column_stack([right, np.ones(len(right))])

    def least_of(places: Any, columns: Any) -> Array:
        taken = [rows[starts[place] : starts[place + 1]] for place in places]
        return (np.concatenate(taken) @ right[columns].T).min(0)

    for columns in groups[1]:
        mean = right[columns].mean(0)
        off = (right[columns] - mean)[:, :-1]
        size = np.sqrt((off**2).sum(1).max())
        least = np.minimum.reduceat(rows @ mean, starts[:-1]) - far * size
        best = np.argsort(least)[:_FIRST]
        known = least_of(best, columns)
        # the largest that may be below, wherever the columns are
        apart = np.sqrt(((means - means[best[0]]) ** 2).sum(1)) * size
        near = np.flatnonzero(least - apart < (known - off @ means[best[0]]).max())
        near = near[(least[near, None] + means[near] @ off.T < known).any(1)]
        near = np.setdiff1d(near, best)
        low[columns] = np.minimum(known, least_of(near, columns)) if len(near) else known
    return _proven(f, low, data)


def _squares(data: _Data, arrays: dict[str, Any]) -> tuple[float, float]:
    """Squares are not negative."""
    return float(data.M.min()), 0.0


def _in_order(data: _Data, arrays: dict[str, Any]) -> tuple[float, float]:
    """Pair the sorted distances of i with those of j, for each (i, j)."""
    x, y, a, b = data.D_X, data.D_Y, data.a, data.b
    n = len(a)
    if data.exchanged:
        own = np.subtract.outer(np.diag(x), np.diag(y)) ** 2
        x, y = (np.sort(part[~np.eye(n, dtype=bool)].reshape(n, n - 1)) for part in (x, y))
        local = np.array([((row - y) ** 2).sum(1) for row in x]) + own
        local /= n
    else:
        if n == len(b) and np.ptp(a) == 0 == np.ptp(b):
            x, y = np.sort(x), np.sort(y)
        else:
            x, y = (np.array([_means(row, w) for row in side]) for side, w in ((x, a), (y, b)))
        local = np.array([((row - y) ** 2).mean(1) for row in x])
    return _least(data.alpha * local + data.M, arrays["f"], data), _sign(data)


def _means(row: Array, weights: Array) -> Array:
    """Average a quantile function over 1,024 parts of the mass: a convex cost gets no larger."""
    order = np.argsort(row)
    mass, sums = np.cumsum(weights[order]), np.cumsum((weights * row)[order])
    ends = np.interp(np.arange(1025) / 1024, np.append(0, mass / mass[-1]), np.append(0, sums))
    return 1024 * np.diff(ends) / mass[-1]


def _is_concave(data: _Data) -> bool:
    """Whether the objective is, so that a matching is the best plan: centred tables of one sign."""
    ends = []
    for table, weights in ((data.D_X, data.a), (data.D_Y, data.b)):
        if not (table == table.T).all():
            return False
        centre = np.eye(len(table)) - weights
        found = np.linalg.eigvalsh(centre @ table @ centre.T)
        ends.append(np.array([found[-1], -found[0]]) <= _SIGN * np.abs(found).max())
    return bool((ends[0] & ends[1]).any())


def _attainable(bound: float, data: _Data) -> float:
    """Raise a bound of matchings between whole distances to a value that one can have."""
    n, total = len(data.a), (data.D_X**2).sum() + (data.D_Y**2).sum()
    if data.alpha == 0 or total > _WHOLE or not data.exchanged:
        return bound
    pairs = all((table == table.T).all() for table in (data.D_X, data.D_Y))
    step = 4 if pairs and not (np.diag(data.D_X).any() and np.diag(data.D_Y).any()) else 2
    most = np.floor((total - bound * n**2 / data.alpha) / step + _SLACK)
    return max(bound, float(data.alpha * (total - step * most) / n**2))


def _sign(data: _Data) -> float:
    """Bound what eigenvalues of the wrong sign add: n products of at most _SIGN of the largest."""
    return _SIGN * len(data.a) * data.size if data.exchanged else 0.0


def _eigenvalues(data: _Data, arrays: dict[str, Any]) -> tuple[float, float]:
    """Bound tr(G_X P G_Y P') by eigenvalues in order, and the rest by one dual potential."""
    rows = [table @ w - w @ table @ w / 2 for table, w in ((data.D_X, data.a), (data.D_Y, data.b))]
    constant, linear, G_X, G_Y = _split(data, *rows)
    x, y = (
        np.linalg.eigvalsh(np.sqrt(np.outer(weights, weights)) * table)
        for table, weights in ((G_X, data.a), (G_Y, data.b))
    )
    size = min(len(x), len(y))
    most = np.maximum(x, 0)[::-1][:size] @ np.maximum(y, 0)[::-1][:size]
    most += np.minimum(x, 0)[:size] @ np.minimum(y, 0)[:size]
    if data.exchanged:
        # permutations keep lengths: all products in order, but for the zero of the constant vector
        x, y = (np.delete(part, np.abs(part).argmin()) for part in (x, y))
        most = min(most, x @ y)
    return constant + _least(linear, arrays["f"], data) - 2 * data.alpha * float(most), _sign(data)


def _split(data: _Data, r: Array, s: Array) -> tuple[float, Array, Array, Array]:
    """Split F = constant + <linear, P> - 2 alpha tr(G_X P G_Y P'), for any r and s."""
    symmetric = all((table == table.T).all() for table in (data.D_X, data.D_Y))
    _check(symmetric, "is about symmetric distances; D_X or D_Y is not.")
    G_X, G_Y = data.D_X - r[:, None] - r, data.D_Y - s[:, None] - s
    squares = data.a @ data.D_X**2 @ data.a + data.b @ data.D_Y**2 @ data.b
    constant = data.alpha * float(squares - 4 * (data.a @ r) * (data.b @ s))
    cross = np.outer(r, s + G_Y @ data.b) + np.outer(G_X @ data.a, s)
    return constant, data.M - 4 * data.alpha * cross, G_X, G_Y


def _lifting(data: _Data, arrays: dict[str, Any]) -> tuple[float, float]:
    """Check f_ijk + g_ijl + f_kli + g_klj <= C_ijkl + C_klij, and bound what is left."""
    n, m = len(data.a), len(data.b)
    f, g = arrays["pairs_f"], arrays["pairs_g"]
    worst, sums = 0.0, arrays.get("sums", np.zeros((n * m, 0))).reshape(n, m, -1)
    for i in range(n):
        for j in range(m):
            costs = np.subtract.outer(data.D_X[i], data.D_Y[j]) ** 2
            costs += np.subtract.outer(data.D_X[:, i], data.D_Y[:, j]) ** 2
            rest = data.alpha * costs + data.M[i, j] + data.M
            # squares of sums of entries are not negative
            rest -= 2 * sums @ sums[i, j]
            rest -= f[i, j][:, None] + g[i, j] + f[:, :, i] + g[:, :, j]
            if data.exchanged:
                # a matching has no two partners
                own = rest[i, j]
                rest[i, :] = rest[:, j] = np.inf
                rest[i, j] = own
            worst = float(np.minimum(worst, rest.min()))
    local = np.where(np.isinf(data.M), np.inf, f @ data.a + g @ data.b)
    # what is too low by half of the worst holds
    return _least(local, arrays["f"], data) + worst / 2, _sign(data)


def _cutting_planes(data: _Data, arrays: dict[str, Any]) -> tuple[float, float]:
    """Check factors and cuts, and take the least of F at the vertices that these leave."""
    r, s, u, v, sigma, tau = (arrays[name] for name in ("r", "s", "u", "v", "sigma", "tau"))
    constant, linear, G_X, G_Y = _split(data, r, s)
    # the factors are those of the tables, up to rounding
    _check((np.abs(np.append(sigma, tau)) == 1).all(), "has signs of factors that are not 1 or -1.")
    missed = [np.abs((u * sigma) @ u.T - G_X).max(), np.abs((v * tau) @ v.T - G_Y).max()]
    most = [np.abs(G_X).max(), np.abs(G_Y).max()]
    off = 2 * data.alpha * float(missed[0] * (most[1] + missed[1]) + missed[1] * most[0])
    _check(off <= _MISSED * data.size, "has a factor that does not hold.")

    def least(moved: Array, f: Array) -> float:
        return _least(linear, f, data, moved, v)

    bound, beside = _cut(constant, least, ((u, sigma), (v, tau)), data, arrays)
    return bound, off + beside


def _of_points(proof: Proof, X: Any, Y: Any, a: Any, b: Any) -> tuple[float, float, float]:
    """Do the same for squared Euclidean distances that are not stored, and say how large F is."""
    sides, spread, squares = [], [], 0.0
    for name, points, scale, weight in zip("XY", (X, Y), proof.scale, (a, b), strict=True):
        _check(proof.metrics["XY".index(name)] == "sqeuclidean", "is about squared distances.")
        _check(points is not None, f"is about points: pass `{name}`.")
        x = np.asarray(points, dtype=float) * np.sqrt(scale)
        w, turn = _weights(weight, len(x)), proof.arrays["axes_" + name.lower()]
        turned = np.abs(turn @ turn.T - np.eye(x.shape[1])).max() <= _TURNED
        _check(turned, "has axes that are no rotation.")
        x = (x - w @ x) @ turn
        # D = r 1' + 1 r' - 2 x x'
        r = (x**2).sum(1)
        squares += 2 * w @ r**2 + 2 * (w @ r) ** 2 + 4 * (((x.T * w) @ x) ** 2).sum()
        sides.append((x * np.sqrt(2), -np.ones(x.shape[1])))
        spread.append((r, w))
    (r, p), (s, q) = spread
    size = proof.alpha * 16 * float(r.max() + s.max()) ** 2
    data = _Data(x[:0], x[:0], p, q, x[:0], proof.alpha, size, proof.matchings, proof.value)
    _check(proof.alpha == 1 and not proof.matchings, "is about plans without a linear cost.")
    constant = float(squares - 4 * (p @ r) * (q @ s))
    right, groups = np.column_stack([s, sides[1][0]]), [_groups(side) for side, _ in sides]

    def least(moved: Array, f: Array) -> float:
        return _least_near(np.column_stack([-4 * r, moved]), right, f, groups, data)

    bound, off = _cut(constant, least, (sides[0], sides[1]), data, proof.arrays)
    # squares are not negative
    return max(bound, 0.0), off, (len(p) + len(q)) * size


def _cut(constant: float, least: Any, factors: Any, data: _Data, arrays: dict[str, Any]) -> Any:
    """Check the cuts of F = constant + <linear, P> - 2 alpha tr(G_X P G_Y P'), and bound it."""
    (u, sigma), (v, tau) = factors
    left, right = np.repeat(u, v.shape[1], 1), np.tile(v, (1, u.shape[1]))
    c = 2 * data.alpha * np.outer(sigma, tau).ravel()
    pairs = list(zip(left.T, right.T, strict=True))
    high = np.array([_pairing(x, data.a, y, data.b) for x, y in pairs])
    low = np.array([-_pairing(-x, data.a, y, data.b) for x, y in pairs])
    kept, z = arrays["active"].astype(int), arrays["touched"]
    inside = np.isin(kept, np.arange(len(c))).all()
    _check(inside, "follows products of factors that there are not.")
    _check((c[kept] > 0).all(), "follows a convex term where only concave ones can be.")
    # -c z^2 lies above any tangent, if convex
    slope = np.where(c < 0, -2 * c * z, 0.0)
    constant += float((c * z**2)[c < 0].sum())
    # else it is -m R^2 of a contraction R, with rows and columns of squares of sum one at most
    sizes = np.outer(_spread(u, data.a), _spread(v, data.b)).ravel()
    p, q = arrays["rows"], arrays["columns"]
    shares, away = np.add.outer(p, q).ravel(), np.isin(np.arange(len(c)), kept, invert=True)
    enough = (shares >= c * sizes * (1 - _NEAR))[away].all() and min(p.min(), q.min()) >= 0
    _check(enough, "leaves out a product of factors that may matter more.")
    constant -= float(p.sum() + q.sum())

    # every plan meets every cut t + w . z >= h
    def missed(w: Array, height: float, f: Array) -> float:
        whole = slope.copy()
        whole[kept] = w
        return float(height - least(u @ whole.reshape(u.shape[1], -1), f))

    with ThreadPoolExecutor() as threads:
        cuts = (arrays[name] for name in ("slopes", "heights", "potentials"))
        # what is not a number is the largest
        off = float(np.max([0.0, *threads.map(missed, *cuts)]))
    _check(off <= _MISSED * data.size, "has a cut that does not hold.")
    claim = data.claim - constant
    left = (c - shares / sizes)[kept].clip(min=0)
    least_left, lost = _least_vertex(left, low[kept], high[kept], claim, arrays)
    return constant + least_left, off + lost


def _spread(u: Array, weights: Array) -> Array:
    """Bound |U x| of weights A by |D x|, and give the diagonal D^2."""
    gram = (u.T * weights) @ u
    size = gram.diagonal().clip(min=_TINY)
    return size * np.linalg.eigvalsh(gram / np.sqrt(np.outer(size, size))).max(initial=1.0)


def _least_vertex(
    c: Array, low: Array, high: Array, claim: float, arrays: Any
) -> tuple[float, float]:
    """Take the least of t - c . z^2 where all cuts hold, or the claim if that is less.

    Then what it may be too low by, as cuts were left out that are near others.

    A cut makes vertices on edges, where this is no less than at one of the ends: all vertices below
    the claim have a neighbour that was one, so that no others are kept.
    """
    slopes, heights = arrays["slopes"], arrays["heights"]
    width, dim = high - low, len(c) + 1
    _check(dim <= _DIMENSIONS, "follows too many numbers.")
    # plans above a cap cost more than the claim
    scale = claim + float(c @ np.maximum(low**2, high**2)) - heights[0]
    if scale <= 0:
        return claim, 0.0

    # in units of the ranges
    cuts = np.column_stack([slopes[1:] * width / scale, np.ones(len(slopes) - 1)])
    raised = (heights[1:] - slopes[1:] @ low - heights[0]) / scale
    box = np.concatenate([np.eye(dim), -np.eye(dim)]), np.repeat([0.0, -1.0], dim)

    def above(x: Array) -> Array:
        return (heights[0] - claim - (low + x[:, :-1] * width) ** 2 @ c) / scale + x[:, -1]

    for apart in _APART:
        kept = list[int]()
        for k, cut in enumerate(cuts):
            if not kept or np.abs(cuts[kept] - cut).max(1).min() >= apart:
                kept.append(k)
        points = _vertices(*box, cuts[kept], raised[kept], above)
        if points is not None:
            # the heights of two slopes differ by no more than these, and so do what they prove
            lost = 2 * dim * apart * scale if len(kept) < len(cuts) else 0.0
            return claim + float(scale * np.append(above(points), 0.0).min()), float(lost)
    raise InvalidInputError(
        "`proof` has cuts so near each other that vertices are lost in rounding."
    )


def _vertices(box: Array, sizes: Array, cuts: Array, raised: Array, above: Any) -> Array | None:
    """List the vertices of a box and cuts that are below a claim, unless one is lost."""
    dim, rng = box.shape[1], np.random.default_rng()
    # lowered by chance, so that no vertex is on more faces
    raised = raised - _LOWERED * rng.random(len(raised)) * np.abs(cuts).sum(1)
    normals, offsets = np.concatenate([box, cuts]), np.append(sizes, raised)
    names = rng.integers(2**63, size=len(normals), dtype=np.uint64)
    sides = (np.arange(2**dim)[:, None] >> np.arange(dim)) & 1
    made = np.arange(dim) + dim * sides
    faces, points, known = made[:0], np.empty((0, dim + 1, dim)), names[:0]
    for count in range(2 * dim, len(normals) + 1):
        first = np.unique(names[made].sum(1, dtype=np.uint64), return_index=True)[1]
        new = _corners(made[first], normals[:count], offsets[:count], names, above)
        faces, points = np.concatenate([faces, new[0]]), np.concatenate([points, new[1]])
        known = np.append(known, names[new[0]].sum(1, dtype=np.uint64))
        if not np.isin(new[2], known).all():
            return None
        if count == len(normals):
            break
        slack = points @ normals[count] - offsets[count]
        kept = slack >= 0
        row, left = np.nonzero(kept[:, 1:] != kept[:, :1])
        share = slack[row, 0] / (slack[row, 0] - slack[row, left + 1])
        step = share[:, None] * (points[row, left + 1] - points[row, 0])
        points[row, left + 1] = end = points[row, 0] + step
        made = faces[row]
        made[np.arange(len(row)), left] = count
        made = made[~(above(end) >= _NEAR)]
        faces, points, known = (part[kept[:, 0]] for part in (faces, points, known))
    return points[:, 0]


def _corners(faces: Any, normals: Array, offsets: Array, names: Any, above: Any) -> Any:
    """Find the vertices below a claim by their faces, and the ends of their edges after each.

    The names of those of these ends that are below it, too, come last.
    """
    found = []
    for part in np.split(faces, range(_AT_ONCE, len(faces), _AT_ONCE)):
        try:
            edges = np.linalg.inv(normals[part].transpose(0, 2, 1))
        except np.linalg.LinAlgError:
            _check(False, "has a vertex on faces that do not meet in a point.")
        x = offsets[part][:, None] @ edges
        below = ~(above(x[:, 0]) >= 0)
        part, x, edges = part[below], x[below], edges[below]
        rates = -(edges @ normals.T) / (x @ normals.T - offsets).clip(min=_ROUNDED)
        np.put_along_axis(rates, part[:, None], 0.0, 2)
        met = rates.argmax(2)
        ends = x + edges / np.take_along_axis(rates, met[:, :, None], 2)
        points = np.concatenate([x, ends], 1)
        _check(np.isfinite(points).all(), "has an edge without an end.")
        others = names[part].sum(1, dtype=np.uint64)[:, None] - names[part] + names[met]
        low = above(ends.reshape(-1, x.shape[2])) < -_NEAR
        found.append((part, points, others.ravel()[low]))
    return [np.concatenate(parts) for parts in zip(*found, strict=True)]


def _pairing(u: Array, a: Array, v: Array, b: Array) -> float:
    """Compute the largest sum of u_i v_j P_ij, both sorted."""
    i, j = np.argsort(u), np.argsort(v)
    first, second = np.cumsum(a[i]), np.cumsum(b[j])
    ends = np.sort(np.concatenate([first, second]))
    places = ends - np.diff(ends, prepend=0) / 2
    x = u[i][np.minimum(np.searchsorted(first, places), len(u) - 1)]
    y = v[j][np.minimum(np.searchsorted(second, places), len(v) - 1)]
    return float((np.diff(ends, prepend=0) * x) @ y)


_METHODS = {
    "squares": _squares, "distances in order": _in_order, "eigenvalues": _eigenvalues,
    "first level of liftings": _lifting, "semidefinite relaxation": _lifting,
    "cutting planes": _cutting_planes,
}  # fmt: skip
