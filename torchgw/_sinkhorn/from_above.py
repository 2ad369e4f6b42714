"""Where else a linear problem may begin if its error stays: exact prices, or larger epsilons."""

import math
from collections.abc import Callable
from typing import Protocol

import torch

from torchgw._errors import NumericalError
from torchgw._sinkhorn.contract import PreparedProblem
from torchgw._sinkhorn.exact import by_scipy
from torchgw._sinkhorn.newton import is_small
from torchgw._typing import Potentials

# An error stays if a sweep changes it by less than this share; it counts only above this multiple
# of the tolerance, which excludes what is left at the end. [L453]
_STAYS, _ABOVE = 0.02, 10
# An error has to stay for so many iterations before a larger epsilon is tried: the linear problems
# of most outer iterations end earlier. [L471]
_PATIENCE = 100
# How epsilon rises and falls then: in how many iterations up and down, and the error at which it
# falls. [L471]
_RISING, _FALLING, _FALLS = 50, 400, 1e-4
# So many iterations have to be left for that; the largest epsilon, as a multiple of the one asked
# for. [L471]
_ROOM, _HIGHEST = 300, 1e9
# Entries up to which a problem without entropy is solved in the time of some thousand iterations.
# [L1334]
_MOST_EXACT = 2**14


class Found(Protocol):
    """What a linear problem at a larger epsilon comes to."""

    @property
    def potentials(self) -> Potentials: ...
    @property
    def error(self) -> float: ...
    @property
    def n_iters(self) -> int: ...
    @property
    def converged(self) -> bool: ...


class Plateau:
    """Whether the error of a linear problem has stayed for long enough to begin elsewhere."""

    # While a point has yet to change partners the error stays, and each sweep moves the potentials
    # by a multiple of epsilon. Problems begin elsewhere once, or twice if from exact prices first.

    def __init__(self, tol: float, *, wanted: bool) -> None:
        self._tol, self._wanted, self._stayed = tol, wanted, 0

    def reached(self, before: float, error: float, count: int, most: int) -> bool:
        """Learn of the error after ``count`` iterations, where at most ``most`` are left."""
        stays = abs(error - before) <= _STAYS * error and error > _ABOVE * self._tol
        self._stayed = self._stayed + count if stays else 0
        found = self._wanted and self._stayed >= _PATIENCE and most >= _ROOM
        self._wanted = self._wanted and not found
        return found

    def again(self) -> None:
        """Let the error stay once more."""
        self._wanted, self._stayed = True, 0


def exact_prices(prepared: PreparedProblem) -> Potentials | None:
    """Solve a small problem without entropy, whose prices are near the potentials at small epsilon.

    ``None`` if it is not small, or cannot be solved.
    """
    a, b = (weights.cpu() for weights in prepared.problem.marginals)
    if not is_small(prepared) or len(a) * len(b) > _MOST_EXACT:
        return None
    rows, columns = a > 0, b > 0
    cost = prepared.problem.cost.dense().matrix.cpu()[rows][:, columns]
    try:
        found = by_scipy(a[rows].numpy(), b[columns].numpy(), cost.numpy())
    except NumericalError:
        return None
    g = torch.zeros_like(b)
    g[columns] = torch.from_numpy(found.v).to(g)
    return prepared.half_steps(g.to(prepared.problem.marginals.b.device))


def from_larger_epsilon(
    prepared: PreparedProblem,
    start: Potentials,
    most: int,
    solve: Callable[[PreparedProblem, Potentials, int, float], Found],
    factor: float,
) -> tuple[Potentials, int]:
    """Let epsilon rise until a problem is solved at once, and fall again; count iterations."""
    # Where epsilon is large points change partners soon, and nearly for those of the next problem:
    # B. Schmitzer. Stabilized sparse scaling algorithms for entropy regularized transport problems.
    # SIAM Journal on Scientific Computing 2019. ``solve`` is given a budget and a tolerance.
    problem, used = prepared.problem, 0
    level, falling = 1, False
    while level > 0:
        above = factor**level
        # the penalty of a marginal, from which tau follows, is the same at every epsilon
        tau = (part / (part + (1 - part) * above) for part in problem.tau)
        at = problem._replace(epsilon=above * problem.epsilon, tau=(next(tau), next(tau)))
        budget = min(_FALLING if falling else _RISING, most - used)
        if budget <= 0:
            break
        found = solve(prepared.backend.prepare(at), start, budget, _FALLS)
        if not math.isfinite(found.error):
            break
        start, used = found.potentials, used + found.n_iters
        falling = falling or found.converged or above >= _HIGHEST
        level += -1 if falling else 1
    return start, used
