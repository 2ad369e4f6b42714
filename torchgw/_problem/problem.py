"""A problem: which marginals plans must have, its linear cost, what is known before a solve."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import scipy
import torch
from torch import Tensor

from torchgw._boundary.arrays import SAME_DISTANCE, check_linear_cost, check_points, to_tensor
from torchgw._boundary.checks import both, check_choice, is_number, number_of
from torchgw._errors import InvalidInputError, NumericalError, UnsupportedError
from torchgw._problem import losses
from torchgw._problem.limits import limits_of
from torchgw._sinkhorn.blocks import Restriction
from torchgw._sinkhorn.problem import Cost, DenseCost, FactoredCost
from torchgw._tensors.machine import known_free
from torchgw._tensors.operations import EQUAL, LARGEST_LOGARITHM, straight
from torchgw._typing import Marginals
from torchgw.distances.base import DistanceProvider, both_ways
from torchgw.distances.factored import FactoredDistance
from torchgw.distances.points import ANGLES, PointDistance

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


FeatureMetric = Literal["sqeuclidean", "cosine", "correlation", "euclidean"]

# Signatures of nodes have variance one, adjacency matrices 0.01 to 0.02: at this weight both count
# alike. [L339]
_NAMED_ALPHA = 0.99


def check_feature_metric(features: Any, metric: FeatureMetric) -> None:
    """Refuse an unknown metric, and one that measures nothing."""
    check_choice("feature_metric", metric, get_args(FeatureMetric))
    if features is None and metric != "sqeuclidean":
        raise InvalidInputError(
            f"`feature_metric={metric!r}` was given without `features`. Pass both, or drop it."
        )


def check_features(value: Any, metric: FeatureMetric) -> tuple[Tensor, Tensor] | None:
    """Check a pair of features, (n, d) and (m, d), if any were given."""
    check_feature_metric(value, metric)
    if value is None:
        return None
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise InvalidInputError(
            "`features` must be a pair (F_X, F_Y) of shapes (n, d) and (m, d), or, for graphs, a "
            f"name such as 'degree'; got {type(value).__name__}."
        )
    source, target = (check_points(f"features[{side}]", item) for side, item in enumerate(value))
    if source.shape[1] != target.shape[1]:
        raise InvalidInputError(
            "`features` must have the same columns on both sides; got "
            f"{tuple(source.shape)} and {tuple(target.shape)}."
        )
    for side, item in enumerate((source, target)):
        first = item[:, :1] if metric == "correlation" else torch.zeros_like(item[:, :1])
        if metric in ANGLES and bool((item == first).all(1).any()):
            what = "zero" if metric == "cosine" else "constant"
            raise InvalidInputError(
                f"`features[{side}]` has a {what} row, which has no direction. Drop it, or pass "
                "feature_metric='sqeuclidean'."
            )
    return source, target


def is_fused(table: Any, features: tuple[Tensor, Tensor] | None) -> bool:
    """Say whether there is a linear cost; refuse two."""
    if table is not None and features is not None:
        raise InvalidInputError(
            "`M` and `features` are two ways to give one linear cost. Pass one of them."
        )
    return table is not None or features is not None


def linear_cost(
    table: Any,
    features: tuple[Tensor, Tensor] | None,
    metric: FeatureMetric,
    shape: tuple[int, int],
    device: torch.device,
) -> Cost | None:
    """Make M, shape (n, m), float64, from what was given; ``None`` if nothing was."""
    if table is not None:
        return DenseCost(check_linear_cost(table, shape).to(device).double())
    if features is None:
        return None
    rows = len(features[0]), len(features[1])
    if rows != shape:
        raise InvalidInputError(
            f"`features` must have one row per point, {shape[0]} and {shape[1]}; got {rows[0]} and "
            f"{rows[1]}."
        )
    source, target = (item.to(device).double() for item in features)
    if metric == "euclidean" and not limits_of(device).stores(*shape):
        raise UnsupportedError(
            f"feature_metric='euclidean' would store {shape[0]} x {shape[1]} distances, which is "
            "too many. Pass 'sqeuclidean' or 'cosine', which have factors and store none."
        )
    return feature_cost(source, target, metric)


def feature_cost(source: Tensor, target: Tensor, metric: FeatureMetric) -> Cost:
    """Compute distances between features, (n, d) and (m, d): factors, a table for "euclidean"."""
    if metric == "euclidean":
        # differentiable too, with derivative zero where two features coincide
        return DenseCost(straight(source, target))
    if metric == "correlation":
        source, target = (item - item.mean(1, keepdim=True) for item in (source, target))
    if metric in ANGLES:
        left, right = (item / item.norm(dim=1, keepdim=True) for item in (source, target))
        return FactoredCost(left, right, left.new_ones(len(left)), right.new_zeros(len(right)))
    # distances do not depend on the origin; numbers near it are small, and lose fewer digits
    middle = (source.mean(0) + target.mean(0)) / 2
    source, target = source - middle, target - middle
    return FactoredCost(2 * source, target, source.square().sum(1), target.square().sum(1))


def without_structure(
    table: Any, features: tuple[Tensor, Tensor] | None
) -> tuple[FactoredDistance, FactoredDistance]:
    """Make spaces for ``alpha=0``: as many points as the linear cost has, all at distance zero."""
    if features is not None:
        shape: tuple[int, ...] = len(features[0]), len(features[1])
    else:
        shape = () if table is None else tuple(to_tensor("M", table).shape)
    if len(shape) != 2:
        raise InvalidInputError(
            "`alpha=0` needs a linear cost: `M` of shape (n, m), or `features=(F_X, F_Y)`."
        )
    one = torch.ones(1, dtype=torch.float64, device="cpu")
    source, target = (FactoredDistance(one.new_zeros(size, 1), one) for size in shape)
    return source, target


def spread(cost: Cost, support: Tensor | None = None) -> float:
    """Compute the standard deviation of the entries of a cost on a support, all counted alike."""
    if support is not None:
        return float(cost.dense().matrix[support].std(correction=0))
    if isinstance(cost, DenseCost):
        return float(cost.matrix.std(correction=0))
    left, right, row, column = cost.centred()
    # centred rows, columns and products are uncorrelated
    products = ((left.T @ left) * (right.T @ right)).sum() / (len(left) * len(right))
    variance = row.var(correction=0) + column.var(correction=0) + products
    return float(variance.clamp_min(0).sqrt())


def check_alpha(
    alpha: float | Tensor | None, *, fused: bool, named: bool = False, tracked: bool = False
) -> float:
    """Choose the weight of the quadratic term: as given, or 1, or less with a linear cost."""
    # With a linear cost it is 0.5, or 0.99 with signatures that were asked for by name. Tensors
    # that require gradients are refused unless `tracked`.
    if alpha is None:
        return 1.0 if not fused else _NAMED_ALPHA if named else 0.5
    alpha = number_of("alpha", alpha, tracked=tracked)
    if not is_number(alpha) or not 0 <= alpha <= 1:
        raise InvalidInputError(f"`alpha` must be a number in [0, 1]; got {alpha!r}.")
    if alpha < 1 and not fused:
        raise InvalidInputError(
            f"`alpha={alpha}` weighs a linear cost, and none was given. Pass `M` or `features`, "
            "or drop `alpha`."
        )
    return float(alpha)


# What a search pays for mass that is not allowed, over the natural scale of the cost; and the
# weight of the quadratic term where there is no other, which changes objectives by less than they
# are compared to. [L1373]
PRICE, _ALMOST_ONE = 32.0, 1 - 2.0**-20


@dataclass(frozen=True)
class Problem:
    """What is asked: two metric spaces with weights, how they are compared, and a linear cost."""

    source: DistanceProvider  # (n, n)
    target: DistanceProvider  # (m, m)
    marginals: Marginals  # float64
    alpha: float  # weight of the quadratic term; 1 is pure Gromov-Wasserstein
    linear: Cost | None  # (n, m) linear cost M, stored or in factors
    loss: losses.Loss = losses.SQUARE
    # (n, m) bool, the pairs that may hold mass; None: all. Such a problem has a linear cost, if
    # only of zeros: nothing that is true of distances alone is true of it.
    support: Tensor | None = None
    # the same as groups that do not mix, or as a list, where a table would be too large
    restriction: Restriction | None = None

    def __post_init__(self) -> None:
        """Give a problem on a support its linear cost."""
        if self.support is not None and self.linear is None:
            zeros = torch.zeros(self.support.shape, dtype=self.dtype, device=self.support.device)
            object.__setattr__(self, "linear", DenseCost(zeros))
        if self.restriction is not None and self.linear is None:
            a, b = (weight.to(self.dtype) for weight in self.marginals)
            nothing = FactoredCost.of_products(a.new_zeros(len(a), 0), b.new_zeros(len(b), 0))
            object.__setattr__(self, "linear", nothing)

    def to(self, dtype: torch.dtype) -> "Problem":
        """Convert the distances and the linear cost to another dtype."""
        return replace(
            self,
            source=self.source.to(self.source.device, dtype),
            target=self.target.to(self.target.device, dtype),
            linear=None if self.linear is None else self.linear.to(dtype),
        )

    def crossed(self) -> tuple[DistanceProvider, DistanceProvider] | None:
        """Pair the functions of the distances whose product the cross term is, if it is one."""
        return self.loss.crossed(self.source, self.target)

    def cross(self) -> losses.Cross:
        """Make the cross term of stored distances, the mean over all ways of directed ones."""
        crossed = self.crossed()
        if crossed is not None and not all(side.directed for side in crossed):
            # a symmetric side sees the mean of the other over both directions
            return losses.ProductCross(*map(stored_matrix, crossed))
        ways = [tuple(map(stored_matrix, way)) for way in both_ways(*(crossed or self.sides))]
        if crossed is None:
            return losses.mean_of([losses.MinimumCross(*way) for way in ways])
        return losses.mean_of([losses.ProductCross(x, y.T) for x, y in ways])

    def priced(self, scale: float) -> "Problem":
        """Write the support, for a search, as a linear cost that nothing else outweighs."""
        # Starts and moves then keep to it wherever they can, also of few points that stand for
        # others, whose masses may leave no choice. ``scale`` is the natural scale of the cost.
        if self.support is None:
            return self
        assert self.linear is not None
        # a linear cost of weight zero would have no price
        alpha = min(self.alpha, _ALMOST_ONE)
        table = self.linear.dense().matrix * (self.alpha < 1)
        table = table.masked_fill(~self.support, PRICE * scale / (1 - alpha) + float(table.max()))
        return replace(self, alpha=alpha, linear=DenseCost(table))

    @property
    def sides(self) -> tuple[DistanceProvider, DistanceProvider]:
        """The distances of both sides."""
        return self.source, self.target

    @property
    def shape(self) -> tuple[int, int]:
        """Points of both sides."""
        return self.source.n, self.target.n

    @property
    def plain(self) -> bool:
        """Whether the loss is the square of differences of costs that have no direction."""
        return self.loss.is_square and not self.directed

    @property
    def directed(self) -> bool:
        """Whether costs of either side differ with the direction, or are of several relations."""
        return self.source.directed or self.target.directed

    @cached_property
    def has_one_plan(self) -> bool:
        """Whether strict marginals leave one plan: no mass can go round, as there is no cycle."""
        # The difference of two plans has sums of zero, so each of its entries lies on a cycle.
        if self.support is None:
            return False
        rows, columns = (weight > 0 for weight in self.marginals)
        used = self.support[rows][:, columns]
        if int(used.sum()) >= sum(used.shape):
            return False
        table = scipy.sparse.csr_array(used.cpu().numpy())
        both = scipy.sparse.block_array([[None, table], [table.T, None]])
        parts = scipy.sparse.csgraph.connected_components(both, directed=False)[0]
        return bool(table.nnz == sum(table.shape) - parts)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the distances."""
        return self.source.dtype


