"""Starts of semi-relaxed plans by name, and partitions of graphs."""

from typing import Any

import numpy as np

from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw.pot._arrays import Array, generator, product
from torchgw.pot._vertices import transport

# Starts of semi-relaxed problems by name.
_PARTITIONS = ("fluid", "spectral", "kmeans", "fluid_soft", "spectral_soft", "kmeans_soft")
_NAMES = ("product", "random_product", "random", *_PARTITIONS)


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
