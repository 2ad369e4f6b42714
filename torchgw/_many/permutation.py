"""Is a match real: p-values of objectives against spaces as they would be by chance."""

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast, get_args

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._batch.anneal import objectives
from torchgw._batch.packing import LARGEST, Packed, make_stack
from torchgw._boundary.arrays import as_labels, make_generator, resolve_device, to_numpy, to_tensor
from torchgw._boundary.checks import check_choice, check_count, reject_unknown
from torchgw._boundary.graphs import as_graph
from torchgw._errors import ConvergenceWarning, GraphWarning, InvalidInputError, SearchWarning
from torchgw._many.questions import epsilons
from torchgw._many.solve_many import scaled, solve_batch
from torchgw._many.spaces import Listed, Measure, check_measure, read_spaces
from torchgw._problem.named import DistanceName, ScaleName, pair_of_distances
from torchgw._problem.table import check_options
from torchgw._results.base import Result
from torchgw._tensors.operations import EQUAL, centred, straight
from torchgw._typing import Array, Seed

Null = Literal["auto", "rotated", "columns", "entries", "rewired"]

# Entries of tables of null spaces that are kept at a time: 512 MB. A choice.
ENTRIES = 2**26


def rotated(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Turn the points (n, d), as columns of n numbers, about their mean: (count, n, d)."""
    mean = points.mean(0)
    _, sizes, axes = torch.linalg.svd(points - mean, full_matrices=False)
    # coordinates of rounding have no direction
    rank = int((sizes > len(points) * torch.finfo(sizes.dtype).eps * sizes.max()).sum())
    drawn = torch.randn(
        count, len(points), rank, dtype=points.dtype, device=points.device, generator=generator
    )
    drawn -= drawn.mean(1, keepdim=True)
    # without a sign left open, and faster than QR, whose factor it is
    lower = torch.linalg.cholesky(drawn.mT @ drawn)
    turned = torch.linalg.solve_triangular(lower, drawn.mT, upper=False).mT
    made: Tensor = mean + turned * sizes[:rank] @ axes[:rank]
    return made


def columns_shuffled(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Shuffle each column of points (n, d) by itself: (count, n, d)."""
    keys = torch.rand(count, *points.shape, device=points.device, generator=generator)
    return points.expand(count, *points.shape).gather(1, keys.argsort(1))


def entries_shuffled(table: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Shuffle the entries of a symmetric table (n, n) beside its diagonal: (count, n, n)."""
    n = len(table)
    i, j = torch.triu_indices(n, n, 1, device=table.device)
    keys = torch.rand(count, len(i), device=table.device, generator=generator)
    made = table.diagonal().diag_embed().repeat(count, 1, 1)
    made[:, i, j] = made[:, j, i] = table[i, j][keys.argsort(1)]
    return made


def points_of(name: str, table: Tensor) -> Tensor:
    """Find points (n, d) whose Euclidean distances a table has; refuse one that has none."""
    sizes, vectors = torch.linalg.eigh(-centred(table.double().square()) / 2)
    # negative eigenvalues up to a share of the largest are rounding
    if bool(sizes[0] < -1e-8 * sizes[-1]):
        raise InvalidInputError(
            f"null='rotated' turns points, and `{name}` has distances of none in a Euclidean space "
            f"(eigenvalues down to {float(sizes[0] / sizes[-1]):.2g} of the largest). Pass the "
            "points and `distances`, or null='entries', which shuffles the table."
        )
    found: Tensor = vectors * sizes.clamp_min(0).sqrt()
    return found


def rewired(graph: Any, count: int, seed: int) -> list[scipy.sparse.csr_array]:
    """Exchange ends of edges, so that each node keeps its degree; lengths stay with first ends.

    Copies begin at one graph, to which as many steps lead from the graph given: then it and they
    are exchangeable, however few the steps [1]_.

    References
    ----------
    .. [1] J. Besag, P. Clifford. Generalized Monte Carlo significance tests. Biometrika 1989.
    """
    rng = np.random.default_rng(seed)
    upper = scipy.sparse.triu(scipy.sparse.csr_array(graph), 1).tocoo()
    n: int = upper.shape[0]
    edges = np.stack([upper.row, upper.col], 1).astype(np.int64)
    hub = _exchanged(edges[None], n, rng)
    width = max(1, ENTRIES // n**2)
    made = []
    for begin in range(0, count, width):
        some = min(width, count - begin)
        for ends in _exchanged(np.repeat(hub, some, 0), n, rng):
            half = scipy.sparse.coo_array((upper.data, (ends[:, 0], ends[:, 1])), shape=(n, n))
            made.append((half + half.T).tocsr())
    return made


def _exchanged(edges: NDArray[np.int64], n: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Exchange ends of the edges (count, e, 2) of graphs side by side, where none is doubled."""
    count, total = edges.shape[:2]
    if total < 2:
        return edges
    known = np.zeros((count, n, n), bool)
    every = np.arange(count)
    for first, second in ((0, 1), (1, 0)):
        known[every[:, None], edges[:, :, first], edges[:, :, second]] = True
    # ten times the edges: a p-value is valid for any number, and samples are about independent
    for _ in range(10 * total):
        one, other = rng.integers([[total], [total - 1]], size=(2, count))
        other += (other >= one).astype(np.int64)
        turn = rng.integers(2, size=(2, count))
        u, v = edges[every, one, turn[0]], edges[every, one, 1 - turn[0]]
        x, y = edges[every, other, turn[1]], edges[every, other, 1 - turn[1]]
        may = (u != y) & (x != v) & ~known[every, u, y] & ~known[every, x, v]
        here, u, v, x, y = every[may], u[may], v[may], x[may], y[may]
        known[here, u, v] = known[here, v, u] = known[here, x, y] = known[here, y, x] = False
        known[here, u, y] = known[here, y, u] = known[here, x, v] = known[here, v, x] = True
        edges[here, one[may]] = np.stack([u, y], 1)
        edges[here, other[may]] = np.stack([x, v], 1)
    return edges


# Distances of points that are computed for all null spaces at once.
_AT_ONCE = ("auto", "euclidean")
# What each null says, for the summary.
_SAYS = {
    "rotated": "Y is a shapeless (Gaussian) cloud of its mean and covariance",
    "columns": "the columns of Y have nothing to do with each other",
    "entries": "the distances of Y are in any order",
    "rewired": "Y is any graph of its degrees",
    "groups": "both groups are of one kind",
}


@dataclass(frozen=True, repr=False, eq=False)
class MatchTest(Result):
    """Outcome of :func:`torchgw.test` and :func:`torchgw.test_groups`.

    Attributes
    ----------
    p_value : float
        Share of the draws, the observed one among them, that are at least as extreme: at least
        1 / (n_permutations + 1).
    statistic : float
        The objective of the spaces given; of groups, the mean value between them less the mean of
        those within.
    null_distribution : ndarray, shape (n_permutations,), float64
        The statistic of each draw.
    null : str
        What was drawn anew.
    random_state : int
        Seed that reproduces the draws.
    """

    p_value: float
    statistic: float
    null_distribution: Array
    null: str
    random_state: int

    @property
    def z_score(self) -> float:
        """Standard deviations of the null distribution between its mean and the statistic."""
        spread = float(self.null_distribution.std())
        apart = self.statistic - float(self.null_distribution.mean())
        return apart / spread if spread > 0 else float("nan")

    def _summary(self) -> tuple[str, dict[str, str], str]:
        figures = {
            "p_value": f"{self.p_value:.4g}",
            "statistic": f"{self.statistic:.6g}",
            "null_mean": f"{float(self.null_distribution.mean()):.6g}",
            "z_score": f"{self.z_score:.2f}",
        }
        said = f"against {self.null!r}: {_SAYS[self.null]}"
        return f"{len(self.null_distribution)} draws", figures, said


@dataclass(frozen=True, repr=False, eq=False)
class PairwiseTest(Result):
    """Outcome of :func:`torchgw.test_pairwise`, for N and M spaces.

    Attributes
    ----------
    p_value, statistic : ndarray, shape (N, M), float64
        As of :class:`MatchTest`; NaN where a pair was not tested.
    q_value : ndarray, shape (N, M), float64
        p-values adjusted for the number of pairs: among those up to q, a share q is expected to be
        false.
    null : str
    n_permutations : int
    random_state : int
    """

    p_value: Array
    q_value: Array
    statistic: Array
    null: str
    n_permutations: int
    random_state: int

    def _summary(self) -> tuple[str, dict[str, str], str]:
        tested = np.isfinite(self.p_value)
        found = int((self.q_value[tested] <= 0.05).sum())
        figures = {
            "q_at_most_0.05": f"{found} of {int(tested.sum())}",
            "draws": str(self.n_permutations),
        }
        rows, columns = self.p_value.shape
        return f"{rows} x {columns}", figures, f"against {self.null!r}: {_SAYS[self.null]}"


@reject_unknown
def test(
    X: Any = None,
    Y: Any = None,
    *,
    D_X: Any = None,
    D_Y: Any = None,
    null: Null = "auto",
    n_permutations: int = 1000,
    distances: DistanceName | tuple[Any, Any] = "auto",
    n_neighbors: int | None = None,
    scale: ScaleName | None = "auto",
    epsilon: float | Literal["auto"] = "auto",
    n_init: int | None = 1,
    max_iter: int = 20,
    device: torch.device | str | int | None = None,
    random_state: Seed | None = None,
) -> MatchTest:
    """Test whether two spaces match better than the first one matches chance.

    The objective of (X, Y) is compared with those of X and ``n_permutations`` spaces drawn in place
    of Y; small ones count. All problems are solved by the same steps from the same start, as one
    batch, and the p-value is (1 + number of draws with an objective at most the observed one) over
    (1 + draws).

    Permuting the points of Y would change nothing: no objective of this kind depends on their
    order. So a null says what else Y could have been. The p-value is exact, for any X, any number
    of draws and however well problems are solved, if the observed space and those drawn are
    exchangeable, which is the null hypothesis:

    - ``"rotated"``: the points of Y (n, d), less their mean, are multiplied from the left by random
      rotations. Mean, covariance and dimension are kept, shape is lost. Exchangeable if the points
      are a sample of a Gaussian, of any mean and covariance, that knows nothing of X. Of a table
      the points are those of classical scaling.
    - ``"columns"``: each column of the points is shuffled by itself. The distribution of each
      feature is kept, what they have to do with each other is lost. Exchangeable if the points are
      drawn independently, with independent features. It depends on the choice of axes.
    - ``"entries"``: the entries of D_Y are shuffled: their distribution is kept, geometry is lost.
      Exchangeable if all orders of the entries are as likely. Any two spaces with geometry match
      better than this, so use it where tables need not have any, as dissimilarities that people
      report.
    - ``"rewired"``: pairs of edges of a graph exchange ends, so that degrees are kept, by steps to
      and fro that make the copies exchangeable with the graph [1]_ if, given its degrees, all
      graphs are as likely.

    A small p-value says that Y is not of that kind, in the direction of X. It does not say which
    points match: that is for :meth:`GWResult.confidence`.

    Parameters
    ----------
    X, Y : space, of n and m points
        As in :func:`torchgw.solve`, of equal weights; in batches up to 512 points, beyond that one
        after the other.
    D_X, D_Y : array-like, shapes (n, n) and (m, m), optional
        Distance matrices, in place of X and Y.
    null : {"auto", "rotated", "columns", "entries", "rewired"}
        ``"auto"`` is ``"rewired"`` for a graph Y, and else ``"rotated"``.
    n_permutations : int
        Spaces that are drawn.
    distances, n_neighbors, scale, epsilon, n_init, max_iter
        As in :func:`torchgw.solve_many`, the same for all problems. Few iterations from one start
        do: what counts is that none is solved better than others. From one start all
        ``max_iter`` are taken, in float32, as epsilon falls to its target, and the last linear
        problem is solved in float64. With ``n_init=None`` or more iterations the test sees more of
        a match, and takes longer.
    device : torch.device or str, optional
        Where to compute; by default where the inputs are.
    random_state : int, generator or None

    Returns
    -------
    MatchTest
        ``p_value``, ``statistic``, ``null_distribution``; ``torchgw.plotting.plot_test`` draws it.

    Raises
    ------
    InvalidInputError, InvalidTypeError
        For input that cannot be used, and for a null that is none of such a space.

    References
    ----------
    .. [1] J. Besag, P. Clifford. Generalized Monte Carlo significance tests. Biometrika 1989.

    Examples
    --------
    >>> import numpy as np, torchgw
    >>> angles = np.linspace(0, 5, 30)
    >>> arc = np.stack([np.cos(angles), np.sin(angles)], 1)
    >>> found = torchgw.test(arc, 2 + arc[::-1], n_permutations=99, random_state=0)
    >>> found.p_value
    0.01
    """
    check_count("n_permutations", n_permutations)
    check_choice("null", null, get_args(Null))
    check_options(epsilon=epsilon, max_iter=max_iter, n_init=n_init)
    sides = [
        Listed.of(name, None if space is None else [space], None if table is None else [table])
        for name, space, table in (("X", X, D_X), ("Y", Y, D_Y))
    ]
    where = resolve_device(device, *(side.items[0] for side in sides))
    measure = Measure(distances, scale, n_neighbors)
    check_measure(measure, *sides)
    generator, seed = make_generator(random_state, where)
    read = partial(read_spaces, weights=None, features=None, measure=measure, device=where)
    with torch.no_grad():
        source, target = (read(side, side=place)[0].table for place, side in enumerate(sides))
        chosen = _null_of(null, sides[1])
        found = []
        width = max(1, ENTRIES // (len(target) ** 2 + len(source) ** 2))
        for begin in range(0, n_permutations + 1, width):
            # the space given is the first, made as those drawn are
            first, count = begin == 0, min(width, n_permutations + 1 - begin)
            drawn = _drawn(
                chosen, sides[1], target, count - first, measure, read, generator, first=first
            )
            if n_init == 1 and max(len(source), drawn.shape[1]) <= LARGEST:
                found.append(to_numpy(_in_step(source, drawn, epsilon, max_iter)))
            else:
                with warnings.catch_warnings():
                    # ends of few steps are what is compared
                    warnings.simplefilter("ignore", ConvergenceWarning)
                    warnings.simplefilter("ignore", SearchWarning)
                    batch = solve_batch(
                        source.expand(count, -1, -1), drawn, scale=None, epsilon=epsilon,
                        n_init=n_init, max_iter=max_iter, plans=False,
                    )  # fmt: skip
                found.append(to_numpy(batch.objective))
    values = np.concatenate(found)
    return _compared(values[0], values[1:], chosen, seed)


def _in_step(source: Tensor, drawn: Tensor, epsilon: float | str, steps: int) -> Tensor:
    """Compute the objectives of a space (n, n) and each of those drawn, (count, m, m)."""
    x, y = (
        make_stack(
            part, part.new_full(part.shape[:2], 1 / part.shape[1]),
            part.new_full(part.shape[:1], part.shape[1], dtype=torch.int64),
        )
        for part in (source[None], drawn)
    )  # fmt: skip
    every, one = torch.arange(len(drawn), device=drawn.device), torch.ones_like(y.spreads)
    target = float(epsilons(epsilon, 1)[0])
    return objectives(Packed(x, y, 0 * every, every, one, target * one, one), steps)


def _compared(observed: float, drawn: Any, null: str, seed: int) -> MatchTest:
    """Compare a statistic with those of the draws, of which small ones count."""
    # a number that was lost counts against the match, and so does one equal but for rounding
    above = drawn > observed + EQUAL * abs(observed)
    p_value = (1 + int((~above).sum())) / (1 + len(drawn))
    return MatchTest(p_value, float(observed), drawn, null, seed)


def _null_of(null: Null, side: Listed) -> str:
    """Choose a null for a space, or refuse one that it does not have."""
    item = side.items[0]
    is_graph = not side.are_tables and as_graph(side.name, item) is not None
    if null == "auto":
        return "rewired" if is_graph else "rotated"
    if null in ("columns", "rotated") and is_graph or null == "columns" and side.are_measured:
        raise InvalidInputError(
            f"null={null!r} needs points, and Y is a {'graph' if is_graph else 'table'}. Pass "
            f"null={'rewired' if is_graph else 'entries'!r}."
        )
    if null == "rewired" and not is_graph:
        raise InvalidInputError(
            "null='rewired' exchanges edges of a graph, and Y is none. Pass null='rotated' or "
            "'entries'."
        )
    return null


def _drawn(
    null: str,
    side: Listed,
    table: Tensor,
    count: int,
    measure: Measure,
    read: Any,
    generator: torch.Generator,
    *,
    first: bool,
) -> Tensor:
    """Make tables of spaces drawn in place of Y, (count, m, m), after Y if that is ``first``."""
    item, computed = side.items[0], not side.are_measured
    if null == "entries":
        made = entries_shuffled(table, count, generator)
        return torch.cat([table[None], made]) if first else made
    if null == "rewired":
        seed = int(torch.randint(2**62, (1,), generator=generator, device=table.device))
        listed: list[Any] = rewired(as_graph("Y", item), count, seed)
    else:
        points = _points(item, table.device) if computed else points_of("D_Y", table)
        draw = rotated if null == "rotated" else columns_shuffled
        clouds = torch.cat([points.expand(int(first), -1, -1), draw(points, count, generator)])
        if not computed or pair_of_distances(measure.distances)[1] in _AT_ONCE:
            tables = straight(clouds, clouds)
            unit = ("max" if computed else None) if measure.scale == "auto" else measure.scale
            weights = tables.new_full(clouds.shape[:2], 1 / len(points))
            return tables if unit is None else scaled(tables, weights, unit)
        listed, first = list(clouds), False
    with warnings.catch_warnings():
        # a graph that falls apart is stitched, as the one given would be
        warnings.simplefilter("ignore", GraphWarning)
        spaces = read(side._replace(items=[item] * first + listed), side=1)
    return torch.stack([space.table for space in spaces])


def _points(item: Any, device: torch.device) -> Tensor:
    """Read points (n, d) in float64."""
    points = to_tensor("Y", item).to(device, torch.float64)
    if points.ndim != 2:
        raise InvalidInputError(f"`Y` must be points of shape (n, d); got {tuple(points.shape)}.")
    return points


@reject_unknown
def test_pairwise(
    Xs: Any = None,
    Ys: Any = None,
    *,
    D_X: Any = None,
    D_Y: Any = None,
    null: Null = "auto",
    n_permutations: int = 1000,
    distances: DistanceName | tuple[Any, Any] = "auto",
    n_neighbors: int | None = None,
    scale: ScaleName | None = "auto",
    epsilon: float | Literal["auto"] = "auto",
    n_init: int | None = 1,
    max_iter: int = 20,
    device: torch.device | str | int | None = None,
    random_state: Seed | None = None,
) -> PairwiseTest:
    """Test all pairs of spaces, and adjust the p-values for their number.

    Every pair is tested as by :func:`test`; q-values are Benjamini and Hochberg's, by SciPy's
    ``false_discovery_control``. p-values are at least 1 / (n_permutations + 1), so that many pairs
    need many draws.

    Parameters
    ----------
    Xs, Ys : list of spaces, N and M of them
        Without ``Ys``, all pairs i < j of Xs; other entries are NaN.
    D_X, D_Y : list of array-like, shapes (n, n) and (m, m), optional
        Distance matrices, in place of Xs and Ys.
    null, n_permutations, distances, n_neighbors, scale, epsilon, n_init, max_iter, device
        As in :func:`test`.
    random_state : int, generator or None

    Returns
    -------
    PairwiseTest
        ``p_value``, ``q_value`` and ``statistic``, (N, M).

    Raises
    ------
    InvalidInputError, InvalidTypeError
        As in :func:`test`.

    Examples
    --------
    >>> import numpy as np, torchgw
    >>> Xs = [np.random.default_rng(k).normal(size=(12, 2)) for k in range(3)]
    >>> found = torchgw.test_pairwise(Xs, n_permutations=19, random_state=0)
    >>> found.q_value.shape
    (3, 3)
    """
    lists = [Listed.of("X", Xs, D_X)]
    alone = Ys is None and D_Y is None
    lists.append(lists[0] if alone else Listed.of("Y", Ys, D_Y))
    generator, seed = make_generator(random_state, torch.device("cpu"))
    shape = tuple(len(listed.items) for listed in lists)
    if alone and shape[0] < 2:
        raise InvalidInputError("`Xs` must have at least two spaces, or `Ys` others; got one.")
    p_value, statistic = np.full((2, *shape), np.nan)
    for i, j in np.ndindex(*shape):
        if alone and i >= j:
            continue
        given = {
            ("D_" if listed.are_tables else "") + name: listed.items[place]
            for name, listed, place in (("X", lists[0], i), ("Y", lists[1], j))
        }
        found = test(
            **given, null=null, n_permutations=n_permutations, distances=distances,
            n_neighbors=n_neighbors, scale=scale, epsilon=epsilon, n_init=n_init,
            max_iter=max_iter, device=device,
            random_state=int(torch.randint(2**62, (1,), device="cpu", generator=generator)),
        )  # fmt: skip
        p_value[i, j], statistic[i, j] = found.p_value, found.statistic
        null = cast(Null, found.null)
    q_value, tested = np.full(shape, np.nan), np.isfinite(p_value)
    if tested.any():
        q_value[tested] = scipy.stats.false_discovery_control(p_value[tested])
    return PairwiseTest(p_value, q_value, statistic, null, int(n_permutations), seed)


@reject_unknown
def test_groups(
    values: Any, labels: Any, *, n_permutations: int = 1000, random_state: Seed | None = None
) -> MatchTest:
    """Test whether spaces of two groups differ: subjects and patients, networks of two kinds.

    The statistic is the energy distance: twice the mean value between the groups less the mean
    values within each. Draws give the labels to the spaces in another order. Spaces are
    exchangeable if both groups are samples of one distribution, and then the p-value is exact.

    Parameters
    ----------
    values : array-like, shape (N, N)
        Of all pairs of spaces, as :func:`torchgw.pairwise` gives them.
    labels : array-like, shape (N,)
        Two different labels.
    n_permutations : int
    random_state : int, generator or None

    Returns
    -------
    MatchTest
        With the statistic's sign turned, so that small values count as in :func:`test`.

    Raises
    ------
    InvalidInputError, InvalidTypeError
        If there are not two labels, one for each space, with two spaces each.

    Examples
    --------
    >>> import numpy as np, torchgw
    >>> rng = np.random.default_rng(0)
    >>> Xs = [rng.normal(size=(10, 2)) * [1, 1 + 4 * (k % 2)] for k in range(12)]
    >>> values = torchgw.pairwise(Xs, epsilon=0.1, n_init=1, progress=False)
    >>> labels = [k % 2 for k in range(12)]
    >>> found = torchgw.test_groups(values, labels, n_permutations=199, random_state=0)
    >>> found.p_value < 0.05
    True
    """
    check_count("n_permutations", n_permutations)
    matrix = to_numpy(to_tensor("values", values)).astype(np.float64)
    kinds, place = np.unique(as_labels("labels", labels), return_inverse=True)
    sizes = np.bincount(place)
    if len(kinds) != 2 or matrix.shape != (len(place),) * 2 or sizes.min() < 2:
        raise InvalidInputError(
            "`labels` must name two groups, of two spaces or more each, with a label for each of "
            f"{len(matrix)} spaces; got {len(place)} labels of {len(kinds)} groups."
        )
    generator, seed = make_generator(random_state, torch.device("cpu"))
    keys = torch.rand(n_permutations, len(place), device="cpu", generator=generator)
    signs = np.vstack([place, place[keys.argsort(1).numpy()]])[:, :, None] == [0, 1]
    weights = signs / sizes
    within = np.ones(2) / (1 - 1 / sizes)
    # a space is not compared with itself
    matrix = matrix * (1 - np.eye(len(matrix)))
    sums = np.einsum("bik,ij,bjl->bkl", weights, matrix, weights, optimize=True)
    energy = 2 * sums[:, 0, 1] - sums[:, 0, 0] * within[0] - sums[:, 1, 1] * within[1]
    # the observed order comes first
    return _compared(-energy[0], -energy[1:], "groups", seed)