def stored_matrix(provider: DistanceProvider) -> Tensor:
    """Read the whole table of a provider, building it if it is not stored."""
    matrix = provider.matrix()
    if matrix is None:
        return provider.columns(torch.arange(provider.n, device=provider.device))
    return matrix


def _is_sparse(*sides: DistanceProvider) -> bool:
    """Whether tables are mostly zeros; only asked where products of full ones are too large."""
    if max(side.n for side in sides) ** 2 <= limits_of(sides[0].device).dense:
        return False
    tables = [side.matrix() for side in sides]
    return all(
        table is not None and int(table.count_nonzero()) <= losses.SPARSE_SHARE * table.numel()
        for table in tables
    )


def hops_of(provider: DistanceProvider) -> Tensor | None:
    """Return the pairs (n, n) at the least distance if distances are hops in a graph, its edges."""
    table = provider.matrix()
    if table is None or provider.directed:
        return None
    hops = table / table.where(table > 0, torch.inf).min()
    edges = (hops > 0) & (hops <= 1 + SAME_DISTANCE)
    # distances that are no hops have few pairs at the least one, or parts of it: many nerves have
    # the least count, of which logarithms are taken; a graph itself has no others
    whole = ((hops - hops.round()).abs() <= SAME_DISTANCE * hops).all()
    graph = bool((edges.sum() >= len(table)) & (hops.max() > 2 * (1 - SAME_DISTANCE)) & whole)
    return edges if graph else None


