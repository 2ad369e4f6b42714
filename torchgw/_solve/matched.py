"""The ending of a solve of two spaces that are the same: their match, of which nothing is left."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchgw._gradients.contract import Linearised, QuadraticValue
from torchgw._plans.sparse import SparsePlan, sparse_tensor
from torchgw._problem.problem import Problem
from torchgw._search.matching import Isometry
from torchgw._solve.evaluation import Evaluation
from torchgw._solve.options import Options
from torchgw._solve.precision import Dtypes
from torchgw._solve.strategy import Strategy, target_epsilon
from torchgw._typing import Marginals, Potentials


class Matched(NamedTuple):
    """A match as the plan of a solve, and what is known of it."""

    plan: SparsePlan
    evaluation: Evaluation
    strategy: Strategy
    known: Linearised  # the cost at the match, by which new points are mapped


def keep_match(problem: Problem, options: Options, found: Isometry) -> Matched:
    """Make the plan of a match that keeps all distances, which is the best without entropy.

    Potentials of zero are optimal for the whole cost at the match: nothing is stored or solved.
    """
    (a, b), n = problem.marginals, problem.source.n
    means, squares = (torch.stack(part) for part in zip(*(s.T for s in found.moments), strict=True))
    weights = torch.stack([a, b])
    variances = (weights * squares).sum(1) - (weights * means).sum(1).square()
    spread = 4 * problem.alpha * float(variances.clamp_min(0).prod().sqrt())
    epsilon = target_epsilon(options, spread)
    dtypes = Dtypes(torch.float64, torch.float64, again=False)
    strategy = Strategy(
        problem, options, "dense", "float64", dtypes, n_anchors=0, spread=spread, epsilon=epsilon,
        mass=1.0, store=False, tiling=None,
    )  # fmt: skip
    places = torch.stack([torch.arange(n, device=a.device), found.partners])
    entries = sparse_tensor(places, a, (n, n))
    # of the reduced cost, which lacks terms of rows and columns alone
    potentials = Potentials(*(-2 * problem.alpha * part for part in squares))
    plan = SparsePlan(entries, potentials, problem.marginals, epsilon)
    masses = Marginals(*plan.masses)
    error = float((masses.b - b).abs().sum())
    kl = float(-(a @ b[found.partners].log()))
    evaluation = Evaluation(masses, error, QuadraticValue(found.value, 0.0), 0.0, kl)
    sides = problem.source, problem.target
    known = Linearised("dense", sides, entries, problem.alpha, problem.loss)
    return Matched(plan, evaluation, strategy, known)
