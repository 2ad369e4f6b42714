"""Representations of the same items by several subjects or models, matched without the items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._boundary.arrays import as_labels, check_distances, check_points, to_numpy
from torchgw._boundary.checks import check_choice, check_count, check_within, reject_unknown
from torchgw._errors import InvalidInputError
from torchgw._problem.problem import stored_matrix
from torchgw._results.base import Result
from torchgw._typing import Array
from torchgw._variants.several import AllResult
from torchgw._variants.solve_all import solve_all
from torchgw.distances.points import PointMetric, pairwise_distances
from torchgw.metrics import category_accuracy, top_k_accuracy

RepresentationMetric = Literal["precomputed"] | PointMetric
CorrelationKind = Literal["pearson", "spearman"]


class Representations:
    """Distances between the same items, as several subjects or models represent them.

    The items are the same in the same order, which is never used to match them: it scores a match
    that was found from the distances alone.

    Parameters
    ----------
    tables : dict of str to array-like, or sequence of array-like
        Of each subject or model: embeddings (n, d), or with ``metric="precomputed"``
        dissimilarities (n, n); of n items, n the same for all. A dictionary has their names.
    metric : {"cosine", "correlation", "euclidean", "sqeuclidean", "precomputed"}
        How embeddings are compared.
    categories : array-like, shape (n,), optional
        Category of each item.

    Attributes
    ----------
    names : tuple of str
    distances : Tensor, shape (G, n, n), float64
        Each divided by its mean off the diagonal, so that all have one unit.

    Raises
    ------
    InvalidInputError
        If tables do not have the same items.

    Examples
    --------
    >>> import numpy as np, torchgw
    >>> rng = np.random.default_rng(0)
    >>> items = rng.normal(size=(12, 4))
    >>> people = {f"s{k}": items + 0.1 * rng.normal(size=items.shape) for k in range(4)}
    >>> groups = torchgw.Representations(people, metric="euclidean").grouped(2, random_state=0)
    >>> found = groups.align(random_state=0)
    >>> found.top_k(1).shape, bool(found.top_k(1)[0, 1] > 0.8)
    ((2, 2), True)
    """

    @reject_unknown
    def __init__(
        self,
        tables: Mapping[str, Any] | Sequence[Any],
        *,
        metric: RepresentationMetric = "cosine",
        categories: Any = None,
    ) -> None:
        check_choice("metric", metric, ("precomputed", *get_args(PointMetric)))
        given = dict(tables) if isinstance(tables, Mapping) else dict(enumerate(tables))
        if len(given) < 2:
            raise InvalidInputError(
                f"`tables` must have at least two subjects or models; got {len(given)}."
            )
        self.names = tuple(map(str, given))
        read = [
            _distances(f"tables[{name!r}]", item, metric) for name, item in given.items()
        ]  # fmt: skip
        sizes = {len(table) for table in read}
        if len(sizes) > 1:
            raise InvalidInputError(
                f"`tables` must be of the same items; they have {sorted(sizes)} rows."
            )
        self.distances = torch.stack(read)
        self.categories = None
        if categories is not None:
            self.categories = as_labels("categories", categories, len(read[0]), "item")

    def __len__(self) -> int:
        """Count the subjects."""
        return len(self.names)

    def __repr__(self) -> str:
        """Summarise in a line."""
        return f"Representations({len(self)} of {self.distances.shape[1]} items)"

    def grouped(self, groups: Any, random_state: int | None = None) -> Representations:
        """Average the distances of groups of subjects.

        Parameters
        ----------
        groups : int, or array-like of shape (G,)
            How many groups of about equal size are drawn, or the group of each subject, whose
            labels become the names.
        random_state : int, optional
            Draws the groups.
        """
        if isinstance(groups, int) and not isinstance(groups, bool):
            check_count("groups", groups)
            check_within("groups", groups, 2, len(self), ", the number of subjects")
            order = np.random.default_rng(random_state).permutation(len(self))
            labels = np.empty(len(self), dtype=object)
            labels[order] = [f"group {k % groups}" for k in range(len(self))]
        else:
            labels = as_labels("groups", groups, len(self), "subject")
        means = {
            str(label): self.distances[torch.from_numpy(np.asarray(labels == label))].mean(0)
            for label in sorted(set(labels.tolist()))
        }
        return Representations(means, metric="precomputed", categories=self.categories)

    def rsa(self, kind: CorrelationKind = "spearman") -> NDArray[np.float64]:
        """Correlate the distances of all pairs of items between all subjects, (G, G).

        That is representational similarity analysis, which takes the items as known.
        """
        check_choice("kind", kind, get_args(CorrelationKind))
        n = self.distances.shape[1]
        above = torch.triu_indices(n, n, 1, device=self.distances.device)
        flat = to_numpy(self.distances[:, above[0], above[1]])
        if kind == "spearman":
            flat = scipy.stats.rankdata(flat, axis=1)
        return np.corrcoef(flat)

    def align(self, **options: Any) -> RepresentationMatch:
        """Match the items of all subjects by their distances alone.

        Parameters
        ----------
        **options
            Of :func:`torchgw.solve_all`: ``kind``, ``reference``, ``weights``, ``epsilon``,
            ``tol``, ``resume``, ``device``, ``random_state``.

        Returns
        -------
        RepresentationMatch
        """
        result = solve_all(D=list(self.distances), **options)
        codes = None
        if self.categories is not None:
            codes = np.unique(self.categories, return_inverse=True)[1].astype(np.int64)
        return RepresentationMatch(result, self.names, codes, self.rsa("pearson"))


@dataclass(frozen=True, repr=False, eq=False)
class RepresentationMatch(Result):
    """Outcome of :meth:`torchgw.Representations.align`.

    Attributes
    ----------
    result : AllResult
        The plans: ``result[i, j]``.
    names : tuple of str
        Of the G subjects.
    categories : ndarray, shape (n,), int64, or None
        Of the items, as places among all categories in sorted order.
    rsa : ndarray, shape (G, G), float64
        Pearson's correlation of distances with the items known, beside which
        ``distance_correlation()`` is that of the match.
    """

    result: AllResult
    names: tuple[str, ...]
    categories: Array | None
    rsa: Array

    def top_k(self, k: int = 1) -> NDArray[np.float64]:
        """Compute the share of items of i whose counterpart is among the k likeliest in j, (G, G).

        The diagonal is one.
        """
        return self._table(lambda i, j: top_k_accuracy(self.result[i, j], k))

    def category_accuracy(self) -> NDArray[np.float64]:
        """Compute the share of items of i whose likeliest partner in j has their category, (G, G).

        Raises
        ------
        InvalidInputError
            If there are no categories.
        """
        if self.categories is None:
            raise InvalidInputError(
                "There are no categories. Pass `categories` to Representations."
            )
        labels = self.categories
        return self._table(lambda i, j: category_accuracy(self.result[i, j], labels, labels))

    def distance_correlation(self) -> NDArray[np.float64]:
        """Correlate the distances of items with those of their likeliest partners, (G, G)."""
        tables = []
        for item in self.result.common.results:
            assert item.extension is not None
            tables.append(to_numpy(stored_matrix(item.extension.known.distances(1))))

        def related(i: int, j: int) -> float:
            partner = to_numpy(self.result[i, j].argmax())
            above = np.triu_indices(len(partner), 1)
            far = tables[j][np.ix_(partner, partner)]
            return float(np.corrcoef(tables[i][above], far[above])[0, 1])

        return self._table(related)

    def _table(self, score: Any) -> NDArray[np.float64]:
        found = np.ones((len(self.names), len(self.names)))
        for i, j in np.argwhere(~np.eye(len(found), dtype=bool)).tolist():
            found[i, j] = score(i, j)
        return found

    def _summary(self) -> tuple[str, dict[str, str], str]:
        off = ~np.eye(len(self.names), dtype=bool)
        figures = {f"top_{k}": f"{self.top_k(k)[off].mean():.1%}" for k in (1, 5)
                   if k <= self.result.common.distances.n}  # fmt: skip
        if self.categories is not None:
            figures["category"] = f"{self.category_accuracy()[off].mean():.1%}"
        ended = "converged" if self.result.converged else "not converged"
        return f"{len(self.names)} representations", figures, ended


def _distances(name: str, given: Any, metric: RepresentationMetric) -> Tensor:
    """Compute distances (n, n) float64, of mean one."""
    if metric == "precomputed":
        table = check_distances(name, given).double()
    else:
        points = check_points(name, given).double()
        table = pairwise_distances(points, points, metric)
    n = len(table)
    mean = (table.sum() - table.diagonal().sum()) / max(n * (n - 1), 1)
    return table / mean if float(mean) > 0 else table
