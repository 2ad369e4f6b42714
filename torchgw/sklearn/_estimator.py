"""What estimators of two data sets share: the options of a solve as parameters."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_array, validate_data

from torchgw._api import solve
from torchgw._boundary.arrays import to_numpy
from torchgw._boundary.checks import check_choice, named_fields
from torchgw._boundary.graphs import as_graph
from torchgw._errors import InvalidTypeError
from torchgw._results.result import GWResult
from torchgw._solve.table import Options, Parameters

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
