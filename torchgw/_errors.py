"""Every exception and warning of the package.

TorchGWError
├── InvalidInputError (ValueError)        a value that no setting could make right
├── InvalidTypeError (TypeError)          an argument of the wrong kind, or an unknown one
├── UnsupportedError (NotImplementedError)  a combination that is refused, with what to do instead
├── BackendUnavailableError (RuntimeError)  a backend asked for by name that cannot run here
├── PlanTooLargeError (MemoryError)       a dense plan that would not fit
├── NumericalError (ArithmeticError)      a number that is not finite, or that cannot be
└── RankError (RuntimeError)              another process of a distributed solve has ended
"""

import sys
import warnings
from types import FrameType

# A wheel has the package under another name.
_PACKAGE = __name__.partition(".")[0]


class TorchGWError(Exception):
    """Base class of every error raised on purpose by torchgw."""


class InvalidInputError(TorchGWError, ValueError):
    """A value that cannot be used; the message says what was expected."""


class InvalidTypeError(TorchGWError, TypeError):
    """An argument of the wrong type, or an argument that does not exist."""


class UnsupportedError(TorchGWError, NotImplementedError):
    """A combination of options that is refused; the message says what to do instead."""


class BackendUnavailableError(TorchGWError, RuntimeError):
    """A backend asked for by name cannot run; the message says why."""


class PlanTooLargeError(TorchGWError, MemoryError):
    """The dense plan would not fit in memory; the message names the alternative."""


class NumericalError(TorchGWError, ArithmeticError):
    """A number is not finite, or no plan can have it; the message says what to do."""


class RankError(TorchGWError, RuntimeError):
    """A distributed solve cannot go on together; the message names the rank and says why."""


class TorchGWWarning(UserWarning):
    """Base class of every warning raised on purpose by torchgw."""


class CacheWarning(TorchGWWarning):
    """A stored intermediate result could not be used; it was computed again."""


class ConvergenceWarning(TorchGWWarning):
    """A solve stopped before its tolerances were met; the message is the status."""


class GraphWarning(TorchGWWarning):
    """A neighbour graph had to be repaired; the message says how."""


class PerformanceWarning(TorchGWWarning):
    """Something will take long, and the message says what would be faster."""


class SearchWarning(TorchGWWarning):
    """The search for an optimum ended without agreement; the message says what to do."""


class AmbiguityWarning(SearchWarning):
    """Another match costs nearly the same; the message says how it relates to the one returned."""


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn at the line outside the package that called it, however deep inside this is."""
    frame: FrameType | None = sys._getframe(1)
    level = outside = 2
    while frame is not None:
        level += 1
        if frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
            outside = level
        frame = frame.f_back
    warnings.warn(message, category, stacklevel=outside)
