"""Quantized problems: parts of both spaces are matched by representatives, their points in order.

POT divides the spaces and solves for the parts [1]_; points stay in their order here, and graphs
are divided by the method that is named.

References
----------
.. [1] S. Chowdhury, D. Miller, T. Needham. Quantized Gromov-Wasserstein. ECML PKDD 2021.
"""

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
from scipy.sparse.csgraph import connected_components
from scipy.spatial.distance import cdist

from torchgw._boundary.checks import check_count
from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw.pot._arrays import Array, Arrays, handed
from torchgw.pot.gromov._read import Call, check_share, read_problem, takes, without_gradients

# The package that a method needs.
_NEEDED = {
    "fluid": "networkx", "louvain": "networkx", "pagerank": "networkx",
    "spectral": "sklearn", "kmeans": "sklearn",
}  # fmt: skip


def _of_graphs(call: Call) -> Any:
    alpha, seed = check_share(call.alpha), call.random_state
    without_gradients(call.function, call.C1_aux, call.C2_aux)
    arrays, given = Arrays(call.C1, call.C2), (call.C1_aux, call.C2_aux)
    methods = part, rep = [
        name.removesuffix("_fused") for name in (call.part_method, call.rep_method)
    ]

    def divide(side: int, C: Array, count: int, p: Array, F: Array | None) -> Any:
        apart = None if F is None else _squares(F, F)
        plain = fused = C if given[side] is None else arrays.table(f"C{side + 1}_aux", given[side])
        if apart is not None:
            fused = alpha * plain + (1 - alpha) * apart
        first, second = (
            plain if name == plainly else fused
            for name, plainly in zip((call.part_method, call.rep_method), methods, strict=True)
        )
        if part == "fluid" and count < len(C) and connected_components(first)[0] > 1:
            raise InvalidInputError(
                "'fluid' divides connected graphs, and this one is not. Use 'louvain' or "
                "'spectral'."
            )
        labels = handed("get_graph_partition")(first, count, part, random_state=seed)
        chosen = handed("get_graph_representants")(second, labels, rep, seed)
        return labels, handed("format_partitioned_graph")(C, p, labels, chosen, F, apart, alpha)

    return _whole(call, "C", (call.part_method, call.rep_method), divide, lambda table: table)


@takes(_of_graphs)
def quantized_fused_gromov_wasserstein(
    C1: Any, C2: Any, npart1: int, npart2: int, p: Any = None, q: Any = None, C1_aux: Any = None,
    C2_aux: Any = None, F1: Any = None, F2: Any = None, alpha: float = 1.0,
    part_method: str = "fluid", rep_method: str = "random", log: bool = False,
    armijo: bool = False, max_iter: float = 1e4, tol_rel: float = 1e-9, tol_abs: float = 1e-9,
    random_state: Any = 0, **kwargs: Any,
) -> Any:  # fmt: skip
    """Match two graphs by parts, as ``ot.gromov.quantized_fused_gromov_wasserstein``.

    POT 0.9.7 partitions at random whenever 'fluid', 'louvain' or 'pagerank' are named, and orders
    its plan part by part; here these are done, and points stay in their order.

    Returns
    -------
    T_global : array of shape (k, l), between representatives
    Ts_local : dict of arrays, between the points of parts i and j that are matched
    T : array of shape (n, m)
    log : dict, only with log=True
        ``global dist``, ``local dist (i,j)`` of each pair of parts, and ``qFGW_dist``.
    """


def _of_samples(call: Call) -> Any:
    method, alpha, seed = call.method.removesuffix("_fused"), call.alpha, call.random_state

    def divide(_: int, X: Array, count: int, p: Array, F: Array | None) -> Any:
        joint = X if method == call.method or F is None else np.hstack([alpha * X, (1 - alpha) * F])
        parts = handed("get_partition_and_representants_samples")(joint, count, method, seed)
        return parts[0], handed("format_partitioned_samples")(X, p, *parts, F, alpha)

    return _whole(call, "X", (call.method,), divide, lambda X: _squares(X, X))


