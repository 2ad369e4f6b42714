"""Where results go, one object or several: embeddings, plans, carried columns and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

from torchgw._boundary.arrays import to_numpy
from torchgw._errors import InvalidInputError, InvalidTypeError, TorchGWWarning, warn_user
from torchgw._plans.contract import Plan
from torchgw._results.result import GWResult
from torchgw.anndata._spaces import Side, check_name, check_objects, is_object

if TYPE_CHECKING:
    from anndata import AnnData

# Names of columns, and whether each goes from the reference, and back to it.
Carried = Sequence[tuple[str, bool, bool]]


class Match(NamedTuple):
    """What is written for one source."""

    plan: Plan
    entries: scipy.sparse.csr_matrix  # the largest of the plan
    mapped: NDArray[np.float64] | None  # in the space of the reference
    about: dict[str, Any]

    @classmethod
    def of(cls, result: GWResult, warned: list[str], count: int, points: Any) -> Match:
        """Take from a result what is written, with ``count`` entries of each row."""
        plan = result.lazy_plan
        sparse = plan.to_sparse(min(count, plan.shape[1]))
        kept = float(sparse.sum() / result.marginal_a.sum())
        mapped = None if points is None else means(plan, points)
        return cls(plan, scipy.sparse.csr_matrix(sparse), mapped, figures(result, warned, kept))


def store_of(data: Any, target: Any, batch_key: str | None) -> Objects | Batches:
    """Choose where results go: two objects, several by name, or the batches of one."""
    if batch_key is not None:
        if target is not None or not is_object(data):
            raise InvalidTypeError("`batch_key` is for one AnnData, passed alone.")
        return Batches(data, batch_key)
    if target is not None:
        return Objects([Side("src", "adata_src", data), Side("tgt", "adata_tgt", target)])
    objects = getattr(data, "mod", data)
    if not isinstance(objects, Mapping):
        raise InvalidTypeError(
            "`data` must be an AnnData with a `target` or a `batch_key`, a dictionary of AnnData "
            f"or a MuData; got {type(data).__name__}."
        )
    return Objects([Side(str(name), f"data[{name!r}]", it) for name, it in objects.items()])


class Objects:
    """Several objects, each with its own ``obs``, ``obsm`` and ``uns``."""

    sends_back = True  # whether a source has columns of its own

    def __init__(self, sides: list[Side]) -> None:
        self._sides = {side.name: side for side in sides}
        self.shown = {side.name: side.shown for side in sides}

    def sides(self) -> dict[str, Side]:
        """Look up the sides by name, as they are now."""
        return self._sides

    def put_numbers(self, side: Side, name: str, values: NDArray[np.float64]) -> None:
        """Write a column of numbers into ``obs``."""
        side.adata.obs[name] = values

    def put_points(self, name: str, points: Mapping[str, NDArray[Any]]) -> None:
        """Write coordinates by side into ``obsm``."""
        for side in self._sides.values():
            side.adata.obsm[name] = points[side.name]

    def write(
        self, reference: str, points: Any, matches: dict[str, Match], carried: Carried, key: str
    ) -> None:
        """Write matches with a reference, whose points are given if there are any."""
        end = self._sides[reference].adata
        written: dict[int, list[str]] = {}
        for side in self._sides.values():
            _clear(side.adata, key, carried)
        for source, match in matches.items():
            start = self._sides[source].adata
            start.obsm[f"{key}_plan"] = match.entries
            if match.mapped is not None:
                start.obsm[f"X_{key}"] = match.mapped
            columns = np.asarray(end.obs_names, dtype=object)
            for name, there, back in carried:
                ways = [(start, end, match.plan)] if there else []
                ways += [(end, start, match.plan.T)] if back else []
                for receiver, giver, plan in ways:
                    for suffix, values in carry(giver.obs[name], plan).items():
                        receiver.obs[f"{key}_{name}{suffix}"] = values
                        written.setdefault(id(receiver), []).append(f"{key}_{name}{suffix}")
                    _copy_colours(giver, receiver, name, f"{key}_{name}")
            names = np.array(written.get(id(start), []), object)
            start.uns[key] = {**match.about, "plan_columns": columns, "carried": names}
        if points is not None:
            end.obsm[f"X_{key}"] = points
        about = {source: match.about for source, match in matches.items()}
        names = np.array(written.get(id(end), []), object)
        only = next(iter(about.values()))
        end.uns[key] = about if len(about) > 1 else {**only, "carried": names}


class Batches:
    """Batches of one object, in the order of their categories or names."""

    # columns belong to the whole object, whose reference has them
    sends_back = False

    def __init__(self, whole: AnnData, batch_key: str) -> None:
        self._whole, self._key = whole, batch_key
        self.shown = {side.name: side.shown for side in self._cut()}

    def _cut(self) -> list[Side]:
        """Cut the object into its batches."""
        from pandas import Categorical

        data, key = self._whole, self._key
        if not isinstance(key, str) or key not in data.obs:
            known = ", ".join(map(repr, data.obs.columns)) or "nothing"
            raise InvalidInputError(f"`batch_key={key!r}` is no column of .obs, which has {known}.")
        batch = Categorical(data.obs[key])
        if (batch.codes < 0).any():
            raise InvalidInputError(f"`obs[{key!r}]` has missing values: every cell needs a batch.")
        batch = batch.remove_unused_categories()
        return [
            Side(str(name), f"data[{key} == {name!r}]", data[np.asarray(batch == name)])
            for name in batch.categories
        ]

    def sides(self) -> dict[str, Side]:
        # cut again, for there may be new columns
        return {side.name: side for side in self._cut() if side.name in self.shown}

    def _members(self) -> dict[str, NDArray[np.bool_]]:
        """Tell for each batch which cells are in it."""
        batch = self._whole.obs[self._key].astype(str).to_numpy()
        return {name: batch == name for name in self.shown}

    def put_numbers(self, side: Side, name: str, values: NDArray[np.float64]) -> None:
        obs = self._whole.obs
        column = obs[name].to_numpy(np.float64) if name in obs else np.full(len(obs), np.nan)
        column = column.copy()
        column[self._members()[side.name]] = values
        obs[name] = column

    def put_points(self, name: str, points: Mapping[str, NDArray[Any]]) -> None:
        # cells of other batches have NaN
        width = next(iter(points.values())).shape[1]
        joined = np.full((self._whole.n_obs, width), np.nan)
        members = self._members()
        for batch, part in points.items():
            joined[members[batch]] = part
        self._whole.obsm[name] = joined

    def write(
        self, reference: str, points: Any, matches: dict[str, Match], carried: Carried, key: str
    ) -> None:
        whole, written = self._whole, list[str]()
        _clear(whole, key, carried)
        rows = {name: np.flatnonzero(mine) for name, mine in self._members().items()}
        there = rows[reference]
        parts = {source: match.entries.tocoo() for source, match in matches.items()}
        data = np.concatenate([part.data for part in parts.values()])
        row = np.concatenate([rows[source][part.row] for source, part in parts.items()])
        column = np.concatenate([there[part.col] for part in parts.values()])
        shape = (whole.n_obs, whole.n_obs)
        whole.obsp[f"{key}_plan"] = scipy.sparse.csr_matrix((data, (row, column)), shape=shape)
        if points is not None:
            mapped = {source: match.mapped for source, match in matches.items()}
            self.put_points(f"X_{key}", {reference: points, **mapped})  # type: ignore[dict-item]
        order = np.argsort(np.concatenate([there, *(rows[source] for source in matches)]))
        for name, _, _ in carried:
            own = whole.obs[name].iloc[there]
            found = [carry(own, match.plan) for match in matches.values()]
            for suffix in found[0]:
                values = [part[suffix] for part in found]
                whole.obs[f"{key}_{name}{suffix}"] = _joined(own, suffix, values, order)
                written.append(f"{key}_{name}{suffix}")
            _copy_colours(whole, whole, name, f"{key}_{name}")
        about = {source: match.about for source, match in matches.items()}
        whole.uns[key] = {"reference": reference, **about, "carried": np.array(written, object)}


def _clear(adata: AnnData, key: str, carried: Carried) -> None:
    """Remove what an earlier alignment of this name wrote, and another may not write again."""
    adata.obsm.pop(f"X_{key}", None)
    adata.obsm.pop(f"{key}_plan", None)
    adata.obsp.pop(f"{key}_plan", None)
    before = adata.uns.get(key)
    names = before.get("carried", ()) if isinstance(before, Mapping) else ()
    # a column that is carried now is read first, and written over if it is written again
    read = [name for name, _, _ in carried]
    for name in (str(name) for name in names):
        if name in adata.obs and name not in read:
            del adata.obs[name]
            adata.uns.pop(f"{name}_colors", None)


def _joined(own: Any, suffix: str, values: list[Any], order: NDArray[np.int64]) -> Any:
    """Join a column of the reference with what was carried of it, in the order of the cells."""
    from pandas import Categorical

    if suffix:
        # the reference agrees with itself
        return np.concatenate([np.ones(len(own)), *values])[order]
    if isinstance(values[0], Categorical):
        codes = np.concatenate([Categorical(own).codes, *(value.codes for value in values)])
        return Categorical.from_codes(codes[order], dtype=values[0].dtype)
    return np.concatenate([own.to_numpy(np.float64), *values])[order]


def _copy_colours(giver: AnnData, receiver: AnnData, name: str, written: str) -> None:
    """Give a carried column the colours that scanpy keeps of the original."""
    if f"{name}_colors" in giver.uns:
        receiver.uns[f"{written}_colors"] = giver.uns[f"{name}_colors"]


def means(plan: Plan, values: NDArray[Any]) -> NDArray[np.float64]:
    """Average values (m, c) over the partners of each row, (n, c); NaN for a row without mass."""
    sums = to_numpy(plan @ np.column_stack([values, np.ones(len(values))]))
    return _ratio(sums[:, :-1], sums[:, -1:])


def _ratio(over: NDArray[Any], under: NDArray[Any]) -> NDArray[Any]:
    return np.divide(over, under, out=np.full(over.shape, np.nan), where=under > 0)


def carry(column: Any, plan: Plan) -> dict[str, Any]:
    """Carry a column over: new columns by what is added to its name."""
    # Numbers are averaged over partners that have one. Of other values the one that most of a row's
    # mass goes to is taken, with the categories and their order, and the share that agrees.
    from pandas import Categorical
    from pandas.api.types import is_bool_dtype, is_numeric_dtype

    if (is_numeric_dtype(column) and not is_bool_dtype(column)) and not _are_groups(column):
        values = column.to_numpy(dtype=np.float64, na_value=np.nan)
        known = np.isfinite(values)
        sums = to_numpy(plan @ np.column_stack([np.where(known, values, 0), known]))
        return {"": _ratio(sums[:, 0], sums[:, 1])}
    known = Categorical(column)
    # a missing label gets no share
    shares = means(plan, np.eye(len(known.categories) + 1)[known.codes][:, :-1])
    best = np.nan_to_num(shares.max(axis=1))
    codes = np.where(best > 0, np.nan_to_num(shares).argmax(axis=1), -1)
    return {"": Categorical.from_codes(codes, dtype=known.dtype), "_share": best}


def _are_groups(column: Any) -> bool:
    """Whether whole numbers are names of groups, as there are few different ones; says so."""
    from pandas.api.types import is_integer_dtype

    if not is_integer_dtype(column) or column.nunique() ** 2 > len(column):
        return False
    warn_user(
        f"`obs[{column.name!r}]` has whole numbers, {column.nunique()} different ones, and was "
        "carried over as labels of groups. Make it .astype('category') to say so, or "
        ".astype(float) for means.",
        TorchGWWarning,
    )
    return True


def figures(result: GWResult, warned: list[str], kept: float) -> dict[str, Any]:
    """Describe a solve in what h5ad files can hold."""
    same = "value epsilon alpha converged marginal_error gradient ambiguity doubt"
    others = result.alternatives
    about = {
        **{name: getattr(result, name) for name in same.split()}, "status": result.status.name,
        "mass": float(result.marginal_a.sum()), "plan_mass_kept": kept,
        "random_state": str(result.random_state),
        "alternative_values": np.array([other.value for other in others]),
        "alternative_relations": np.array([other.relation for other in others], object),
        "warnings": "\n".join(warned),
    }  # fmt: skip
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
