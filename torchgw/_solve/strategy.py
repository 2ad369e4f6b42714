"""How a problem is solved: everything that is chosen before the first iteration."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from torchgw._batch.packing import AUTO_EPSILON, AUTO_STEP, LEAST_WEIGHT, OWN_SHARE
from torchgw._boundary.arrays import MASS_TOLERANCE
from torchgw._errors import InvalidInputError, TorchGWWarning, UnsupportedError, warn_user
from torchgw._gradients.contract import Gradient, distance_spread, visible
from torchgw._gradients.dense import DenseGradient, HalfGradient
from torchgw._gradients.factored import FactoredGradient
from torchgw._gradients.relaxed import RelaxedGradient
from torchgw._gradients.sampled import SampledGradient
from torchgw._problem import table
from torchgw._problem.limits import CPU, limits_of
from torchgw._problem.losses import Loss, check_products
from torchgw._problem.problem import STRICT, Facts, MarginalRule, Problem
from torchgw._problem.problem import spread as linear_spread
from torchgw._sinkhorn.annealing import Annealing
from torchgw._sinkhorn.blocks import RestrictedBackend
from torchgw._sinkhorn.choose import choose_backend
from torchgw._sinkhorn.contract import Backend
from torchgw._sinkhorn.eager import LARGEST
from torchgw._sinkhorn.problem import DenseCost
from torchgw._sinkhorn.tiles.tiling import Tiling
from torchgw._solve.forecast import Forecast
from torchgw._solve.polish import can_polish, check_polish
from torchgw._solve.route import (
    Route,
    can_halve,
    can_subsample,
    choose_gradient,
    make_route,
    route_of_copies,
    why_no_tiles,
)
from torchgw._solve.state import Options, Recorder, Setting
from torchgw._starts.coarse import directed_points, mean_spread
from torchgw._starts.isometry import rounding_advice
from torchgw._tensors.ahead import compile_for_rank
from torchgw._typing import Marginals
from torchgw.distances.modes import FIRST, apart, modes
from torchgw.distances.sampling import choose_points
from torchgw.distances.surface import Surface

logger = logging.getLogger(__name__)

# Anchor pairs to begin with: about 4 sqrt(n), within these. [L123]
_FEWEST_ANCHORS, MOST_ANCHORS = 256, 1024
# Penalties above this multiple of the natural scale are compared as strict marginals: they would
# multiply the marginal errors that few iterations leave. [L970]
_HARD = 1e4


@dataclass(frozen=True)
class Strategy:
    """What has been chosen for a solve."""

    problem: Problem  # its linear term is divided by the mass of a partial plan
    options: Options
    facts: Facts
    route: Route
    mass: float  # mass that a partial plan moves; 1 for other problems

    @property
    def forecast(self) -> Forecast:
        """How long a solve takes."""
        return Forecast(self.facts, self.options, self.gradient, self.route.each)

    @property
    def gradient(self) -> str:
        """Name of the gradient."""
        return self.route.gradient.chosen

    @property
    def epsilon(self) -> float:
        """The target, divided by the mass of a partial plan."""
        return self.facts.epsilon

    @property
    def can_subsample(self) -> bool:
        """Whether a subsample is worth solving first, and can be."""
        limits = limits_of(self.problem.source.device)
        return can_subsample(self.facts, self.options, limits, self.gradient)

    @cached_property
    def tiling(self) -> Tiling | None:
        """The tiling of solves that skip tiles; it remembers what they kept."""
        storage = self.route.storage
        if storage.width is None:
            return None
        return Tiling((self.facts.n, self.facts.m), storage.width, storable=storage.storable)

    @property
    def scale(self) -> float:
        """Natural scale of the cost; one where all plans cost the same and any epsilon will do."""
        return self.facts.spread or 1.0

    @property
    def proximal(self) -> bool:
        """Whether proximal steps follow the annealing."""
        return self.options.regularization == "proximal"

    @property
    def proximal_polished(self) -> bool:
        """Whether proximal steps only lead to where polishing begins."""
        return self.proximal and bool(self.options.polish)

    @property
    def search_epsilon(self) -> float:
        """Epsilon at which starts are compared: proximal plans are sharp, whatever their step."""
        sharp = AUTO_EPSILON * self.scale * self.mass
        return sharp if self.proximal else self.epsilon

    @property
    def soft_rule(self) -> MarginalRule | None:
        """The marginal rule by which plans that are not settled yet are compared."""
        rule = self.options.rule
        if rule is None:
            return None
        hard = [math.inf if rho > _HARD * self.scale else rho for rho in rule.rho]
        return replace(rule, rho=(hard[0], hard[1]))

    @property
    def constant(self) -> bool:
        """Whether all plans have the same value, but for rounding."""
        strict = self.options.rule is None
        one = min(self.problem.shape) == 1
        return self.facts.spread == 0 or (strict and one)

    def fingerprint(self) -> tuple[str, list[float]]:
        """List the choices that must be alike on all ranks, and the numbers that show it."""
        width = 0 if self.tiling is None else self.tiling.width
        chosen = [*self.problem.shape, self.facts.spread, self.epsilon]
        where = "(n, m, scale of the cost, epsilon, whether the cost is stored, width of a tile)"
        return f"the problem {where}", [*chosen, self.route.storage.stored, width]

    def in_float64(self, setting: Setting) -> Setting:
        """Change a setting to float64; a sampled gradient keeps its anchors and its dtype."""
        double = self.stage(setting, torch.float64)
        return double if setting.gradient.exact else replace(double, gradient=setting.gradient)

    def backend(self, dtype: torch.dtype, tiling: Tiling | None) -> Backend:
        """Choose what solves linear problems of a dtype, by tiles if there is a tiling."""
        options, device = self.options, self.problem.source.device
        backend = choose_backend(options.backend, device, dtype, tiling, options.ranks)
        listed = self.problem.restriction
        return backend if listed is None else RestrictedBackend(backend, listed)

    def _half(self, dtype: torch.dtype) -> bool:
        """Whether the products of a stage are made of half-precision ones."""
        # a later stage is exact
        rough = dtype == torch.float32 != self.route.dtypes.settle
        limits = limits_of(self.problem.source.device)
        return rough and can_halve(self.facts, limits, self.gradient)

    def stage(self, before: Setting, dtype: torch.dtype, tol: float | None = None) -> Setting:
        """Make what the loop needs to go on in some dtype, and to some change of the coupling."""
        tol = before.tol if tol is None else tol
        return self.setting(dtype, tol, before.anneal, before.generator, before.recorder)

    def setting(
        self,
        dtype: torch.dtype,
        tol: float,
        anneal: Annealing,
        generator: torch.Generator,
        recorder: Recorder,
    ) -> Setting:
        """Make what the loop needs to run in some dtype."""
        options, rule, problem = self.options, self.options.rule, self.problem.to(dtype)
        if self._half(dtype):
            # after a patient annealing the last digits do not matter yet
            base: Gradient = HalfGradient(problem, rough=anneal.patient)
        else:
            base = make_gradient(self.gradient, problem, self.route.n_anchors, options.redraw)
        return Setting(
            gradient=base if rule is None else RelaxedGradient(base, problem), problem=problem,
            anneal=anneal, options=options, backend=self.backend(dtype, self.tiling),
            generator=generator, recorder=recorder, store=self.route.storage.stored, tol=tol,
            scale=self.scale, dtype=dtype, rule=rule,
        )  # fmt: skip


def choose_strategy(
    problem: Problem, options: Options, *, init: str = "", given: int = 0
) -> Strategy:
    """Choose the route of a problem, and its epsilon; refuse what cannot be met."""
    # ``init`` names what was passed as a start; ``given`` are edges of graphs whose paths were.
    limits = limits_of(problem.source.device)
    facts = Facts.of(problem, options.rule, given=given)
    gradient = choose_gradient(facts, options, limits)
    stored = {
        "this gradient": gradient.chosen == "dense",
        "a linear cost as a table": isinstance(problem.linear, DenseCost),
        "proximal steps": options.regularization == "proximal",
    }  # fmt: skip
    if facts.listed and any(stored.values()):
        raise UnsupportedError(
            f"What is known of {facts.n} x {facts.m} points is too much for a table, and "
            f"{next(name for name in stored if stored[name])} would store one. Pass distances with "
            "factors (points, landmarks), gradient='factored' or 'sampled', features in place of "
            "`M`, and regularization='entropic'; or take fewer points."
        )
    options.check_gradient(gradient.chosen, partial(rounding_advice, problem))
    if options.polish:
        check_polish(problem.marginals, options.rule)
    elif options.sharp and gradient.chosen == "dense" and options.ranks is None:
        few = facts.entries <= limits.exact
        options = replace(options, polish=few and can_polish(problem.marginals, options.rule))
    mass = (options.rule and options.rule.mass) or 1.0
    unit = 1.0 if options.rule is None else options.rule.unit
    if unit != 1 and problem.linear is not None:
        # the objective over the square of the mass, as a function of the normalised plan
        share = torch.tensor(1 / unit, dtype=torch.float64, device=problem.source.device)
        problem = replace(problem, linear=problem.linear.scaled(share))
    usual = min(MOST_ANCHORS, max(_FEWEST_ANCHORS, 4 * math.isqrt(facts.larger)))
    n_anchors = options.n_anchors or usual
    spread = natural_scale(
        visible(problem, n_anchors) if gradient.chosen == "sampled" else problem,
        relaxed=options.rule is not None,
    )
    epsilon = _target_epsilon(options, spread, mass)
    # products with it stay in the range of float32 [L641]
    if epsilon > LARGEST * max(1.0, spread):
        raise InvalidInputError(
            f"`epsilon` leaves nothing but a x b of any plan: it is {epsilon:.3g} where costs vary "
            f"by {spread:.3g}. Lower it, or pass epsilon='auto'."
        )
    facts = facts._replace(spread=spread, epsilon=epsilon)
    route = make_route(facts, options, limits, gradient, n_anchors, init)
    for choice in (route.gradient, route.precision, route.storage.choice, route.end):
        logger.info("%s %s: %s", *choice)
    if problem.source.device.type == "cuda":
        compile_for_rank(problem.source.device, facts.cost_rank(gradient.chosen, n_anchors))
    return Strategy(problem, options, facts, route, mass)


def strategy_of_copies(problem: Problem, options: Options, spread: float) -> Strategy:
    """Return what is chosen for spaces that are the same but for order, of a spread of costs."""
    facts = Facts.of(problem, None)._replace(
        spread=spread, epsilon=_target_epsilon(options, spread)
    )
    return Strategy(problem, options, facts, route_of_copies(facts), mass=1.0)


def _target_epsilon(options: Options, spread: float, mass: float = 1.0) -> float:
    """Choose the epsilon to reach, for a natural scale of the cost."""
    if options.epsilon == "auto":
        share = AUTO_EPSILON if options.regularization == "entropic" else AUTO_STEP
        return share * (spread or 1.0) * mass
    return float(options.epsilon) / mass


def natural_scale(problem: Problem, *, relaxed: bool) -> float:
    """Compute the spread of the cost at a concentrated plan; zero if all plans cost the same."""
    # 4 alpha std(DX) std(DY) + (1 - alpha) std(M) for the square loss. The spread at a x b itself
    # would not do: it vanishes on homogeneous spaces, where all points have the same mean distance.
    # Where one side is nearly a point, ``relaxed`` plans still see the distances of the other.
    weights = Marginals(*map(_levelled, problem.marginals))
    sides = list(zip(problem.sides, weights, strict=True))
    if problem.loss.is_square:
        spreads = [distance_spread(*side) for side in sides]
        product = math.prod(spreads)
        if relaxed:
            product = max(product, OWN_SHARE * sum(spread**2 for spread in spreads))
        scale = 4 * problem.alpha * product
    else:
        # of a few of the points it would depend on their order
        most = limits_of(problem.source.device).all_points
        near, far = (choose_points(*side, most) for side in sides)
        own = OWN_SHARE if relaxed else 0.0
        spread = mean_spread(problem.loss, directed_points((near, far), problem), weights, own)
        scale = 2 * problem.alpha * spread
    if problem.linear is not None:
        scale += (1 - problem.alpha) * linear_spread(problem.linear, problem.support)
    return scale


def in_units_of_cost(rule: MarginalRule | None, problem: Problem) -> MarginalRule | None:
    """Read the weights of penalties as multiples of how far costs vary."""
    if rule is None or rule.mass is not None:
        return rule
    scale = natural_scale(problem, relaxed=True)
    if scale == 0:
        return rule
    # a free marginal stays free, and a strict one strict
    return replace(rule, rho=(scale * rule.rho[0], scale * rule.rho[1]))


def heavy_as_strict(rule: MarginalRule | None, problem: Problem) -> MarginalRule | None:
    """Turn penalties into strict marginals if they are too heavy to tell the difference."""
    if rule is None or not any(0 < rho < math.inf for rho in rule.rho):
        return rule
    least = STRICT * natural_scale(problem, relaxed=True)
    # if the weights of both sides have different sums, no plan can have both
    if least == 0 or max(abs(total - 1) for total in rule.totals) > MASS_TOLERANCE:
        return rule

    def read(rho: float, weights: Tensor) -> float:
        curvature = float((weights**2).sum() * weights.max()) if rule.squares else 1.0
        return math.inf if rho * curvature >= least else rho

    source, target = map(read, rule.rho, problem.marginals)
    if source == target == math.inf:
        return None
    squares = rule.squares and {source, target} != {0.0, math.inf}
    return replace(rule, rho=(source, target), squares=squares)


def _levelled(weights: Tensor) -> Tensor:
    """Raise tiny weights, so that the cost of points with next to no mass counts in the scale."""
    least = LEAST_WEIGHT / len(weights)
    if float(weights.min()) >= least:
        return weights
    raised = torch.where(weights > 0, weights.clamp_min(least), 0.0)
    return torch.where((raised == weights).all(), weights, raised / raised.sum())


def check_known(options: Options, loss: Loss, *, matrix: bool) -> None:
    """Refuse what cannot be met for any distances, before they are made; ``matrix`` is M given."""
    check_products(options.gradient, loss.name, products=loss.cross is not None)
    gradient = "factored" if options.gradient == "auto" else options.gradient
    stored = options.storage == "stored"
    reason = why_no_tiles(gradient, options.backend, linear=matrix, store=stored)
    if options.skip_tiles is True and reason is not None:
        raise UnsupportedError(f"`skip_tiles=True` cannot be met: {reason}")


# Penalty of areas that a match does not keep, where both sides are divided by their largest
# distances. [L1533]
_AREAS = 0.003
# What rules or certifies masses, or needs them to be kept.
_ASKED = (
    "unbalanced", "unbalanced_type", "unbalanced_unit", "mass", "scale", "distances", "loss",
    "regularization", "polish", "certify", "gradient", "distributed", "checkpoint",
)  # fmt: skip


def with_penalised_areas(x: Any, y: Any, asked: table.Options) -> table.Options:
    """Penalise the areas of two surfaces that are no poses of one shape, and say so."""
    # The same parts have other shares of the area then. A plan that has to move all of it puts
    # arms on legs, and costs less than the right one.
    usual = table.Options()
    left = all(getattr(asked, name) == getattr(usual, name) for name in _ASKED)
    if not (left and isinstance(x, Surface) and isinstance(y, Surface)):
        return asked
    one, other = modes(x, FIRST), modes(y, FIRST)
    if one is None or other is None or apart(one, other) <= CPU.alike:
        return asked
    warn_user(
        "X and Y are surfaces of different shape (their modes of vibration differ), so that the "
        f"same parts have other shares of the area: areas are penalised (unbalanced={_AREAS}, "
        "scale='max') and not kept. Pass `a` and `b` to keep them.",
        TorchGWWarning,
    )
    return asked.replace(unbalanced=_AREAS, scale="max")


def make_gradient(name: str, problem: Problem, n_anchors: int, redraw: float) -> Gradient:
    """Build a gradient by name."""
    if name == "dense":
        return DenseGradient(problem)
    if name == "factored":
        return FactoredGradient(problem)
    return SampledGradient(problem, n_anchors, redraw)
