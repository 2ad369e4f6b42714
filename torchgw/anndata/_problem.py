"""Alignment in steps: two objects, several, the modalities of one, or the batches of one."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from torchgw._api import as_arguments, solve
from torchgw._boundary.arrays import to_numpy, to_tensor
from torchgw._boundary.checks import check_count, reject_unknown
from torchgw._errors import InvalidInputError
from torchgw._plans.contract import Plan
from torchgw._problem.table import Options
from torchgw._results.result import GWResult
from torchgw._variants.embedding import joint_embedding
from torchgw.anndata._spaces import (
    Names,
    Recipe,
    Side,
    Space,
    check_labels,
    check_name,
    check_objects,
    check_options,
    check_relaxation,
    check_sources,
    groups_of,
    look_up,
    pairs_of,
    points_of,
    read_spaces,
    solve_arguments,
)
from torchgw.anndata._store import Match, means, store_of

if TYPE_CHECKING:
    from anndata import AnnData
    from pandas import DataFrame, Index

    from torchgw.distances.graph import GraphMetric

Pair = tuple[str, str]


@contextlib.contextmanager
def _noting(messages: list[str]) -> Iterator[None]:
    """Keep the texts of warnings, and warn again afterwards."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            messages += [str(entry.message) for entry in caught]
    for entry in caught:
        warnings.warn_explicit(entry.message, entry.category, entry.filename, entry.lineno)


