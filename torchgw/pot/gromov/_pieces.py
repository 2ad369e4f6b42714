"""The pieces that POT's solvers are made of: losses, gradients, line searches, starts."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw.pot._arrays import Array, Arrays, product
from torchgw.pot._quadratic import transform
from torchgw.pot._unbalanced import between_products, to_product
from torchgw.pot._vertices import transport

__all__ = [
    "div_between_product",
    "div_to_product",
    "gwggrad",
    "gwloss",
    "init_matrix",
    "init_matrix_semirelaxed",
    "semirelaxed_init_plan",
    "solve_gromov_linesearch",
    "solve_partial_gromov_linesearch",
    "solve_semirelaxed_gromov_linesearch",
    "tensor_product",
]

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
    f1, f2, h1, h2 = transform(arrays.read("C1", C1), arrays.read("C2", C2), loss_fun)
    constant = (f1 @ arrays.read("p", p))[:, None] + f2 @ arrays.read("q", q)
    return arrays.give(constant), arrays.give(h1), arrays.give(h2)


def tensor_product(constC: Any, hC1: Any, hC2: Any, T: Any, nx: Any = None) -> Any:
    """Compute constC - hC1 T hC2', as ``ot.gromov.tensor_product``."""
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
    f1, f2, h1, h2 = transform(arrays.read("C1", C1), arrays.read("C2", C2), loss_fun)
    constant = np.outer(f1 @ arrays.read("p", p), np.ones(len(f2)))
    return arrays.give(constant), arrays.give(h1), arrays.give(h2), arrays.give(f2.T)


def solve_gromov_linesearch(
    G: Any,
    deltaG: Any,
    cost_G: Any,
    C1: Any,
    C2: Any,
    M: Any,
    reg: float,
    alpha_min: float | None = None,
    alpha_max: float | None = None,
    nx: Any = None,
    symmetric: bool = False,
    **kwargs: Any,
) -> tuple[Any, int, Any]:
    """Find the best step on a line, as ``ot.gromov.solve_gromov_linesearch``.

    Returns
    -------
    alpha, calls, cost : float, int, float
    """
    cross = C1 @ deltaG @ C2.T
    bend = -reg * (cross * deltaG).sum()
    mixed = 2 * (cross * G).sum()
    if not symmetric:
        mixed = (cross * G).sum() + (C1 @ G @ C2.T * deltaG).sum()
    slope = (M * deltaG).sum() - reg * mixed
    alpha = _step(bend, slope, alpha_min, alpha_max)
    return alpha, 1, cost_G + bend * alpha**2 + slope * alpha


def solve_semirelaxed_gromov_linesearch(
    G: Any,
    deltaG: Any,
    cost_G: Any,
    C1: Any,
    C2: Any,
    ones_p: Any,
    M: Any,
    reg: float,
    fC2t: Any = None,
    alpha_min: float | None = None,
    alpha_max: float | None = None,
    nx: Any = None,
    **kwargs: Any,
) -> tuple[Any, int, Any]:
    """Find the best step, as ``ot.gromov.solve_semirelaxed_gromov_linesearch``.

    Returns
    -------
    alpha, calls, cost : float, int, float
    """
    squares = C2.T**2 if fC2t is None else fC2t
    at_direction = (deltaG.sum(0) @ squares)[None, :] - C1 @ deltaG @ C2.T
    at_plan = (G.sum(0) @ squares)[None, :] - C1 @ G @ C2.T
    bend = reg * (at_direction * deltaG).sum()
    slope = (M * deltaG).sum() + reg * ((at_direction * G).sum() + (at_plan * deltaG).sum())
    alpha = _step(bend, slope, alpha_min, alpha_max)
    return alpha, 1, cost_G + bend * alpha**2 + slope * alpha


