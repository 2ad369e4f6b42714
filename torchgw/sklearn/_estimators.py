"""Estimators of two data sets: what all share, an aligner, and a transport in the manner of POT."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial.distance import pdist
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_array, check_is_fitted, validate_data

from torchgw._api import solve
from torchgw._boundary.arrays import as_labels, to_numpy
from torchgw._boundary.checks import called, check_choice, named_fields, reject_unknown
from torchgw._boundary.graphs import as_graph
from torchgw._errors import InvalidInputError, InvalidTypeError, UnsupportedError
from torchgw._problem.table import Options, Parameters
from torchgw._results.result import GWResult
from torchgw._tensors.operations import at_even_steps
from torchgw.metrics import foscttm

FLOATS = (np.float64, np.float32)


def as_numpy(points: Any) -> Any:
    """Take points as NumPy's, from any device; leave what is no tensor to scikit-learn."""
    return to_numpy(points) if isinstance(points, torch.Tensor) else points


# The constructor is that of a dataclass: it keeps what it is given, and every option has its name,
# type and default from the one table.
@named_fields
@dataclass(kw_only=True, eq=False, repr=False)
class GWEstimator(Parameters, BaseEstimator):  # type: ignore[misc]
    """Every option of :func:`torchgw.solve` as a parameter, and ``metric``."""

    metric: Literal["precomputed"] | None = None
    # the name that `redraw` had before
    momentum: float | None = None

    def _read(
        self, names: tuple[str, str], source: Any, target: Any, dtype: Any, *, flat: bool = False
    ) -> tuple[Any, Any]:
        """Check both sides: points, the target's may be ``flat``, or matrices and graphs."""
        source, target = as_numpy(source), as_numpy(target)
        sparse: Any = "csr" if self.metric == "precomputed" else False
        if sparse:
            source, target = _matrix(names[0], source), _matrix(names[1], target)
        elif any(as_graph("X", side) is not None for side in (source, target)):
            raise InvalidTypeError(
                "Points must be dense, and this is a sparse matrix or a graph: pass "
                "metric='precomputed' for graphs and their edge lengths, or points by toarray()."
            )
        return validate_data(self, source, accept_sparse=sparse, dtype=dtype), check_array(
            target, accept_sparse=sparse, dtype=dtype, ensure_2d=not flat, input_name=names[1]
        )

    def _solve(self, X: Any, Y: Any, data: dict[str, Any]) -> GWResult:
        """Solve with the parameters as options."""
        given = self.get_params(deep=False)
        metric, momentum = given.pop("metric"), given.pop("momentum")
        advice = "How points are measured is `distances`, such as distances='correlation'."
        check_choice("metric", metric, ("precomputed",), advice, none=True)
        options = Options(**given)
        if metric is None or as_graph("X", X) is not None:
            return solve(X, Y, options=options, momentum=momentum, **data)
        return solve(D_X=X, D_Y=Y, options=options, momentum=momentum, **data)

    def __sklearn_is_fitted__(self) -> bool:
        """Whether there is a result."""
        return hasattr(self, "result_")


def _matrix(name: str, given: Any) -> Any:
    """Make a sparse matrix of a graph, and leave what is none."""
    graph = as_graph(name, given)
    return given if graph is None else graph


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
        return super().get_feature_names_out(input_features)

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
    count = min(len(points), _SCORED)
    rows = at_even_steps(len(points), count, torch.device("cpu")).numpy()
    chosen = points[rows] if not hasattr(X, "iloc") else X.iloc[rows]
    own, image = (pdist(to_numpy(part)) for part in (points[rows], estimator.transform(chosen)))
    if len(own) < 2 or own.std() == 0 or image.std() == 0:
        return 0.0
    return float(np.corrcoef(own, image)[0, 1])


