"""The public names, for type checkers, and for `__init__.py`, which imports them from here."""

from torchgw import distances as distances
from torchgw._api import explain as explain
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
from torchgw._search.alternatives import Alternative as Alternative
from torchgw._search.chain import Trial as Trial
from torchgw._solve.route import Route as Route
from torchgw._solve.status import Status as Status
from torchgw._solve.table import Options as Options
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

__version__: str
