"""Alignment of AnnData objects. Needs anndata: ``pip install 'torchgw[anndata]'``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import scipy
from numpy.typing import NDArray
from scipy.sparse.csgraph import dijkstra

from torchgw._api import solve
from torchgw._boundary.arrays import check_points, to_numpy
from torchgw._boundary.checks import check_choice, check_count, reject_unknown
from torchgw._errors import GraphWarning, InvalidInputError, InvalidTypeError, warn_user
from torchgw._results.result import GWResult
from torchgw.distances import knn_graph, symmetrise

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["align"]

Names = str | tuple[str, str] | None
Recipe = Literal["scot"]
# Points that SCOT joins each one to, itself counted, and its epsilon. [L358]
_SCOT_NEIGHBORS = 110
_SCOT_EPSILON = 1e-3
_ARGUMENTS = ("adata_src", "adata_tgt")


@partial(reject_unknown, nested=("solve_options", solve))
def align(
    adata_src: AnnData,
    adata_tgt: AnnData,
    *,
    use_rep: Names = None,
    use_obsp: Names = None,
    joint_rep: Names = None,
    recipe: Recipe | None = None,
    labels: str | None = None,
    key_added: str = "torchgw",
    sparse_topk: int = 10,
    solve_options: Mapping[str, Any] | None = None,
) -> GWResult:
    """Align two AnnData objects, and write the embedding, labels and plan into them.

    Parameters
    ----------
    adata_src, adata_tgt : AnnData
        Their observations are aligned; the variables need not have anything in common.
    use_rep : str or pair of str, optional
        Points of each side: a key of ``obsm``, or ``"X"``. By default ``"X_pca"`` where there is
        one, otherwise ``"X"``. A pair names one for each side.
    use_obsp : str or pair of str, optional
        Instead, a key of ``obsp``. A sparse matrix is a graph, such as the ``"distances"`` of
        ``scanpy.pp.neighbors``, and is made symmetric; a dense one is a distance matrix, and is
        divided by its maximum unless ``solve_options`` has a ``scale``. Entries are lengths; those
        of ``"connectivities"``, which are large between near neighbours, are not read: every edge
        counts as one step, and a warning says so.
    joint_rep : str or pair of str, optional
        Key of ``obsm`` with coordinates that both sides share, for a fused alignment: squared
        distances between them, over their mean, are the linear cost.
    recipe : {"scot"}, optional
        A published way to measure and solve. ``"scot"`` [1]_: rows of ``use_rep`` of length one,
        each joined to the fifth of its side (at most 110 points, itself counted) that it correlates
        with most, distances counted in steps and over their maximum, pairs without a path at the
        largest; unless ``solve_options`` has others, ``epsilon`` is 1e-3 and the start the product
        plan.
    labels : str, optional
        Column of ``obs`` of the target, the source or both, which is carried to the other side.
    key_added : str
        Name under which results are written.
    sparse_topk : int
        Number of entries of each row of the plan that are kept.
    solve_options : mapping, optional
        Options of :func:`torchgw.solve`, such as ``{"epsilon": 1e-3, "random_state": 0}``.

    Returns
    -------
    GWResult
        What the solve returned. With ``key_added="torchgw"`` these are written:

        ``obsm["X_torchgw"]`` of both
            The joint embedding: the source projected into the space of the target's ``use_rep``,
            and the target's points themselves (of length one, by ``recipe="scot"``). Not written
            with ``use_obsp``.
        ``obsm["torchgw_plan"]`` of the source
            The largest entries of the plan, a sparse (n, m) matrix.
        ``obs["torchgw_LABEL"]`` and ``obs["torchgw_LABEL_share"]``
            Labels carried over, and the share of the mass that agrees with them.
        ``uns["torchgw"]`` of both
            Value, status and settings; of the source also the ``obs_names`` of the plan's columns.

    Raises
    ------
    InvalidInputError
        If a key is missing; the message lists those that exist.

    References
    ----------
    .. [1] P. Demetci, R. Santorella, B. Sandstede, W. S. Noble, R. Singh. SCOT: single-cell
       multi-omics alignment with optimal transport. Journal of Computational Biology 2022.

    Examples
    --------
    >>> import numpy as np, torchgw.anndata
    >>> from anndata import AnnData
    >>> X = np.random.default_rng(0).normal(size=(60, 3))
    >>> atac, rna = AnnData(X), AnnData(X + 5)
    >>> options = {"distances": "euclidean", "random_state": 0}
    >>> result = torchgw.anndata.align(atac, rna, solve_options=options)
    >>> sorted(atac.obsm)
    ['X_torchgw', 'torchgw_plan']
    """
    both = (adata_src, adata_tgt)
    for argument, adata in zip(_ARGUMENTS, both, strict=True):
        if not all(hasattr(adata, slot) for slot in ("obsm", "obsp", "obs", "uns")):
            raise InvalidTypeError(f"`{argument}` must be an AnnData; got {type(adata).__name__}.")
    for argument, text in (("key_added", key_added), ("labels", labels)):
        if not isinstance(text, str) and (text is not None or argument == "key_added"):
            raise InvalidTypeError(f"`{argument}` must be a name; got {text!r}.")
    if solve_options is not None and not isinstance(solve_options, Mapping):
        raise InvalidTypeError(
            f"`solve_options` must be a dictionary; got {type(solve_options).__name__}."
        )
    check_count("sparse_topk", sparse_topk)
    if use_rep is not None and use_obsp is not None:
        raise InvalidInputError("Pass `use_rep` or `use_obsp`, not both.")
    if recipe is not None:
        check_choice("recipe", recipe, get_args(Recipe))
    if recipe is not None and use_obsp is not None:
        raise InvalidInputError(f"`recipe={recipe!r}` is for `use_rep`: drop `use_obsp`.")
    options = dict(solve_options or {})
    taken = sorted({"X", "Y", "D_X", "D_Y", "M", "features"} & set(options))
    if taken:
        raise InvalidInputError(
            f"`solve_options` has {', '.join(taken)}, which come from the AnnData objects: use "
            "`use_rep`, `use_obsp` and `joint_rep`."
        )
    points: list[Any] = [None, None]
    inputs: dict[str, Any] = {}
    names = _pair("use_rep", use_rep) if use_obsp is None else _pair("use_obsp", use_obsp)
    for place, (argument, adata, name) in enumerate(zip(_ARGUMENTS, both, names, strict=True)):
        side = "XY"[place]
        if use_obsp is not None:
            value = _entry(adata, "obsp", name)
            graph = scipy.sparse.issparse(value)
            if graph and str(name).endswith("connectivities"):
                value = _steps(value, f"{argument}.obsp[{name!r}]")
            inputs[side if graph else f"D_{side}"] = symmetrise(value) if graph else value
            # two modalities have no unit in common
            options.setdefault("scale", "max")
        elif recipe is None:
            points[place] = inputs[side] = _points(argument, adata, name)
        else:
            points[place] = _unit_rows(_points(argument, adata, name))
            inputs[f"D_{side}"] = _scot_distances(points[place])
    if joint_rep is not None:
        pairs = zip(_ARGUMENTS, both, _pair("joint_rep", joint_rep), strict=True)
        inputs["features"] = _joint(*(_points(*entry) for entry in pairs))
    if recipe is not None:
        options.setdefault("epsilon", _SCOT_EPSILON)
        if not {"init", "n_init"} & set(options):
            # at the product plan and the last epsilon
            sizes = adata_src.n_obs, adata_tgt.n_obs
            options["init"] = np.full(sizes, 1 / math.prod(sizes))
    columns = _label_columns(both, labels)
    result = solve(**inputs, **options)
    _write(result, both, points[1], key_added, sparse_topk)
    plans = result.lazy_plan, result.lazy_plan.T
    for adata, plan, column in zip(both, plans, columns[::-1], strict=True):
        if column is not None:
            _write_labels(adata, plan, column, f"{key_added}_{labels}")
    return result


def _pair(argument: str, names: Names) -> tuple[str | None, str | None]:
    """Make a pair of one name, or check a pair."""
    if names is None or isinstance(names, str):
        return names, names
    listed = isinstance(names, (tuple, list)) and len(names) == 2
    if not listed or not all(isinstance(name, (str, type(None))) for name in names):
        raise InvalidInputError(f"`{argument}` must be one name or a pair; got {names!r}.")
    return names[0], names[1]


def _entry(adata: AnnData, slot: str, name: Any) -> Any:
    """Look up an entry of obsm or obsp; an error lists those that exist."""
    table = getattr(adata, slot)
    if name not in table:
        known = ", ".join(map(repr, table.keys())) or "nothing"
        raise InvalidInputError(f"There is no {name!r} in .{slot}, which has {known}.")
    return table[name]


def _points(argument: str, adata: AnnData, name: str | None) -> NDArray[np.float64]:
    """Read the points of one side, as a copy: what is written back must not change with them."""
    if name is None:
        name = "X_pca" if "X_pca" in adata.obsm else "X"
    value = adata.X if name == "X" else _entry(adata, "obsm", name)
    what = f"{argument}.X" if name == "X" else f"{argument}.obsm[{name!r}]"
    if value is None:
        raise InvalidInputError(f"`{what}` is None; name an entry of obsm as `use_rep`.")
    # anndata's own class, of a file that is not read into memory
    if scipy.sparse.issparse(value) or hasattr(value, "to_memory"):
        raise InvalidInputError(
            f"`{what}` is sparse, and distances among counts say little. Reduce it first, for "
            "example by scanpy.pp.pca, and pass use_rep='X_pca'."
            if name == "X"
            else f"`{what}` is sparse. Make it dense: {what} = {what}.toarray()."
        )
    return np.array(to_numpy(check_points(what, value)), dtype=np.float64)


def _steps(graph: Any, what: str) -> Any:
    """Make every edge of a graph of similarities one step."""
    warn_user(
        f"`{what}` has large entries between near neighbours, so it is no graph of lengths: every "
        "edge was taken as one step.",
        GraphWarning,
    )
    steps = scipy.sparse.csr_matrix(graph, copy=True)
    steps.eliminate_zeros()
    steps.data = np.ones(len(steps.data))
    return steps


def _unit_rows(points: NDArray[np.float64]) -> NDArray[np.float64]:
    length = np.linalg.norm(points, axis=1, keepdims=True)
    return np.asarray(points / np.where(length > 0, length, 1))


def _scot_distances(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Count the steps between points on the graph of those that correlate most."""
    n = len(points)
    count = min(_SCOT_NEIGHBORS, max(n // 5, 5), n) - 1
    graph = knn_graph(points, max(count, 1), metric="correlation")
    steps = dijkstra(graph, directed=False, unweighted=True)
    steps[np.isinf(steps)] = steps[np.isfinite(steps)].max()
    return np.asarray(steps / (steps.max() or 1.0))


def _joint(source: NDArray[np.float64], target: NDArray[np.float64]) -> tuple[Any, Any]:
    """Scale shared coordinates so that their mean squared distance is one."""
    if source.shape[1] != target.shape[1]:
        raise InvalidInputError(
            f"`joint_rep` must have as many columns on both sides; got {source.shape[1]} and "
            f"{target.shape[1]}."
        )
    middle = (source.mean(0) + target.mean(0)) / 2
    source, target = source - middle, target - middle
    square = (source**2).sum(1).mean() + (target**2).sum(1).mean()
    unit = np.sqrt(square - 2 * source.mean(0) @ target.mean(0)) or 1.0
    return source / unit, target / unit


def _label_columns(both: tuple[AnnData, AnnData], labels: str | None) -> list[Any]:
    """Find the labels of each side, ``None`` for a side that has no such column."""
    found = [
        None if labels is None or labels not in side.obs else side.obs[labels] for side in both
    ]
    if labels is not None and all(column is None for column in found):
        raise InvalidInputError(f"`labels={labels!r}` is a column of neither .obs.")
    for argument, column in zip(_ARGUMENTS, found, strict=True):
        if column is not None and column.isna().all():
            raise InvalidInputError(f"`{argument}.obs[{labels!r}]` has no labels, all are missing.")
    return found


def _write(
    result: GWResult, both: tuple[AnnData, AnnData], target: Any, key: str, count: int
) -> None:
    """Write the embedding, the plan, and the figures of the solve."""
    source, other = both
    if target is not None:
        source.obsm[f"X_{key}"] = result.lazy_plan.barycentric(target).cpu().numpy()
        other.obsm[f"X_{key}"] = target
    sparse = result.lazy_plan.to_sparse(min(count, result.lazy_plan.shape[1]))
    source.obsm[f"{key}_plan"] = scipy.sparse.csr_matrix(sparse)
    about = {
        "value": result.value,
        "epsilon": result.epsilon,
        "alpha": result.alpha,
        "status": result.status.name,
        "converged": result.converged,
        "marginal_error": result.marginal_error,
        "gradient": result.gradient,
        "random_state": str(result.random_state),
    }
    decided = result.log["distances"]
    if decided:
        about["distances"] = f"{decided['chosen']}: {decided['why']}"
    source.uns[key] = {**about, "plan_columns": np.asarray(other.obs_names, dtype=object)}
    other.uns[key] = about


def _write_labels(adata: AnnData, plan: Any, column: Any, name: str) -> None:
    """Write the label that most of each row's mass goes to, and its share."""
    from pandas import Categorical

    known = Categorical(column)
    # a missing label gets no share
    indicators = np.eye(len(known.categories) + 1)[known.codes][:, :-1]
    shares = plan.barycentric(indicators).cpu().numpy()
    chosen = known.categories[shares.argmax(axis=1)]
    adata.obs[name] = Categorical(chosen, categories=known.categories)
    adata.obs[f"{name}_share"] = shares.max(axis=1)
