"""Dictionaries of graphs: weights of atoms whose mean is near a graph, and the atoms."""

import sys
from typing import Any, NamedTuple

import numpy as np
from scipy.spatial.distance import cdist

from torchgw._errors import InvalidInputError
from torchgw.pot._arrays import Array, Arrays, generator, product
from torchgw.pot._descent import Line, best_step, descend
from torchgw.pot._quadratic import quadratic
from torchgw.pot._vertices import transport
from torchgw.pot.gromov._call import Call, takes
from torchgw.pot.gromov._read import check_lengths, check_share, without_gradients

_PROJECTIONS = ("nonnegative_symmetric", "symmetric", "nonnegative")
# Decay of Adam's two means, and what is added to its divisor: the usual choices. [L509]
_DECAY, _TINY = (0.9, 0.999), 1e-9


@takes(
    """C, Cdict, reg=0.0, p=None, q=None, tol_outer=1e-5, tol_inner=1e-5, max_iter_outer=20,
    max_iter_inner=200, symmetric=None, **kwargs"""
)
def gromov_wasserstein_linear_unmixing(call: Call) -> Any:
    """Weigh the atoms of a dictionary, as ``ot.gromov.gromov_wasserstein_linear_unmixing``.

    Plans and weights by turns, until the objective stays.

    Returns
    -------
    w : array of shape (D,), not negative, of sum one
    Cembedded : array of shape (nt, nt)
        The mean of the atoms.
    T : array of shape (ns, nt)
    current_loss : float
        GW(C, Cembedded) - reg * ||w||^2.
    """
    arrays, found = _unmix_one(call)
    return tuple(map(arrays.give, (found.w, found.C, found.T, np.float64(found.loss))))


@takes(
    """C, Y, Cdict, Ydict, alpha, reg=0.0, p=None, q=None, tol_outer=1e-5, tol_inner=1e-5,
    max_iter_outer=20, max_iter_inner=200, symmetric=True, **kwargs"""
)
def fused_gromov_wasserstein_linear_unmixing(call: Call) -> Any:
    """Weigh atoms with features, as ``ot.gromov.fused_gromov_wasserstein_linear_unmixing``.

    Returns
    -------
    w, Cembedded, Yembedded, T, current_loss
        Those of :func:`gromov_wasserstein_linear_unmixing`, and mean features (nt, d).
    """
    arrays, found = _unmix_one(call)
    return tuple(map(arrays.give, (found.w, found.C, found.Y, found.T, np.float64(found.loss))))


@takes(
    """Cs, D, nt, reg=0.0, ps=None, q=None, epochs=20, batch_size=32, learning_rate=1.0,
    Cdict_init=None, projection="nonnegative_symmetric", use_log=True, tol_outer=1e-5,
    tol_inner=1e-5, max_iter_outer=20, max_iter_inner=200, use_adam_optimizer=True, verbose=False,
    random_state=None, **kwargs"""
)
def gromov_wasserstein_dictionary_learning(call: Call) -> Any:
    """Learn the atoms, as ``ot.gromov.gromov_wasserstein_dictionary_learning``.

    Returns
    -------
    Cdict : array of shape (D, nt, nt)
        The dictionary after the epoch of the least loss.
    log : dict
        ``loss_batches`` and ``loss_epochs`` with ``use_log=True``.
    """
    arrays, (C, _), log = _learn(call, (call.learning_rate, 0.0))
    return arrays.give(C), log


@takes(
    """Cs, Ys, D, nt, alpha, reg=0.0, ps=None, q=None, epochs=20, batch_size=32,
    learning_rate_C=1.0, learning_rate_Y=1.0, Cdict_init=None, Ydict_init=None,
    projection="nonnegative_symmetric", use_log=False, tol_outer=1e-5, tol_inner=1e-5,
    max_iter_outer=20, max_iter_inner=200, use_adam_optimizer=True, verbose=False,
    random_state=None, **kwargs"""
)
def fused_gromov_wasserstein_dictionary_learning(call: Call) -> Any:
    """Learn atoms with features, as ``ot.gromov.fused_gromov_wasserstein_dictionary_learning``.

    Returns
    -------
    Cdict, Ydict, log
        Those of :func:`gromov_wasserstein_dictionary_learning`, and features (D, nt, d).
    """
    arrays, (C, Y), log = _learn(call, (call.learning_rate_C, call.learning_rate_Y))
    return arrays.give(C), arrays.give(Y), log


class _Graph(NamedTuple):
    """A graph, or the atoms of a dictionary with a first axis of D."""

    C: Array  # (n, n)
    Y: Array  # (n, d), no columns without features
    p: Array  # (n,)


class _Unmixed(NamedTuple):
    """The weights of atoms, their mean, and the plan from the graph to that."""

    w: Array
    C: Array
    Y: Array
    T: Array
    loss: float