# calls such as transform(Xs=...) would not pass scikit-learn's wrapper for other output types
class GWTransport(TransformerMixin, GWEstimator, auto_wrap_output_keys=None):  # type: ignore[call-arg, misc]
    """Domain adaptation in the manner of POT's ``ot.da`` transports.

    The parameters are the options of :func:`torchgw.solve`, and ``metric``: with ``"precomputed"``
    Xs and Xt are matrices of distances or graphs, which labels and the coupling are transported by,
    but not points. Unlike POT's, the two domains need not share a space. In a pipeline the target
    domain is a parameter of the fit: ``pipeline.fit(Xs, ys, gwtransport__Xt=Xt)``, and so it is in
    a grid search: ``search.fit(Xs, Xt=Xt)``. After a fit of tensors, arrays that come out are
    tensors of the same dtype and device.

    Attributes
    ----------
    result_ : GWResult
        The alignment.
    n_iter_ : int
        Outer iterations.
    n_features_in_ : int
    coupling_ : array, shape (n, m)
        The plan, as POT's transports have it; built when it is asked for.
    cost_ : array, shape (n, m)
        The cost of its linear problem, where POT's transports have distances between the domains:
        the objective linearised at the plan, up to terms of rows and of columns.
    log_ : dict
        ``result_.log``.
    xs_, xt_ : ndarray
        The points of :meth:`fit`.

    Examples
    --------
    >>> import numpy as np
    >>> from torchgw.sklearn import GWTransport
    >>> Xs = np.random.default_rng(0).normal(size=(60, 3))
    >>> ys = (Xs[:, 0] > 0).astype(int)
    >>> transport = GWTransport(distances="euclidean", random_state=0).fit(Xs=Xs, Xt=Xs + 5)
    >>> bool((transport.transform_labels(ys).argmax(1) == ys).all())
    True
    """

    @reject_unknown
    def fit(self, Xs: Any = None, ys: Any = None, Xt: Any = None, yt: Any = None) -> "GWTransport":
        """Align source and target points.

        Parameters
        ----------
        Xs, Xt : array-like, shapes (n, d) and (m, d')
        ys, yt : array-like, shapes (n,) and (m,), optional
            Labels. With both, a pair of different labels costs 1, weighed against the distances by
            ``alpha``; -1 in ``yt`` is an unknown label, as in POT. One of them alone is not used.

        Returns
        -------
        GWTransport
            Itself.
        """
        if Xs is None or Xt is None:
            raise InvalidInputError(
                "GWTransport.fit needs both domains: fit(Xs=Xs, Xt=Xt), and in a pipeline "
                "pipeline.fit(Xs, ys, gwtransport__Xt=Xt)."
            )
        self._given = Xs[:0] if isinstance(Xs, torch.Tensor) else None
        self.xs_, self.xt_ = self._read(("Xs", "Xt"), Xs, Xt, FLOATS)
        linear = None
        if ys is not None and yt is not None:
            source = as_labels("ys", ys, self.xs_.shape[0])
            target = as_labels("yt", yt, self.xt_.shape[0])
            known = target != -1 if target.dtype.kind in "biuf" else np.full(len(target), True)
            linear = ((source[:, None] != target) & known).astype(np.float64)
        with called(X="Xs", Y="Xt"):
            self.result_ = self._solve(self.xs_, self.xt_, {"M": linear})
        self.n_iter_ = self.result_.n_iters
        self._linear = linear is not None
        return self

    @property
    def coupling_(self) -> Any:
        """The plan as a matrix."""
        check_is_fitted(self)
        return self._give(self.result_.plan)

    @property
    def cost_(self) -> Any:
        """The linearised cost as a matrix."""
        check_is_fitted(self)
        if not self.result_.epsilon:
            raise UnsupportedError("A plan without entropy keeps no cost: drop `polish`.")
        return self._give(self.result_.lazy_plan.cost.dense().matrix)

    @property
    def log_(self) -> dict[str, Any]:
        """The log of the result."""
        check_is_fitted(self)
        return self.result_.log

    def fit_transform(self, Xs: Any = None, ys: Any = None, Xt: Any = None, yt: Any = None) -> Any:
        """Align, and map the source points into the target space, shape (n, d')."""
        return self.fit(Xs, ys, Xt, yt).transform(Xs)

    def transform(self, Xs: Any) -> Any:
        """Map source points into the target space, shape (q, d'); new ones have no labels."""
        check_is_fitted(self)
        Xs = validate_data(self, as_numpy(Xs), dtype=FLOATS, reset=False)
        return self._map(Xs, self.xs_, self.xt_, self.result_.lazy_plan, self.result_.transform)

    def inverse_transform(self, Xt: Any) -> Any:
        """Map target points into the source space, shape (q, d); new ones have no labels."""
        check_is_fitted(self)
        Xt = check_array(as_numpy(Xt), dtype=FLOATS)
        plan = self.result_.lazy_plan.T
        return self._map(Xt, self.xt_, self.xs_, plan, self.result_.inverse_transform)

    def _map(self, points: Any, known: Any, others: Any, plan: Any, new: Any) -> Any:
        """Map points to the other side: the known ones by the plan, others as new ones."""
        if self.metric == "precomputed":
            raise UnsupportedError(
                "Distances have no coordinates to map to: with metric='precomputed' use "
                "transform_labels, coupling_, or GWAligner, which returns shares of the target."
            )
        if np.array_equal(points, known):
            return self._give(plan.barycentric(others))
        unlabelled = np.zeros((len(points), len(others))) if self._linear else None
        return self._give(new(points, M_new=unlabelled))

    def _give(self, array: Any) -> Any:
        """Hand an array out as the kind that was fitted."""
        if self._given is None:
            return to_numpy(array)
        return torch.as_tensor(array, device=self._given.device).to(self._given)

    def score(self, X: Any, y: Any = None) -> float:
        """Score the map of some source points by :func:`agreement_score`; labels are not used."""
        return agreement_score(self, X)

    def transform_labels(self, ys: Any) -> Any:
        """Say from which classes each target point's mass comes, as POT does.

        Parameters
        ----------
        ys : array-like, shape (n,)
            Labels of the source points.

        Returns
        -------
        array of shape (m, classes)
            Shares, of sum one, of the classes in the order of ``np.unique(ys)``: the labels are
            ``np.unique(ys)[shares.argmax(1)]``.
        """
        check_is_fitted(self)
        return self._give(_shares(self.result_.lazy_plan.T, as_labels("ys", ys, self.xs_.shape[0])))

    def inverse_transform_labels(self, yt: Any) -> Any:
        """Say to which classes each source point's mass goes, shape (n, classes)."""
        check_is_fitted(self)
        return self._give(_shares(self.result_.lazy_plan, as_labels("yt", yt, self.xt_.shape[0])))


def _shares(plan: Any, labels: NDArray[Any]) -> Any:
    """Compute which share of each row's mass goes to each label."""
    classes, place = np.unique(labels, return_inverse=True)
    return plan.barycentric(np.eye(len(classes))[place])
