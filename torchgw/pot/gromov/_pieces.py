"""The pieces that POT's solvers are made of: losses, gradients, line searches, starts."""

from typing import Any, get_args

import numpy as np

from torchgw._boundary.checks import check_choice, is_number
from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw.pot._arrays import Array, Arrays, generator, product
from torchgw.pot._descent import best_step
from torchgw.pot._quadratic import transform
from torchgw.pot._unbalanced import Divergence, between_products, to_product
from torchgw.pot._vertices import transport
from torchgw.pot.gromov._call import Call, takes
from torchgw.pot.gromov._read import check_limits, check_numbers, check_share, scalar

# Starts of semi-relaxed problems by name.
_PARTITIONS = ("fluid", "spectral", "kmeans", "fluid_soft", "spectral_soft", "kmeans_soft")
_NAMES = ("product", "random_product", "random", *_PARTITIONS)


def init_matrix(
    C1: Any, C2: Any, p: Any, q: Any, loss_fun: str = "square_loss", nx: Any = None
) -> tuple[Any, Any, Any]:
    """Compute the constant and the two factors of a loss, as ``ot.gromov.init_matrix``.

    Returns
    -------
    constC, hC1, hC2 : arrays of shapes (n, m), (n, n) and (m, m)
    """
    arrays = Arrays(C1, C2, p, q)
    f1, f2, h1, h2 = transform(arrays.table("C1", C1), arrays.table("C2", C2), loss_fun)
    weights = arrays.read("p", p, (len(f1),)), arrays.read("q", q, (len(f2),))
    constant = (f1 @ weights[0])[:, None] + f2 @ weights[1]
    return arrays.give(constant), arrays.give(h1), arrays.give(h2)


def tensor_product(constC: Any, hC1: Any, hC2: Any, T: Any, nx: Any = None) -> Any:
    """Compute constC - hC1 T hC2', as ``ot.gromov.tensor_product``."""
    _check_shapes(T=T, constC=constC, hC1=hC1, hC2=hC2)
    return constC - hC1 @ T @ hC2.T


def gwloss(constC: Any, hC1: Any, hC2: Any, T: Any, nx: Any = None) -> Any:
    """Compute the loss of a plan, as ``ot.gromov.gwloss``; tensors keep their gradients."""
    return (tensor_product(constC, hC1, hC2, T) * T).sum()


def gwggrad(constC: Any, hC1: Any, hC2: Any, T: Any, nx: Any = None) -> Any:
    """Compute the derivative of a symmetric loss, as ``ot.gromov.gwggrad``."""
    return 2 * tensor_product(constC, hC1, hC2, T)


def init_matrix_semirelaxed(
    C1: Any, C2: Any, p: Any, loss_fun: str = "square_loss", nx: Any = None
) -> tuple[Any, Any, Any, Any]:
    """Compute the pieces of a semi-relaxed loss, as ``ot.gromov.init_matrix_semirelaxed``.

    Returns
    -------
    constC, hC1, hC2, fC2t : arrays of shapes (n, m), (n, n), (m, m) and (m, m)
    """
    arrays = Arrays(C1, C2, p)
    f1, f2, h1, h2 = transform(arrays.table("C1", C1), arrays.table("C2", C2), loss_fun)
    constant = np.outer(f1 @ arrays.read("p", p, (len(f1),)), np.ones(len(f2)))
    return arrays.give(constant), arrays.give(h1), arrays.give(h2), arrays.give(f2.T)


@takes(
    """G, deltaG, cost_G, C1, C2, M, reg, alpha_min=None, alpha_max=None, nx=None,
    symmetric=False, **kwargs"""
)
def solve_gromov_linesearch(call: Call) -> tuple[Any, int, Any]:
    """Find the best step on a line, as ``ot.gromov.solve_gromov_linesearch``.

    Returns
    -------
    alpha, calls, cost : float, int, float
    """
    _check_line(call, "C1", "C2")
    plan, direction, C1, C2 = call.G, call.deltaG, call.C1, call.C2
    cross = C1 @ direction @ C2.T
    mixed = 2 * (cross * plan).sum()
    if not call.symmetric:
        mixed = (cross * plan).sum() + (C1 @ plan @ C2.T * direction).sum()
    slope = (call.M * direction).sum() - call.reg * mixed
    return _line(call, -call.reg * (cross * direction).sum(), slope)


