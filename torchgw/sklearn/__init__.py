"""Estimators for scikit-learn. Needs it: ``pip install scikit-learn``."""

try:
    from sklearn.utils.validation import validate_data as _needed  # noqa: F401 - of 1.6
except ImportError as error:
    raise ImportError(
        "torchgw.sklearn needs scikit-learn 1.6 or newer: pip install scikit-learn"
    ) from error

from torchgw.sklearn._estimators import GWAligner as GWAligner
from torchgw.sklearn._estimators import GWTransport as GWTransport
from torchgw.sklearn._estimators import agreement_score as agreement_score
from torchgw.sklearn._spaces import GWDistance as GWDistance
from torchgw.sklearn._spaces import GWKernel as GWKernel

__all__ = ["GWAligner", "GWDistance", "GWKernel", "GWTransport", "agreement_score"]
