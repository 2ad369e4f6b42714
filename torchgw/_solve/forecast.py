"""How long a solve takes, by a model of each of its parts, and what is said of that beforehand.

The models count work, in seconds of one core of the processor that they were fitted on; what is
said is that times how much slower the processor at hand is, which is measured at first use.
"""

import logging
import math
from collections.abc import Collection, Set
from typing import NamedTuple

import torch

from torchgw._errors import PerformanceWarning, warn_user
from torchgw._problem.limits import Limits, limits_of
from torchgw._problem.problem import Facts
from torchgw._search.alternatives import Search
from torchgw._search.beliefs import LONG, seconds_of_regions
from torchgw._search.optima import KEPT
from torchgw._search.world import SOON
from torchgw._solve.state import Options
from torchgw._solve.step import INNER_ITERATIONS
from torchgw._tensors.deadline import foresee
from torchgw._tensors.foretold import correct, promise, say_more
from torchgw._tensors.machine import slowness

logger = logging.getLogger(__name__)


class _Rates(NamedTuple):
    """Picoseconds of one linear problem, fitted to the tables in OPTIMIZATION_LOG.md."""

    make: float  # per entry: compute the cost, and the kernel from it
    read: float  # per entry and iteration: scale the kernel
    exponential: float  # per entry and iteration of streaming, at any rank
    product: float  # per entry, iteration and column of the factors
    # On a GPU: reading where a row does not fit on chip, the least that an iteration of streaming
    # takes, and the operands of streaming for each problem.
    wide: float = 0.0
    launch: float = 0.0
    prepare: float = 0.0


# The time of a stored and of a streamed problem is a sum of these. On a GPU a row of up to
# 2^17 bytes is read once per iteration, and launches bound small streamed problems. [L91]
_RATES = {
    ("cuda", torch.float32): _Rates(12.0, 1.1, 0.55, 0.018, 2.0, 2.0e8, 1.2e9),
    ("cuda", torch.float64): _Rates(18.0, 2.25, 4.0, 0.1, 5.2, 2.0e8, 1.2e9),
    ("cpu", torch.float32): _Rates(6.5e3, 650.0, 1500.0, 30.0),
    ("cpu", torch.float64): _Rates(1.4e4, 1200.0, 2900.0, 75.0),
}
# Time of a streamed problem on a CPU if tiles are skipped: half the tiles are kept over five
# iterations of two levels. On a curve a fifth are kept, in fewer iterations. On a cloud nearly all
# are, which is not known before: so small problems, where storing loses 0.2 s at most, are charged
# extra seconds for streaming. [L99, L211]
_TILED_SHARE = 0.125
_TILED_SECONDS = 2.7e-2
# Bytes of a row that the one-read iteration holds on chip. [L91]
_ROW_BYTES = 2**17


def tiled_seconds(streamed: float, problems: int = 1) -> float:
    """Model the time of streamed problems on a CPU once tiles are skipped."""
    return _TILED_SECONDS * problems + _TILED_SHARE * streamed


def problem_seconds(
    device: str, dtype: torch.dtype, shape: tuple[int, int], rank: int
) -> tuple[float, float]:
    """Model the time of one linear problem, stored and streamed."""
    rates = _RATES[device, dtype]
    entries = shape[0] * shape[1]
    wide = shape[1] * dtype.itemsize > _ROW_BYTES
    stored = entries * (rates.make + INNER_ITERATIONS[False] * max(rates.read, rates.wide * wide))
    each = max(rates.launch, entries * (rates.exponential + rates.product * rank))
    return 1e-12 * stored, 1e-12 * (rates.prepare + INNER_ITERATIONS[False] * each)


def iteration_seconds(
    facts: Facts, gradient: str, rank: int, dtype: torch.dtype, *, stored: bool, tiled: bool
) -> float:
    """Model the time of one outer iteration on a CPU, in seconds, for costs of some rank."""
    if stored or rank == 0:
        rates = _RATES[facts.device, dtype]
        each = max(rates.launch, _SMALL) + rates.read * facts.entries
        seconds = 1e-12 * (rates.make * facts.entries + INNER_ITERATIONS[True] * each)
    else:
        streamed = problem_seconds(facts.device, dtype, (facts.n, facts.m), rank)[1]
        streamed *= (facts.listed or facts.entries) / facts.entries
        # tiles of the plan are empty where points lie on curves; for clouds nearly all are kept
        seconds = tiled_seconds(streamed) if tiled and not facts.clouds else streamed
    if gradient != "dense":
        return seconds
    if not facts.products:
        return seconds + 1e-12 * _MINIMUM * facts.entries * facts.larger
    return seconds + 1e-12 * _PRODUCT * dtype.itemsize * facts.entries * (facts.n + facts.m)


