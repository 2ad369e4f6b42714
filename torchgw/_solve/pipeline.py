"""One solve: choose how, find a start, run the loop, settle the marginals, evaluate the plan."""

import math
from functools import partial
from time import perf_counter
from typing import NamedTuple

from torchgw._search.alternatives import Search
from torchgw._search.isometry import Isometry
from torchgw._sinkhorn.choose import alone
from torchgw._solve.begin import Guess, named_start
from torchgw._solve.copies import WHY_NOT_A_COPY, find_copy, kept
from torchgw._solve.evaluation import misses_a_copy
from torchgw._solve.finish import finish
from torchgw._solve.forecast import forecast, forecast_again, seconds_per_iteration
from torchgw._solve.loop import iterate
from torchgw._solve.outcome import Asked, Ending, Outcome
from torchgw._solve.resolution import Resolved, choose_resolution, solve_on_cells
from torchgw._solve.route import Route
from torchgw._solve.settle import leaves, settle
from torchgw._solve.stages import run_stages
from torchgw._solve.start import Start, begin, find_start
from torchgw._solve.state import LoopState, Recorder, Setting
from torchgw._solve.status import Status
from torchgw._solve.strategy import Strategy, annealed, choose_strategy
from torchgw._tensors.deadline import keep_least
from torchgw._typing import Potentials

# Outer iterations whose time, and share of a time limit that, search and loop leave to what follows
# them. [L1294]
_ITERATIONS_KEPT, _SHARE_KEPT = 4, 0.2


def solve_once(asked: Asked, recorder: Recorder) -> Outcome:
    """Solve a problem, for one mass and by one search."""
    problem, options = asked.problem, asked.options
    match = find_copy(asked, recorder)
    if match is not None and options.sharp:
        return kept(problem, options, match, recorder)
    return conclude(asked, follow(asked, recorder, match))


def route_of(asked: Asked) -> Route:
    """Choose the path of a problem, and go no further."""
    return _chosen(asked).route


def _chosen(asked: Asked) -> Strategy:
    """Choose how a problem is solved."""
    graphs = None not in asked.graphs
    return choose_strategy(
        asked.problem, asked.options, init=named_start(asked.init), graphs=graphs
    )


class Followed(NamedTuple):
    """A solve up to where its loop has ended."""

    strategy: Strategy
    start: Start
    setting: Setting
    state: LoopState
    resolved: Resolved | None  # the plan of a problem that was solved on cells


def follow(asked: Asked, recorder: Recorder, match: Isometry | None = None) -> Followed:
    """Choose how to solve and where to begin, and run the loop."""
    options, checkpoint = asked.options, asked.checkpoint
    clock = perf_counter()
    strategy = _chosen(asked)
    if options.ranks is not None:
        options.ranks.agree(*strategy.fingerprint())
    # a plan is of no use before its last marginals and its numbers
    keep_least(_ITERATIONS_KEPT * seconds_per_iteration(strategy), _SHARE_KEPT)
    untold = options.told == "nothing"
    if untold:
        forecast(strategy)
    start = find_start(asked, strategy, match)
    if untold and start.search is not None and start.search.compare:
        forecast_again(strategy)
    if start.guess.patient and options.skip_tiles == "auto":
        strategy = annealed(strategy)
    clock = recorder.time("multistart", clock)
    setting, state = begin(strategy, start, asked.generator, recorder)
    if checkpoint is not None:
        recorder.checkpoint = partial(checkpoint.keep, setting)
    recorder.time("setup", clock)
    resolved, tolerance = None, choose_resolution(strategy)
    if start.sample is not None and tolerance is not None:
        state, resolved = solve_on_cells(strategy, setting, state, tolerance)
    if resolved is None:
        setting, state = run_stages(strategy, setting, state, start.guess)
    return Followed(strategy, start, setting, state, resolved)


def conclude(asked: Asked, followed: Followed) -> Outcome:
    """Settle the plan that a loop has come to, and compute its numbers."""
    checkpoint, (strategy, start, setting, state, resolved) = asked.checkpoint, followed
    if resolved is None:
        if checkpoint is not None and state.status is Status.STOPPED:
            checkpoint.keep(setting, state, now=True)
        plan, state = settle(setting, state, strategy.dtypes.settle)
        while (left := leaves(setting, state, plan)).state is not None:
            plan, state = settle(setting, iterate(setting, left.state), strategy.dtypes.settle)
        guess = start.guess
        begun = guess.plan if guess.epsilon == 0 else None
        ending = finish(strategy, setting, plan, state, left.coupling, begun)
        if checkpoint is not None and state.status is not Status.STOPPED:
            checkpoint.done()
    else:
        plan = resolved.plan
        ending = Ending(
            plan.released(alone(setting.backend)), resolved.evaluation, plan.epsilon,
            resolved.status, None, None,
        )  # fmt: skip
    gradient, search = setting.gradient, start.search
    # a plan from a given start is not compared with the match of copies
    given = asked.init is not None and not isinstance(asked.init, Guess)
    searched = not given and asked.options.rule is None
    if searched and misses_a_copy(setting.problem, gradient, ending.evaluation, ending.epsilon):
        search = (search or Search((), math.nan))._replace(doubt=WHY_NOT_A_COPY)
    f, g = plan.potentials
    return Outcome(
        ending=ending,
        strategy=strategy,
        potentials=Potentials(f + gradient.row, g + gradient.column),
        backend=setting.backend.name,
        n_anchors=gradient.n_anchors,
        noise=gradient.noise(state.coupling),
        search=search,
        recorder=setting.recorder,
        known=gradient.remember(state.coupling, setting.marginals),
        resolution=resolved and resolved.resolution,
        route=strategy.route,
    )
