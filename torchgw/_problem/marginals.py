"""Which marginals a plan must have: strict, held by a penalty, free, or bounds."""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgw._boundary.arrays import to_tensor
from torchgw._boundary.checks import both, is_number
from torchgw._errors import InvalidInputError, NumericalError
from torchgw._tensors.operations import EQUAL, LARGEST_LOGARITHM
from torchgw._typing import Marginals

# Penalty, over the natural scale, from which on marginals are taken as strict: it would let plans
# miss them by 1e-8, and errors within the tolerances would weigh more than the cost. [L1061]
STRICT = 1e8
# The first share of the mass that is tried where it is to be chosen, or not known, and the least.
# [L1386]
_FIRST, LEAST_SHARE = 0.5, 0.1


def is_assignment(marginals: Marginals) -> bool:
    """Whether there are as many points on both sides, all of one weight."""
    a, b = marginals
    return len(a) == len(b) and bool((a == a[0]).all()) and bool((b == b[0]).all())


def weigh_alike(marginals: Marginals) -> bool:
    """Tell the same up to rounding of the weights, so that matchings are nearly plans."""
    a, b = marginals
    return len(a) == len(b) and bool((torch.cat([a, b]) * len(a) - 1).abs().max() <= EQUAL)


@dataclass(frozen=True)
class MarginalRule:
    """Which marginals a plan must have; both are strict by default."""

    # Weight of KL(P1 x P1 | a x a), and of the same for the target. Infinity is a strict marginal,
    # zero a free one.
    rho: tuple[float, float] = (math.inf, math.inf)
    # Mass that a partial plan moves, with P1 <= a and P'1 <= b; None for other problems.
    mass: float | None = None
    # Whether that mass is only the first of many, of which the objective chooses.
    chosen: bool = False
    # Sums of the weights as they were given, where a penalty holds them; they are divided by these.
    totals: tuple[float, float] = (1.0, 1.0)
    # Whether the penalty of a side is |P1 x P1 - a x a|^2 / 2 in place of the divergence.
    squares: bool = False
    # Mass by which a linear cost is divided where the mass of the plan is part of the answer.
    held: float = 1.0

    @property
    def unit(self) -> float:
        """Mass that a linear cost is divided by, as the objective is by its square."""
        return self.held if self.mass is None else self.mass

    @property
    def fixed_mass(self) -> float | None:
        """Mass that every plan has; ``None`` where it is part of the answer."""
        if self.mass is not None:
            return self.mass
        return 1.0 if math.inf in self.rho else None

    @property
    def share(self) -> float:
        """Share of the mass that is sure to move; half where penalties alone decide."""
        return _FIRST if self.fixed_mass is None else self.fixed_mass

    @property
    def polyhedral(self) -> bool:
        """Whether plans are bounded by linear constraints, with no penalty."""
        return self.mass is not None or set(self.rho) == {0.0, math.inf}

    def tau(self, epsilon: float) -> tuple[float, float]:
        """Compute the factors of the half-steps, 2 rho / (2 rho + epsilon)."""
        source, target = (
            1.0 if math.isinf(rho) else 2 * rho / (2 * rho + epsilon) for rho in self.rho
        )
        return source, target

    def violation(self, masses: Marginals, weights: Marginals) -> float:
        """Measure how far masses miss strict marginals or exceed bounds: the larger L1 distance."""
        over = [mass - weight for mass, weight in zip(masses, weights, strict=True)]
        if self.mass is not None:
            return max(float(part.clamp_min(0).sum()) for part in over)
        return max(
            float(part.abs().sum()) if math.isinf(rho) else 0.0
            for part, rho in zip(over, self.rho, strict=True)
        )


def check_penalty(unbalanced_type: Any) -> str:
    """Read the option ``unbalanced_type``: 'kl' or 'l2'."""
    kind = str(unbalanced_type).lower()
    if kind not in ("kl", "l2"):
        raise InvalidInputError(
            f"`unbalanced_type` must be 'kl' or 'l2', the penalty of `unbalanced`; got "
            f"{unbalanced_type!r}. A free marginal is unbalanced=(inf, 0), a partial plan mass=."
        )
    return kind


def check_marginal_rule(
    unbalanced: Any, mass: Any, unbalanced_type: Any = "kl"
) -> MarginalRule | None:
    """Read the options ``unbalanced`` and ``mass``; ``None`` for strict marginals."""
    kind = check_penalty(unbalanced_type)
    if kind == "l2" and unbalanced is None:
        raise InvalidInputError(
            "`unbalanced_type='l2'` is how `unbalanced` is measured: pass its weight as well."
        )
    if mass is not None:
        if unbalanced is not None:
            raise InvalidInputError(
                "`unbalanced` relaxes marginals by a penalty and `mass` by a bound. Pass one of "
                "them."
            )
        if isinstance(mass, str) and mass == "auto":
            return MarginalRule(mass=_FIRST, chosen=True)
        if not is_number(mass) or not 0 < mass <= 1:
            raise InvalidInputError(
                "`mass` must be the share of the mass that a partial plan moves, in (0, 1], or "
                f"'auto'; got {mass!r}."
            )
        return MarginalRule(mass=float(mass)) if mass < 1 else None
    if unbalanced is None:
        return None
    pair = both(unbalanced)
    if len(pair) != 2 or not all(is_number(rho) and rho >= 0 for rho in pair):
        raise InvalidInputError(
            "`unbalanced` must be None, a weight rho of the marginals' divergence, or a pair "
            f"(rho_a, rho_b), each between 0 (free) and inf (strict); got {unbalanced!r}."
        )
    if pair == (0, 0):
        raise InvalidInputError(
            "`unbalanced=0` frees both marginals, and nothing would hold any mass. Make one weight "
            "positive, as in (inf, 0)."
        )
    rho = float(pair[0]), float(pair[1])
    if rho == (math.inf, math.inf):
        return None
    # a free side has no penalty
    return MarginalRule(rho, squares=kind == "l2" and set(rho) != {0.0, math.inf})


