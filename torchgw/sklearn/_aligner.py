"""Points of one data set carried into the space of another, and a score that needs no labels."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import pdist
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_array, check_is_fitted, validate_data

from torchgw._boundary.arrays import to_numpy
from torchgw._boundary.checks import reject_unknown
from torchgw._errors import InvalidInputError
from torchgw.metrics import foscttm
from torchgw.sklearn._estimator import FLOATS, GWEstimator, as_numpy

# A score compares the distances among so many points at most. [L380]
_SCORED = 1000


class GWAligner(ClassNamePrefixFeaturesOutMixin, TransformerMixin, GWEstimator):  # type: ignore[misc]
    """Carry points into the space of another data set, a transformer for pipelines.

    ``fit(X, Y)`` takes the target data in the place of ``y``; it may have another number of rows
    and columns. The parameters are the options of :func:`torchgw.solve`, and ``metric``: with
    ``"precomputed"`` X and Y are matrices of distances or sparse graphs, as in scikit-learn.
    ``transform`` then takes distances to the points of X, shape (q, n), and returns the share that
    each point of Y has in the match of a row, shape (q, m).

    In a grid search the target goes in whole, ``search.fit(X, target=Y)``, whatever its size, and
    parameters are compared by :func:`agreement_score` on rows held out. Where rows of X and Y are
    known to be partners, ``search.fit(X, Y)`` compares by these instead, see :meth:`score`.

    Attributes
    ----------
    result_ : GWResult
        The alignment: plan, value, status.
    n_iter_ : int
        Outer iterations.
    n_features_in_ : int
    feature_names_in_ : ndarray of str
        If X had names.

    Examples
    --------
    >>> import numpy as np
    >>> from torchgw.sklearn import GWAligner
    >>> X = np.random.default_rng(0).normal(size=(60, 3))
    >>> aligner = GWAligner(distances="euclidean", random_state=0).fit(X[:50], X[:50] + 5)
    >>> bool(np.abs(aligner.transform(X[50:]) - X[50:] - 5).mean() < 0.5)
    True
    """

    @reject_unknown
    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        a: Any = None,
        b: Any = None,
        init: Any = None,
        features: Any = None,
        target: Any = None,
        allowed: Any = None,
        groups: Any = None,
        pairs: Any = None,
    ) -> "GWAligner":
        """Align X with the target points.

        Parameters
        ----------
        X : array-like, shape (n, d)
            Source points.
        y : array-like, shape (m, d') or (m,)
            Target points; one dimension is one feature.
        a, b : array-like, shapes (n,) and (m,), optional
            Weights.
        init : plan or GWResult, optional
            Where to start.
        features : pair of array-like, shapes (n, f) and (m, f), optional
            Features that both sides share. New points are then mapped by ``result_.transform``,
            which takes theirs.
        target : array-like, shape (m, d'), optional
            Target points, in place of ``y``: folds of a cross-validation take the same rows of
            ``y`` as of X, and leave a target of another size whole.
        allowed, groups, pairs : optional
            What is known of the match, as in :func:`torchgw.solve`: which pairs of points may hold
            mass. New points are mapped without.

        Returns
        -------
        GWAligner
            Itself.
        """
        if (y is None) == (target is None):
            what = "y to be passed, but the target y is None" if y is None else "one target"
            raise ValueError(
                f"{type(self).__name__} requires {what}. Pass the target points: fit(X, Y), or "
                "fit(X, target=Y)."
            )
        target = y if target is None else target
        names = getattr(target, "columns", None)
        data = {
            "a": a, "b": b, "init": init, "features": features, "allowed": allowed,
            "groups": groups, "pairs": pairs,
        }  # fmt: skip
        tables = self._precomputed = self.metric == "precomputed"
        dtype = np.float64 if tables else FLOATS
        X, target = self._read(("X", "y"), X, target, dtype, flat=not tables)
        if not tables:
            target = target.reshape(len(target), -1)
        elif target.shape[0] != target.shape[1]:
            raise InvalidInputError(
                f"The target must be a square matrix with metric='precomputed'; got "
                f"{target.shape}. A cross-validation takes rows of `y` alone: pass "
                "fit(X, target=Y), which stays whole."
            )
        self.result_ = self._solve(X, target, data)
        self.n_iter_ = self.result_.n_iters
        self._n_features_out = target.shape[1]
        unnamed = names is None or tables
        self._target_names = None if unnamed else np.asarray(names, dtype=object)
        return self

    def transform(self, X: Any) -> NDArray[np.float64]:
        """Map points of the source space into the target space, shape (q, d')."""
        check_is_fitted(self)
        X = validate_data(self, as_numpy(X), dtype=FLOATS, reset=False)
        return self._map(X, self.result_.transform, 1)

    def inverse_transform(self, X: Any) -> NDArray[np.float64]:
        """Map points of the target space into the source space, shape (q, d)."""
        check_is_fitted(self)
        X = check_array(as_numpy(X), dtype=FLOATS)
        return self._map(X, self.result_.inverse_transform, 0)

    def _map(self, X: NDArray[Any], method: Any, other: int) -> NDArray[np.float64]:
        """Map points, or distances to the known ones, to the other side."""
        if not self._precomputed:
            return to_numpy(method(X))
        count = self.result_.lazy_plan.shape[other]
        return to_numpy(method(D_new=X, values=np.eye(count)))

    def score(self, X: Any, y: Any = None) -> float:
        """Score the map of some points: by their partners if these are known, else by distances.

        Parameters
        ----------
        X : array-like, shape (q, d)
            Points of the source space, best such as the fit has not seen.
        y : array-like, shape (q, d'), optional
            The true partner of each row of X.

        Returns
        -------
        float
            With ``y``: 1 - FOSCTTM, the mean share of other true partners that are farther from a
            mapped point than its own; 1 is perfect and 0.5 is chance. Without:
            :func:`agreement_score`.
        """
        if y is None or self.metric == "precomputed":
            return agreement_score(self, X)
        partners = check_array(as_numpy(y), ensure_2d=False, input_name="y")
        return 1 - foscttm(self.transform(X), partners.reshape(len(partners), -1))

    def get_feature_names_out(self, input_features: Any = None) -> NDArray[Any]:
        """Name the columns of the target; ``gwaligner0`` and so on if they had no names."""
        check_is_fitted(self)
        if self._target_names is not None:
            return self._target_names
        found: NDArray[Any] = super().get_feature_names_out(input_features)
        return found

    def __sklearn_tags__(self) -> Any:
        """Say that ``y`` is needed and may have several columns."""
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.target_tags.two_d_labels = True
        tags.input_tags.pairwise = self.metric == "precomputed"
        tags.input_tags.sparse = self.metric == "precomputed"
        return tags


def agreement_score(estimator: Any, X: Any, y: Any = None) -> float:
    """Correlate distances among points with those among their images: no labels, no partners.

    A scorer of scikit-learn: ``GridSearchCV(GWAligner(), grid, scoring=agreement_score)``.

    Parameters
    ----------
    estimator : GWAligner or GWTransport
        Fitted.
    X : array-like, shape (q, d)
        Points of the source space, best such as the fit has not seen; of more than 1,000, as many
        evenly spaced rows are compared.
    y : object, optional
        Not used.

    Returns
    -------
    float
        Pearson's correlation of Euclidean distances, 1 where the map keeps distances up to a
        factor; 0 where all images coincide. With ``metric="precomputed"``, where there are no
        coordinates, ``result_.distance_correlation`` of the points that were fitted.
    """
    check_is_fitted(estimator)
    if estimator.metric == "precomputed":
        return float(estimator.result_.distance_correlation)
    X = as_numpy(X)
    points = np.asarray(check_array(X), dtype=np.float64)
    rows = np.linspace(0, len(points) - 1, min(len(points), _SCORED)).round().astype(int)
    chosen = points[rows] if not hasattr(X, "iloc") else X.iloc[rows]
    own, image = (pdist(to_numpy(part)) for part in (points[rows], estimator.transform(chosen)))
    if len(own) < 2 or own.std() == 0 or image.std() == 0:
        return 0.0
    return float(np.corrcoef(own, image)[0, 1])
