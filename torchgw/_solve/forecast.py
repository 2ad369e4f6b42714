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
from torchgw._search.beliefs import LONG, seconds_of_candidates, seconds_of_regions
from torchgw._search.optima import KEPT
from torchgw._search.world import SOON
from torchgw._sinkhorn.annealing import INNER_ITERATIONS
from torchgw._sinkhorn.problem import ROW_BYTES
from torchgw._solve.state import Options
from torchgw._starts.alternatives import Search
from torchgw._tensors.deadline import correct, foresee, promise, say_more
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
# `ROW_BYTES` is read once per iteration, and launches bound small streamed problems. [L91]
_CPU, _GPU = _Rates(6.5e3, 650.0, 1500.0, 30.0), _Rates(12.0, 1.1, 0.55, 0.018, 2.0, 2.0e8, 1.2e9)
_RATES = {
    ("cuda", torch.float32): _GPU,
    ("cuda", torch.float64): _GPU._replace(
        make=18.0, read=2.25, exponential=4.0, product=0.1, wide=5.2
    ),
    ("cpu", torch.float32): _CPU,
    ("cpu", torch.float64): _Rates(*(2 * rate for rate in _CPU)),  # of twice the bytes [L1872]
}
# Time of a streamed problem on a CPU if tiles are skipped: half the tiles are kept over five
# iterations of two levels. On a curve a fifth are kept, in fewer iterations. On a cloud nearly all
# are, which is not known before: so small problems, where storing loses 0.2 s at most, are charged
# extra seconds for streaming. [L99, L211]
_TILED_SHARE = 0.125
_TILED_SECONDS = 2.7e-2


def tiled_seconds(streamed: float, problems: int = 1) -> float:
    """Model the time of streamed problems on a CPU once tiles are skipped."""
    return _TILED_SECONDS * problems + _TILED_SHARE * streamed


def problem_seconds(
    device: str, dtype: torch.dtype, shape: tuple[int, int], rank: int
) -> tuple[float, float]:
    """Model the time of one linear problem, stored and streamed."""
    rates = _RATES[device, dtype]
    entries = shape[0] * shape[1]
    wide = shape[1] * dtype.itemsize > ROW_BYTES
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


# Outer iterations of most solves, the least and the most; with relaxed marginals; and for a sampled
# loss that is no product. [L375, L454]
_USUAL, _PARTIAL, _SAMPLED = (15, 60), (80, 130), (40, 70)
# The same at a large epsilon, and from which share of the natural scale on that is one. [L1590]
_BLURRED, _BLURRED_FROM = (1, 8), 0.05
# Sinkhorn iterations of a cost that samples have moved; and how many times as long iterations take
# whose marginals are bounds, and starts that are followed with relaxed ones. [L1379, L1591, L1896]
_PERTURBED_INNER, _RELAXED = 200, 4.0
# Share of the iterations that is left from a start that a search has found, the best or another,
# and share of a solve after which those from others are left behind. [L1563, L1598]
_FOUND = 0.5
# Seconds of a solve beside its iterations, and of a search on few points; of starts that are
# followed on all points, and of these for each point of the larger side. [L1379, L1560, L1590]
_START, _COARSE, _FOLLOWED, _POINT = 0.01, 0.05, 0.5, 0.021
# How many times the longer time, beside repairs, a solve takes at most whose starts do not agree:
# others are repaired, and edges of graphs are matched. [L1642]
_TIMES = 3.0
# Starts of graphs whose regions are matched anew. [L1599]
_STARTS = 3
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
# What a plan and its numbers take at least, in outer iterations; the same where costs are streamed,
# of whose Sinkhorn iterations it takes twelve. [L1567, L1597]
_LEAST, _STREAMED = 2, 12 / INNER_ITERATIONS[False]
# Seconds of the parts of a few points that may leave a plan in doubt. [L1592]
_PARTS = 0.25
# Seconds of all turns of the plane for each pair of points. [L1563]
_TURNS = 3e-6