@takes(_of_samples)
def quantized_fused_gromov_wasserstein_samples(
    X1: Any, X2: Any, npart1: int, npart2: int, p: Any = None, q: Any = None, F1: Any = None,
    F2: Any = None, alpha: float = 1.0, method: str = "kmeans", log: bool = False,
    armijo: bool = False, max_iter: float = 1e4, tol_rel: float = 1e-9, tol_abs: float = 1e-9,
    random_state: Any = 0, **kwargs: Any,
) -> Any:  # fmt: skip
    """Match two clouds by parts, as ``ot.gromov.quantized_fused_gromov_wasserstein_samples``.

    Distances are squared Euclidean ones. Points stay in their order, unlike in POT 0.9.7.

    Returns
    -------
    T_global, Ts_local, T, log
        As :func:`quantized_fused_gromov_wasserstein`.
    """


def _whole(
    call: Call,
    space: str,
    methods: tuple[str, ...],
    divide: Callable[..., Any],
    measure: Callable[[Array], Array],
) -> Any:
    """Divide both spaces, match their parts, and put the points back into their order."""
    call.check_known()
    check_count("npart1", call.npart1)
    check_count("npart2", call.npart2)
    spaces = call.get(f"{space}1"), call.get(f"{space}2")
    features, weights, alpha = (call.F1, call.F2), (call.p, call.q), check_share(call.alpha)
    if alpha == 0:
        raise InvalidInputError("`alpha` must be above 0 and at most 1; got 0.")
    fused = alpha != 1 or any(name.endswith("_fused") for name in methods)
    if fused and (call.F1 is None or call.F2 is None):
        raise InvalidInputError(
            "`alpha` below 1 and methods on '_fused' weigh features: pass those of both spaces."
        )
    for name in methods:
        needed = _NEEDED.get(name.removesuffix("_fused"))
        if needed and find_spec(needed) is None:
            raise UnsupportedError(f"{name!r} needs the package {needed}. Or use 'random'.")
    without_gradients(call.function, *spaces, *weights, *features)
    arrays = Arrays(*spaces, *weights)
    X, Y = (arrays.read(f"{space}{side}", one) for side, one in zip("12", spaces, strict=True))
    p, q = arrays.weights("p", call.p, len(X)), arrays.weights("q", call.q, len(Y))
    F, G = (None if part is None else arrays.read("F", part) for part in features)
    with warnings.catch_warnings():
        # as many parts as points
        warnings.filterwarnings("ignore", "Requested number of partitions")
        first, (CR1, R1, p1, *FR1) = divide(0, X, call.npart1, p, F)
        second, (CR2, R2, p2, *FR2) = divide(1, Y, call.npart2, q, G)
    steps = {name: call.get(name) for name in ("armijo", "max_iter", "tol_rel", "tol_abs")}
    parts = CR1, CR2, R1, R2, p1, p2, _squares(FR1[0], FR2[0]) if FR1 and FR2 else None
    solve = handed("quantized_fused_gromov_wasserstein_partitioned")
    whole, local, blocks, log = solve(*parts, alpha, build_OT=True, log=True, **steps)
    plan = np.empty_like(blocks)
    plan[np.ix_(*(labels.argsort(kind="stable") for labels in (first, second)))] = blocks
    local = {pair: arrays.give(part) for pair, part in local.items()}
    found = arrays.give(whole), local, arrays.give(plan)
    if not call.log:
        return found
    M = None if alpha == 1 or F is None or G is None else _squares(F, G)
    problem = read_problem(measure(X), measure(Y), p, q, "square_loss", None, M=M, alpha=alpha)
    return (*found, arrays.give_all({**log, "qFGW_dist": np.float64(sum(problem.parts(plan)))}))


def _squares(first: Array, second: Array) -> Array:
    return cdist(first, second, "sqeuclidean")