class TranslationProblem:
    """Alignment of AnnData objects in steps, with the names of moscot.

    Every object is aligned with a reference: of two objects with the second.

    Parameters
    ----------
    data : AnnData, mapping of str to AnnData, or MuData
        The source; or two or more objects by name; or an object with a modality each; or, with
        ``batch_key``, one object whose batches are aligned.
    target : AnnData, optional
        The reference of a single source. The two are then called ``"src"`` and ``"tgt"``.
    batch_key : str, optional
        Column of ``obs`` that says which batch a cell of ``data`` is in.
    reference : str, optional
        Name of the object, modality or batch that all others are aligned with; of two the second.

    Attributes
    ----------
    solutions : dict
        Results by pairs of names, (source, reference), after :meth:`solve`.

    Raises
    ------
    InvalidTypeError
        If something is no AnnData.
    InvalidInputError
        If there are fewer than two objects, or no reference is named among several.

    Examples
    --------
    >>> import numpy as np
    >>> from anndata import AnnData
    >>> from torchgw.anndata import TranslationProblem
    >>> X = np.random.default_rng(0).normal(size=(60, 3))
    >>> data = {"atac": AnnData(X), "protein": AnnData(X * 2), "rna": AnnData(X + 5)}
    >>> problem = TranslationProblem(data, reference="rna").prepare()
    >>> problem.solve(solve_options={"distances": "euclidean", "random_state": 0}).solutions.keys()
    dict_keys([('atac', 'rna'), ('protein', 'rna')])
    >>> problem.translate("atac").shape
    (60, 3)
    """

    @reject_unknown
    def __init__(
        self,
        data: AnnData | Mapping[str, AnnData] | Any,
        target: AnnData | None = None,
        *,
        batch_key: str | None = None,
        reference: str | None = None,
    ) -> None:
        check_name("reference", reference)
        self._store = store_of(data, target, batch_key)
        sides = self._store.sides()
        check_objects(*((side.shown, side.adata) for side in sides.values()))
        if len(sides) < 2:
            raise InvalidInputError(f"There must be at least two objects; got {len(sides)}.")
        names = list(sides)
        if reference is None and len(sides) == 2:
            reference = names[1]
        if reference not in names:
            raise InvalidInputError(
                f"`reference` must be one of {', '.join(map(repr, names))}; got {reference!r}."
            )
        self._reference = reference
        self._sources = [name for name in names if name != reference]
        self._spaces: dict[str, Space] = {}
        self._recipe: Recipe | None = None
        self._cells: dict[str, Index[str]] = {}
        self._warned: dict[Pair, list[str]] = {}
        self.solutions: dict[Pair, GWResult] = {}

    def _unchanged_sides(self) -> dict[str, Side]:
        """Give the objects; refuse them if their cells are not those that the plans are for."""
        sides = self._store.sides()
        for name, cells in self._cells.items():
            now = sides[name].adata.obs_names if name in sides else cells[:0]
            if not now.equals(cells):
                same = now.sort_values().equals(cells.sort_values())
                what = f"{len(now)} cells that are not the {len(cells)} that were prepared"
                what = "the cells that were prepared in another order" if same else what
                raise InvalidInputError(
                    f"`{self._store.shown[name]}` has {what}, which plans are not about. Call "
                    "`prepare` and `solve` again; of what `write` left in the objects, `read_plan` "
                    "finds the part that is still there."
                )
        return sides

    @reject_unknown
    def prepare(
        self,
        *,
        use_rep: Names = None,
        use_obsp: Names = None,
        joint_rep: Names = None,
        recipe: Recipe | None = None,
        metric: GraphMetric | None = None,
    ) -> TranslationProblem:
        """Read what is compared, as :func:`align` does, and return the problem.

        Parameters
        ----------
        use_rep, use_obsp, joint_rep : str, pair of str, or mapping of str to str, optional
            As in :func:`align`; a mapping names one for every object.
        recipe, metric : str, optional
            As in :func:`align`.
        """
        check_sources(use_rep, use_obsp, recipe, metric)
        sides = self._store.sides()
        spaces = read_spaces(list(sides.values()), use_rep, use_obsp, joint_rep, recipe, metric)
        self._spaces = dict(zip(sides, spaces, strict=True))
        self._cells = {name: side.adata.obs_names.copy() for name, side in sides.items()}
        self._recipe = recipe
        self.solutions = {}
        return self

    @reject_unknown
    def solve(
        self,
        alpha: float | Literal["auto"] | None = None,
        epsilon: float | Literal["auto"] | None = None,
        tau_a: float | None = None,
        tau_b: float | None = None,
        *,
        groups_key: str | None = None,
        pairs_key: str | None = None,
        solve_options: Options | Mapping[str, Any] | None = None,
    ) -> TranslationProblem:
        """Solve every source against the reference, and return the problem.

        Parameters
        ----------
        alpha, epsilon : float, optional
            As in :func:`torchgw.solve`, if ``solve_options`` does not have them.
        tau_a, tau_b, groups_key, pairs_key, solve_options
            As in :func:`align`, for the masses of source and reference.
        """
        options = dict(check_options(solve_options))
        for name, value in (("alpha", alpha), ("epsilon", epsilon)):
            if value is not None and name in options:
                raise InvalidInputError(f"Pass `{name}` or solve_options[{name!r}], not both.")
            options |= {} if value is None else {name: value}
        options |= check_relaxation(tau_a, tau_b, options)
        if not self._spaces:
            raise InvalidInputError("Call `prepare` before `solve`.")
        sides = self._unchanged_sides()
        for name, key in (("groups", groups_key), ("pairs", pairs_key)):
            check_name(f"{name}_key", key)
            if key is not None and name in options:
                raise InvalidInputError(f"Pass `{name}_key` or solve_options[{name!r}], not both.")
        target = self._spaces[self._reference]
        for name in self._sources:
            pair, warned = (name, self._reference), list[str]()
            arguments = solve_arguments(self._spaces[name], target, options, self._recipe)
            if groups_key is not None:
                arguments["groups"] = tuple(groups_of(sides[side], groups_key) for side in pair)
            if pairs_key is not None:
                arguments["pairs"] = pairs_of([sides[side] for side in pair], pairs_key)
            with _noting(warned):
                self.solutions[pair] = solve(**as_arguments(arguments))
            self._warned[pair] = warned
        return self

    def _pair(self, source: str | None, target: str | None) -> tuple[Side, Side, Plan]:
        """Find the two sides and the plan from one to the other."""
        check_name("source", source)
        check_name("target", target)
        if not self.solutions:
            raise InvalidInputError("Call `prepare` and `solve` first.")
        if source is None and len(self._sources) == 1:
            source = self._sources[0] if target in (None, self._reference) else self._reference
        target = self._reference if target is None else target
        sides = self._unchanged_sides()
        for pair, plan in ((p, r.lazy_plan) for p, r in self.solutions.items()):
            if pair == (source, target):
                return sides[pair[0]], sides[pair[1]], plan
            if pair == (target, source):
                return sides[pair[1]], sides[pair[0]], plan.T
        known = ", ".join(map(str, self.solutions))
        raise InvalidInputError(
            f"There is no solution from {source!r} to {target!r}; there are {known}, and their "
            "inverses."
        )

    def __repr__(self) -> str:
        """Show the objects, and how far the problem is."""
        cells = {name: side.adata.n_obs for name, side in self._store.sides().items()}
        sources = ", ".join(f"{name} ({cells.get(name, 0)} cells)" for name in self._sources)
        state = "not prepared"
        if self._spaces:
            ended = ", ".join(result.status.name for result in self.solutions.values())
            state = f"solved: {ended}" if ended else "prepared, not solved"
        reference = f"{self._reference} ({cells.get(self._reference, 0)} cells)"
        return f"TranslationProblem({sources} -> {reference}; {state})"

    @reject_unknown
    def translate(
        self,
        source: str | None = None,
        target: str | None = None,
        forward: bool = True,
        *,
        use_rep: str | None = None,
    ) -> NDArray[np.float64]:
        """Project the cells of a source into the space of a target.

        Parameters
        ----------
        source, target : str, optional
            Names; by default the only source, and the reference. ``source="rna", target="atac"``
            goes back from a reference.
        forward : bool
            Whether source cells go into the space of the target; otherwise it is the other way.
        use_rep : str, optional
            What is averaged of the target: a key of ``obsm`` or ``"X"``, such as the expression of
            genes; by default the points that were compared.

        Returns
        -------
        ndarray of shape (n, d), float64
            Means over the partners of each cell, NaN for a cell without mass.
        """
        start, end, plan = self._pair(source, target)
        if not forward:
            start, end, plan = end, start, plan.T
        points = self._spaces[end.name].points
        check_name("use_rep", use_rep)
        if use_rep is not None:
            points = points_of(end.shown, end.adata, use_rep, sparse=True)
        if points is None:
            raise InvalidInputError("`use_obsp` gave no coordinates: name some as `use_rep`.")
        return means(plan, points)

    def push(
        self,
        source: str | None = None,
        target: str | None = None,
        data: Any = None,
        subset: str | Sequence[str] | None = None,
        *,
        scale_by_marginals: bool = True,
        key_added: str | None = None,
    ) -> NDArray[np.float64]:
        """Send a distribution over the cells of a source to those of a target.

        Parameters
        ----------
        source, target : str, optional
            As in :meth:`translate`.
        data : str or array-like of shape (n,) or (n, k), optional
            Mass on each cell: an array, or a column of numbers of ``obs``; a column of labels with
            ``subset``: the same mass on every cell with one of these; by default on every cell.
        subset : str or list of str, optional
            Labels of the column ``data``.
        scale_by_marginals : bool
            Whether each cell sends all of its mass, however much the plan gives it.
        key_added : str, optional
            Column of the target's ``obs`` to write the answer to, if it has one dimension.

        Returns
        -------
        ndarray of shape (m,) or (m, k), float64
            Mass that arrives at each cell.
        """
        check_name("key_added", key_added)
        start, end, plan = self._pair(source, target)
        values = _distribution(start, data, subset)
        if scale_by_marginals:
            mass = to_numpy(plan.marginals()[0]).reshape(-1, *[1] * (values.ndim - 1))
            values = np.divide(values, mass, out=np.zeros_like(values), where=mass > 0)
        moved = np.asarray(to_numpy(plan.T @ values), dtype=np.float64)
        if key_added is not None:
            if moved.ndim != 1:
                raise InvalidInputError(f"`key_added` is for one column; got {moved.shape[1]}.")
            self._store.put_numbers(end, key_added, moved)
        return moved

    def pull(
        self,
        source: str | None = None,
        target: str | None = None,
        data: Any = None,
        subset: str | Sequence[str] | None = None,
        *,
        scale_by_marginals: bool = True,
        key_added: str | None = None,
    ) -> NDArray[np.float64]:
        """Fetch a distribution over the cells of a target back to those of a source.

        It is :meth:`push` with the two exchanged: ``data`` and ``subset`` are of the target, and
        the answer is of the source, (n,) or (n, k).
        """
        start, end, _ = self._pair(source, target)
        return self.push(
            end.name, start.name, data, subset, scale_by_marginals=scale_by_marginals,
            key_added=key_added,
        )  # fmt: skip

    def cell_transition(
        self,
        source: str | None = None,
        target: str | None = None,
        source_groups: str | None = None,
        target_groups: str | None = None,
        *,
        forward: bool = False,
    ) -> DataFrame:
        """Sum the plan over groups of cells.

        Parameters
        ----------
        source, target : str, optional
            As in :meth:`translate`.
        source_groups, target_groups : str
            Columns of ``obs`` with labels.
        forward : bool
            Whether a row says where the mass of a source group goes, with sum one; otherwise a
            column says where that of a target group comes from.

        Returns
        -------
        DataFrame
            A row for each source group, a column for each target group.
        """
        from pandas import Categorical, DataFrame

        start, end, plan = self._pair(source, target)
        sides = (start, source_groups), (end, target_groups)
        rows, columns = (Categorical(_column(side, name)) for side, name in sides)
        left, right = (np.eye(len(it.categories) + 1)[it.codes][:, :-1] for it in (rows, columns))
        table = left.T @ to_numpy(plan @ right)
        total = table.sum(axis=int(forward), keepdims=True)
        share = np.divide(table, total, out=np.full(table.shape, np.nan), where=total > 0)
        return DataFrame(share, index=rows.categories, columns=columns.categories)

    @reject_unknown
    def embed(
        self,
        *,
        dimension: int = 2,
        n_neighbors: int | None = None,
        coupling: float = 1.0,
        key_added: str = "X_joint",
    ) -> TranslationProblem:
        """Put all objects into one space of few dimensions, and return the problem.

        Each keeps its neighbours, and cells lie near those that the plans to the reference match
        them with; sources meet through the reference, as in SCOTv2 [1]_. Other than :meth:`write`,
        which maps all into the space of the reference, this moves the reference too.

        Parameters
        ----------
        dimension, n_neighbors, coupling
            As in :func:`torchgw.joint_embedding`.
        key_added : str
            Entry of ``obsm`` that the coordinates are written to, in every object.

        Raises
        ------
        InvalidInputError
            If there are no solutions, or distances were compared, which have no neighbours here.

        References
        ----------
        .. [1] P. Demetci, R. Santorella, M. Chakravarthy, B. Sandstede, R. Singh. SCOTv2:
           single-cell multiomic alignment with disproportionate cell-type representation. Journal
           of Computational Biology 2022.
        """
        check_name("key_added", key_added, none=False)
        if not self.solutions:
            raise InvalidInputError("Call `prepare` and `solve` before `embed`.")
        self._unchanged_sides()
        matrices = [name for name, space in self._spaces.items() if space.is_matrix]
        if matrices:
            raise InvalidInputError(
                f"{', '.join(map(repr, matrices))} was compared by distances. `embed` needs points "
                "or graphs: pass `use_rep`, or `use_obsp` of a neighbour graph, to `prepare`."
            )
        sources, target = self._sources, self._spaces[self._reference]
        joint = joint_embedding(
            [self._spaces[name].value for name in sources], target.value,
            [self.solutions[name, self._reference] for name in sources], dimension=dimension,
            n_neighbors=n_neighbors, coupling=coupling,
        )  # fmt: skip
        coordinates = map(to_numpy, (*joint.sources, joint.anchor))
        found = dict(zip([*sources, self._reference], coordinates, strict=True))
        self._store.put_points(key_added, found)
        return self

    @reject_unknown
    def write(
        self,
        *,
        labels: str | Sequence[str] | None = None,
        key_added: str = "torchgw",
        sparse_topk: int = 10,
    ) -> TranslationProblem:
        """Write embeddings, plans, carried columns and figures into the objects, and return self.

        Separate objects get what :func:`align` describes; with several sources ``uns[key_added]``
        of the reference has the figures of each by its name. Labels go from the reference to the
        sources, and back from a single source. Batches of one object get instead:

        ``obsm["X_torchgw"]``
            All batches in the space of the reference.
        ``obsp["torchgw_plan"]``
            Largest entries of the plans, a row for each cell outside the reference.
        ``obs["torchgw_LABEL"]``, ``obs["torchgw_LABEL_share"]``
            Labels carried from the reference to all others; the reference has its own.
        ``uns["torchgw"]``
            The reference, and figures by batch.

        Parameters
        ----------
        labels : str or list of str, optional
            Columns of ``obs``, as in :func:`align`.
        key_added : str
            Name under which results are written.
        sparse_topk : int
            Number of entries of each row of a plan that are kept.
        """
        names = check_labels(labels, key_added)
        check_count("sparse_topk", sparse_topk)
        carried = self._columns_of(names)
        if not self.solutions:
            raise InvalidInputError("Call `prepare` and `solve` before `write`.")
        points = self._spaces[self._reference].points
        matches = {
            pair[0]: Match.of(result, self._warned[pair], sparse_topk, points)
            for pair, result in self.solutions.items()
        }
        self._store.write(self._reference, points, matches, carried, key_added)
        return self

    def _columns_of(self, names: Sequence[str]) -> list[tuple[str, bool, bool]]:
        """Tell of each column whether it goes from the reference to sources, and whether back."""
        carried = []
        sides = self._unchanged_sides()
        reference = sides[self._reference]
        alone = self._store.sends_back and len(self._sources) == 1
        single = sides[self._sources[0]] if alone else None
        for name in names:
            givers = [side for side in (reference, single) if side and name in side.adata.obs]
            if not givers:
                where = f"no column of the .obs of the reference, {self._reference!r}"
                where = "a column of neither .obs" if single else where
                known = ", ".join(map(repr, reference.adata.obs.columns)) or "no columns"
                raise InvalidInputError(
                    f"`labels={name!r}` is {where}; that of the reference has {known}."
                )
            for side in givers:
                if side.adata.obs[name].isna().all():
                    raise InvalidInputError(
                        f"`{side.shown}.obs[{name!r}]` has no labels, all are missing."
                    )
            carried.append((name, reference in givers, single in givers))
        return carried


