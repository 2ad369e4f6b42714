"""Match two data sets by the distances inside each: Gromov-Wasserstein transport on PyTorch.

``result = torchgw.solve(X, Y)`` takes points, graphs or distance matrices (``D_X``, ``D_Y``);
``result.lazy_plan.argmax()`` gives the partner of every row of X.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchgw import distances as distances
    from torchgw._api import solve as solve
    from torchgw._errors import AmbiguityWarning as AmbiguityWarning
    from torchgw._errors import BackendUnavailableError as BackendUnavailableError
    from torchgw._errors import ConvergenceWarning as ConvergenceWarning
    from torchgw._errors import GraphWarning as GraphWarning
    from torchgw._errors import InvalidInputError as InvalidInputError
    from torchgw._errors import InvalidTypeError as InvalidTypeError
    from torchgw._errors import NumericalError as NumericalError
    from torchgw._errors import PlanTooLargeError as PlanTooLargeError
    from torchgw._errors import RankError as RankError
    from torchgw._errors import SearchWarning as SearchWarning
    from torchgw._errors import TorchGWError as TorchGWError
    from torchgw._errors import TorchGWWarning as TorchGWWarning
    from torchgw._errors import UnsupportedError as UnsupportedError
    from torchgw._many.pairwise import pairwise as pairwise
    from torchgw._many.result import BatchResult as BatchResult
    from torchgw._many.solve_many import solve_batch as solve_batch
    from torchgw._many.solve_many import solve_many as solve_many
    from torchgw._plans.transport import TransportPlan as TransportPlan
    from torchgw._results.matching import Matching as Matching
    from torchgw._results.report import Report as Report
    from torchgw._results.result import GWResult as GWResult
    from torchgw._results.storage import load as load
    from torchgw._search.chains import Trial as Trial
    from torchgw._search.optima import Alternative as Alternative
    from torchgw._solve.status import Status as Status
    from torchgw._typing import HessianProduct as HessianProduct
    from torchgw._typing import Iteration as Iteration
    from torchgw._variants.barycenter import BarycenterResult as BarycenterResult
    from torchgw._variants.barycenter import barycenter as barycenter
    from torchgw._variants.embedding import JointEmbedding as JointEmbedding
    from torchgw._variants.embedding import joint_embedding as joint_embedding
    from torchgw._variants.sampled_gw import build_knn_graph as build_knn_graph
    from torchgw._variants.sampled_gw import sampled_gw as sampled_gw
    from torchgw._variants.sampled_gw import sampled_lowrank_gw as sampled_lowrank_gw
    from torchgw._variants.solve_low_rank import LowRankResult as LowRankResult
    from torchgw._variants.solve_low_rank import solve_low_rank as solve_low_rank
    from torchgw._variants.warmup import warmup as warmup

__version__ = "0.1.0"


def _refuse_mixture(place: str) -> None:
    """Refuse a folder into which PyPI's other project of this import name was installed as well."""
    # its files and ours lie in one folder then, and whoever came last has overwritten some; what is
    # installed says so without a look into them
    beside = os.listdir(place) if os.path.isdir(place) else []
    others = [
        name
        for name in beside
        if name.startswith("torchgw-") and name.endswith((".dist-info", ".egg-info"))
    ]
    if others:
        raise ImportError(
            f"The distribution `torchgw` ({others[0]}) is installed in the same folder as this "
            f"package, {place}. It is another project with the same import name, and each has "
            "overwritten files of the other. Uninstall both (pip uninstall torchgw torch-gromov), "
            "then install the one that you mean: this one is called torch-gromov, and is "
            "installed from a checkout (pip install .)."
        )


_refuse_mixture(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# A name is imported when it is first used; for type checkers they are imported above.
_HOMES = {
    name: f"torchgw.{home}"
    for home, names in {
        "_api": "solve",
        "_errors": "AmbiguityWarning BackendUnavailableError ConvergenceWarning GraphWarning "
        "InvalidInputError InvalidTypeError NumericalError PlanTooLargeError RankError "
        "SearchWarning TorchGWError TorchGWWarning UnsupportedError",
        "_many.pairwise": "pairwise",
        "_many.result": "BatchResult",
        "_many.solve_many": "solve_batch solve_many",
        "_plans.transport": "TransportPlan",
        "_results.matching": "Matching",
        "_results.report": "Report",
        "_results.result": "GWResult",
        "_results.storage": "load",
        "_search.chains": "Trial",
        "_search.optima": "Alternative",
        "_solve.status": "Status",
        "_typing": "HessianProduct Iteration",
        "_variants.barycenter": "BarycenterResult barycenter",
        "_variants.embedding": "JointEmbedding joint_embedding",
        "_variants.sampled_gw": "build_knn_graph sampled_gw sampled_lowrank_gw",
        "_variants.solve_low_rank": "LowRankResult solve_low_rank",
        "_variants.warmup": "warmup",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    """Import a name, or the module of distances."""
    if name == "distances":
        return import_module("torchgw.distances")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return ["__version__", "distances", *_HOMES]
