"""Quantized problems: parts of both spaces are matched by representatives, their points in order.

The plan of the representatives is found first; the points of two matched parts are then matched by
their distances to the representative of each, in one dimension [1]_.

References
----------
.. [1] S. Chowdhury, D. Miller, T. Needham. Quantized Gromov-Wasserstein. ECML PKDD 2021.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.spatial.distance import cdist

from torchgw._boundary.checks import check_count
from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw.pot._arrays import Array, Arrays, Places
from torchgw.pot._vertices import in_order
from torchgw.pot.gromov._call import Call, takes
from torchgw.pot.gromov._read import check_share, read_problem, without_gradients
from torchgw.pot.gromov._starts import partition
from torchgw.pot.gromov._steps import exact

_STEPS = "armijo=False, max_iter=1e4, tol_rel=1e-9, tol_abs=1e-9"
_FEATURES = "`alpha` below 1 and methods on '_fused' weigh features: pass those of both spaces."


@takes(
    "CR1, CR2, list_R1, list_R2, list_p1, list_p2, MR=None, alpha=1.0, build_OT=False, log=False, "
    f"{_STEPS}, nx=None, **kwargs"
)
def quantized_fused_gromov_wasserstein_partitioned(call: Call) -> Any:
    """Match two spaces in parts, as ``ot.gromov.quantized_fused_gromov_wasserstein_partitioned``.

    Returns
    -------
    T_global : array of shape (k, l), between representatives
    Ts_local : dict of arrays, between the points of parts i and j that are matched
    T : array of shape (n, m), points part by part, or None without ``build_OT``
    log : dict, only with ``log=True``
        ``global dist``, and ``local dist (i,j)`` of each pair of parts.
    """
    call.check_known()
    tables, alpha = (call.CR1, call.CR2), check_share(call.alpha)
    lists = call.list_R1, call.list_R2, call.list_p1, call.list_p2
    without_gradients(call.function, *tables, *lists, call.MR)
    if alpha == 0:
        raise InvalidInputError("`alpha` must be above 0 and at most 1; got 0.")
    if alpha < 1 and call.MR is None:
        raise InvalidInputError(_FEATURES)
    for R, p, side in zip(lists[:2], lists[2:], "12", strict=True):
        if [len(part) for part in R] != [len(part) for part in p]:
            raise InvalidInputError(
                f"`list_R{side}` and `list_p{side}` must have one array for each part, with a "
                "distance and a weight of each of its points."
            )
    arrays = Arrays(*tables, *call.list_R1, *call.list_R2)
    R1, R2, p1, p2 = ([arrays.read("list", part).ravel() for part in parts] for parts in lists)
    p, q = (np.array([part.sum() for part in parts]) for parts in (p1, p2))
    linear = None if alpha == 1 else call.MR
    problem = read_problem(*tables, p, q, "square_loss", None, M=linear, alpha=alpha)
    stop = {"max_iter": int(call.max_iter), "tol_rel": call.tol_rel, "tol_abs": call.tol_abs}
    found = exact(problem, "balanced", None, armijo=call.armijo, **stop)
    n, m = (np.cumsum([0, *map(len, parts)]) for parts in (p1, p2))
    whole, local, log = np.zeros((n[-1], m[-1])), {}, {"global dist": np.float64(found.value)}
    for i, j in zip(*found.plan.nonzero(), strict=True):
        rows, columns = R1[i].argsort(), R2[j].argsort()
        plan = np.zeros((len(rows), len(columns)))
        plan[np.ix_(rows, columns)] = in_order(p1[i][rows] / p[i], p2[j][columns] / q[j])
        whole[n[i] : n[i + 1], m[j] : m[j + 1]] = found.plan[i, j] * plan
        local[int(i), int(j)] = arrays.give(plan)
        log[f"local dist ({i},{j})"] = np.vdot(np.subtract.outer(R1[i], R2[j]) ** 2, plan)
    plans = arrays.give(found.plan), local, arrays.give(whole) if call.build_OT else None
    return (*plans, arrays.give_all(log)) if call.log else plans


@takes(
    "C1, C2, npart1, npart2, p=None, q=None, C1_aux=None, C2_aux=None, F1=None, F2=None, "
    f'alpha=1.0, part_method="fluid", rep_method="random", log=False, {_STEPS}, random_state=0, '
    "**kwargs"
)
def quantized_fused_gromov_wasserstein(call: Call) -> Any:
    """Match two graphs by parts, as ``ot.gromov.quantized_fused_gromov_wasserstein``.

    POT 0.9.7 partitions at random whenever 'fluid', 'louvain' or 'pagerank' are named, and orders
    its plan part by part; here these are done, and points stay in their order.

    Returns
    -------
    T_global, Ts_local, T, log
        As :func:`quantized_fused_gromov_wasserstein_partitioned`; the log has ``qFGW_dist`` too.
    """
    methods, seed = (call.part_method, call.rep_method), call.random_state
    given = call.C1_aux, call.C2_aux
    without_gradients(call.function, *given)
    arrays = Arrays(call.C1, call.C2)

    def divide(place: int, C: Array, count: int, p: Array, F: Array | None) -> Any:
        apart = None if F is None else _squares(F, F)
        plain = fused = C if given[place] is None else arrays.table("C_aux", given[place])
        if apart is not None:
            fused = call.alpha * plain + (1 - call.alpha) * apart
        first, second = (fused if name.endswith("_fused") else plain for name in methods)
        part, rep = (name.removesuffix("_fused") for name in methods)
        labels = get_graph_partition(first, count, part, random_state=seed)
        chosen = get_graph_representants(second, labels, rep, seed)
        return labels, format_partitioned_graph(C, p, labels, chosen, F, apart, call.alpha)

    return _whole(call, (call.C1, call.C2), methods, divide, lambda table: table)


@takes(
    "X1, X2, npart1, npart2, p=None, q=None, F1=None, F2=None, alpha=1.0, "
    f'method="kmeans", log=False, {_STEPS}, random_state=0, **kwargs'
)
def quantized_fused_gromov_wasserstein_samples(call: Call) -> Any:
    """Match two clouds by parts, as ``ot.gromov.quantized_fused_gromov_wasserstein_samples``.

    Distances are squared Euclidean ones. Points stay in their order, unlike in POT 0.9.7.

    Returns
    -------
    T_global, Ts_local, T, log
        As :func:`quantized_fused_gromov_wasserstein`.
    """
    method, alpha, seed = call.method.removesuffix("_fused"), call.alpha, call.random_state

    def divide(_: int, X: Array, count: int, p: Array, F: Array | None) -> Any:
        joint = X if method == call.method or F is None else np.hstack([alpha * X, (1 - alpha) * F])
        labels, chosen = get_partition_and_representants_samples(joint, count, method, seed)
        return labels, format_partitioned_samples(X, p, labels, chosen, F, alpha)

    return _whole(call, (call.X1, call.X2), (call.method,), divide, lambda X: _squares(X, X))


@takes('C, npart, part_method="random", F=None, alpha=1.0, random_state=0, nx=None')
def get_graph_partition(call: Call) -> Any:
    """Label the nodes of a graph by their part, as ``ot.gromov.get_graph_partition``."""
    arrays, method = Arrays(call.C), call.part_method
    if check_share(call.alpha) != 1 and call.F is None:
        raise InvalidInputError(_FEATURES)
    if method not in ("random", "louvain", "fluid", "spectral"):
        raise InvalidInputError(
            f"`part_method` must be 'random', 'louvain', 'fluid' or 'spectral'; got {method!r}."
        )
    table = arrays.table("C", call.C)
    return arrays.give(_label(table, call.npart, method, call.random_state))


@takes('C, part, rep_method="pagerank", random_state=0, nx=None')
def get_graph_representants(call: Call) -> Any:
    """Choose a node of each part, as ``ot.gromov.get_graph_representants``."""
    arrays, method = Arrays(call.C), call.rep_method
    table, parts = arrays.table("C", call.C), _members(arrays.read("part", call.part))
    if method == "random":
        return _choose(parts, call.random_state)
    if method != "pagerank":
        raise InvalidInputError(f"`rep_method` must be 'random' or 'pagerank'; got {method!r}.")
    try:
        import networkx
    except ImportError:
        raise UnsupportedError(
            "rep_method='pagerank' needs networkx: pip install networkx. Or use 'random'."
        ) from None
    graphs = (networkx.from_numpy_array(table[np.ix_(part, part)]) for part in parts)
    ranks = (list(networkx.pagerank(graph).values()) for graph in graphs)
    return [int(part[np.argmax(rank)]) for part, rank in zip(parts, ranks, strict=True)]


@takes("C, p, part, rep_indices, F=None, M=None, alpha=1.0, nx=None")
def format_partitioned_graph(call: Call) -> Any:
    """Arrange a graph by its parts, as ``ot.gromov.format_partitioned_graph``.

    Returns
    -------
    CR, list_R, list_p : array of shape (k, k), and lists of k arrays
    FR : array of shape (k, d), only with ``F``
    """
    if check_share(call.alpha) != 1 and call.M is None:
        raise InvalidInputError(_FEATURES)
    arrays = Arrays(call.C, call.p)
    table, M = arrays.table("C", call.C), None if call.M is None else arrays.read("M", call.M)
    return _format(
        call,
        arrays,
        lambda rows, columns: table[rows][:, columns],
        lambda rows, columns, F: M[rows][:, columns],  # type: ignore[index]
    )


@takes('X, npart, method="kmeans", random_state=0, nx=None')
def get_partition_and_representants_samples(call: Call) -> Any:
    """Divide a cloud, as ``ot.gromov.get_partition_and_representants_samples``.

    Returns
    -------
    part : array of shape (n,)
    rep_indices : list of k places
    """
    arrays, method, seed = Arrays(call.X), call.method, call.random_state
    if method not in ("random", "kmeans"):
        raise InvalidInputError(f"`method` must be 'random' or 'kmeans'; got {method!r}.")
    points = arrays.read("X", call.X)
    labels = _label(points, call.npart, method, seed)
    parts = _members(labels)
    if method == "random" or len(parts) == 1:
        return arrays.give(labels), _choose(parts, seed)
    means = (points[part].mean(0) for part in parts)
    near = (((points[part] - x) ** 2).sum(1).argmin() for part, x in zip(parts, means, strict=True))
    return arrays.give(labels), [int(part[i]) for part, i in zip(parts, near, strict=True)]


@takes("X, p, part, rep_indices, F=None, alpha=1.0, nx=None")
def format_partitioned_samples(call: Call) -> Any:
    """Arrange a cloud by its parts, as ``ot.gromov.format_partitioned_samples``.

    Returns
    -------
    CR, list_R, list_p, FR
        As :func:`format_partitioned_graph`.
    """
    arrays = Arrays(call.X, call.p)
    points = arrays.read("X", call.X)
    return _format(
        call,
        arrays,
        lambda rows, columns: _squares(points[rows], points[columns]),
        lambda rows, columns, F: _squares(F[rows], F[columns]),
    )


def _format(
    call: Call,
    arrays: Arrays,
    between: Callable[[Any, Any], Array],
    features_between: Callable[[Any, Any, Array], Array],
) -> Any:
    """Arrange a space by its parts, from functions that compute entries of rows and columns."""
    if check_share(call.alpha) != 1 and call.F is None:
        raise InvalidInputError(_FEATURES)
    without_gradients(call.function, call.p, call.F, call.get("C"), call.get("X"), call.get("M"))
    n = len(call.get("X", call.get("C")))
    parts = _members(arrays.read("part", call.part, (n,)))
    places, F = np.asarray(call.rep_indices), None
    if places.shape != (len(parts),) or not np.isin(places, range(n)).all():
        raise InvalidInputError(
            f"`rep_indices` must be a point of each of the {len(parts)} parts, from 0 to {n - 1}; "
            f"got {call.rep_indices!r}."
        )
    places = places.astype(int)
    p = arrays.weights("p", call.p, n)
    if call.F is not None:
        F = arrays.read("F", call.F)
    gaps = []
    for place, part in zip(places, parts, strict=True):
        gap = between([place], part)[0]
        if call.alpha != 1 and F is not None:
            gap = call.alpha * gap + (1 - call.alpha) * features_between([place], part, F)[0]
        gaps.append(arrays.give(gap))
    found = arrays.give(between(places, places)), gaps, [arrays.give(p[part]) for part in parts]
    return found if F is None else (*found, arrays.give(F[places]))


def _whole(
    call: Call,
    spaces: tuple[Any, Any],
    methods: tuple[str, ...],
    divide: Callable[..., Any],
    measure: Callable[[Array], Array],
) -> Any:
    """Divide both spaces, match their parts, and put the points back into their order."""
    check_count("npart1", call.npart1)
    check_count("npart2", call.npart2)
    features, weights, alpha = (call.F1, call.F2), (call.p, call.q), check_share(call.alpha)
    fused = alpha != 1 or any(name.endswith("_fused") for name in methods)
    if fused and (call.F1 is None or call.F2 is None):
        raise InvalidInputError(_FEATURES)
    without_gradients(call.function, *spaces, *weights, *features)
    arrays = Arrays(*spaces, *weights)
    X, Y = (arrays.read("space", space) for space in spaces)
    p, q = arrays.weights("p", call.p, len(X)), arrays.weights("q", call.q, len(Y))
    F, G = (None if part is None else arrays.read("F", part) for part in features)
    first, (CR1, R1, p1, *FR1) = divide(0, X, call.npart1, p, F)
    second, (CR2, R2, p2, *FR2) = divide(1, Y, call.npart2, q, G)
    MR = _squares(FR1[0], FR2[0]) if alpha != 1 else None
    steps = {name: call.get(name) for name in ("armijo", "max_iter", "tol_rel", "tol_abs")}
    *plans, blocks, log = quantized_fused_gromov_wasserstein_partitioned(
        CR1, CR2, R1, R2, p1, p2, MR, alpha, build_OT=True, log=True, **steps, **call.kwargs
    )
    plan = np.empty_like(blocks)
    plan[np.ix_(*(labels.argsort(kind="stable") for labels in (first, second)))] = blocks
    local = {pair: arrays.give(part) for pair, part in plans[1].items()}
    found = arrays.give(plans[0]), local, arrays.give(plan)
    if not call.log:
        return found
    M = None if alpha == 1 or F is None or G is None else _squares(F, G)
    problem = read_problem(measure(X), measure(Y), p, q, "square_loss", None, M=M, alpha=alpha)
    return (*found, arrays.give_all({**log, "qFGW_dist": np.float64(sum(problem.parts(plan)))}))


def _label(table: Array, count: int, method: str, random_state: Any) -> Places:
    """Label points by their part."""
    check_count("npart", count)
    n = len(table)
    if not 1 < count < n:
        return np.arange(n) if count >= n else np.zeros(n, dtype=int)
    if method == "random":
        return np.random.default_rng(random_state).integers(count, size=n)
    return partition(table, count, method, random_state).astype(int)


def _members(labels: Any) -> list[Places]:
    return [np.flatnonzero(labels == label) for label in np.unique(labels)]


def _choose(parts: list[Places], random_state: Any) -> list[int]:
    random = np.random.default_rng(random_state)
    return [int(random.choice(part)) for part in parts]


def _squares(first: Array, second: Array) -> Array:
    return np.asarray(cdist(first, second, "sqeuclidean"))