def entries_that_matter(provider: DistanceProvider) -> Tensor | None:
    """Return how far the entries (n, n) that matter of a table lie from the others, if few do."""
    # of graphs they have led chains, and of few points partners have been exchanged
    table, limits = provider.matrix(), limits_of(provider.device)
    if table is None or provider.directed or is_sparse(table):
        return None
    if len(table) <= limits.exchanged_points or table.numel() > limits.edges:
        return None
    away = (table - table.median()).abs().fill_diagonal_(0)
    squares, most = away.square().flatten(), limits.graph_density * table.numel()
    share = limits.matter * squares.sum()
    # few entries hold such a share only if their own squares are as large
    if bool(share.square() > most * squares.square().sum()):
        return None
    squares, order = squares.sort(descending=True)
    least = int((squares.cumsum(0) < share).sum())
    few = away.flatten().index_fill(0, order[least + 1 :], 0).view_as(away)
    return few if is_sparse(few) and bool(few.any()) else None


def is_sparse(table: Tensor) -> bool:
    """Tell whether a table is mostly zeros."""
    return int(table.count_nonzero()) <= limits_of(table.device).graph_density * table.numel()


def _edges(*sides: DistanceProvider) -> tuple[int, bool]:
    """Count the edges of the emptier of two graphs on a CPU; tell whether tables tell of both."""
    # Those of others are what is not zero in a table that is stored.
    few = max(side.n for side in sides) ** 2 <= limits_of(sides[0].device).dense
    if not few or sides[0].device.type != "cpu":
        return 0, False
    for of_table in (hops_of, entries_that_matter):
        found = [of_table(side) for side in sides]
        if None not in found:
            return min(int(edges.count_nonzero()) for edges in found if edges is not None), True
    tables = [side.matrix() for side in sides]
    return min(0 if table is None else int(table.count_nonzero()) for table in tables), False