@takes(
    """G, deltaG, cost_G, C1, C2, ones_p, M, reg, fC2t=None, alpha_min=None, alpha_max=None,
    nx=None, **kwargs"""
)
def solve_semirelaxed_gromov_linesearch(call: Call) -> tuple[Any, int, Any]:
    """Find the best step, as ``ot.gromov.solve_semirelaxed_gromov_linesearch``.

    Returns
    -------
    alpha, calls, cost : float, int, float
    """
    _check_line(call, "C1", "C2", *(() if call.fC2t is None else ("fC2t",)))
    plan, direction, C1, C2 = call.G, call.deltaG, call.C1, call.C2
    squares = C2.T**2 if call.fC2t is None else call.fC2t
    at_direction = (direction.sum(0) @ squares)[None, :] - C1 @ direction @ C2.T
    at_plan = (plan.sum(0) @ squares)[None, :] - C1 @ plan @ C2.T
    mixed = (at_direction * plan).sum() + (at_plan * direction).sum()
    slope = (call.M * direction).sum() + call.reg * mixed
    return _line(call, call.reg * (at_direction * direction).sum(), slope)


@takes(
    """G, deltaG, cost_G, df_G, df_Gc, M, reg, alpha_min=None, alpha_max=None, nx=None,
    **kwargs"""
)
def solve_partial_gromov_linesearch(call: Call) -> tuple[Any, int, Any, Any]:
    """Find the best step, as ``ot.gromov.solve_partial_gromov_linesearch``.

    Returns
    -------
    alpha, calls, cost, gradient : float, int, float, array of shape (n, m)
    """
    _check_line(call, "df_G", "df_Gc")
    change, direction = call.df_Gc - call.df_G, call.deltaG
    slope = (call.M * direction).sum() + call.reg * (call.df_G * direction).sum()
    alpha, calls, cost = _line(call, 0.5 * call.reg * (change * direction).sum(), slope)
    return alpha, calls, cost, call.df_G + alpha * change


# Tables of the first and of the second space; others are between the two.
_WITHIN = ("C1", "hC1"), ("C2", "hC2", "fC2t")


def _check_shapes(**given: Any) -> None:
    """Refuse tables that do not fit the first of them, which is between two spaces."""
    first = tuple(getattr(next(iter(given.values())), "shape", ()))
    within: dict[str, Any] = {
        name: (size, size) for names, size in zip(_WITHIN, first, strict=False) for name in names
    }
    for name, table in given.items():
        found = tuple(table.shape) if hasattr(table, "shape") else type(table).__name__
        wanted = within.get(name, first) if len(first) == 2 else "(n, m)"
        if found != wanted:
            raise InvalidInputError(f"`{name}` must have shape {wanted}; got {found}.")


def _check_line(call: Call, *names: str) -> None:
    """Refuse what is no line between plans; M may be a number, as without a linear cost."""
    tables = {name: call.get(name) for name in ("G", "deltaG", *names)}
    if not is_number(scalar(call.M)):
        tables["M"] = call.M
    _check_shapes(**tables)
    check_numbers(reg=call.reg, cost_G=call.cost_G)
    check_limits(alpha_min=call.alpha_min, alpha_max=call.alpha_max)


def _line(call: Call, bend: Any, slope: Any) -> tuple[Any, int, Any]:
    """Minimise bend s^2 + slope s over [0, 1], and between the limits if there are any."""
    step = best_step(float(bend), float(slope))
    if call.alpha_min is not None or call.alpha_max is not None:
        step = float(np.clip(step, call.alpha_min, call.alpha_max))
    return step, 1, call.cost_G + bend * step**2 + slope * step


@takes('pi, a, b, pi1=None, pi2=None, divergence="kl", mass=True, nx=None')
def div_to_product(call: Call) -> Any:
    """Compute the divergence of a plan from a x b, as ``ot.gromov.div_to_product``."""
    arrays = Arrays(call.pi, call.a, call.b)
    plan = arrays.read("pi", call.pi)
    _check_shapes(pi=plan)
    check_choice("divergence", call.divergence, get_args(Divergence))
    of_rows, of_columns = plan.shape[:1], plan.shape[1:]
    rows = plan.sum(1) if call.pi1 is None else arrays.read("pi1", call.pi1, of_rows)
    columns = plan.sum(0) if call.pi2 is None else arrays.read("pi2", call.pi2, of_columns)
    weights = arrays.read("a", call.a, of_rows), arrays.read("b", call.b, of_columns)
    mass = call.mass
    return arrays.give(to_product(plan, *weights, rows, columns, call.divergence, mass=mass))


def div_between_product(
    mu: Any, nu: Any, alpha: Any, beta: Any, divergence: str, nx: Any = None
) -> Any:
    """Compute the divergence of two products, as ``ot.gromov.div_between_product``."""
    arrays = Arrays(mu, nu, alpha, beta)
    check_choice("divergence", divergence, get_args(Divergence))
    first, second = arrays.read("mu", mu), arrays.read("nu", nu)
    alone = arrays.read("alpha", alpha, first.shape)
    beside = arrays.read("beta", beta, second.shape)
    return arrays.give(between_products(first, second, alone, beside, divergence))