def divide_by_totals(
    a: Any, b: Any, rule: MarginalRule | None
) -> tuple[Any, Any, MarginalRule | None]:
    """Divide the weights of sides that a penalty holds by their sums, which the rule keeps."""
    if rule is None or rule.mass is not None:
        return a, b, rule
    given, totals = [a, b], [1.0, 1.0]
    for side, (name, rho) in enumerate(zip("ab", rule.rho, strict=True)):
        if math.isinf(rho) or given[side] is None:
            continue
        weights = to_tensor(name, given[side]).double()
        total = float(weights.sum())
        # other sums are refused later, when the weights are read
        if 0 < total < math.inf and bool((weights >= 0).all()):
            if not is_usable_sum(total):
                raise InvalidInputError(
                    f"`{name}` has a sum of {total:.3g}, and the squares of such masses are no "
                    "numbers of float64. Divide the weights of both sides by one number."
                )
            given[side], totals[side] = weights / total, total
    return given[0], given[1], replace(rule, totals=(totals[0], totals[1]))


def is_usable_sum(total: float) -> bool:
    """Whether products of two squares of sums like this one are numbers of float64."""
    # the product of two squares has to be a number too
    return 0 < total < math.inf and 2 * abs(math.log(total)) <= LARGEST_LOGARITHM


class ObjectiveTerms(NamedTuple):
    """Terms of the objective of a plan of mass one."""

    value: float  # alpha <L(P), P> (+ (1 - alpha) <M, P>)
    source: float  # sum p log(p / a)
    target: float  # sum q log(q / b)
    whole: float  # sum P log(P / (a x b))


def best_mass(
    terms: ObjectiveTerms, rule: MarginalRule, epsilon: float, linear: float = 0.0
) -> float:
    """Find the mass of least objective along multiples of a plan, exp(-B / 2R) (equation 16)."""
    # The same formula holds for a linear objective, whose penalties are 2 rho KL(P1 | a). `linear`
    # is the cost that grows with the mass and not with its square: a mass t of least objective has
    # B + linear / 2t + 2R log t = 0. A mass of zero, where that cost weighs most, is not looked
    # for.
    if rule.fixed_mass is not None:
        return rule.fixed_mass
    source, target = rule.rho
    first, second = map(math.log, rule.totals)
    slope = terms.value + 2 * source * (terms.source - first) + 2 * target * (terms.target - second)
    slope += epsilon * (terms.whole - first - second)
    pull = 2 * (source + target + epsilon / 2)
    if linear == 0 or not math.isfinite(slope + linear):
        return _exp(-slope / pull)

    def rest(logarithm: float) -> float:
        return slope + linear / 2 * math.exp(-logarithm) + pull * logarithm

    # the function rises to the right of this point, its last minimum (or where there is no linear
    # cost)
    low = math.log(linear / (2 * pull)) if linear > 0 else -slope / pull
    if rest(low) > 0:
        raise NumericalError(
            "Nothing is moved here: the linear cost grows with the mass of a plan and weighs more "
            "than what the penalties gain. Raise `unbalanced`, or `alpha`, or subtract a constant "
            "from the linear cost."
        )
    high = low + 1
    while rest(high) < 0:
        high += high - low
    from scipy.optimize import brentq  # SciPy takes long to import

    return _exp(brentq(rest, low, high, xtol=1e-15))


def _exp(logarithm: float) -> float:
    """Compute a mass from its logarithm; refuse one whose square would overflow."""
    if abs(logarithm) > LARGEST_LOGARITHM:
        many = "more and more" if logarithm > 0 else "nothing"
        raise NumericalError(
            f"A plan of least objective moves {many} here, as its cost outweighs the penalties: "
            f"a mass of e^{logarithm:.3g}. Raise `unbalanced`, or bring the costs nearer to zero."
        )
    return math.exp(logarithm)


def relative_entropy(masses: Tensor, weights: Tensor) -> float:
    """Compute sum p log(p / a), for masses p, of the same sum, that are zero wherever a is."""
    # -p + a has the sum zero, and is added: what is left where p is nearly a is precise, and a
    # large rho multiplies it
    change = (masses - weights) / weights.clamp_min(torch.finfo(weights.dtype).tiny)
    return float((weights * (torch.special.xlog1py(1 + change, change) - change)).sum())


def divergence(entropy: float, mass: float, total: float = 1.0) -> float:
    """Compute KL(mu | nu) for mu = mass * p, nu = total * a, from KL(p | a)."""
    return mass * (entropy + math.log(mass / total)) - mass + total


def quadratic_divergence(entropy: float, mass: float, total: float = 1.0) -> float:
    """Compute KL(mu x mu | nu x nu), mu = mass p, nu = total a, from KL(p | a) (equation 14)."""
    change = (mass - total) * (mass + total) / total**2
    growth = (1 + change) * math.log1p(change) if change > -1 else 0.0
    return 2 * mass**2 * entropy + total**2 * (growth - change)