class Facts(NamedTuple):
    """What is known of a problem before it is solved; plain numbers and names, no tensors."""

    n: int
    m: int
    device: str  # "cpu" or "cuda"
    loss: str
    square: bool  # whether it is the square loss
    products: bool  # whether the loss is a sum of products of functions of both distances
    factors: tuple[int | None, int | None]  # columns of the factors of each side; None: no factors
    directed: tuple[bool, bool]
    cheap: bool  # whether any columns of both sides can be read at little cost
    linear: int | None  # columns of the factors of a linear cost; 0 if it is stored, None: no cost
    alpha: float
    rule: str  # "strict", "relaxed" or "partial"
    assignment: bool  # whether there are as many points on both sides, of equal weight
    clouds: bool  # whether either side is measured straight between points
    free: int  # bytes that can be allocated, if three float64 tables of a plan may be too many
    sparse: bool = False  # whether both sides are stored tables of mostly zeros, and large
    edges: int = 0  # edges of the emptier of two graphs, given or stored on a CPU
    # whether paths in two graphs are compared, or few entries matter, which tell of edges
    hops: bool = False
    given: bool = False  # whether both sides were given as graphs
    restricted: bool = False  # whether some pairs may hold no mass
    # pairs of points whose streaming takes as long as reading those that are allowed from labels
    # or from a list; zero if a table says what is, or nothing does
    listed: float = 0.0
    one_plan: bool = False  # whether marginals and what is allowed leave one plan
    spread: float = float("nan")  # natural scale of the cost; zero where every plan costs the same
    epsilon: float = float("nan")

    @classmethod
    def of(cls, problem: Problem, rule: MarginalRule | None, *, given: int = 0) -> "Facts":
        """Read those that cost nothing; the scale is known once the gradient is.

        ``given`` are the edges of the emptier of two graphs, in both directions.
        """
        source, target, linear = problem.source, problem.target, problem.linear
        crossed, (edges, hops) = problem.crossed() or (), _edges(source, target)
        found = [side.factors() for side in crossed] or [None, None]
        ranks = [None if side is None else side.signs.numel() for side in found]
        columns = linear.rank if isinstance(linear, FactoredCost) else 0
        return cls(
            n=source.n, m=target.n, device=source.device.type, loss=problem.loss.name,
            square=problem.loss.is_square, products=problem.loss.cross is not None,
            factors=(ranks[0], ranks[1]), directed=(source.directed, target.directed),
            cheap=all(side.cheap_columns for side in crossed or (source, target)),
            linear=None if linear is None else columns, alpha=problem.alpha,
            rule="strict" if rule is None else "relaxed" if rule.mass is None else "partial",
            assignment=is_assignment(problem.marginals),
            restricted=problem.support is not None or problem.restriction is not None,
            one_plan=rule is None and problem.has_one_plan,
            listed=0.0 if problem.restriction is None else problem.restriction.work(),
            sparse=_is_sparse(source, target), edges=given or edges,
            hops=given > 0 or hops, given=given > 0,
            clouds=any(isinstance(side, PointDistance) for side in (source, target)),
            free=known_free(3 * 8 * source.n * target.n, source.device),
        )  # fmt: skip

    @property
    def plain(self) -> bool:
        """Whether the loss is the square of differences of costs that have no direction."""
        return self.square and not any(self.directed)

    @property
    def entries(self) -> int:
        """Pairs of points."""
        return self.n * self.m

    @property
    def larger(self) -> int:
        """Points of the larger side."""
        return max(self.n, self.m)

    def cost_rank(self, gradient: str, n_anchors: int) -> int:
        """Count the columns of the factors of a linearised cost, zero if it is a matrix anyway."""
        if gradient == "dense" or self.linear == 0:
            return 0
        own = [rank for rank in self.factors if rank is not None]
        return (n_anchors if gradient == "sampled" else min(own)) + (self.linear or 0)
