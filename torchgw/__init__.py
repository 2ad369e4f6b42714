"""Gromov-Wasserstein optimal transport on PyTorch."""

from torchgw import distances as distances
from torchgw._api import solve as solve
from torchgw._barycenter import barycenter as barycenter
from torchgw._barycenter_result import BarycenterResult as BarycenterResult
from torchgw._embedding import JointEmbedding as JointEmbedding
from torchgw._embedding import joint_embedding as joint_embedding
from torchgw._errors import BackendUnavailableError as BackendUnavailableError
from torchgw._errors import ConvergenceWarning as ConvergenceWarning
from torchgw._errors import GraphWarning as GraphWarning
from torchgw._errors import InvalidInputError as InvalidInputError
from torchgw._errors import InvalidTypeError as InvalidTypeError
from torchgw._errors import NumericalError as NumericalError
from torchgw._errors import PlanTooLargeError as PlanTooLargeError
from torchgw._errors import TorchGWError as TorchGWError
from torchgw._errors import TorchGWWarning as TorchGWWarning
from torchgw._errors import UnsupportedError as UnsupportedError
from torchgw._multistart import Alternative as Alternative
from torchgw._plan import TransportPlan as TransportPlan
from torchgw._result import GWResult as GWResult
from torchgw._sampled_gw import sampled_gw as sampled_gw
from torchgw._schedule import Status as Status
from torchgw._solve_low_rank import LowRankResult as LowRankResult
from torchgw._solve_low_rank import solve_low_rank as solve_low_rank
from torchgw._storage import load as load
from torchgw._typing import Iteration as Iteration

__version__ = "0.1.0"
