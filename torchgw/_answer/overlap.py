"""``mass="auto"``: the share of the mass that matches, where the cost of more leaves its level.

Plans that move more and more mass are solved, each from its neighbour's. As long as there are
points left whose distances agree, the next part of the mass adds pairs that cost what the pairs
before them do; beyond the overlap they cost more by far. The share that is chosen is where the
logarithm of the added cost, which two straight lines describe, breaks. What is added is compared at
one epsilon over the share, of the first; the answer has the epsilon of its own share.
"""

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from torchgw._answer.passes import solve_problem
from torchgw._problem.limits import limits_of
from torchgw._problem.problem import MarginalRule
from torchgw._problem.support import most_mass, usable
from torchgw._solve.pipeline import Asked, Outcome, Overlap
from torchgw._solve.state import Recorder
from torchgw._starts.alternatives import WHY_NO_ELBOW, WHY_TIME, Search
from torchgw._starts.chain import BETTER
from torchgw._tensors.deadline import is_over

# Shares of the mass that are tried. [L1386]
SHARES = tuple(k / 20 for k in range(2, 21))
# Costs that differ by no more than this factor are on one level: all of the mass matches. [L1386]
_FLAT = 4.0
# What two lines leave of the logarithm at least. [L1386]
_EXACT = 0.01
# Costs below this share of the largest are no different from it: logarithms of nothing. [L1386]
_LEAST = 1e-4


def solve_overlap(asked: Asked, recorder: Recorder) -> Outcome:
    """Solve for the share of the mass that matches."""
    rule, ends = asked.options.rule, dict[float, Outcome]()
    assert rule is not None
    assert rule.mass is not None
    support, shares = asked.problem.support, SHARES
    if support is not None:
        # what is allowed may leave no plan that moves more
        most = most_mass(support, asked.problem.marginals)
        shares = tuple(share for share in SHARES if share <= most)
    level: float | None = None
    # a search begins at the mass of the rule and at all of it; and, where these lead to no clear
    # break, at half of the first: of more than the overlap another part may match as well [L1865]
    begun, clear = min(rule.mass, shares[-1]), limits_of(asked.problem.source.device).clear_break
    half = next(share for share in shares if share >= begun / 2)
    for first in dict.fromkeys((begun, shares[-1], half)):
        if ends and is_over():
            break
        if first < begun and _elbow(ends, asked.problem.alpha).contrast >= clear:
            break
        # a plan to begin with is one of the mass that is tried first
        question = asked if first == begun else asked._replace(init=None)
        _take(ends, first, solve_problem(_moving(question, first, level), Recorder()))
        if level is None and asked.options.epsilon == "auto":
            level = ends[first].strategy.epsilon
        below = [share for share in reversed(shares) if share < first]
        for path in (below, [share for share in shares if share > first]):
            near = ends[first]
            for share in path:
                if is_over():
                    break
                near, known = _from_neighbour(_moving(asked, share, level), near), ends.get(share)
                same = _take(ends, share, near)
                # from here on both paths are one, or one adds more and more that does not match
                if same or (share > first and ends[share] is known):
                    break
    found = _elbow(ends, asked.problem.alpha)
    best = ends[found.chosen]
    if level is not None and not is_over():
        best = _from_neighbour(_moving(asked, found.chosen), best)
    recorder.history, recorder.timings = best.recorder.history, best.recorder.timings
    doubt = ""
    if len(ends) < len(shares):
        doubt = WHY_TIME
    elif found.contrast < clear:
        doubt = WHY_NO_ELBOW.format(share=found.chosen)
    if doubt:
        search = best.search or Search((), math.nan)
        best = best._replace(search=search._replace(doubt=doubt))
    return best._replace(recorder=recorder, overlap=found)


def _moving(asked: Asked, share: float, level: float | None = None) -> Asked:
    """Ask for a plan that moves a share of the mass, at an epsilon over the share if one is set."""
    rule, problem = MarginalRule(mass=share, chosen=True) if share < 1 else None, asked.problem
    if rule is None and problem.support is not None:
        problem = replace(problem, support=usable(problem.support, problem.marginals, None))
    epsilon = asked.options.epsilon if level is None else level * share
    options = replace(asked.options, rule=rule, epsilon=epsilon)
    return asked._replace(problem=problem, options=options)


def _from_neighbour(asked: Asked, near: Outcome) -> Outcome:
    """Solve for a share from the plan of another one."""
    return solve_problem(asked.again(near.plan), Recorder())._replace(search=near.search)


def _take(ends: dict[float, Outcome], share: float, found: Outcome) -> bool:
    """Keep the lower one of two ends of a share; return whether they are the same."""
    before = ends.setdefault(share, found)
    here, there = found.objective, before.objective
    if here < there:
        ends[share] = found
    return before is not found and abs(here - there) <= BETTER * abs(there)


def _elbow(ends: dict[float, Outcome], alpha: float) -> Overlap:
    """Choose the share, by what each adds to the one before it."""
    shares = np.array(sorted(ends))
    found = [ends[share].ending.evaluation for share in shares]
    # a part of a plan of more mass is a plan too, whose pairs and points cost the same
    pairs = np.array([alpha * one.quadratic.value for one in found]) / shares**2
    points = (1 - alpha) * np.array([one.linear for one in found]) / shares
    costs = [pairs[k:] * share**2 + points[k:] * share for k, share in enumerate(shares)]
    lowest = [k + int(cost.argmin()) for k, cost in enumerate(costs)]
    added = np.diff(pairs[lowest] * shares**2, prepend=0) / np.diff(shares**2, prepend=0)
    added += np.diff(points[lowest] * shares, prepend=0) / np.diff(shares, prepend=0)
    place, step, contrast = elbow(shares, added)
    parts = tuple(shares.tolist()), tuple(added.tolist())
    return Overlap(*parts, float(shares[place]), step, contrast)


def elbow(shares: NDArray[np.float64], added: NDArray[np.float64]) -> tuple[int, float, float]:
    """Find the last share before the added cost leaves its level; tell how far it rises there."""
    # That is by how many times, and how clearly. If the cost stays on its level it is the last
    # share.
    logs = np.log(np.maximum(added, _LEAST * max(added.max(), np.finfo(float).tiny)))
    last = len(shares) - 1
    if logs.max() - logs.min() <= math.log(_FLAT):
        return last, 1.0, math.inf
    best, place, rise = math.inf, last, 0.0
    for count in range(1, last + 1):
        (before, left), (after, right) = (
            _line(shares[part], logs[part], shares[count])
            for part in (slice(count), slice(count, None))
        )
        # no level is left where costs fall
        if after > before and left + right < best:
            best, place, rise = left + right, count - 1, after - before
    spread = max(_EXACT, math.sqrt(best / max(1, len(shares) - 4)))
    return place, math.exp(rise), rise / spread


def _line(x: NDArray[np.float64], y: NDArray[np.float64], at: float) -> tuple[float, float]:
    """Fit a line; return its value at a place, and the sum of squares that it leaves."""
    slope = float(np.polyfit(x, y, 1)[0]) if len(x) > 1 else 0.0
    middle = float(y.mean() - slope * x.mean())
    return middle + slope * at, float(((y - middle - slope * x) ** 2).sum())
