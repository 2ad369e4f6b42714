"""Estimators for scikit-learn. Needs it: ``pip install scikit-learn``."""

try:
    from sklearn.utils.validation import validate_data as _needed  # noqa: F401 - of 1.6
except ImportError as error:
    raise ImportError(
        "torchgw.sklearn needs scikit-learn 1.6 or newer: pip install scikit-learn"
    ) from error

from torchgw.sklearn._aligner import GWAligner as GWAligner
from torchgw.sklearn._aligner import agreement_score as agreement_score
from torchgw.sklearn._spaces import GWDistance as GWDistance
from torchgw.sklearn._spaces import GWKernel as GWKernel
from torchgw.sklearn._transport import GWTransport as GWTransport

__all__ = ["GWAligner", "GWDistance", "GWKernel", "GWTransport", "agreement_score"]
