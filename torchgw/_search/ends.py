"""What plans of all points, at which solves have ended, tell of each other."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torchgw._plans.contract import Plan
from torchgw._plans.transport import round_to_marginals
from torchgw._problem.problem import Problem
from torchgw._search.alternatives import Alternative, Search, ambiguity_of, among_all, first_of_each
from torchgw._search.chain import STANDS_OUT, Trial
from torchgw._search.coarse import Coarsened, CoarseProblem, coarse_problem
from torchgw._search.doubts import WHY_OPEN

# The same of plans of all points (all_sent_apart). [L617]
OTHER = 0.2
# Objectives of whole solves within this of each other, relative, are of the same optimum, as those
# of chains are. [L1161]
AGREED = 1e-3


def compare_ends(problem: Problem, ends: Sequence[tuple[Trial, Tensor]]) -> Search:
    """Say what solves of all points, the lowest first, with plans (n, m), tell of each other."""
    n, m = problem.source.n, problem.target.n
    whole = coarse_problem(problem, max(n, m))
    source, target = (side.indices for side in whole.problem[:2])
    weights = whole.problem.source.weights, whole.problem.target.weights
    plans = torch.stack(
        [round_to_marginals(plan[source[:, None], target], *weights) for _, plan in ends]
    )
    trials = tuple(trial for trial, _ in ends)
    alternatives, ambiguity = different_optima(whole, trials, plans, (n, m))
    certain = ends_settle(trials) or ambiguity < STANDS_OUT
    doubt = "" if certain else WHY_OPEN["auto"].format(count=len(ends))
    return Search(alternatives, ambiguity, trials, doubt, ended=True)


def different_optima(
    whole: Coarsened, trials: Sequence[Trial], plans: Tensor, shape: tuple[int, int]
) -> tuple[tuple[Alternative, ...], float]:
    """Keep those of plans (k, s, t), the best first, that are different; tell their ambiguity."""
    source, target = whole.problem.source.indices, whole.problem.target.indices
    apart = all_sent_apart(whole.problem, plans).tolist() if len(plans) > 1 else [[0.0]]
    optima = tuple(
        Alternative(trials[i].value, trials[i].start, plans[i], source, target, shape, epsilon=0.0)
        for i in first_of_each(range(len(plans)), apart, OTHER)
    )
    return optima, ambiguity_of(whole, optima)


def ends_settle(trials: Sequence[Trial]) -> bool:
    """Whether solves from different starts, the lowest first, agree, or the first stands out."""
    best, worst = trials[0].objective, trials[-1].objective
    return worst - best <= AGREED * abs(best) or best < STANDS_OUT * worst


def sent_apart(problem: Problem, few: Alternative, plan: Plan) -> float:
    """Return how far a plan sends points from where the best plan of few points sends those few.

    As :func:`all_sent_apart`, but 0 also where one plan is the other one blurred by entropy: the
    smaller variance of the images less their covariance, over the variance of distances.
    """
    a, b = few.plan.sum(1), few.plan.sum(0)
    columns = problem.target.columns(few.target).to(few.plan)
    # a point without weight is sent nowhere
    sends = [
        part / part.sum(1, keepdim=True).clamp_min(torch.finfo(part.dtype).tiny)
        for part in (few.plan, plan.rows(few.source).to(few.plan))
    ]
    columns = columns - b @ columns[few.target]
    ours, theirs = sends[0] @ columns[few.target], sends[1] @ columns
    own, other, both = (
        float(a @ (one * another) @ b)
        for one, another in ((ours, ours), (theirs, theirs), (ours, theirs))
    )
    return (min(own, other) - both) / float(b @ columns[few.target].square() @ b)


def led_by(search: Search, problem: Problem, plan: Tensor, value: float, label: str) -> Search:
    """Put the plan (n, m) of a solve first among the optima of a search on the same points."""
    first = search.alternatives[0]
    plan = plan[first.source[:, None], first.target].to(first.plan)
    mine = replace(first, value=value, label=label, plan=plan, epsilon=0.0)
    whole = coarse_problem(problem, max(problem.source.n, problem.target.n))
    both = mine, *search.alternatives
    apart = whole.problem.distances(torch.stack([among_all(one, whole.problem)[0] for one in both]))
    alternatives = tuple(both[i] for i in first_of_each(range(len(both)), apart.tolist()))
    ambiguity = ambiguity_of(whole, alternatives)
    return search._replace(alternatives=alternatives, ambiguity=ambiguity)


def all_sent_apart(problem: CoarseProblem, plans: Tensor) -> Tensor:
    """Return how far plans (k, s, t) send points apart by all distances of where they go, (k, k).

    0 where those are the same, as of nodes that have the same neighbours; 1 for unrelated matches.
    An entry of a table that is no distance says nothing of how far two points are apart.
    """
    table, b = problem.target.table, problem.target.weights
    a = problem.source.weights[:, None]
    images = (plans @ (table - b @ table) * (b / a).sqrt()).flatten(1)
    spread = b @ (table - b @ table).square() @ b
    return torch.cdist(images, images).square() / (2 * spread).clamp_min(torch.finfo(b.dtype).tiny)
