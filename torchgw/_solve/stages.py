"""The loop in stages: by two paths, with more anchors, in another dtype."""

import logging
import math
from dataclasses import replace
from itertools import count

from torchgw._plans.given import StoredPlan
from torchgw._plans.rounded import round_to_marginals
from torchgw._plans.transport import TransportPlan
from torchgw._solve.begin import Guess, starting_point
from torchgw._solve.inner import prepare, solve_linear
from torchgw._solve.loop import iterate
from torchgw._solve.state import LoopState, Setting
from torchgw._solve.status import Status
from torchgw._solve.strategy import Strategy

logger = logging.getLogger(__name__)

# Anchors are added until the sampled cost is so many times its standard error; and at most so many.
# [L114]
_SIGNAL_TO_NOISE = 10.0
_MOST_ANCHORS = 4096
# The last cost has so many times the anchors of the iterations before, and so many at most. [L124]
_REFINING = 4
_REFINED_ANCHORS = 1024
# Sinkhorn iterations in which plans that are compared meet their marginals, at most. [L951]
_COMPARED = 100


def run_stages(
    strategy: Strategy, setting: Setting, state: LoopState, guess: Guess
) -> tuple[Setting, LoopState]:
    """Iterate in the dtype of the loop; then with more anchors, or in the settling dtype."""
    options, dtypes = strategy.options, strategy.dtypes
    rough = guess.epsilon > 0 and setting.recorder.checkpoint is None
    if rough and strategy.proximal_polished and strategy.problem.linear is None:
        setting, state = _choose_path(setting, state)
    state = iterate(setting, state)
    if options.n_anchors is None and options.rule is None and not setting.gradient.exact:
        setting, state = _refine_anchors(*_grow_anchors(setting, state, guess))
    if dtypes.settle == dtypes.loop:
        return setting, state
    if not setting.gradient.exact:
        # the anchors are kept; only their last linear problem is solved in the other dtype
        return replace(setting, dtype=dtypes.settle), state
    setting = strategy.setting(
        dtypes.settle, options.tol, setting.anneal, setting.generator, setting.recorder
    )
    again = dtypes.again and not strategy.proximal_polished and state.status is not Status.FLAT
    return setting, iterate(setting, state) if again else state


def _choose_path(setting: Setting, state: LoopState) -> tuple[Setting, LoopState]:
    """Begin proximal steps in two ways, at a large epsilon and after annealing; keep the lower.

    Which of them breaks the symmetry of a rough start better depends on the problem. Both are
    followed to one epsilon, where values of plans rounded to their marginals are compared. [L951]
    """
    gradient, sharp, tol, paths = setting.gradient, setting.anneal.sharp, setting.tol, []
    for floor in (math.inf, sharp):
        anneal = replace(setting.anneal, floor=floor)
        path = replace(setting, anneal=anneal, recorder=replace(setting.recorder, history=[]))
        steps = next(step for step in count() if anneal(step) <= sharp) + 1
        reached = iterate(path, state, most=steps)
        cost = gradient.linearise(reached.coupling).seen(reached.coupling.masses).dense()
        prepared = prepare(path, cost, anneal(reached.annealed))
        inner = solve_linear(path, prepared, reached.start, max_iter=_COMPARED, tol=tol)
        matrix = TransportPlan.of(prepared, inner.potentials).to_dense().double()
        plan = round_to_marginals(matrix, *setting.marginals)
        there = gradient.update(StoredPlan(plan), None, setting.generator)
        value = gradient.pairing(gradient.linearise(there).seen(there.masses), there, there)
        paths.append((float(value), path, reached))
        if reached.status is Status.STOPPED:
            break
    _, path, reached = min(paths, key=lambda each: each[0])
    setting.recorder.history += path.recorder.history
    return replace(path, recorder=setting.recorder), reached


def _grow_anchors(setting: Setting, state: LoopState, guess: Guess) -> tuple[Setting, LoopState]:
    """Solve again with more anchors until the cost stands out of its noise, or there are enough."""
    while state.status is not Status.STOPPED:
        noise, count = setting.gradient.noise(state.coupling), setting.gradient.n_anchors
        if noise is None or count is None:
            break
        # a cost that vanishes, such as that of a single point, has nothing to stand out of
        ratio = noise.standard_error / noise.size if noise.size > 0 else 0.0
        wanted = count * min((_SIGNAL_TO_NOISE * ratio) ** 2, _MOST_ANCHORS)
        left = setting.options.max_iter - state.done
        if wanted <= count or count >= _MOST_ANCHORS or left <= 0:
            break
        grown = min(_MOST_ANCHORS, max(2 * count, math.ceil(min(wanted, _MOST_ANCHORS))))
        logger.info("the sampled cost is drowned in noise: %d anchors in place of %d", grown, count)
        setting = replace(setting, gradient=setting.gradient.with_anchors(grown))
        state = iterate(setting, starting_point(setting, guess)._replace(done=state.done))
    return setting, state


def _refine_anchors(setting: Setting, state: LoopState) -> tuple[Setting, LoopState]:
    """Make one more iteration, with more anchors of its plan: the last cost decides on the noise.

    Many iterations with few columns and one with many take fewer of them than many with many.
    """
    used = setting.gradient.n_anchors or 0
    count = min(_REFINING * used, _REFINED_ANCHORS)
    spent = state.status is Status.STOPPED or state.done >= setting.options.max_iter
    if count <= used or spent or setting.anneal.proximal:
        return setting, state
    setting = replace(setting, gradient=setting.gradient.with_anchors(count))
    refined = iterate(setting, state, most=1)
    status = refined.status if refined.status is Status.STOPPED else state.status
    return setting, refined._replace(status=status)
