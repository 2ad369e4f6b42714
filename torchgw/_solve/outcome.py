"""What a solve is asked, and all that it comes to."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torchgw._gradients.contract import CostNoise, Linearised
from torchgw._plans.sparse import SparsePlan
from torchgw._plans.transport import TransportPlan
from torchgw._problem.problem import Problem
from torchgw._search.alternatives import Search
from torchgw._search.batch import Searched
from torchgw._solve.checkpoint import Checkpoint
from torchgw._solve.evaluation import Evaluation
from torchgw._solve.options import Options
from torchgw._solve.polish import Polished
from torchgw._solve.resolution import Resolution
from torchgw._solve.route import Route
from torchgw._solve.state import Recorder
from torchgw._solve.status import Status
from torchgw._solve.strategy import Strategy
from torchgw._typing import Potentials
from torchgw.distances.geodesics import Geodesics


class Asked(NamedTuple):
    """What is to be solved, and what a solve begins with."""

    problem: Problem
    options: Options
    init: Any  # as the user gave it
    generator: torch.Generator
    graphs: tuple[Geodesics | None, Geodesics | None]  # given, whose paths are compared
    checkpoint: Checkpoint | None = None
    made: Sequence[Searched] = ()  # searches that decided on distances


class Ending(NamedTuple):
    """The plan of a solve, and its numbers."""

    plan: TransportPlan | SparsePlan
    evaluation: Evaluation
    epsilon: float  # entropic regularisation that the plan has
    status: Status
    polished: Polished | None
    unpolished: TransportPlan | None  # the plan of the last cost, if ``plan`` is a polished one


class Outcome(NamedTuple):
    """Everything that a result is made from."""

    ending: Ending
    strategy: Strategy
    potentials: Potentials  # of the whole cost, float64; those of `plan` are reduced ones
    backend: str
    n_anchors: int | None
    noise: CostNoise | None  # of a sampled cost
    search: Search | None  # what a multi-start found, if there was one
    recorder: Recorder
    known: Linearised  # the cost of the plan, by which new points are mapped
    resolution: Resolution | None  # of a problem that was solved on cells
    route: Route  # that was chosen before anything was solved