class Forecast(NamedTuple):
    """How long a solve takes on this CPU, by a gradient of which an iteration takes ``each``."""

    facts: Facts
    options: Options
    gradient: str
    each: float  # seconds, but for those of a sampled loss that is no product

    @property
    def usual(self) -> tuple[int, int]:
        """The least and the most outer iterations of most solves."""
        facts, options = self.facts, self.options
        if options.regularization == "entropic" and facts.epsilon > _BLURRED_FROM * facts.spread:
            return _BLURRED
        if facts.rule != "strict":
            return _PARTIAL
        return _USUAL if facts.products or self.gradient != "sampled" else _SAMPLED

    @property
    def mean(self) -> float:
        """Their geometric mean, which is what is said."""
        few, many = (min(part, self.options.max_iter) for part in self.usual)
        return math.sqrt(few * many)

    @property
    def iteration(self) -> float:
        """Seconds of an outer iteration that is like most."""
        facts, options = self.facts, self.options
        if facts.products or self.gradient != "sampled" or facts.rule == "partial":
            return self.each
        inner = min(_SAMPLED_INNER, options.inner_max_iter)
        return self.each + slowness() * inner * (_ITERATION + _ENTRY * facts.entries)

    @property
    def in_full(self) -> float:
        """Seconds of one with the Sinkhorn iterations that others do not need."""
        facts, each = self.facts, self.iteration
        if self.gradient == "sampled" and facts.products:
            each += slowness() * _PERTURBED_INNER * (_ITERATION + _ENTRY * facts.entries)
        return each * (_RELAXED if facts.rule == "partial" else 1.0)

    def seconds(self, limits: Limits, moves: Collection[str]) -> tuple[float, float]:
        """Model what a solve takes, and what if its search follows starts on all points."""
        facts, slow, rule = self.facts, slowness(), self.options.rule
        whole = self.mean * self.in_full
        if not moves:
            return (slow * _START + whole,) * 2
        # annealing begins later where a search has found the start
        seconds = slow * (_START + _COARSE) + _FOUND * whole
        if "product" in moves and "chains" not in moves:
            seconds += slow * _START + whole
        strict_too = rule is not None and facts.larger > limits.few_points
        if {"chains", "relaxed"}.isdisjoint(moves) and not strict_too:
            # a loss that is no product has no chains, and each optimum is solved from
            others = 0 if facts.products else (KEPT - 1) * ("optima" in moves)
            return seconds, seconds + others * (slow * _START + _FOUND * whole)
        times = slow * (1.0 if rule is None or rule.squares else _RELAXED)
        times *= limits.chains_of(self.options.search) / limits.chains
        if rule is not None:
            # few points are searched in any case, and more of them solved from two starts
            seconds *= 1 + strict_too
            seconds += times * (_FOLLOWED + _POINT * min(facts.larger, limits.few_points))
            times *= strict_too
        return seconds, seconds + times * (_FOLLOWED + _POINT * facts.larger)

    def matched(self, usual: float, longer: float) -> tuple[float, float]:
        """Model what a match of the edges takes, and what if a solve follows."""
        seconds = slowness() * _START + seconds_of_candidates(self.facts.edges)
        return seconds, seconds + max(usual, longer)

    def disagreeing(self, longer: float, moves: Collection[str]) -> float:
        """Model the most that a search on all points takes, given what one like this does."""
        facts, seconds = self.facts, SOON
        if facts.edges and ("edges" if facts.hops else "messages") in moves:
            # of two graphs, or of those that hops tell of
            seconds += _STARTS * seconds_of_regions(facts.larger, facts.edges)
        return _TIMES * longer + slowness() * seconds

    def longest(self, moves: Collection[str]) -> float | None:
        """Model the longest that all solves at a small epsilon may take; ``None`` at others."""
        facts, options = self.facts, self.options
        if not facts.epsilon < _SHARP * (facts.spread or 1.0):
            return None
        each = slowness() * (_ITERATION + _ENTRY * facts.entries)
        each = _HOST_ITERATION if facts.device != "cpu" else each
        # where ends are followed side by side few whole solves are made
        alone = "ends" in moves
        others = 0 if alone else ("product" in moves) + (KEPT - 1) * ("optima" in moves)
        return (1 + others) * options.max_iter * options.inner_max_iter * each

    def say(
        self, cost: str, worst: float | None, seconds: tuple[float, float] | None = None
    ) -> None:
        """Log what a solve will ``cost``, on a CPU an iteration too, and warn if it takes long."""
        # ``worst`` are the seconds of all solves at a small epsilon, and ``seconds`` those of a
        # usual and a longer one.
        facts, most = self.facts, self.options.max_iter
        if worst is not None:
            self._foresee_sharp(worst)
        if facts.device != "cpu":
            return
        logger.info("forecast: %.2g s for an outer iteration, if nothing else runs", self.each)
        logger.info("forecast: %s", cost)
        if seconds is not None:
            promise(*seconds)
        if self.options.regularization == "proximal":
            logger.info("forecast: up to %.0f s of proximal steps", most * self.each)
        (fewest, usual), each = self.usual, self.iteration
        least = min(fewest, most) * each
        if least > LONG:
            unit, name = _unit(least)
            warn_user(
                f"This solve takes long: {facts.n:,} x {facts.m:,} points take about {each:.2g} s "
                f"for each outer iteration on this CPU, and usually {fewest} to {usual} of them: "
                f"{least / unit:.0f} to {min(usual, most) * each / unit:.0f} {name}. `callback` "
                "and `verbose=True` show progress; fewer points, `solve_low_rank` or a GPU are "
                "faster.",
                PerformanceWarning,
            )

    def _foresee_sharp(self, worst: float) -> None:
        """Say what a small epsilon may take: in the log, or as a warning where that is long."""
        facts, options = self.facts, self.options
        share, most = facts.epsilon / (facts.spread or 1.0), options.max_iter
        entry = 1e-12 * _RATES["cpu", torch.float64].exponential
        sharpest = slowness() * (_ITERATION + entry * facts.entries)
        if facts.device != "cpu":
            sharpest = _HOST_ITERATION
        text = (
            f"epsilon is {share:.1g} of the natural scale of the cost, so that linear problems may "
            f"take all of `inner_max_iter`: up to {worst:.0f} s in all; a larger epsilon and "
            "`polish=True` come to sharp plans sooner"
        )
        likely = min(most * options.inner_max_iter, _SHARPEST_ITERATIONS) * sharpest
        if share < _SHARPEST and likely > LONG:
            warn_user(f"{text[0].upper()}{text[1:]}.", PerformanceWarning)
        else:
            logger.info("forecast: %s", text)

    def say_again(self) -> None:
        """Say what solves from several starts will take on a CPU, and warn if that is long."""
        if self.facts.device != "cpu":
            return
        counts = [self.usual] * 2
        if self.options.rule is not None:
            # the other start is the plan of a whole solve with strict marginals
            counts.append(_USUAL)
        least, most = (
            sum(min(count, self.options.max_iter) for count in ends) * self.iteration
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

    def say_solves(self, count: float, why: str) -> None:
        """Say what so many solves, or a part of one, will take on a CPU."""
        if self.facts.device == "cpu" and count:
            say_more(count * self.mean * self.in_full, why)

    def correct_loop(self, search: Search | None, moves: Set[str], longer: float) -> None:
        """Correct what was said once a search has ended: some moves follow other starts."""
        found = search is not None and search.alternatives
        once = slowness() * _START + self.mean * self.in_full * (_FOUND if found else 1.0)
        others = self._others(search, moves, longer, once)
        if self.options.rule is not None and search is not None and search.compare:
            # the best match with strict marginals is searched, and solved from
            others += once + slowness() * (_FOLLOWED + _POINT * self.facts.larger)
        correct(once + others, "the search has ended")

    def correct_others(
        self,
        search: Search | None,
        moves: Set[str],
        longer: float,
        once: float,
        *,
        parts: bool,
        labels: int,
    ) -> None:
        """Correct what was said once a solve has ended, which has taken some seconds ``once``."""
        # Whether ``parts`` of its plan are looked at, and how many ends of labels are followed, is
        # known by then.
        others = self._others(search, moves, longer, once) + labels * once
        others += slowness() * _PARTS * parts
        if others:
            correct(others, "more is tried, which may end lower")

    def _others(self, search: Search | None, moves: Set[str], longer: float, once: float) -> float:
        """Model what moves take that follow other starts."""
        if search is None or self.options.rule is not None:
            return 0.0
        how = self.options.search
        whole, found = search.followed(how, moves)
        seconds = once * (whole / _FOUND + _FOUND * found)
        limits = limits_of(torch.device(self.facts.device))
        if search.thorough(how):
            # the search by default
            seconds += longer * limits.chains / limits.chains_of(how)
        return seconds

    def foresee(self, *, stored: bool) -> None:
        """Warn before any work that a limit of time cannot be held on this CPU."""
        facts = self.facts
        if facts.device == "cpu":
            what = f"a plan of {facts.n:,} x {facts.m:,} points and its numbers"
            foresee((_LEAST if stored else _STREAMED) * self.each, what)

    def correct_end(self) -> None:
        """Correct what was said once the loop has ended."""
        correct(_LEAST * self.each, "the plan has settled")

    def say_turns(self) -> None:
        """Say what all turns of the plane will take."""
        more = slowness() * _TURNS * self.facts.entries
        say_more(more, "points are laid on the others at many turns")


def _unit(seconds: float) -> tuple[int, str]:
    """Choose the unit in which a time is said."""
    return (60, "minutes") if seconds > 120 else (1, "seconds")
