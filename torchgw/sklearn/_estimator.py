"""What estimators of two data sets share: the options of a solve as parameters."""

import os
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_array, validate_data

from torchgw._api import solve
from torchgw._boundary.arrays import to_numpy
from torchgw._boundary.checks import check_choice, reject_unknown
from torchgw._boundary.graphs import as_graph
from torchgw._errors import InvalidTypeError
from torchgw._gradients.choose import GradientName
from torchgw._problem.linear_term import FeatureMetric
from torchgw._problem.losses import LossName
from torchgw._results.result import GWResult
from torchgw._search.alternatives import SearchName
from torchgw._sinkhorn.choose import BackendName
from torchgw._sinkhorn.contract import Backend
from torchgw._solve.options import Precision, Regularization, Storage
from torchgw._tensors.ranks import Distributed
from torchgw._typing import Iteration, Seed

FLOATS = (np.float64, np.float32)


def keep(estimator: Any, given: dict[str, Any]) -> None:
    """Keep the arguments of a constructor as attributes, under their names."""
    for name in estimator._get_param_names():
        setattr(estimator, name, given[name])


def as_numpy(points: Any) -> Any:
    """Take points as NumPy's, from any device; leave what is no tensor to scikit-learn."""
    return to_numpy(points) if isinstance(points, torch.Tensor) else points


class GWEstimator(BaseEstimator):  # type: ignore[misc]
    """Every option of :func:`torchgw.solve` as a parameter, and ``metric``."""

    @reject_unknown
    def __init__(
        self,
        *,
        distances: Any = "auto",
        alpha: float | None = None,
        loss: LossName = "square",
        unbalanced: float | tuple[float, float] | None = None,
        unbalanced_type: Literal["kl", "l2"] = "kl",
        mass: float | None = None,
        n_neighbors: int | None = None,
        n_landmarks: int | None = None,
        curvature: float | tuple[float, float] | None = None,
        disconnected: Literal["stitch", "fill"] = "stitch",
        scale: Literal["auto", "max", "mean"] | None = "auto",
        epsilon: float | Literal["auto"] = "auto",
        gradient: GradientName = "auto",
        n_anchors: int | None = None,
        redraw: float = 0.9,
        n_init: int | None = None,
        search: SearchName = "auto",
        feature_metric: FeatureMetric = "sqeuclidean",
        skip_tiles: bool | Literal["auto"] = "auto",
        resolution: float | Literal["auto"] | None = "auto",
        max_iter: int = 500,
        time_limit: float | None = None,
        min_iter: int = 40,
        tol: float = 1e-5,
        objective_tol: float = 1e-4,
        inner_max_iter: int = 2000,
        inner_tol: float | None = None,
        regularization: Regularization = "entropic",
        polish: bool | None = None,
        backend: BackendName | Backend = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
        precision: Precision = "auto",
        storage: Storage = "auto",
        random_state: Seed | None = None,
        cache: str | os.PathLike[str] | None = None,
        callback: Callable[[Iteration], Any] | None = None,
        verbose: bool = False,
        distributed: Distributed = False,
        checkpoint: str | os.PathLike[str] | None = None,
        momentum: float | None = None,
        metric: Literal["precomputed"] | None = None,
    ) -> None:
        keep(self, locals())

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
        options = self.get_params(deep=False)
        metric = options.pop("metric")
        advice = "How points are measured is `distances`, such as distances='correlation'."
        check_choice("metric", metric, ("precomputed",), advice, none=True)
        if metric is None or as_graph("X", X) is not None:
            return solve(X, Y, **options, **data)
        return solve(D_X=X, D_Y=Y, **options, **data)

    def __sklearn_is_fitted__(self) -> bool:
        """Whether there is a result."""
        return hasattr(self, "result_")


def _matrix(name: str, given: Any) -> Any:
    """Make a sparse matrix of a graph, and leave what is none."""
    graph = as_graph(name, given)
    return given if graph is None else graph