def solve_partial_gromov_linesearch(
    G: Any,
    deltaG: Any,
    cost_G: Any,
    df_G: Any,
    df_Gc: Any,
    M: Any,
    reg: float,
    alpha_min: float | None = None,
    alpha_max: float | None = None,
    nx: Any = None,
    **kwargs: Any,
) -> tuple[Any, int, Any, Any]:
    """Find the best step, as ``ot.gromov.solve_partial_gromov_linesearch``.

    Returns
    -------
    alpha, calls, cost, gradient : float, int, float, array of shape (n, m)
    """
    change = df_Gc - df_G
    bend = 0.5 * reg * (change * deltaG).sum()
    slope = (M * deltaG).sum() + reg * (df_G * deltaG).sum()
    alpha = _step(bend, slope, alpha_min, alpha_max)
    return alpha, 1, cost_G + bend * alpha**2 + slope * alpha, df_G + alpha * change


def _step(bend: Any, slope: Any, low: float | None, high: float | None) -> float:
    a, b = float(bend), float(slope)
    step = min(1.0, max(0.0, -b / (2 * a))) if a > 0 else float(a + b < 0)
    return step if low is None and high is None else float(np.clip(step, low, high))


def div_to_product(
    pi: Any,
    a: Any,
    b: Any,
    pi1: Any = None,
    pi2: Any = None,
    divergence: str = "kl",
    mass: bool = True,
    nx: Any = None,
) -> Any:
    """Compute the divergence of a plan from a x b, as ``ot.gromov.div_to_product``."""
    arrays = Arrays(pi, a, b)
    plan = arrays.read("pi", pi)
    rows = plan.sum(1) if pi1 is None else arrays.read("pi1", pi1)
    columns = plan.sum(0) if pi2 is None else arrays.read("pi2", pi2)
    weights = arrays.read("a", a), arrays.read("b", b)
    return arrays.give(to_product(plan, *weights, rows, columns, divergence, mass=mass))


def div_between_product(
    mu: Any, nu: Any, alpha: Any, beta: Any, divergence: str, nx: Any = None
) -> Any:
    """Compute the divergence of two products, as ``ot.gromov.div_between_product``."""
    given = {"mu": mu, "nu": nu, "alpha": alpha, "beta": beta}
    arrays = Arrays(*given.values())
    first, second, alone, beside = (arrays.read(name, value) for name, value in given.items())
    return arrays.give(between_products(first, second, alone, beside, divergence))


def semirelaxed_init_plan(
    C1: Any,
    C2: Any,
    p: Any,
    M: Any = None,
    alpha: float = 1.0,
    method: str = "product",
    use_target: bool = True,
    random_state: Any = 0,
    nx: Any = None,
) -> Any:
    """Compute a start of a semi-relaxed problem, as ``ot.gromov.semirelaxed_init_plan``.

    Returns
    -------
    T : array of shape (n, m), with first marginal p
    """
    arrays = Arrays(C1, C2, p)
    first, second = arrays.table("C1", C1), arrays.table("C2", C2)
    weights = arrays.weights("p", p, len(first))
    linear = None if M is None else arrays.read("M", M)
    plan = semirelaxed_start(
        first, second, weights, linear, alpha, method, random_state, use_target=use_target
    )
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
        # the generator of POT, so that a seed means the same there and here
        random = np.random.RandomState(random_state)  # noqa: NPY002
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
    parts = np.eye(count)[_partition(larger, count, name, random_state)]
    parts *= p[:, None] if n > m else 1 / m
    q = parts.sum(0)
    if n > m and not use_target:
        return np.asarray(parts)
    means = parts.T @ larger @ parts / np.outer(q, q)
    matched = transport(q, q if n > m else p)(_gaps(means, smaller)).plan
    plan: Array = parts @ (matched / q[:, None])
    result: Array = plan if n > m else plan.T
    return result


def _gaps(first: Array, second: Array) -> Array:
    """Compute Euclidean distances between the rows of two tables."""
    squares = (first**2).sum(1)[:, None] + (second**2).sum(1) - 2 * first @ second.T
    result: Array = np.sqrt(np.maximum(squares, 0))
    return result


def _partition(table: Array, count: int, name: str, random_state: Any) -> Array:
    """Label points by their part."""
    if name == "fluid":
        try:
            import networkx
        except ImportError:
            raise UnsupportedError(
                "method='fluid' needs networkx: pip install networkx. Or use 'spectral'."
            ) from None
        graph = networkx.from_numpy_array(table)
        parts = networkx.algorithms.community.asyn_fluidc(graph, count, seed=random_state)
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
