"""What is written into objects: embeddings, plans, carried columns, figures of the solve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import scipy
from numpy.typing import NDArray

from torchgw._boundary.arrays import to_numpy
from torchgw._errors import InvalidInputError
from torchgw._plans.contract import Plan
from torchgw._results.result import GWResult
from torchgw.anndata._spaces import check_name, check_objects

if TYPE_CHECKING:
    from anndata import AnnData


def means(plan: Plan, values: NDArray[Any]) -> NDArray[np.float64]:
    """Average values (m, c) over the partners of each row, (n, c); NaN for a row without mass."""
    table = np.column_stack([values, np.ones(len(values))])
    sums = to_numpy(plan @ table)
    return np.asarray(_ratio(sums[:, :-1], sums[:, -1:]))


def _ratio(over: NDArray[Any], under: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(np.divide(over, under, out=np.full(over.shape, np.nan), where=under > 0))


def check_column(shown: str, adata: AnnData, name: str) -> None:
    """Refuse a column all of whose values are missing."""
    if adata.obs[name].isna().all():
        raise InvalidInputError(f"`{shown}.obs[{name!r}]` has no labels, all are missing.")


def carry(column: Any, plan: Plan) -> dict[str, Any]:
    """Carry a column over: new columns by what is added to its name.

    Numbers are averaged over partners that have one. Of other values the one that most of a row's
    mass goes to is taken, with the categories and their order, and the share that agrees.
    """
    from pandas import Categorical
    from pandas.api.types import is_bool_dtype, is_numeric_dtype

    if is_numeric_dtype(column) and not is_bool_dtype(column):
        values = column.to_numpy(dtype=np.float64, na_value=np.nan)
        known = np.isfinite(values)
        table = np.column_stack([np.where(known, values, 0), known])
        sums = to_numpy(plan @ table)
        return {"": _ratio(sums[:, 0], sums[:, 1])}
    known = Categorical(column)
    # a missing label gets no share
    indicators = np.eye(len(known.categories) + 1)[known.codes][:, :-1]
    shares = means(plan, indicators)
    best = np.nan_to_num(shares.max(axis=1))
    codes = np.where(best > 0, np.nan_to_num(shares).argmax(axis=1), -1)
    return {"": Categorical.from_codes(codes, dtype=known.dtype), "_share": best}


def largest_entries(result: GWResult, count: int) -> tuple[scipy.sparse.csr_matrix, float]:
    """Return the largest entries of each row of a plan, and the share of its mass they carry."""
    plan = result.lazy_plan
    sparse = plan.to_sparse(min(count, plan.shape[1]))
    return scipy.sparse.csr_matrix(sparse), float(sparse.sum() / result.marginal_a.sum())


def figures(result: GWResult, warned: list[str], kept: float) -> dict[str, Any]:
    """Describe a solve in what h5ad files can hold."""
    same = "value epsilon alpha converged marginal_error gradient ambiguity doubt"
    others = result.alternatives
    about = {
        **{name: getattr(result, name) for name in same.split()},
        "status": result.status.name,
        "mass": float(result.marginal_a.sum()),
        "plan_mass_kept": kept,
        "random_state": str(result.random_state),
        "alternative_values": np.array([other.value for other in others]),
        "alternative_relations": np.array([other.relation for other in others], object),
        "warnings": "\n".join(warned),
    }
    decided = result.log["distances"]
    if decided:
        about["distances"] = f"{decided['chosen']}: {decided['why']}"
    return about


def read_plan(
    adata_src: AnnData, adata_tgt: AnnData, key: str = "torchgw"
) -> scipy.sparse.csr_matrix:
    """Read the plan that an alignment wrote, for the observations that two objects have now.

    Rows of ``obsm[key + "_plan"]`` follow the source when it is subset or sorted; its columns do
    not follow the target. They are found again by the names of observations.

    Parameters
    ----------
    adata_src, adata_tgt : AnnData
        The objects that were aligned, or parts of them in any order. Of one object with batches
        the plan is ``obsp[key + "_plan"]``, which follows it by itself.
    key : str
        The ``key_added`` of the alignment.

    Returns
    -------
    scipy.sparse.csr_matrix, shape (n, m), float64
        The entries that were kept.

    Raises
    ------
    InvalidInputError
        If the source has no such plan, the target has observations that were not aligned, or the
        names of the aligned ones are not unique.
    """
    from pandas import Index

    check_objects(("adata_src", adata_src), ("adata_tgt", adata_tgt))
    check_name("key", key)
    slot = f"{key}_plan"
    if slot not in adata_src.obsm:
        raise InvalidInputError(
            f"`adata_src` has its plan in obsp[{slot!r}], which follows it by itself."
            if slot in adata_src.obsp
            else f"`adata_src` has no plan {slot!r}: align it first."
        )
    if "plan_columns" not in adata_src.uns.get(key, {}):
        raise InvalidInputError(
            f"`adata_src` has a plan, but uns[{key!r}], which names its columns, was lost, as by "
            "anndata.concat: copy it from the object that was aligned."
        )
    names = Index(adata_src.uns[key]["plan_columns"])
    if not names.is_unique:
        raise InvalidInputError(
            "The aligned target had names that occur twice, so its part cannot be found. Call "
            "`obs_names_make_unique()` before the alignment."
        )
    places = names.get_indexer(adata_tgt.obs_names)
    if (places < 0).any():
        unknown = adata_tgt.obs_names[places < 0][0]
        raise InvalidInputError(
            f"{int((places < 0).sum())} observations of `adata_tgt` were not aligned, such as "
            f"{unknown!r}."
        )
    return scipy.sparse.csr_matrix(adata_src.obsm[slot])[:, places]
