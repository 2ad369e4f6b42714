"""Spaces that are the same but for order: the match that keeps all distances."""

import torch

from torchgw._gradients.contract import Linearised, QuadraticValue
from torchgw._plans.sparse import SparsePlan
from torchgw._problem.facts import Facts
from torchgw._problem.problem import Problem
from torchgw._search.isometry import Isometry, find_isometry
from torchgw._sinkhorn.choose import choose_backend
from torchgw._solve.begin import first_guess, searchable
from torchgw._solve.evaluation import Evaluation
from torchgw._solve.options import Options
from torchgw._solve.outcome import Asked, Ending, Outcome
from torchgw._solve.polish import Polished
from torchgw._solve.route import route_of_copies
from torchgw._solve.state import Recorder
from torchgw._solve.status import Status
from torchgw._solve.strategy import Strategy, target_epsilon
from torchgw._tensors.sparse import sparse_tensor
from torchgw._typing import Marginals, Potentials

# The warning about a plan that costs more than a match of copies.
WHY_NOT_A_COPY = (
    "Both spaces seem to have the same distances in another order, and this plan does not keep "
    "them: it is a local optimum above the best. Pass a larger `n_init`, search='thorough', or "
    "an `init` that you know."
)


def find_copy(asked: Asked, recorder: Recorder) -> Isometry | None:
    """Look for a match that keeps all distances, where it would be the best start or plan."""
    problem, options = asked.problem, asked.options
    entropic = options.regularization == "entropic" or options.sharp
    free = options.rule is None and options.ranks is None and options.gradient != "sampled"
    whole = asked.checkpoint is None and searchable(problem, asked.init, options)
    if not (entropic and free and whole):
        return None
    with recorder.timed("copies"):
        return find_isometry(problem, streamed=options.sharp)


def kept(problem: Problem, options: Options, match: Isometry, recorder: Recorder) -> Outcome:
    """End with a match that keeps all distances, which is the best without entropy, as the plan."""
    # Potentials of zero are optimal for the whole cost at the match: nothing is stored or solved.
    (a, b), n = problem.marginals, problem.source.n
    means, squares = (torch.stack(part) for part in zip(*(s.T for s in match.moments), strict=True))
    weights = torch.stack([a, b])
    variances = (weights * squares).sum(1) - (weights * means).sum(1).square()
    spread = 4 * problem.alpha * float(variances.clamp_min(0).prod().sqrt())
    epsilon = target_epsilon(options, spread)
    facts = Facts.of(problem, None)._replace(spread=spread, epsilon=epsilon)
    strategy = Strategy(problem, options, facts, route_of_copies(facts), mass=1.0)
    entries = sparse_tensor(
        torch.stack([torch.arange(n, device=a.device), match.partners]), a, (n, n)
    )
    # of the reduced cost, which lacks terms of rows and columns alone
    potentials = Potentials(*(-2 * problem.alpha * part for part in squares))
    plan = SparsePlan(entries, potentials, problem.marginals, epsilon)
    masses = Marginals(*plan.masses)
    error = float((masses.b - b).abs().sum())
    kl = float(-(a @ b[match.partners].log()))
    evaluation = Evaluation(masses, error, QuadraticValue(match.value, 0.0), 0.0, kl)
    # nothing is better, but few points tell whether something is nearly as good
    with recorder.timed("multistart"):
        _, search = first_guess(problem, None, None, options, strategy.search_epsilon, match)
    polished = Polished(steps=0, stationary=True, gap=0.0)
    sides = problem.source, problem.target
    return Outcome(
        ending=Ending(plan, evaluation, 0.0, Status.CONVERGED, polished, None),
        strategy=strategy,
        potentials=Potentials(*map(torch.zeros_like, problem.marginals)),
        backend=choose_backend(options.backend, problem.source.device, torch.float64).name,
        n_anchors=None,
        noise=None,
        search=search,
        recorder=recorder,
        known=Linearised("dense", sides, entries, problem.alpha, problem.loss),
        resolution=None,
        route=strategy.route,
    )
