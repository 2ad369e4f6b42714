"""One embedding for several datasets, from their neighbour graphs and their plans."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy
import torch
from numpy.typing import NDArray

from torchgw._boundary.arrays import check_list, check_points, without_tensors
from torchgw._boundary.checks import check_count, check_positive, reject_unknown
from torchgw._boundary.graphs import as_graph
from torchgw._errors import InvalidInputError, InvalidTypeError, NumericalError
from torchgw._plans.transport import DualPlan
from torchgw._results.base import Result
from torchgw._typing import Array
from torchgw.distances import knn_graph, validate_graph


@dataclass(frozen=True, repr=False, eq=False)
class JointEmbedding(Result):
    """Outcome of :func:`torchgw.joint_embedding`.

    Attributes
    ----------
    sources : tuple of Tensor or ndarray, shapes (n_s, dimension), float64
        Coordinates of the points of each source.
    anchor : Tensor or ndarray, shape (m, dimension), float64
        Coordinates of the points of the anchor.
    eigenvalues : Tensor or ndarray, shape (dimension,), float64
        Smallest eigenvalues of the joint normalised Laplacian, ascending, without the zero of the
        constant vector.
    """

    sources: tuple[Array, ...]
    anchor: Array
    eigenvalues: Array

    def _summary(self) -> tuple[str, dict[str, str], str]:
        sizes = ", ".join(str(len(part)) for part in self.sources)
        size = f"sources of {sizes} points, anchor of {len(self.anchor)}"
        return size, {"dimension": str(len(self.eigenvalues))}, ""


@reject_unknown
def joint_embedding(
    sources: Sequence[Any],
    anchor: Any,
    results: Sequence[Any],
    *,
    dimension: int = 2,
    n_neighbors: int | None = None,
    coupling: float = 1.0,
) -> JointEmbedding:
    """Embed several datasets together by Laplacian eigenmaps of one graph over all points.

    Points of one dataset are joined by their neighbour graph, and a source point i with an anchor
    point j by their share of the plan, ``coupling`` * P_ij / sqrt(a_i b_j). No plan is stored.

    Parameters
    ----------
    sources : sequence
        Each points of shape (n_s, d_s), or a graph of edge lengths.
    anchor : array-like of shape (m, d), or graph
        The dataset that all plans lead to.
    results : sequence of GWResult or TransportPlan
        From each source to the anchor, as by ``solve(source, anchor)``.
    dimension : int
        Coordinates per point; fewer than the points of every dataset, less one.
    n_neighbors : int, optional
        Neighbours in the graphs; about log n by default.
    coupling : float
        Weight of the plans against the graphs, both with weights of about one per point. Larger
        values bring partners closer together.

    Returns
    -------
    JointEmbedding

    Raises
    ------
    InvalidInputError
        If shapes do not fit, or ``dimension`` is more than there are eigenvectors to use.
    NumericalError
        If the eigenvectors do not converge.

    Notes
    -----
    Neighbours at length l have the affinity exp(-l^2 / (s_i s_j)), with s_i the mean length of the
    edges of i, normalised to D^(-1/2) W D^(-1/2). The embedding is that of Laplacian eigenmaps [1]_
    for the joint affinity, found by Lanczos iterations on the CPU, one product with each plan and
    its transpose per iteration.

    References
    ----------
    .. [1] M. Belkin, P. Niyogi. Laplacian eigenmaps for dimensionality reduction and data
       representation. Neural Computation 2003.

    Examples
    --------
    >>> import numpy as np, torchgw
    >>> X = np.random.default_rng(0).normal(size=(80, 3)) * [1, 2, 4]
    >>> Y = X[::-1] @ np.array([[0, 1, 0], [0, 0, 1], [1, 0, 0]])
    >>> result = torchgw.solve(X, Y, distances="euclidean")
    >>> joint = torchgw.joint_embedding([X], Y, [result])
    >>> gap = np.linalg.norm(joint.sources[0][::-1] - joint.anchor) / np.linalg.norm(joint.anchor)
    >>> bool(gap < 0.05)
    True
    """
    check_count("dimension", dimension)
    check_positive("coupling", coupling, "the weight of plans against graphs")
    sources = check_list("sources", sources, "of points or graphs")
    results = check_list("results", results, "the plan of each source")
    if len(sources) != len(results) or not len(results):
        raise InvalidInputError(
            "`results` must have one plan for each of the sources, at least one; got "
            f"{len(results)} for {len(sources)}."
        )
    names = [f"sources[{index}]" for index in range(len(sources))] + ["anchor"]
    blocks = [
        _affinity(name, item, n_neighbors)
        for name, item in zip(names, [*sources, anchor], strict=True)
    ]
    plans = [_plan(index, item) for index, item in enumerate(results)]
    sizes = [block.shape[0] for block in blocks]
    for name, size, plan in zip(names, sizes, plans, strict=False):
        if plan.shape != (size, sizes[-1]):
            raise InvalidInputError(
                f"The plan of `{name}` must have shape {(size, sizes[-1])}, from its points to the "
                f"anchor's; got {plan.shape}. Solve with the source first, or pass `plan.T`."
            )
    if dimension > min(sizes) - 2:
        raise InvalidInputError(
            f"`dimension={dimension}` is more than the eigenvectors to choose from: the smallest "
            f"dataset has {min(sizes)} points. Pass at most {max(min(sizes) - 2, 0)}."
        )
    values, vectors = _leading(_joint(blocks, plans, coupling), dimension + 1)
    parts = torch.from_numpy(vectors[:, 1:]).split(sizes)
    eigenvalues = torch.from_numpy(np.maximum(1 - values[1:], 0))
    found = JointEmbedding(tuple(parts[:-1]), parts[-1], eigenvalues)
    return found.in_numpy() if without_tensors(sources, anchor) else found


def _plan(index: int, result: Any) -> DualPlan:
    """Take the plan of a result, or a plan as it is."""
    plan = getattr(result, "lazy_plan", result)
    if not isinstance(plan, DualPlan):
        raise InvalidTypeError(
            f"`results[{index}]` must be a GWResult or a TransportPlan; got "
            f"{type(result).__name__}."
        )
    return plan.giving(in_numpy=False)


def _affinity(name: str, value: Any, n_neighbors: int | None) -> scipy.sparse.csr_array:
    """Compute the normalised affinity of a neighbour graph."""
    graph = as_graph(name, value)
    lengths = knn_graph(check_points(name, value), n_neighbors) if graph is None else None
    lengths = validate_graph(graph) if lengths is None else lengths
    edges = lengths.tocoo()
    degree = np.maximum(np.bincount(edges.row, minlength=edges.shape[0]), 1)
    mean = np.bincount(edges.row, edges.data, minlength=edges.shape[0]) / degree
    # a point whose neighbours all coincide with it is at distance zero from them in any unit
    mean[mean == 0] = 1.0
    weight = np.exp(-(edges.data**2) / (mean[edges.row] * mean[edges.col]))
    affinity = scipy.sparse.csr_array((weight, (edges.row, edges.col)), shape=edges.shape)
    # divided by the roots of the degrees of both points
    degree = affinity.sum(1)
    root = scipy.sparse.diags_array(np.where(degree > 0, degree, 1.0) ** -0.5)
    return scipy.sparse.csr_array(root @ affinity @ root)


def _joint(blocks: list[scipy.sparse.csr_array], plans: list[DualPlan], coupling: float) -> Any:
    """Make the affinity over all points, the sources' first, as an operator of SciPy."""
    ends = np.cumsum([block.shape[0] for block in blocks])
    roots = [
        [torch.where(weight > 0, weight.double() ** -0.5, 0.0) for weight in plan.weights]
        for plan in plans
    ]

    def product(values: NDArray[np.float64]) -> NDArray[np.float64]:
        parts = np.split(values.ravel(), ends[:-1])
        products = [block @ part for block, part in zip(blocks, parts, strict=True)]
        for index, (plan, (near, far)) in enumerate(zip(plans, roots, strict=True)):
            source = torch.from_numpy(parts[index]).to(plan.device)
            anchor = torch.from_numpy(parts[-1]).to(plan.device)
            forth = near * (plan @ (far * anchor))
            back = far * (plan.T @ (near * source))
            products[index] = products[index] + coupling * forth.cpu().numpy()
            products[-1] = products[-1] + coupling * back.cpu().numpy()
        return np.concatenate(products)

    shape = (int(ends[-1]),) * 2
    return scipy.sparse.linalg.LinearOperator(shape, matvec=product, dtype=np.float64)


def _leading(joint: Any, count: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Find the largest eigenvalues of the normalised affinity, and the embedding they give."""
    size = joint.shape[0]
    degree = joint @ np.ones(size)
    root = np.where(degree > 0, degree, 1.0) ** -0.5
    operator = scipy.sparse.linalg.LinearOperator(
        (size, size), matvec=lambda x: root * (joint @ (root * x.ravel())), dtype=np.float64
    )
    # always the same start, so that results do not depend on a seed
    start = np.random.default_rng(0).normal(size=size)
    try:
        values, vectors = scipy.sparse.linalg.eigsh(
            operator, k=count, which="LA", v0=start, tol=1e-10
        )
    except scipy.sparse.linalg.ArpackNoConvergence as error:
        raise NumericalError(
            f"Only {len(error.eigenvalues)} of {count} eigenvectors converged. Lower `dimension`, "
            "or raise `coupling` or `n_neighbors` so that the graph is better connected."
        ) from error
    order = values.argsort()[::-1]
    placed = root[:, None] * vectors[:, order]
    # the sign of an eigenvector is arbitrary
    largest = placed[np.abs(placed).argmax(0), np.arange(count)]
    return values[order], placed * np.sign(largest)