@takes(
    """C1, C2, p, M=None, alpha=1.0, method="product", use_target=True, random_state=0, nx=None"""
)
def semirelaxed_init_plan(call: Call) -> Any:
    """Compute a start of a semi-relaxed problem, as ``ot.gromov.semirelaxed_init_plan``.

    Returns
    -------
    T : array of shape (n, m), with first marginal p
    """
    arrays = Arrays(call.C1, call.C2, call.p)
    tables = arrays.table("C1", call.C1), arrays.table("C2", call.C2)
    weights = arrays.weights("p", call.p, len(tables[0]))
    shape = len(tables[0]), len(tables[1])
    linear = None if call.M is None else arrays.read("M", call.M, shape)
    alpha, target = check_share(call.alpha), call.use_target
    named: Any = call.method, call.random_state
    plan = semirelaxed_start(*tables, weights, linear, alpha, *named, use_target=target)
    return arrays.give(plan)


def semirelaxed_start(
    C1: Array,
    C2: Array,
    p: Array,
    M: Array | None,
    alpha: float,
    method: str,
    random_state: Any,
    *,
    use_target: bool = True,
) -> Array:
    """Compute a start by its name."""
    if method not in _NAMES:
        raise InvalidInputError(f"`method` must be one of {', '.join(_NAMES)}; got {method!r}.")
    n, m = len(C1), len(C2)
    if method == "product":
        plan = product(p, np.full(m, 1 / m))
    elif method in ("random_product", "random"):
        random = generator(random_state)
        if method == "random_product":
            q = random.uniform(0, m, size=m)
            plan = product(p, q / q.sum())
        else:
            plan = random.uniform(0, n * m, size=(n, m))
            plan *= (p / plan.sum(1))[:, None]
    else:
        name, _, soft = method.partition("_")
        plan = _by_partition(C1, C2, p, name, random_state, use_target)
        if soft:
            plan = (plan + np.outer(p, plan.sum(0))) / 2
    if M is None:
        return np.asarray(plan)
    nearest = (M.min(1, keepdims=True) == M).astype(np.float64)
    nearest *= (p / nearest.sum(1))[:, None]
    return np.asarray(alpha * plan + (1 - alpha) * nearest)


def _by_partition(
    C1: Array, C2: Array, p: Array, name: str, random_state: Any, use_target: bool
) -> Array:
    """Partition the larger space into as many parts as the smaller has points, and match them."""
    n, m = len(C1), len(C2)
    if n == m:
        return transport(p, p)(_gaps(C1, C2)).plan
    larger, smaller, count = (C1, C2, m) if n > m else (C2, C1, n)
    parts = np.eye(count)[partition(larger, count, name, random_state)]
    parts *= p[:, None] if n > m else 1 / m
    q = parts.sum(0)
    if n > m and not use_target:
        return np.asarray(parts)
    means = parts.T @ larger @ parts / np.outer(q, q)
    matched = transport(q, q if n > m else p)(_gaps(means, smaller)).plan
    plan: Array = parts @ (matched / q[:, None])
    return plan if n > m else plan.T


def _gaps(first: Array, second: Array) -> Array:
    """Compute Euclidean distances between the rows of two tables."""
    squares = (first**2).sum(1)[:, None] + (second**2).sum(1) - 2 * first @ second.T
    found: Array = np.sqrt(np.maximum(squares, 0))
    return found


def partition(table: Array, count: int, name: str, random_state: Any) -> Array:
    """Label points by their part; Louvain's method decides how many there are."""
    if name in ("fluid", "louvain"):
        try:
            import networkx
        except ImportError:
            raise UnsupportedError(
                f"method={name!r} needs networkx: pip install networkx. Or use 'spectral'."
            ) from None
        graph, community = networkx.from_numpy_array(table), networkx.algorithms.community
        if name == "fluid":
            if not networkx.is_connected(graph):
                raise InvalidInputError(
                    "'fluid' divides connected graphs, and this one is not. Use 'louvain' or "
                    "'spectral'."
                )
            parts = community.asyn_fluidc(graph, count, seed=random_state)
        else:
            parts = community.louvain_communities(graph, seed=random_state)
        labels = np.zeros(len(table), dtype=int)
        for label, members in enumerate(parts):
            labels[list(members)] = label
        return labels
    try:
        from sklearn import cluster
    except ImportError:
        raise UnsupportedError(
            f"method={name!r} needs scikit-learn: pip install scikit-learn."
        ) from None
    if name == "kmeans":
        model = cluster.KMeans(n_clusters=count, random_state=random_state, n_init=1)
    else:
        model = cluster.SpectralClustering(
            n_clusters=count, random_state=random_state, affinity="precomputed"
        )
    found: Array = model.fit(table).labels_
    return found