def _read_graph(arrays: Arrays, name: str, C: Any, Y: Any, p: Any) -> _Graph:
    table = arrays.table(f"C{name}", C)
    n = len(table)
    features = np.zeros((n, 0)) if Y is None else arrays.read(f"Y{name}", Y)
    if features.ndim != 2 or len(features) != n:
        raise InvalidInputError(f"`Y{name}` must have shape ({n}, d); got {features.shape}.")
    return _Graph(table, features, arrays.weights(f"p{name}", p, n))


def _read_atoms(arrays: Arrays, C: Any, Y: Any, q: Any) -> _Graph:
    table = arrays.read("Cdict", C)
    if table.ndim != 3 or table.shape[1] != table.shape[2]:
        raise InvalidInputError(f"`Cdict` must have shape (D, nt, nt); got {table.shape}.")
    features = np.zeros((*table.shape[:2], 0)) if Y is None else arrays.read("Ydict", Y)
    if features.ndim != 3 or features.shape[:2] != table.shape[:2]:
        raise InvalidInputError(
            f"`Ydict` must have shape (D, nt, d) beside `Cdict`; got {features.shape}."
        )
    return _Graph(table, features, arrays.weights("q", q, table.shape[1]))


def _unmix_one(call: Call) -> tuple[Arrays, _Unmixed]:
    call.check_known()
    given = call.C, call.get("Y"), call.Cdict, call.get("Ydict")
    without_gradients(call.function, *given, call.p, call.q)
    arrays = Arrays(*given, call.p, call.q)
    graph = _read_graph(arrays, "", call.C, call.get("Y"), call.p)
    atoms = _read_atoms(arrays, call.Cdict, call.get("Ydict"), call.q)
    return arrays, _unmix(call, graph, atoms, call.symmetric)


def _unmix(call: Call, graph: _Graph, atoms: _Graph, symmetric: bool | None) -> _Unmixed:
    """Solve for the plan and for the weights by turns (Vincent-Cuaz et al., ICML 2021)."""
    (C, Y, p), (Cs, Ys, q), reg = graph, atoms, float(call.reg)
    if abs(p.sum() - q.sum()) > 1e-6 * p.sum():
        raise InvalidInputError("The weights of a graph and `q` must have the same sum.")
    if Y.shape[1] != Ys.shape[2]:
        raise InvalidInputError(
            f"Features of graphs and atoms must be as many; got {Y.shape[1]} and {Ys.shape[2]}."
        )
    alpha = check_share(call.get("alpha", 1.0))
    w, T, loss = np.full(len(Cs), 1 / len(Cs)), product(p, q, float(p.sum())), np.inf
    weighted = Cs * np.outer(q, q)
    gram = alpha * np.einsum("dij,eij->de", weighted, Cs) - reg * np.eye(len(Cs))
    gram += (1 - alpha) * np.einsum("dia,eia,i->de", Ys, Ys, q)
    solver = transport(p, q)
    for _ in range(max(int(call.max_iter_outer), 1)):
        mean, features = np.tensordot(w, Cs, 1), np.tensordot(w, Ys, 1)
        linear = (1 - alpha) * cdist(Y, features, "sqeuclidean") if Y.size else 0.0
        term = quadratic(C, mean, "square_loss", symmetric)
        steps: Any = {"max_iter": call.max_iter_inner, "tol_rel": call.tol_inner, "tol_abs": 0.0}
        found = descend(Line(term, alpha, linear), T, solver, **steps)
        T, before = found.plan, loss
        b = alpha * np.tensordot(Cs, T.T @ C @ T, 2) + (1 - alpha) * np.tensordot(Ys, T.T @ Y, 2)
        constant = found.value - reg * float(w @ w) - float(w @ gram @ w - 2 * b @ w)
        w, loss = _weigh(gram, b, w, constant, call.tol_inner, int(call.max_iter_inner))
        if abs(before - loss) <= call.tol_outer * abs(before) < np.inf:
            break
    return _Unmixed(w, np.tensordot(w, Cs, 1), np.tensordot(w, Ys, 1), T, loss)


def _weigh(
    gram: Array, b: Array, w: Array, constant: float, tol: float, max_iter: int
) -> tuple[Array, float]:
    """Minimise w' G w - 2 b' w + constant over shares, by steps towards one atom."""
    value = constant + float(w @ gram @ w - 2 * b @ w)
    for _ in range(max_iter):
        slope = 2 * (gram @ w - b)
        direction = np.eye(len(w))[slope.argmin()] - w
        bend, fall = float(direction @ gram @ direction), float(slope @ direction)
        length = best_step(bend, fall)
        w, gain = w + length * direction, -(bend * length**2 + fall * length)
        value -= gain
        if gain <= tol * abs(value):
            break
    return w, value