# Picoseconds that a Sinkhorn iteration takes at least. [L1563]
_SMALL = 4e7
# Picoseconds of one multiplication of a dense gradient on a CPU for each byte of a number, one
# thread; and of a minimum in place of a product. [L454, L1563]
_PRODUCT, _MINIMUM = 4.5, 60_000.0


def usual_iterations(facts: Facts, options: Options, gradient: str) -> tuple[int, int]:
    """Return the least and the most outer iterations of most solves."""
    if options.regularization == "entropic" and facts.epsilon > _BLURRED_FROM * facts.spread:
        return _BLURRED
    if facts.rule != "strict":
        return _PARTIAL
    return _USUAL if facts.products or gradient != "sampled" else _SAMPLED


# Outer iterations of most solves, the least and the most; with relaxed marginals; and for a sampled
# loss that is no product. [L375, L454]
_USUAL, _PARTIAL, _SAMPLED = (15, 60), (80, 130), (40, 70)
# The same at a large epsilon, and from which share of the natural scale on that is one. [L1590]
_BLURRED, _BLURRED_FROM = (1, 8), 0.05


def _in_full(facts: Facts, gradient: str, each: float) -> float:
    """Add to the time of an iteration the Sinkhorn iterations that others do not need."""
    if gradient == "sampled" and facts.products:
        each += slowness() * _PERTURBED_INNER * (_ITERATION + _ENTRY * facts.entries)
    return each * (_BOUNDED if facts.rule == "partial" else 1.0)


# Sinkhorn iterations of a cost that samples have moved; and how many times as long an iteration
# takes whose marginals are bounds. [L1591]
_PERTURBED_INNER, _BOUNDED = 200, 4.0


# Share of the iterations that is left from a start that a search has found, the best or another.
# [L1563]
FOUND = 0.5
# Seconds of a solve beside its iterations, and of a search on few points; of starts that are
# followed on all points, and of these for each point of the larger side; by how many times these
# take longer with relaxed marginals, and how many solves a relaxed problem has that is too large
# for starts of its own. [L1379, L1560, L1590]
_START, _COARSE, _FOLLOWED, _POINT, _RELAXED, _SOLVES = 0.01, 0.05, 0.5, 0.021, 4.0, 2


def solve_seconds(
    facts: Facts,
    options: Options,
    limits: Limits,
    gradient: str,
    each: float,
    moves: Collection[str],
) -> tuple[float, float]:
    """Model what a solve takes on this CPU, and what if starts are followed on all points.

    ``each`` are the seconds of an iteration there, and ``moves`` those of its search.
    """
    slow, relaxed = slowness(), options.rule is not None
    few, many, each = _usual_iterations(facts, options, gradient, each)
    each = _in_full(facts, gradient, each)
    few, many = (min(part, options.max_iter) for part in (few, many))
    seconds = slow * _START + math.sqrt(few * many) * each
    if not moves:
        return seconds, seconds
    # annealing begins later where a search has found the start
    whole = math.sqrt(few * many) * each
    seconds = slow * (_START + _COARSE) + FOUND * whole
    if "product" in moves and "chains" not in moves:
        seconds += slow * _START + whole
    strict_too = relaxed and facts.larger > limits.few_points
    if {"chains", "relaxed"}.isdisjoint(moves) and not strict_too:
        # a loss that is no product has no chains, and each optimum is solved from
        others = 0 if facts.products else (KEPT - 1) * ("optima" in moves)
        return seconds, seconds + others * (slow * _START + FOUND * whole)
    squares = options.rule is not None and options.rule.squares
    times = slow * (_RELAXED if relaxed and not squares else 1.0)
    times *= limits.chains_of(options.search) / limits.chains
    if relaxed:
        # few points are searched in any case
        seconds *= _SOLVES if strict_too else 1
        seconds += times * (_FOLLOWED + _POINT * min(facts.larger, limits.few_points))
        times *= strict_too
    return seconds, seconds + times * (_FOLLOWED + _POINT * facts.larger)


# How many times the longer time, beside repairs, a solve takes at most whose starts do not agree:
# others are repaired, and edges of graphs are matched. [L1642]
_TIMES = 3.0
# Starts of graphs whose regions are matched anew. [L1599]
_STARTS = 3


