"""How long a solve will take, said before it begins."""

import logging

from torchgw._errors import PerformanceWarning, warn_user
from torchgw._solve.route import (
    ENTRY,
    HOST_ITERATION,
    ITERATION,
    USUAL,
    iteration_seconds,
    usual_iterations,
)
from torchgw._solve.strategy import Strategy

logger = logging.getLogger(__name__)

# Sinkhorn iterations of each linear problem of a sampled loss that is no product. [L454]
_SAMPLED_INNER = 600
# A warning comes if a solve with the least number of iterations takes so many seconds. [L454]
_LONG = 20.0
# The epsilon below which a solve may take very many iterations, how many some took, and the seconds
# for each entry there. [L551]
_SHARPEST, _SHARPEST_ITERATIONS, _SHARPEST_ENTRY = 2.5e-5, 30_000, 3e-9


def forecast(strategy: Strategy) -> None:
    """Log what an outer iteration on a CPU will take, and warn if a solve takes long."""
    problem, options = strategy.problem, strategy.options
    if strategy.route.longest is not None:
        _foresee_sharp(strategy, strategy.route.longest)
    if problem.source.device.type != "cpu":
        return
    each = seconds_per_iteration(strategy)
    logger.info("forecast: %.2g s for an outer iteration, if nothing else runs", each)
    if strategy.proximal:
        logger.info("forecast: up to %.0f s of proximal steps", options.max_iter * each)
    fewest, usual, each = _usual_iterations(strategy)
    least, most = (min(count, options.max_iter) * each for count in (fewest, usual))
    if least > _LONG:
        unit, name = _unit(least)
        warn_user(
            f"{problem.source.n:,} x {problem.target.n:,} points take about {each:.2g} s for each "
            f"outer iteration on this CPU, and a solve like this usually {fewest} to {usual} of "
            f"them: {least / unit:.0f} to {most / unit:.0f} {name}. `callback` and `verbose=True` "
            "show progress; fewer points, `solve_low_rank` or a GPU are faster.",
            PerformanceWarning,
        )


def forecast_again(strategy: Strategy) -> None:
    """Say what a solve and those from other starts will take on a CPU, and warn if that is long."""
    options = strategy.options
    if strategy.problem.source.device.type != "cpu":
        return
    fewest, usual, each = _usual_iterations(strategy)
    counts = [(fewest, usual)] * 2
    if options.rule is not None:
        # the other start is the plan of a whole solve with strict marginals
        counts.append(USUAL)
    least, most = (
        sum(min(count, options.max_iter) for count in ends) * each
        for ends in zip(*counts, strict=True)
    )
    logger.info("forecast: %d solves, from several starts, up to %.2g s", len(counts), most)
    if least > _LONG:
        unit, name = _unit(most)
        warn_user(
            f"A few points do not represent these, so that {len(counts)} solves from several "
            f"starts are compared: up to {most / unit:.0f} {name} in all. search='fast' leaves "
            "them out, and a start that is known (`init`) needs none.",
            PerformanceWarning,
        )


def _usual_iterations(strategy: Strategy) -> tuple[int, int, float]:
    """Return the least and the most outer iterations of most solves, and the seconds of each."""
    facts, options = strategy.facts, strategy.options
    fewest, usual = usual_iterations(facts, strategy.gradient)
    each = seconds_per_iteration(strategy)
    if not facts.products and strategy.gradient == "sampled" and facts.rule != "partial":
        inner = min(_SAMPLED_INNER, options.inner_max_iter)
        each += inner * (ITERATION + ENTRY * facts.entries)
    return fewest, usual, each


def _unit(seconds: float) -> tuple[int, str]:
    """Choose the unit in which a time is said."""
    return (60, "minutes") if seconds > 120 else (1, "seconds")


def _foresee_sharp(strategy: Strategy, worst: float) -> None:
    """Say what a small epsilon may take: in the log, or as a warning where that is long."""
    options, share = strategy.options, strategy.epsilon / strategy.scale
    source, target = strategy.problem.source, strategy.problem.target
    most, entries = options.max_iter * options.inner_max_iter, source.n * target.n
    sharpest = ITERATION + _SHARPEST_ENTRY * entries
    if source.device.type != "cpu":
        sharpest = HOST_ITERATION
    text = (
        f"epsilon is {share:.1g} of the natural scale of the cost, so that linear problems may "
        f"take all of `inner_max_iter`: up to {worst:.0f} s in all; a larger epsilon and "
        "`polish=True` come to sharp plans sooner"
    )
    likely = min(most, _SHARPEST_ITERATIONS) * sharpest
    if share < _SHARPEST and likely > _LONG:
        warn_user(f"{text[0].upper()}{text[1:]}.", PerformanceWarning)
    else:
        logger.info("forecast: %s", text)


def seconds_per_iteration(strategy: Strategy) -> float:
    """Model the time of one outer iteration on a CPU, in seconds."""
    facts, route = strategy.facts, strategy.route
    return iteration_seconds(
        facts, route.gradient.chosen, route.storage, route.dtypes, route.n_anchors
    )