def _learn(
    call: Call, rates: tuple[float, float]
) -> tuple[Arrays, tuple[Array, Array], dict[str, Any]]:
    """Take stochastic gradient steps of the atoms, at the weights and plans of some graphs."""
    call.check_known()
    if call.projection is not None and call.projection not in _PROJECTIONS:
        raise InvalidInputError(
            f"Unknown `projection={call.projection!r}`. Use one of: {_PROJECTIONS}."
        )
    Ys, ps = call.get("Ys"), call.ps
    check_lengths(Cs=call.Cs, Ys=Ys, ps=ps)
    without_gradients(call.function, call.Cs, Ys or (), ps or (), call.q)
    arrays = Arrays(*call.Cs, *(Ys or ()), *(ps or ()), call.q, call.Cdict_init)
    blank = [None] * len(call.Cs)
    sides = zip(call.Cs, Ys or blank, ps or blank, strict=True)
    graphs = [_read_graph(arrays, f"s[{k}]", *side) for k, side in enumerate(sides)]
    widths = [graph.Y.shape[1] for graph in graphs]
    if len(set(widths)) > 1:
        raise InvalidInputError(f"Features of all graphs must be as many; got {widths}.")
    random = generator(call.random_state)
    atoms = _first_atoms(call, arrays, graphs, random)
    parts, q = [atoms.C, atoms.Y], atoms.p
    alpha, size = check_share(call.get("alpha", 1.0)), min(int(call.batch_size), len(graphs))
    symmetric = True if "symmetric" in str(call.projection) else None
    means = [(np.zeros_like(part), np.zeros_like(part)) for part in parts]
    log: dict[str, list[float]] = {"loss_batches": [], "loss_epochs": []}
    best, least, count = (parts[0], parts[1]), np.inf, 0
    for epoch in range(int(call.epochs)):
        whole = 0.0
        for _ in range(len(graphs) // size):
            slopes, loss = [np.zeros_like(part) for part in parts], 0.0
            for k in random.choice(len(graphs), size=size, replace=False):
                graph = graphs[k]
                found = _unmix(call, graph, _Graph(parts[0], parts[1], q), symmetric)
                T, loss = found.T, loss + found.loss
                of_C = found.C * np.outer(q, q) - T.T @ graph.C @ T
                of_Y = found.Y * q[:, None] - T.T @ graph.Y
                for slope, of, share in zip(slopes, (of_C, of_Y), (alpha, 1 - alpha), strict=True):
                    slope += 2 * share / size * np.multiply.outer(found.w, of)
            count, whole = count + 1, whole + loss / size
            log["loss_batches"].append(loss / size)
            for place, (slope, rate) in enumerate(zip(slopes, rates, strict=True)):
                if call.use_adam_optimizer:
                    slope, means[place] = _adam(slope, means[place], count)
                parts[place] = parts[place] - rate * slope
            parts[0] = _project(parts[0], call.projection)
        log["loss_epochs"].append(whole)
        if whole < least:
            best, least = (parts[0], parts[1]), whole
        if call.verbose:
            sys.stderr.write(f"{epoch:5d}|{whole:8e}\n")
    return arrays, best, log if call.use_log else {}


def _first_atoms(call: Call, arrays: Arrays, graphs: list[_Graph], random: Any) -> _Graph:
    """Read the first atoms, or draw them with the mean and spread of the graphs, as POT does."""
    shape, C, Y = (int(call.D), int(call.nt)), call.Cdict_init, call.get("Ydict_init")
    if C is None:
        levels = [graph.C.mean() for graph in graphs]
        C = random.normal(np.mean(levels), np.std(levels), size=(*shape, shape[1]))
        C = _project(C, call.projection)
    if Y is None and "Ys" in vars(call):
        middles = np.stack([graph.Y.mean(0) for graph in graphs])
        Y = random.normal(middles.mean(0), middles.std(0), size=(*shape, middles.shape[1]))
    atoms = _read_atoms(arrays, C, Y, call.q)
    if atoms.C.shape[:2] != shape:
        raise InvalidInputError(
            f"`Cdict_init` must have shape {(*shape, shape[1])}; got {atoms.C.shape}."
        )
    return atoms


def _adam(
    slope: Array, means: tuple[Array, Array], count: int
) -> tuple[Array, tuple[Array, Array]]:
    """Scale a step by running means of slopes and of their squares."""
    first, second = (
        decay * mean + (1 - decay) * power
        for decay, mean, power in zip(_DECAY, means, (slope, slope**2), strict=True)
    )
    one, two = (1 - decay**count for decay in _DECAY)
    return first / one / (np.sqrt(second / two) + _TINY), (first, second)


def _project(C: Array, projection: str | None) -> Array:
    """Make atoms symmetric, without negative entries, or both."""
    name = str(projection)
    if "symmetric" in name:
        C = (C + C.transpose(0, 2, 1)) / 2
    return np.maximum(C, 0) if "nonnegative" in name else C
