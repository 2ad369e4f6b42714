"""Distances and similarities between whole spaces, for estimators that take them precomputed."""

from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from torchgw._boundary.arrays import to_numpy, to_tensor
from torchgw._boundary.cache import content_key
from torchgw._boundary.checks import check_positive, named_fields
from torchgw._boundary.graphs import as_graph
from torchgw._errors import InvalidTypeError
from torchgw._many.pairwise import pairwise
from torchgw._problem.named import DistanceName, ScaleName
from torchgw._problem.problem import FeatureMetric
from torchgw._problem.signatures import features_of_all
from torchgw.distances.base import DistanceProvider

# Values of pairs by their contents and options.
_known: dict[tuple[str, str], float] = {}
# Those without contents: numbers of their own.
_providers = count()
# How many of them are kept: 100 MB. A choice. [L1370]
_MOST_KNOWN = 2**18
# Options that a value does not depend on, and features, whose numbers count.
_APART = ("features", "n_jobs")


@named_fields
@dataclass(kw_only=True, eq=False, repr=False)
class GWDistance(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Distances between whole spaces, as ``metric="precomputed"`` takes them.

    A sample is a space: points (n, d) or a graph. ``transform`` returns the square roots of the
    values of :func:`torchgw.pairwise` to the spaces of ``fit``, whose options these are. With
    entropy a space has a small distance from itself; ``polish=True`` has none.

    Parameters
    ----------
    features : str, optional
        Name of an attribute of the nodes of all graphs, or of signatures, for a fused problem.
        Numbers are divided by their spread over the nodes of the spaces of ``fit``.
    distances, feature_metric, alpha, n_neighbors, scale, epsilon, n_init, polish, n_jobs, device
        See :func:`torchgw.pairwise`.

    Notes
    -----
    Values are kept while the process lives, under the contents of two spaces in whichever order and
    the options: a search over ``gamma`` and the parameters of an SVM computes each pair once.

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
    features: str | None = None
    feature_metric: FeatureMetric = "sqeuclidean"
    alpha: float | Literal["auto"] | None = None
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
        """Compute the values of all pairs, (N, M), that are not known yet."""
        options = self.get_params(deep=False)
        options.pop("gamma", None)
        spaces = [*Xs, *(Ys or ())]
        features = None if self.features is None else self._features(spaces)
        asked = repr([(name, options[name]) for name in sorted(options) if name not in _APART])
        options["features"] = features
        contents = [
            _content(space, None if features is None else features[place], asked)
            for place, space in enumerate(spaces)
        ]
        first = 0 if Ys is None else len(Xs)
        rows, columns = range(len(Xs)), range(first, len(spaces))
        places = [(i, j) for i in rows for j in columns if first or i <= j]
        # a pair is one problem, whichever of the two comes first
        places = [(i, j) if contents[i] <= contents[j] else (j, i) for i, j in places]
        keys = [(contents[i], contents[j]) for i, j in places]
        found = {key: _known[key] for key in keys if key in _known}
        missing = {key: place for key, place in zip(keys, places, strict=True) if key not in found}
        if missing:
            pairs = np.array(list(missing.values()))
            values = to_numpy(
                pairwise(spaces, pairs=pairs, symmetric=False, **options, progress=False)
            )
            found |= zip(missing, np.maximum(values, 0).tolist(), strict=True)
        for key in found:
            _known.pop(key, None)
        # the latest come last, and the oldest are dropped
        _known.update(found)
        for key in list(_known)[: max(0, len(_known) - _MOST_KNOWN)]:
            del _known[key]
        table = np.empty((len(spaces), len(spaces)))
        for (i, j), key in zip(places, keys, strict=True):
            table[i, j] = table[j, i] = found[key]
        return table[: len(Xs), first:]

    def _features(self, spaces: list[Any]) -> list[torch.Tensor]:
        """Read features by name, divided as those of the spaces of ``fit``."""
        name = str(self.features)
        fitted = [(f"X[{place}]", space, None) for place, space in enumerate(self.spaces_)]
        _, scaling = features_of_all(name, fitted, "None")
        listed = [(f"X[{place}]", space, None) for place, space in enumerate(spaces)]
        return features_of_all(name, listed, "None", scaling)[0]

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
    features, distances, feature_metric, alpha, n_neighbors, scale, epsilon, n_init, polish, n_jobs
        See :class:`GWDistance`.
    device : torch.device or str, optional
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


def _content(space: Any, features: torch.Tensor | None, asked: str) -> str:
    """Make a key of what a space holds and of the options; one of its own for a provider."""
    if isinstance(space, DistanceProvider):
        return f"provider {next(_providers)}"
    graph = as_graph("X", space, directed=True)
    if graph is None:
        parts = [to_tensor("X", space)]
    else:
        table = scipy.sparse.csr_array(graph)
        parts = [torch.from_numpy(part) for part in (table.indptr, table.indices, table.data)]
    return content_key("space", *parts, *([] if features is None else [features]), asked)


def _listed(spaces: Any) -> list[Any]:
    """Make a list of spaces; refuse a table, whose rows are the points of one."""
    if getattr(spaces, "ndim", 1) == 2:
        raise InvalidTypeError(
            "`X` must be a list of spaces, each with points of its own; got "
            f"{tuple(spaces.shape)}. Two spaces are compared by torchgw.solve(X, Y)."
        )
    return list(spaces)
