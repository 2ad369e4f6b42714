"""The first state of the loop: from a checkpoint, a search, a subsample, or what was passed."""

import math
from dataclasses import replace
from typing import NamedTuple

import torch

from torchgw._gradients.factored import FactoredGradient
from torchgw._search.alternatives import Search
from torchgw._search.isometry import Isometry
from torchgw._search.subsample import Coarse, draw_subsample, extend
from torchgw._sinkhorn.annealing import Annealing
from torchgw._sinkhorn.choose import alone
from torchgw._solve.begin import PRODUCT, Guess, first_guess, searchable, starting_point
from torchgw._solve.checkpoint import Saved
from torchgw._solve.loop import iterate
from torchgw._solve.outcome import Asked
from torchgw._solve.relaxed_search import search_relaxed
from torchgw._solve.state import LoopState, Recorder, Setting
from torchgw._solve.strategy import Strategy

# Points per side of a subsample: with so many the coupling is known to a few percent in a second.
# [L11]
_COARSE_POINTS = 1_500
# Change of the plan at which a mixed-precision solve goes over from float32 to float64. [L139]
_HANDOVER_TOLERANCE = 1e-3
# Change of the plan at which polishing takes over from proximal steps: hundreds more steps would
# sharpen the plan, and lead to the same vertex. [L141]
POLISH_TOLERANCE = 3e-3
# The same where steps go on from a sharp plan that starts have met at. [L1257]
_MET_TOLERANCE = 1e-2


class Start(NamedTuple):
    """Where a solve begins, and what was found on the way there."""

    guess: Guess
    search: Search | None = None  # what a multi-start found
    sample: Coarse | None = None  # fewer points, which are solved first
    saved: Saved | None = None  # where an earlier solve stood


def find_start(asked: Asked, strategy: Strategy, match: Isometry | None) -> Start:
    """Find where to begin: at a checkpoint, at what was passed, or by a search."""
    # the problem of the strategy has its linear cost divided by the mass of a partial plan
    problem, scaled, options = asked.problem, strategy.problem, asked.options
    if asked.checkpoint is not None:
        saved = asked.checkpoint.read(strategy, problem.source.device)
        if saved is not None:
            return Start(PRODUCT._replace(patient=saved.anneal.patient), saved=saved)
    alone = asked.checkpoint is None and options.ranks is None
    again = strategy.gradient if alone else None
    sample = None
    if asked.init is None and match is None and strategy.can_subsample:
        sample = draw_subsample(scaled, _COARSE_POINTS, asked.generator)
    if options.rule is not None and searchable(problem, asked.init, options):
        guess, search = search_relaxed(problem, strategy, asked.generator, again)
        return Start(guess, search, sample)
    found = first_guess(
        scaled, sample, asked.init, options, strategy.search_epsilon, match, asked.made, again
    )
    return Start(*found, sample)


def begin(
    strategy: Strategy, start: Start, generator: torch.Generator, recorder: Recorder
) -> tuple[Setting, LoopState]:
    """Make the first setting of the loop, and its state at the start."""
    dtypes, epsilon, guess = strategy.dtypes, strategy.epsilon, start.guess
    handover = strategy.options.tol
    if dtypes.again:
        handover = max(handover, _HANDOVER_TOLERANCE)
    sharp = math.inf
    goes_on = guess.sharp and strategy.proximal_polished and not strategy.facts.assignment
    if strategy.proximal_polished:
        enough = _MET_TOLERANCE if goes_on else POLISH_TOLERANCE
        handover, sharp = max(handover, enough), strategy.search_epsilon
    anneal = Annealing(
        max(epsilon, guess.epsilon * strategy.scale), epsilon, proximal=strategy.proximal,
        patient=guess.patient, sharp=sharp, shortened=guess.ended, held=guess.plan is not None,
    )  # fmt: skip
    if goes_on:
        # an epsilon larger than that of the plan would blur it: steps go on as after annealing.
        # Plans of equal weights are sharp again soon, and end a little lower. [L1236]
        anneal = replace(anneal, start=sharp, floor=sharp)
    elif guess.sharp:
        # its potentials are of a far smaller epsilon
        guess = guess._replace(potentials=None)
    setting = strategy.setting(dtypes.loop, handover, anneal, generator, recorder)
    if start.saved is not None:
        return replace(setting, anneal=start.saved.anneal), start.saved.state
    if start.sample is None:
        return setting, starting_point(setting, guess)
    state = _solve_coarse(setting, start.sample, guess)
    done = Annealing(epsilon, epsilon, proximal=strategy.proximal)
    return replace(setting, anneal=done), state


def _solve_coarse(setting: Setting, sample: Coarse, guess: Guess) -> LoopState:
    """Solve the coarse problem; go on from its coupling, its potentials extended to all points."""
    sample = sample.to(setting.problem.dtype)
    small = replace(
        setting,
        # too small to be shared
        backend=alone(setting.backend),
        gradient=FactoredGradient(sample.problem),
        problem=sample.problem,
        anneal=replace(setting.anneal, proximal=False),
        store=True,
        tol=max(setting.tol, _HANDOVER_TOLERANCE),
    )
    state = iterate(small, starting_point(small, guess))
    fine, epsilon = setting.gradient.in_factors(), setting.anneal.target
    assert state.potentials is not None
    assert fine is not None
    whole, weights = fine.factored(state.coupling), setting.gradient.marginals
    potentials = extend(sample, whole, weights, state.potentials, epsilon, small.backend)
    return LoopState(
        state.coupling, state.coupling, potentials, potentials, state.status, done=state.done
    )