def disagreeing(facts: Facts, longer: float, moves: Collection[str]) -> float:
    """Model the most that a search on all points takes, given what one like this does."""
    seconds = SOON
    if ("edges" if facts.hops else "messages") in moves:
        # of two graphs, or of those that hops tell of
        seconds += _STARTS * seconds_of_regions(facts.larger, facts.edges)
    return _TIMES * longer + slowness() * seconds


# Sinkhorn iterations of each linear problem of a sampled loss that is no product. [L454]
_SAMPLED_INNER = 600
# Below this epsilon, as a share of the natural scale, Sinkhorn takes many iterations; and seconds
# of the operations of one, which scales entries. [L416]
_SHARP, _ITERATION = 2.5e-4, 2e-4
_ENTRY = 1e-12 * _RATES["cpu", torch.float64].read
# Seconds of one such iteration on a GPU, where the problems are small and the host sets the time.
# [L604]
_HOST_ITERATION = 1.2e-3
# The epsilon below which a solve may take very many iterations, which need exponentials, and how
# many some took. [L551]
_SHARPEST, _SHARPEST_ITERATIONS = 2.5e-5, 30_000


def forecast(
    facts: Facts,
    options: Options,
    gradient: str,
    each: float,
    cost: str,
    worst: float | None,
    seconds: tuple[float, float] | None = None,
) -> None:
    """Log what a solve will ``cost``, on a CPU an iteration too, and warn if a solve takes long.

    ``each`` are the seconds of an iteration, but for those of a sampled loss that is no product,
    ``worst`` those of all solves at a small epsilon, and ``seconds`` of a usual and a longer one.
    """
    proximal = options.regularization == "proximal"
    if worst is not None:
        _foresee_sharp(facts, options, worst)
    if facts.device != "cpu":
        return
    logger.info("forecast: %.2g s for an outer iteration, if nothing else runs", each)
    logger.info("forecast: %s", cost)
    if seconds is not None:
        promise(*seconds)
    if proximal:
        logger.info("forecast: up to %.0f s of proximal steps", options.max_iter * each)
    fewest, usual, each = _usual_iterations(facts, options, gradient, each)
    least, most = (min(count, options.max_iter) * each for count in (fewest, usual))
    if least > LONG:
        unit, name = _unit(least)
        warn_user(
            f"This solve takes long: {facts.n:,} x {facts.m:,} points take about {each:.2g} s for "
            f"each outer iteration on this CPU, and usually {fewest} to {usual} of "
            f"them: {least / unit:.0f} to {most / unit:.0f} {name}. `callback` and `verbose=True` "
            "show progress; fewer points, `solve_low_rank` or a GPU are faster.",
            PerformanceWarning,
        )


# What a plan and its numbers take at least, in outer iterations; the same where costs are streamed,
# of whose Sinkhorn iterations it takes twelve. [L1567, L1597]
_LEAST, _STREAMED = 2, 12 / INNER_ITERATIONS[False]


def forecast_limit(facts: Facts, each: float, *, stored: bool) -> None:
    """Warn before any work that a limit of time cannot be held on this CPU."""
    if facts.device == "cpu":
        what = f"a plan of {facts.n:,} x {facts.m:,} points and its numbers"
        foresee((_LEAST if stored else _STREAMED) * each, what)


def forecast_again(facts: Facts, options: Options, gradient: str, each: float) -> None:
    """Say what solves from several starts will take on a CPU, and warn if that is long."""
    if facts.device != "cpu":
        return
    fewest, usual, each = _usual_iterations(facts, options, gradient, each)
    counts = [(fewest, usual)] * 2
    if options.rule is not None:
        # the other start is the plan of a whole solve with strict marginals
        counts.append(_USUAL)
    least, most = (
        sum(min(count, options.max_iter) for count in ends) * each
        for ends in zip(*counts, strict=True)
    )
    say_more(math.sqrt(least * most), f"{len(counts)} solves from several starts are compared")
    if least > LONG:
        unit, name = _unit(most)
        warn_user(
            f"A few points do not represent these, so that {len(counts)} solves from several "
            f"starts are compared: up to {most / unit:.0f} {name} in all. search='fast' leaves "
            "them out, and a start that is known (`init`) needs none.",
            PerformanceWarning,
        )


def forecast_solves(
    facts: Facts, options: Options, gradient: str, each: float, count: float, why: str
) -> None:
    """Say what so many solves, or a part of one, will take on a CPU."""
    if facts.device == "cpu" and count:
        fewest, usual, each = _usual_iterations(facts, options, gradient, each)
        each = _in_full(facts, gradient, each)
        say_more(count * min(math.sqrt(fewest * usual), options.max_iter) * each, why)


