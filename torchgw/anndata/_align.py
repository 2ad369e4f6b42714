"""Two objects in, their alignment written into both: the problem in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args, overload

import numpy as np
from numpy.typing import NDArray

from torchgw._api import DATA
from torchgw._boundary.arrays import check_points, to_numpy
from torchgw._boundary.checks import check_choice, check_count, check_flag, reject_unknown
from torchgw._errors import InvalidInputError, TorchGWWarning, warn_user
from torchgw._problem.table import TABLE, Options
from torchgw._results.confidence import why_not
from torchgw._results.maps import MapKind, SpaceMap
from torchgw._results.result import GWResult
from torchgw.anndata._problem import TranslationProblem
from torchgw.anndata._spaces import (
    Names,
    Recipe,
    check_labels,
    check_objects,
    check_options,
    check_relaxation,
)

if TYPE_CHECKING:
    from anndata import AnnData
    from typing_extensions import Unpack

    from torchgw.distances.graph import GraphMetric


class _Options(TypedDict, total=False):
    """What both forms of :func:`align` take."""

    use_rep: Names
    use_obsp: Names
    joint_rep: Names
    recipe: Recipe | None
    metric: GraphMetric | None
    labels: str | Sequence[str] | None
    tau_a: float | None
    tau_b: float | None
    groups_key: str | None
    pairs_key: str | None
    key_added: str
    sparse_topk: int
    spatial: MapKind | None
    confidence: bool
    solve_options: Options | Mapping[str, Any] | None


@overload
def align(
    adata_src: AnnData, adata_tgt: AnnData, *, copy: Literal[False] = ..., **rest: Unpack[_Options]
) -> GWResult: ...


@overload
def align(
    adata_src: AnnData, adata_tgt: AnnData, *, copy: Literal[True], **rest: Unpack[_Options]
) -> tuple[GWResult, AnnData, AnnData]: ...


@partial(reject_unknown, nested=("solve_options", (*DATA, *TABLE)))
def align(
    adata_src: AnnData,
    adata_tgt: AnnData,
    *,
    use_rep: Names = None,
    use_obsp: Names = None,
    joint_rep: Names = None,
    recipe: Recipe | None = None,
    metric: GraphMetric | None = None,
    labels: str | Sequence[str] | None = None,
    tau_a: float | None = None,
    tau_b: float | None = None,
    groups_key: str | None = None,
    pairs_key: str | None = None,
    key_added: str = "torchgw",
    sparse_topk: int = 10,
    spatial: MapKind | None = None,
    confidence: bool = False,
    copy: bool = False,
    solve_options: Options | Mapping[str, Any] | None = None,
) -> GWResult | tuple[GWResult, AnnData, AnnData]:
    """Align two AnnData objects, and write the embedding, labels and plan into them.

    :class:`TranslationProblem` does the same in steps, for several objects, the modalities of a
    MuData and the batches of one object.

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
    metric : {"correlation", "euclidean", "cosine"}, optional
        How a recipe finds the nearest points; by default as published, by correlation.
    labels : str or list of str, optional
        Columns of ``obs`` of the target, the source or both, which are carried to the other side.
        Numbers are averaged, but whole numbers with few different values, at most the square root
        of the number of cells, are labels of groups, and a warning says so. Other columns keep
        their categories, the order of these and scanpy's colours.
    tau_a, tau_b : float in (0, 1], optional
        How strictly the masses of source and target are kept; 1, the default, is strict. They are
        the factors of Sinkhorn's half-steps, 2 rho / (2 rho + epsilon) for
        ``unbalanced=(rho_a, rho_b)``, and need ``epsilon`` as a number.
    groups_key : str, optional
        Column of ``obs`` of both sides with the type of each cell: cells are matched within their
        type alone. See docs/known.md.
    pairs_key : str, optional
        Column of ``obs`` of both sides that names matched cells: two cells of one name are a known
        pair. Cells without a name, or with one that the other side lacks, are matched as others.
    key_added : str
        Name under which results are written.
    sparse_topk : int
        Number of entries of each row of the plan that are kept; ``uns["torchgw"]`` says how much of
        the mass they carry.
    spatial : {"rigid", "affine", "thin_plate"}, optional
        Slices: also fit such a map of the source's ``obsm["spatial"]`` onto the target's, robustly,
        as :meth:`torchgw.GWResult.rigid` and the others do.
    confidence : bool
        Whether to compute :meth:`torchgw.GWResult.confidence` of the cells of the source; a warning
        says so where that has none, as of relaxed plans and known types.
    copy : bool
        Whether to leave the objects as they are, and return copies with the results.
    solve_options : Options or mapping, optional
        Options of :func:`torchgw.solve`, such as ``{"epsilon": 1e-3, "random_state": 0}``.

    Returns
    -------
    GWResult, or tuple of GWResult, AnnData and AnnData
        What the solve returned; with ``copy`` also the source and the target written to. With
        ``key_added="torchgw"`` these are written, and what an earlier alignment wrote under that
        name is removed:

        - ``obsm["X_torchgw"]`` of both: The joint embedding: the source projected into the space of
          the target's ``use_rep``, and the target's points themselves (of length one, by
          ``recipe="scot"``). NaN for a cell that a relaxed plan leaves without mass. Not written
          with ``use_obsp``.
        - ``obsm["torchgw_plan"]`` of the source: The largest entries of the plan, a sparse (n, m)
          matrix. Its rows follow the source when that is subset; :func:`read_plan` finds the
          columns of a part of the target.
        - ``obsm["spatial_aligned"]`` of both: With ``spatial``: places of the source where the map
          takes them, those of the target as they are. ``uns["torchgw"]["spatial"]`` of the source
          has the kind of the map, its ``error``, and whether it ``reflects``.
        - ``obs["torchgw_confidence"]`` of the source: With ``confidence``.
        - ``obs["torchgw_LABEL"]`` and, but for numbers, ``obs["torchgw_LABEL_share"]``: Values
          carried over, and the share of the mass that agrees with them.
        - ``uns["torchgw_LABEL_colors"]``: Colours of the labels, where the other side has
          ``uns["LABEL_colors"]``.
        - ``uns["torchgw"]`` of both: The names of the columns written to ``obs`` (``carried``).
          Value, status and settings; the mass moved and the share of it in the stored plan
          (``plan_mass_kept``); ``ambiguity``, ``doubt``, the values of the alternatives and what
          each is to the first in words (``alternative_relations``), and the text of all
          ``warnings``; of the source also the ``obs_names`` of the plan's columns.

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
    names = check_labels(labels, key_added)
    check_count("sparse_topk", sparse_topk)
    check_relaxation(tau_a, tau_b, check_options(solve_options))
    for flag, value in (("copy", copy), ("confidence", confidence)):
        check_flag(flag, value)
    check_objects(("adata_src", adata_src), ("adata_tgt", adata_tgt))
    if copy:
        adata_src, adata_tgt = adata_src.copy(), adata_tgt.copy()
    named = ("adata_src", adata_src), ("adata_tgt", adata_tgt)
    places = None if spatial is None else places_of(spatial, *named)
    problem = TranslationProblem(adata_src, adata_tgt)
    problem._columns_of(names)
    problem.prepare(
        use_rep=use_rep, use_obsp=use_obsp, joint_rep=joint_rep, recipe=recipe, metric=metric
    )
    problem.solve(
        tau_a=tau_a, tau_b=tau_b, groups_key=groups_key, pairs_key=pairs_key,
        solve_options=solve_options,
    )  # fmt: skip
    problem.write(labels=names, key_added=key_added, sparse_topk=sparse_topk)
    result = next(iter(problem.solutions.values()))
    if places is not None:
        there: SpaceMap = getattr(result, str(spatial))(*places, robust=True)
        adata_src.obsm["spatial_aligned"] = there.transform(places[0])
        adata_tgt.obsm["spatial_aligned"] = places[1]
        adata_src.uns[key_added]["spatial"] = {
            "map": str(spatial), "error": there.error, "reflects": there.reflects,
        }  # fmt: skip
    why = why_not(result._known(), result.lazy_plan) if confidence else ""
    if why:
        # the solve may have taken hours, so the rest of its result is kept
        warn_user(f"`confidence=True` has no effect. {why}", TorchGWWarning)
    elif confidence:
        column, about = f"{key_added}_confidence", adata_src.uns[key_added]
        adata_src.obs[column] = to_numpy(result.confidence().partner)
        # which the next alignment of this name removes
        about["carried"] = np.append(about["carried"], column)
    return (result, adata_src, adata_tgt) if copy else result


def places_of(spatial: Any, *slices: tuple[str, AnnData]) -> list[NDArray[np.float64]]:
    """Read the places of slices, each with its name in messages."""
    check_choice("spatial", spatial, get_args(MapKind))
    for name, data in slices:
        if "spatial" not in data.obsm:
            raise InvalidInputError(
                f"`spatial={spatial!r}` maps places of slices, and `{name}.obsm` has no 'spatial'; "
                f"it has: {', '.join(data.obsm) or 'none'}."
            )
    places = [
        to_numpy(check_points(f"{name}.obsm['spatial']", data.obsm["spatial"])).astype(np.float64)
        for name, data in slices
    ]
    widths = [array.shape[1] for array in places]
    if spatial == "rigid" and len(set(widths)) > 1:
        raise InvalidInputError(
            f"spatial='rigid' needs as many coordinates in obsm['spatial'] of all slices; got "
            f"{', '.join(map(str, widths))}. Pass spatial='affine', or leave some out."
        )
    return places
