"""Domain adaptation with the names of POT's ``ot.da``."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import TransformerMixin
from sklearn.utils.validation import check_array, check_is_fitted, validate_data

from torchgw._boundary.arrays import as_labels, check_shape, to_numpy
from torchgw._boundary.checks import called, reject_unknown
from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw.sklearn._aligner import agreement_score
from torchgw.sklearn._estimator import FLOATS, GWEstimator, as_numpy


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
            source = _labels(ys, self.xs_.shape[0], "ys")
            target = _labels(yt, self.xt_.shape[0], "yt")
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
        plan = self.result_.lazy_plan
        return self._map(Xs, self.xs_, self.xt_, plan, self.result_.transform)

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
        return self._give(_shares(self.result_.lazy_plan.T, _labels(ys, self.xs_.shape[0], "ys")))

    def inverse_transform_labels(self, yt: Any) -> Any:
        """Say to which classes each source point's mass goes, shape (n, classes)."""
        check_is_fitted(self)
        return self._give(_shares(self.result_.lazy_plan, _labels(yt, self.xt_.shape[0], "yt")))


def _labels(labels: Any, count: int, name: str) -> NDArray[Any]:
    """Check labels, shape (count,)."""
    array = as_labels(name, labels)
    check_shape(name, array, (count,), "one label per point")
    return array


def _shares(plan: Any, labels: NDArray[Any]) -> Any:
    """Compute which share of each row's mass goes to each label."""
    classes, place = np.unique(labels, return_inverse=True)
    return plan.barycentric(np.eye(len(classes))[place])
