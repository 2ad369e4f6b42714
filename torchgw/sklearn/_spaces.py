"""Distances and similarities between whole spaces, for estimators that take them precomputed."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from torchgw._boundary.arrays import to_numpy
from torchgw._boundary.checks import check_positive, named_fields
from torchgw._errors import InvalidTypeError
from torchgw._many.pairwise import pairwise
from torchgw._problem.named import DistanceName, ScaleName


@named_fields
@dataclass(kw_only=True, eq=False, repr=False)
class GWDistance(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Distances between whole spaces, as ``metric="precomputed"`` takes them.

    A sample is a space: points (n, d) or a graph. ``transform`` returns the square roots of the
    values of :func:`torchgw.pairwise` to the spaces of ``fit``, whose options these are. With
    entropy a space has a small distance from itself; ``polish=True`` has none.

    Parameters
    ----------
    distances, n_neighbors, scale, epsilon, n_init, polish, n_jobs, device
        See :func:`torchgw.pairwise`.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.neighbors import KNeighborsClassifier
    >>> from sklearn.pipeline import make_pipeline
    >>> from torchgw.sklearn import GWDistance
    >>> rng = np.random.default_rng(0)
    >>> lines = [rng.normal(size=(n, 2)) * [1, 0.05] for n in (9, 10, 11)]
    >>> discs = [rng.normal(size=(n, 2)) for n in (9, 10, 11)]
    >>> nearest = KNeighborsClassifier(1, metric="precomputed")
    >>> model = make_pipeline(GWDistance(epsilon=0.02), nearest)
    >>> model.fit(lines[:2] + discs[:2], [0, 0, 1, 1]).predict([lines[2], discs[2]]).tolist()
    [0, 1]
    """

    distances: DistanceName | tuple[Any, Any] = "auto"
    n_neighbors: int | None = None
    scale: ScaleName | None = "auto"
    epsilon: float | Literal["auto"] = "auto"
    n_init: int | None = None
    polish: bool | None = None
    n_jobs: int | None = None
    device: torch.device | str | int | None = None

    def fit(self, X: Any, y: Any = None) -> "GWDistance":
        """Keep the spaces that others are compared with."""
        self.spaces_ = _listed(X)
        return self

    def transform(self, X: Any) -> NDArray[np.float64]:
        """Compute distances of spaces to those of ``fit``, shape (q, n)."""
        check_is_fitted(self)
        return self._from_values(self._values(_listed(X), self.spaces_))

    def fit_transform(self, X: Any, y: Any = None, **params: Any) -> NDArray[np.float64]:
        """Compute distances among spaces, shape (n, n), each pair once."""
        self.fit(X, y)
        values = self._values(self.spaces_, None)
        self._learn(values)
        return self._from_values(values)

    def _values(self, Xs: list[Any], Ys: list[Any] | None) -> NDArray[np.float64]:
        options = self.get_params(deep=False)
        options.pop("gamma", None)
        values = pairwise(Xs, Ys, **options, progress=False)
        return np.maximum(np.asarray(to_numpy(values), np.float64), 0)

    def _learn(self, values: NDArray[np.float64]) -> None:
        """Take what is needed from the values among the spaces of ``fit``."""

    def _from_values(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.sqrt(values)


@named_fields
@dataclass(kw_only=True, eq=False, repr=False)
class GWKernel(GWDistance):
    """Similarities exp(-gamma value) between whole spaces, for ``SVC(kernel="precomputed")``.

    Such a kernel need not be positive definite; in practice its negative eigenvalues are small
    where gamma is large.

    Parameters
    ----------
    gamma : float or None
        One over the median value between different spaces of ``fit`` by default.
    distances, n_neighbors, scale, epsilon, n_init, polish, n_jobs, device
        See :func:`torchgw.pairwise`.
    """

    gamma: float | None = None

    def transform(self, X: Any) -> NDArray[np.float64]:
        """Compute similarities of spaces to those of ``fit``, shape (q, n)."""
        check_is_fitted(self)
        if self.gamma is None and not hasattr(self, "gamma_"):
            self._learn(self._values(self.spaces_, None))
        return super().transform(X)

    def fit(self, X: Any, y: Any = None) -> "GWKernel":
        """Keep the spaces that others are compared with."""
        super().fit(X, y)
        if hasattr(self, "gamma_"):
            del self.gamma_
        return self

    def _learn(self, values: NDArray[np.float64]) -> None:
        if self.gamma is not None:
            check_positive("gamma", self.gamma, "or None")
        others = values[~np.eye(len(values), dtype=bool)]
        middle = float(np.median(others)) if others.size else 0.0
        self.gamma_ = self.gamma or 1 / (middle or 1.0)

    def _from_values(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.exp(-(self.gamma or self.gamma_) * values)


def _listed(spaces: Any) -> list[Any]:
    """Make a list of spaces; refuse a table, whose rows are the points of one."""
    if getattr(spaces, "ndim", 1) == 2:
        raise InvalidTypeError(
            "`X` must be a list of spaces, each with points of its own; got "
            f"{tuple(spaces.shape)}. Two spaces are compared by torchgw.solve(X, Y)."
        )
    return list(spaces)
