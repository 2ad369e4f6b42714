"""What several spaces matched together give: plans of all pairs, a common space, labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Literal

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._boundary.arrays import as_labels, to_numpy, to_tensor
from torchgw._boundary.checks import check_within
from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw._plans.contract import Plan
from torchgw._plans.paired import ComposedPlan
from torchgw._results.base import Result, load
from torchgw._results.result import GWResult
from torchgw._tensors.operations import EQUAL
from torchgw._typing import Array
from torchgw._variants.barycenter import BarycenterResult

SeveralKind = Literal["full", "star", "chain"]


@dataclass(frozen=True, repr=False, eq=False)
class AllResult(Result):
    """Outcome of :func:`torchgw.solve_all`, k spaces.

    Attributes
    ----------
    common : BarycenterResult
        The common space; ``common.results[s]`` is its alignment with space s.
    kind : {"full", "star", "chain"}
        Which pairs were solved.
    pairs : Tensor or ndarray, shape (K, 2), int64
        The pairs that were solved.
    results : tuple of GWResult
        Their results; empty if they are files in ``folder``.
    folder : str
        Where the results of the pairs are; empty if they are in memory.
    own, through : Tensor or ndarray, shape (K,), float64
        Objective of each pair at its own plan, and of the matching through the common space,
        followed from there: where that was lower the pair has it as its own.
    weights : Tensor or ndarray, shape (k, k), float64
        Weight of each pair.
    cycle_error : float
        Share of points that two pairs lead elsewhere than the third, over all triangles, at the
        own plans of the pairs. NaN where no triangle was solved.
    common_points : tuple of Tensor or ndarray, shapes (n_s,), int64
        The point of the common space that each point belongs to, -1 for none.
    """

    common: BarycenterResult
    kind: str
    pairs: Array
    results: tuple[GWResult, ...]
    folder: str
    own: Array
    through: Array
    weights: Array
    cycle_error: float
    common_points: tuple[Array, ...]

    def __len__(self) -> int:
        """Count the spaces."""
        return len(self.common_points)

    @property
    def value(self) -> float:
        """The value of the common space, `common.value`."""
        return self.common.value

    @property
    def converged(self) -> bool:
        """Whether the common space has converged."""
        return self.common.converged

    @property
    def consistent(self) -> bool:
        """Whether the own plans of all pairs close every cycle, so that they are the answer."""
        return self.cycle_error == 0

    def pair(self, i: int, j: int) -> GWResult:
        """Give the result of a pair that was solved, i before j; from its file if it has one."""
        place = self._solved(*self._place(i, j))
        if place is None:
            raise UnsupportedError(
                f"The pair ({i}, {j}) was not solved alone: kind={self.kind!r} has "
                f"{to_numpy(self.pairs).tolist()}. `result[{i}, {j}]` is its plan through the "
                "common space."
            )
        if self.folder:
            return load(file_of(self.folder, i, j), device=self._device)
        return self.results[place]

    def __getitem__(self, pair: tuple[int, int]) -> Plan:
        """Give the plan from space i to space j, consistent with those of all others."""
        # That of the pair itself if the pairs close every cycle; otherwise, and where the pair was
        # not solved, through the common space. `pair(i, j)` has what is best for two alone.
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise InvalidInputError(f"`result[i, j]` takes two spaces; got {pair!r:.60}.")
        i, j = self._place(*pair)
        if self.consistent and i != j:
            if self._solved(i, j) is not None:
                return self.pair(i, j).lazy_plan
            if self._solved(j, i) is not None:
                return self.pair(j, i).lazy_plan.T
        near, far = (self.common.results[side].lazy_plan for side in (i, j))
        masses = to_tensor("weights", self.common.weights).to(near.device)
        return ComposedPlan(near, far, masses, in_numpy=near.in_numpy)

    def matching(self, i: int, j: int) -> Any:
        """Find the partner in space j of each point of space i, (n_i,) int64, -1 for none.

        Points belong together if they belong to the same point of the common space (of several the
        one of most mass there), so that every cycle closes.
        """
        i, j = self._place(i, j)
        labels, others = (to_numpy(self.common_points[side]) for side in (i, j))
        mass = to_numpy(self.common.results[j].lazy_plan.giving(in_numpy=False).to_dense())
        first = np.full(len(mass), -1)
        held = np.where(others >= 0, mass[others, np.arange(len(others))], -1.0)
        for point in held.argsort(kind="stable"):
            if others[point] >= 0:
                first[others[point]] = point
        return self._as(torch.from_numpy(np.where(labels >= 0, first[labels], -1)))

    def labels(self, known: Mapping[int, Any]) -> tuple[NDArray[Any], ...]:
        """Carry labels to the points of every space, from one space or from several.

        Each point of the common space has a share of each label, of all labelled spaces together
        by their weights; each point of a space takes the label of which it gets most. Points whose
        labels are known take part as others do.

        Parameters
        ----------
        known : dict of int to array-like, shape (n_s,)
            Labels of all points of some spaces, numbers or words.

        Returns
        -------
        tuple of ndarray, shapes (n_s,)
        """
        if not isinstance(known, Mapping) or not known:
            raise InvalidInputError("`known` must be a dictionary: the labels of each known space.")
        places = {s: self._place(s, s)[0] for s in known}
        tables = {
            places[s]: as_labels(f"known[{s}]", item, len(self.common_points[places[s]]))
            for s, item in known.items()
        }
        names = np.unique(np.concatenate(list(tables.values())))
        share = np.zeros((self.common.distances.n, len(names)))
        importance = to_numpy(self.weights).sum(1)
        for s, item in tables.items():
            plan = self.common.results[s].lazy_plan
            share += importance[s] * to_numpy(plan @ (item[:, None] == names).astype(np.float64))
        return tuple(
            names[to_numpy(item.lazy_plan.T @ share).argmax(1)] for item in self.common.results
        )

    def transform(
        self, i: int, j: int, X_new: Any = None, *, D_new: Any = None, values: Any
    ) -> Any:
        """Map new points of space i to space j, through the common space, without solving again.

        Parameters
        ----------
        i, j : int
            Spaces.
        X_new : array-like, shape (q, d_i), optional
            New points, in the coordinates of space i.
        D_new : array-like, shape (q, n_i), optional
            Distances of the new points to those of space i, in its units, in place of ``X_new``;
            for matrices, graphs and providers.
        values : array-like, shape (n_j, c)
            What is averaged: coordinates of space j, or indicators of labels.

        Returns
        -------
        Tensor or ndarray, shape (q, c)
        """
        i, j = self._place(i, j)
        carried = self.common.results[j].lazy_plan.barycentric(values)
        return self.common.results[i].inverse_transform(X_new, D_new=D_new, values=carried)

    def plot(self, *, ax: Any = None) -> Any:
        """Draw what each pair costs alone and through the common space. Needs matplotlib."""
        from matplotlib import pyplot

        axes = pyplot.subplots()[1] if ax is None else ax
        own, through = (to_numpy(part) for part in (self.own, self.through))
        axes.plot(own, through, "o")
        axes.axline((float(own.min()), float(own.min())), slope=1.0, color="0.7", zorder=0)
        for (i, j), x, y in zip(to_numpy(self.pairs).tolist(), own, through, strict=True):
            axes.annotate(f"{i}-{j}", (x, y), textcoords="offset points", xytext=(4, -8))
        axes.set(xlabel="objective of the pair alone", ylabel="through the common space")
        axes.set_title(f"cycle error of the pairs {self.cycle_error:.1%}")
        return axes

    @property
    def _device(self) -> torch.device:
        return self.common.results[0].lazy_plan.device

    def _as(self, found: Tensor) -> Any:
        tensors = isinstance(self.own, Tensor)
        return found.to(self._device) if tensors else found.numpy()

    def _place(self, i: Any, j: Any) -> tuple[int, int]:
        count = len(self)
        for name, side in (("i", i), ("j", j)):
            check_within(name, side, -count, count - 1)
        return int(i) % count, int(j) % count

    def _solved(self, i: int, j: int) -> int | None:
        places = (to_numpy(self.pairs) == (i, j)).all(1).nonzero()[0]
        return int(places[0]) if len(places) else None

    def _summary(self) -> tuple[str, dict[str, str], str]:
        sizes = ", ".join(str(len(part)) for part in self.common_points)
        figures = {
            "kind": self.kind,
            "value": f"{self.value:.4g}",
            "cycle_error": f"{self.cycle_error:.2%}",
        }
        ended = "converged" if self.converged else "not converged"
        return f"{len(self)} spaces of {sizes} points", figures, ended


def file_of(folder: str, i: int, j: int) -> str:
    """Name the file of a pair."""
    return f"{folder}/{i}-{j}.npz"


def belonging(plan: Plan) -> Tensor:
    """Choose the point of a common space (c, n) that each point belongs to, (n,) int64."""
    table = plan.giving(in_numpy=False).to_dense()
    return torch.where(table.sum(0) > 0, _chosen(table), -1)


def _chosen(table: Tensor) -> Tensor:
    """Choose a row of a table (c, n) for each column, (n,) int64, those of the largest sum."""
    # one column for each row, where there are enough
    found = table.argmax(0)
    if table.shape[1] <= table.shape[0]:
        rows, columns = scipy.optimize.linear_sum_assignment(-table.cpu().numpy())
        found[torch.from_numpy(columns)] = torch.from_numpy(rows).to(found)
    return found


def agreeing(
    common: Sequence[Plan],
    own: Callable[[tuple[int, int]], Plan],
    pairs: Sequence[tuple[int, int]],
    weights: Tensor,
) -> tuple[Tensor, ...]:
    """Choose points of the common space by its plans and by those of the pairs, (n_s,) each."""
    # Begins where the plans of the common space say. Then the points of one space after the other
    # are assigned so that as much mass as can be of its plans, its pairs' and the common one, is
    # between points that belong together, until that no longer grows: each pair's counts by its
    # weight, that of the common space by the mean of these.
    found = [belonging(plan) for plan in common]
    moved = True
    while moved:
        moved = False
        for side, beside in enumerate(common):
            share = weights[side].sum() / (len(common) - 1)
            table = share * beside.giving(in_numpy=False).to_dense()
            for pair in (pair for pair in pairs if side in pair):
                plan, there = own(pair), found[sum(pair) - side]
                toward = plan.T if pair[0] == side else plan
                mass = toward.giving(in_numpy=False).to_dense()[there >= 0]
                table.index_add_(0, there[there >= 0], weights[pair] * mass.to(table))
            chosen = torch.where(found[side] < 0, -1, _chosen(table))
            before, after = (table.T.gather(1, part.clamp_min(0)[:, None]).sum()
                             for part in (found[side], chosen))  # fmt: skip
            # equal up to rounding is not more
            if after > before * (1 + EQUAL):
                found[side], moved = chosen, True
    return tuple(found)


def cycle_error(matchings: dict[tuple[int, int], Tensor], count: int) -> float:
    """Compute the share of points that go elsewhere by two pairs than by the third."""
    wrong = total = 0
    for i, j, k in permutations(range(count), 3):
        if all(pair in matchings for pair in ((i, j), (j, k), (i, k))):
            there = matchings[j, k][matchings[i, j]]
            wrong += int((there != matchings[i, k]).sum())
            total += len(there)
    return wrong / total if total else float("nan")


def partners(
    own: Callable[[tuple[int, int]], Plan], pairs: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], Tensor]:
    """Find the likeliest partners both ways, of plans of pairs."""
    found = {}
    for i, j in pairs:
        plan = own((i, j))
        found[i, j], found[j, i] = plan.argmax(), plan.argmax(axis=0)
    return found
