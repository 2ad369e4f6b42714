"""How good an alignment is, where the answer or labels are known."""

from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from torchgw._boundary.arrays import BLOCK, as_labels, check_shape, to_tensor
from torchgw._boundary.checks import check_within
from torchgw._errors import InvalidInputError

__all__ = [
    "category_accuracy", "foscttm", "label_accuracy", "top_k_accuracy", "transfer_labels",
]  # fmt: skip


def foscttm(projected: Any, true: Any) -> float:
    """Compute the fraction of samples closer than the true match.

    That is, for each sample, the share of samples on the other side that are strictly closer to it
    than its partner is; the mean over the samples of both sides [1]_. 0 is perfect, chance is 0.5.

    Parameters
    ----------
    projected, true : array-like, shape (n, d)
        The two data sets in one space; row i of either is the same sample.

    References
    ----------
    .. [1] J. Liu, Y. Huang, R. Singh, J.-P. Vert, W. S. Noble. Jointly embedding multiple
       single-cell omics measurements. WABI 2019.

    Examples
    --------
    >>> import numpy as np
    >>> from torchgw.metrics import foscttm
    >>> points = np.random.default_rng(0).normal(size=(50, 2))
    >>> foscttm(points, points)
    0.0
    """
    x, y = _points("projected", projected), _points("true", true)
    if x.shape != y.shape:
        raise InvalidInputError(
            f"`projected` and `true` must have one shape, a row per sample; got {x.shape} and "
            f"{y.shape}."
        )
    own = np.linalg.norm(x - y, axis=1)
    closer = 0
    for rows in _blocks(len(x)):
        distance = scipy.spatial.distance.cdist(x[rows], y)
        # a pair has exactly its own distance, however that was computed
        own[rows] = distance[np.arange(len(distance)), np.arange(len(x))[rows]]
        closer += int((distance < own[rows, None]).sum())
    closer += sum(
        int((scipy.spatial.distance.cdist(y[rows], x) < own[rows, None]).sum())
        for rows in _blocks(len(x))
    )
    return closer / (2 * len(x) ** 2)


def transfer_labels(
    projected: Any, anchors: Any, anchor_labels: Any, *, n_neighbors: int = 5
) -> NDArray[Any]:
    """Give each projected point the commonest label among its nearest anchors.

    Parameters
    ----------
    projected : array-like, shape (q, d)
    anchors : array-like, shape (m, d)
    anchor_labels : array-like, shape (m,)
    n_neighbors : int
        Anchors that vote; the first label in sorted order wins a tie.

    Returns
    -------
    ndarray, shape (q,)
    """
    x, y = _points("projected", projected), _points("anchors", anchors)
    labels = as_labels("anchor_labels", anchor_labels)
    if labels.shape != (len(y),) or x.shape[1] != y.shape[1]:
        raise InvalidInputError(
            f"`anchors` and `anchor_labels` must have one row per anchor and `projected` as many "
            f"columns; got {y.shape}, {labels.shape} and {x.shape}."
        )
    check_within("n_neighbors", n_neighbors, 1, len(y), ", the number of anchors")
    classes, place = np.unique(labels, return_inverse=True)
    chosen = []
    for rows in _blocks(len(x), len(y)):
        nearest = np.argpartition(
            scipy.spatial.distance.cdist(x[rows], y), n_neighbors - 1, axis=1
        )[:, :n_neighbors]
        chosen.append((place[nearest][:, :, None] == np.arange(len(classes))).sum(1).argmax(1))
    return classes[np.concatenate(chosen)]


def label_accuracy(
    projected: Any, labels: Any, anchors: Any, anchor_labels: Any, *, n_neighbors: int = 5
) -> float:
    """Compute the share of points to which :func:`transfer_labels` gives their own label.

    Raises
    ------
    InvalidInputError
        If shapes differ or labels are missing.
    """
    found = transfer_labels(projected, anchors, anchor_labels, n_neighbors=n_neighbors)
    own = as_labels("labels", labels, len(found), "projected point")
    return float((found == own).mean())


def top_k_accuracy(plan: Any, k: int = 1, *, truth: Any = None) -> float:
    """Compute the share of source points whose true partner is among their k likeliest.

    Parameters
    ----------
    plan : TransportPlan or array-like, shape (n, m)
    k : int
        At most m.
    truth : array-like of int, shape (n,), optional
        The true partner of each; by default the point of the same number.
    """
    table = plan if hasattr(plan, "topk") else to_tensor("plan", plan)
    check_within("k", k, 1, table.shape[1], ", the number of target points")
    best = to_tensor("plan", table.topk(k)[1]).cpu().numpy()
    own = np.arange(len(best)) if truth is None else to_tensor("truth", truth).cpu().numpy()
    check_shape("truth", own, (len(best),), "the partner of each source point")
    return float((best == own[:, None]).any(1).mean())


def category_accuracy(plan: Any, labels: Any, target_labels: Any) -> float:
    """Compute the share of source points whose likeliest partner has their own label.

    Parameters
    ----------
    plan : TransportPlan or array-like, shape (n, m)
    labels, target_labels : array-like, shapes (n,) and (m,)
    """
    table = plan if hasattr(plan, "topk") else to_tensor("plan", plan)
    best = to_tensor("plan", table.topk(1)[1]).cpu().numpy()[:, 0]
    own = as_labels("labels", labels, table.shape[0], "source point")
    other = as_labels("target_labels", target_labels, table.shape[1], "target point")
    return float((other[best] == own).mean())


def _points(name: str, value: Any) -> NDArray[np.float64]:
    array = to_tensor(name, value).double().cpu().numpy()
    if array.ndim != 2 or 0 in array.shape or not np.isfinite(array).all():
        raise InvalidInputError(
            f"`{name}` must be finite points of shape (n, d); got shape {array.shape}."
        )
    return array


def _blocks(rows: int, columns: int | None = None) -> list[slice]:
    step = max(1, BLOCK // (rows if columns is None else columns))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