def _column(side: Side, name: Any) -> Any:
    """Look up a column of obs."""
    return look_up(side.adata.obs, name, f"`{side.shown}.obs`")


def _distribution(side: Side, data: Any, subset: Any) -> NDArray[np.float64]:
    """Make masses of cells from an array, a column, or labels of a column."""
    count = side.adata.n_obs
    if subset is not None:
        chosen = [subset] if isinstance(subset, str) else subset
        if not isinstance(chosen, (tuple, list)):
            raise InvalidInputError(
                f"`subset` must be a label or a list of labels; got {subset!r}."
            )
        member = _column(side, data).isin(chosen).to_numpy()
        if not member.any():
            raise InvalidInputError(f"No cell of `{side.shown}` has {data!r} in {chosen!r}.")
        return np.asarray(member / member.sum())
    if data is None:
        return np.full(count, 1 / count)
    if isinstance(data, str):
        column = _column(side, data)
        if column.dtype.kind not in "iufb":
            raise InvalidInputError(f"`obs[{data!r}]` holds labels: choose some as `subset`.")
        data = column.to_numpy()
    values = to_numpy(to_tensor("data", data))
    if values.ndim not in (1, 2) or len(values) != count:
        raise InvalidInputError(
            f"`data` must be numbers of shape ({count},) or ({count}, k), one for each cell of "
            f"`{side.shown}`; got {values.shape}."
        )
    return values.astype(np.float64)
