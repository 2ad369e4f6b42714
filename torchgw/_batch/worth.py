"""What plans of many problems are worth, when their outer loops stop, and how they end."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgw._batch.packing import squares_at
from torchgw._batch.sweep import Relaxed, Settled
from torchgw._sinkhorn import annealing
from torchgw._tensors.operations import few_on, sums_along, weighted

# How a problem ends: names of the status, as codes.
ENDINGS = (
    "CONVERGED", "FLAT", "OUTER_LIMIT", "INNER_LIMIT", "BOTH_LIMITS", "IMPLAUSIBLE",
)  # fmt: skip
CONVERGED, FLAT, OUTER, INNER, BOTH, IMPLAUSIBLE = range(len(ENDINGS))


class Rules(NamedTuple):
    """When problems end; the options of a single solve."""

    max_iter: int = 500
    tol: float = 1e-5
    objective_tol: float = 1e-4
    inner_max_iter: int = 2000
    inner_tol: float = 5e-7

    def within(self, max_iter: int, inner_max_iter: int) -> Rules:
        """Allow at most so many outer and inner iterations."""
        most = min(max_iter, self.max_iter), min(inner_max_iter, self.inner_max_iter)
        return self._replace(max_iter=most[0], inner_max_iter=most[1])


class Descent:
    """Objectives that no longer fall: the rule of ``_solve/loop.py``, for many problems."""

    # Every tensor has a row for each problem.

    def __init__(self, count: int, like: Tensor) -> None:
        self.values = like.new_full((count, annealing.WINDOW + 1), torch.inf)  # the newest last
        self.changes = like.new_full((count, annealing.SETTLING_WINDOW), torch.inf)
        self.earlier = like.new_full((count,), torch.inf)  # least change of all iterations before

    def parts(self) -> tuple[Tensor, ...]:
        """List the tensors, which move when their problems do."""
        return self.values, self.changes, self.earlier

    def update(self, rows: Any, value: Any, change: Any, met: Any, tol: float) -> Any:
        """Take an iteration of some problems; say which of them no longer fall, (k,) bool."""
        # Plans whose marginals are not `met` are not compared: their objective may be anything.
        library, as_array, _ = few_on(self.earlier.device)
        known, moved, least = map(as_array, self.parts())
        earlier = library.minimum(least[rows], moved[rows, 0])
        changes = library.concatenate([moved[rows, 1:], change[:, None]], 1)
        values = library.concatenate([known[rows, 1:], value[:, None]], 1)
        values = library.where(met[:, None], values, math.inf)
        least[rows], moved[rows], known[rows] = earlier, changes, values
        fall = (values[:, 0] - value) / annealing.WINDOW
        settling = library.amin(changes, 1) <= annealing.SETTLING * earlier
        # from a value that is not known yet the fall is infinite
        return (fall <= tol * abs(value)) & ~settling


class Terms(NamedTuple):
    """What plans are worth, (k,) each."""

    quadratic: Tensor  # alpha <L(P), P>
    linear: Tensor  # (1 - alpha) <M, P>
    squares: Tensor  # sums of squares whose difference the quadratic term is

    @classmethod
    def of(
        cls, x: Tensor, y: Tensor, masses: tuple[Tensor, Tensor], crossed: Tensor, alpha: Tensor
    ) -> Terms:
        """Evaluate plans of some masses, given <X P Y, P>, without linear costs."""
        own = own_squares(x, masses[0]) + own_squares(y, masses[1])
        return cls.of_sums(alpha, crossed, torch.zeros_like(alpha), own)

    @classmethod
    def of_sums(cls, alpha: Tensor, crossed: Tensor, linear: Tensor, own: Tensor) -> Terms:
        """Evaluate plans by <X P Y, P>, linear terms, and sums of D_ij^2 over their masses."""
        return cls(alpha * own - 2 * alpha * crossed, linear, alpha * own)

    def of_mass(self, relaxed: Relaxed, mass: Tensor) -> Terms:
        """Multiply those of normalised plans by the masses of these."""
        square = mass.square()
        # a linear cost is divided by the mass where that is given
        linear = square if relaxed.mass is not None else mass
        return Terms(square * self.quadratic, linear * self.linear, square * self.squares)


def own_squares(table: Tensor, mass: Tensor) -> Tensor:
    """Compute sum_ij D_ij^2 p_i p_j."""
    return sums_along(squares_at(table, mass) * mass)


def mean_of(table: Tensor, mass: Tensor) -> Tensor:
    """Compute sum_ij D_ij p_i p_j."""
    return sums_along(weighted(mass, table.mT) * mass)


def of_mass(
    relaxed: Relaxed,
    best: Settled,
    both: tuple[Terms, Terms],
    plan: Tensor,
    f: Tensor,
    unit: Tensor,
) -> tuple[tuple[Terms, Terms], Tensor, Tensor, Tensor]:
    """Multiply terms, normalised plans, potentials f and epsilons by the masses of the plans."""
    (terms, product), mass = both, best.mass
    terms = terms.of_mass(relaxed, mass)
    # a relaxed plan may be worth more than a x b: its penalty is less
    product = product._replace(quadratic=torch.full_like(mass, math.inf))
    f = f + (unit * mass.log())[:, None]
    unit = unit if relaxed.mass is None else unit * mass
    return (terms, product), mass[:, None, None] * plan, f, unit


class Found(NamedTuple):
    """Numbers of problems that have ended, by their kind."""

    numbers: Tensor  # (5, k) float64
    counts: Tensor  # (3, k) int64


class Ended(NamedTuple):
    """Plans of some problems that have ended."""

    number: Tensor  # (k,) int64, which problems
    plan: Tensor  # (k, n, m)
    f: Tensor  # (k, n) potentials of its cost, without terms of rows and columns alone
    g: Tensor  # (k, m)
    objective: Tensor  # (k,)


class Finish(NamedTuple):
    """How the iterations of some problems have ended, (k,) each."""

    error: Tensor  # of their last linear problems
    ending: Tensor  # places in ENDINGS
    solved: Tensor  # whether their last linear problems are
    done: Tensor  # outer iterations
    inner: Tensor  # Sinkhorn iterations


def found_numbers(
    both: tuple[Terms, Terms],
    missing: Tensor,
    objective: Tensor,
    epsilon: Tensor,
    finish: Finish,
    rules: Rules,
) -> Found:
    """Compare plans that have ended with a x b; ``missing`` is what their marginals lack."""
    terms, product = both
    ended = _judge(finish.ending, finish.solved, missing, terms, product, rules)
    ended = torch.where(finish.error.isfinite(), ended, INNER)
    numbers = torch.stack([terms.quadratic, terms.linear, objective, missing, epsilon])
    return Found(numbers, torch.stack([ended, finish.done, finish.inner]))


def meets(missing: Tensor, rules: Rules) -> Tensor:
    """Tell which plans lack no more of their marginals than plans that have converged may."""
    return missing <= annealing.CONTRADICTION * rules.inner_tol


def _judge(
    ending: Tensor, solved: Tensor, missing: Tensor, found: Terms, product: Terms, rules: Rules
) -> Tensor:
    """Choose how problems end: by missed marginals, or a value above that of a x b."""
    ending = torch.where(solved, ending, torch.where(ending == OUTER, BOTH, INNER))
    converged = ending <= FLAT
    ending = torch.where(converged & ~meets(missing, rules), INNER, ending)
    slack = (annealing.VALUE_ROUNDING + annealing.VALUE_PER_MARGINAL * missing) * product.squares
    value = found.quadratic + found.linear
    most = product.quadratic + product.linear
    most = most + slack + annealing.VALUE_ROUNDING * product.linear.abs()
    bad = (found.quadratic < -slack) | (value > most)
    return torch.where((ending <= FLAT) & bad, IMPLAUSIBLE, ending)