def forecast_loop(
    facts: Facts,
    options: Options,
    gradient: str,
    each: float,
    search: Search | None,
    moves: Set[str],
    longer: float,
) -> None:
    """Correct what was said once a search has ended, by which some moves follow other starts."""
    fewest, usual, each = _usual_iterations(facts, options, gradient, each)
    count = min(math.sqrt(fewest * usual), options.max_iter)
    found = search is not None and search.alternatives
    once = slowness() * _START
    once += count * _in_full(facts, gradient, each) * (FOUND if found else 1.0)
    others = _others(facts, options, search, moves, longer, once)
    correct(once + others, "the search has ended")


def forecast_others(
    facts: Facts,
    options: Options,
    search: Search | None,
    moves: Set[str],
    longer: float,
    once: float,
    *,
    parts: bool,
) -> None:
    """Correct what was said once a solve has ended, which has taken some seconds ``once``.

    Whether ``parts`` of its plan are looked at is known by then.
    """
    others = _others(facts, options, search, moves, longer, once)
    others += slowness() * _PARTS * parts
    if others:
        correct(others, "more is tried, which may end lower")


# Seconds of the parts of a few points that may leave a plan in doubt. [L1592]
_PARTS = 0.25
# Share of a solve after which others, from what was found, are left behind, in the mean. [L1598]
_LEFT = 0.5


def _others(
    facts: Facts,
    options: Options,
    search: Search | None,
    moves: Set[str],
    longer: float,
    once: float,
) -> float:
    """Model what moves take that follow other starts."""
    if search is None or options.rule is not None:
        return 0.0
    whole, found = search.followed(options.search, moves)
    seconds = once * (whole / FOUND + _LEFT * found)
    limits = limits_of(torch.device(facts.device))
    if search.thorough(options.search):
        # the search by default
        seconds += longer * limits.chains / limits.chains_of(options.search)
    return seconds


def forecast_end(each: float) -> None:
    """Correct what was said once the loop has ended."""
    correct(_LEAST * each, "the plan has settled")


def forecast_turns(facts: Facts) -> None:
    """Say what all turns of the plane will take."""
    say_more(slowness() * _TURNS * facts.entries, "points are laid on the others at many turns")


# Seconds of all turns of the plane for each pair of points. [L1563]
_TURNS = 3e-6


def _usual_iterations(
    facts: Facts, options: Options, gradient: str, each: float
) -> tuple[int, int, float]:
    """Return the least and the most outer iterations of most solves, and the seconds of each."""
    fewest, usual = usual_iterations(facts, options, gradient)
    if not facts.products and gradient == "sampled" and facts.rule != "partial":
        inner = min(_SAMPLED_INNER, options.inner_max_iter)
        each += slowness() * inner * (_ITERATION + _ENTRY * facts.entries)
    return fewest, usual, each


def _unit(seconds: float) -> tuple[int, str]:
    """Choose the unit in which a time is said."""
    return (60, "minutes") if seconds > 120 else (1, "seconds")


def longest(facts: Facts, options: Options, moves: Collection[str]) -> float | None:
    """Model the longest that all solves at a small epsilon may take; ``None`` at others."""
    proximal = options.regularization == "proximal"
    if proximal or not facts.epsilon < _SHARP * (facts.spread or 1.0):
        return None
    each = slowness() * (_ITERATION + _ENTRY * facts.entries)
    each = _HOST_ITERATION if facts.device != "cpu" else each
    # where ends are followed side by side few whole solves are made
    alone = "ends" in moves
    others = 0 if alone else ("product" in moves) + (KEPT - 1) * ("optima" in moves)
    return (1 + others) * options.max_iter * options.inner_max_iter * each


def _foresee_sharp(facts: Facts, options: Options, worst: float) -> None:
    """Say what a small epsilon may take: in the log, or as a warning where that is long."""
    share, most = facts.epsilon / (facts.spread or 1.0), options.max_iter * options.inner_max_iter
    entry = 1e-12 * _RATES["cpu", torch.float64].exponential
    sharpest = slowness() * (_ITERATION + entry * facts.entries)
    if facts.device != "cpu":
        sharpest = _HOST_ITERATION
    text = (
        f"epsilon is {share:.1g} of the natural scale of the cost, so that linear problems may "
        f"take all of `inner_max_iter`: up to {worst:.0f} s in all; a larger epsilon and "
        "`polish=True` come to sharp plans sooner"
    )
    likely = min(most, _SHARPEST_ITERATIONS) * sharpest
    if share < _SHARPEST and likely > LONG:
        warn_user(f"{text[0].upper()}{text[1:]}.", PerformanceWarning)
    else:
        logger.info("forecast: %s", text)
