"""Solves with known pairs: the smaller problem of the other points, and its answer for all."""

import math
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw._gradients.contract import Coupling, Gradient, Linearised, QuadraticValue
from torchgw._plans.given import PairPlan, StoredPlan
from torchgw._plans.paired import PairedPlan
from torchgw._plans.transport import TransportPlan
from torchgw._problem.limits import limits_of
from torchgw._problem.reduction import Reduction
from torchgw._sinkhorn.problem import Cost, DenseCost, softmin
from torchgw._solve.begin import read_init
from torchgw._solve.evaluation import Evaluation, factored_linear
from torchgw._solve.loop import Guess
from torchgw._solve.pipeline import Asked, Outcome
from torchgw._solve.route import Route
from torchgw._solve.strategy import make_gradient
from torchgw._starts.alternatives import Search
from torchgw._typing import Marginals, Potentials
from torchgw.distances.base import both_ways


def reduced(asked: Asked, reduction: Reduction) -> Asked:
    """Ask for the smaller problem, from what is left of the start that was given."""
    init = asked.init
    if init is not None:
        init = _restricted(read_init(init, reduction.whole.marginals), reduction)
    # paths in whole graphs, and searches on all points, say nothing of some of them
    return asked._replace(problem=reduction.problem, init=init, graphs=(None, None), made=())


def told_of(route: Route, reduction: Reduction | None) -> Route:
    """Say in the route of a smaller problem, if it is one, which points it leaves out."""
    if reduction is None:
        return route
    count = len(reduction.mass)
    return route._replace(size=f"{route.size}, beside {count} known pair{'s' * (count != 1)}")


def _restricted(guess: Guess, reduction: Reduction) -> Guess:
    """Restrict a start to the points that are left."""
    plan, kept = guess.plan, reduction.kept
    if isinstance(plan, PairPlan):
        few = plan.among(kept)
        if not float(few.mass.sum()) > 0:
            raise InvalidInputError(
                "`init` matches no two points beside the known `pairs`. Leave `init` out."
            )
        return guess._replace(plan=few)
    if plan is not None:
        if not limits_of(kept.source.device).stores(*map(len, kept)):
            raise UnsupportedError(
                f"`init` as a plan of {plan.shape[0]} x {plan.shape[1]} points would be stored for "
                "a solve with `pairs`, which is too large. Pass a matching: init=plan.argmax()."
            )
        part = plan.rows(kept.source)[:, kept.target].double()
        return guess._replace(plan=StoredPlan(part / part.sum()), potentials=None)
    if guess.potentials is None:
        return guess
    f, g = (part[index] for part, index in zip(guess.potentials, kept, strict=True))
    return guess._replace(potentials=Potentials(f, g))


def of_all_points(asked: Asked, reduction: Reduction, found: Outcome) -> Outcome:
    """Answer for all points, from the answer for those that are left."""
    whole, ending, strategy = reduction.whole, found.ending, found.strategy
    options = strategy.options
    problem = whole.to(torch.float64 if strategy.gradient == "factored" else ending.plan.dtype)
    gradient = make_gradient(
        strategy.gradient, problem, found.n_anchors or strategy.route.n_anchors, options.redraw
    )
    left, log_mass = reduction.left, _log(reduction.mass)
    # of the plan whose cost is the last one, which new points are mapped by
    first = ending.unpolished or ending.plan
    coupling = _coupling(reduction, gradient, found.known)
    if coupling is None:
        coupling = gradient.update(_paired(reduction, first), None, asked.generator)
    paired, leaning = _costs_of_pairs(reduction, coupling, gradient, first)
    mapping = _paired(reduction, first, paired, leaning)
    plan = mapping if ending.unpolished is None else _paired(reduction, ending.plan)
    # those of the plan are of a cost without terms of rows and columns alone
    own = Potentials(gradient.row.double(), gradient.column.double())
    shift = first.epsilon * math.log(left) / 2
    potentials = Potentials(
        *(
            (term + part).index_copy(0, rest, inner - shift)
            for term, part, rest, inner in zip(
                own, mapping.potentials, reduction.kept, found.potentials, strict=True
            )
        )
    )
    small, linear = ending.evaluation, _linear(whole.linear, plan, reduction)
    # what the problem of fewer points minimises is the value of all, but for a constant
    value = left * small.value(strategy.problem.alpha) + _constant(reduction)
    quadratic = (value - (1 - whole.alpha) * linear) / whole.alpha if whole.alpha > 0 else 0.0
    error = left**2 * small.quadratic.standard_error
    evaluation = Evaluation(
        masses=Marginals(*plan.masses),
        marginal_error=left * small.marginal_error,
        quadratic=QuadraticValue(quadratic, error),
        linear=linear,
        # of P = left P' on a x b = left^2 a' x b', and of pairs on w x w
        kl=left * (small.kl - math.log(left)) - float(reduction.mass @ log_mass),
    )
    search = found.search and _search_of_all(found.search, reduction)
    return found._replace(
        ending=ending._replace(
            plan=plan,
            evaluation=evaluation,
            unpolished=None if ending.unpolished is None else mapping,
        ),
        potentials=potentials,
        search=search,
        route=told_of(found.route, reduction),
        known=gradient.remember(coupling, whole.marginals),
    )


def _coupling(reduction: Reduction, gradient: Gradient, known: Linearised) -> Coupling | None:
    """Add what pairs are in factors to the coupling of the others, without a pass over these."""
    fine, crossed, (i, j) = gradient.in_factors(), reduction.whole.crossed(), reduction.pairs
    if fine is None or known.gradient != gradient.name or crossed is None:
        return None
    source, target = (side.factors() for side in crossed)
    assert source is not None
    assert target is not None
    near, far = source.matrix[i].double(), target.matrix[j].double()
    inner = known.oriented(0)
    return fine.encoded(reduction.left * inner + near.T @ (reduction.mass[:, None] * far))


def _log(mass: Tensor) -> Tensor:
    """Take logarithms of weights; those of weight zero hold nothing whatever it is."""
    return torch.where(mass > 0, mass, 1.0).log()


def _costs_of_pairs(
    reduction: Reduction, coupling: Coupling, gradient: Gradient, plan: Any
) -> tuple[Tensor, Tensor]:
    """Compute the last cost of pairs, and how far the point of X lies above its partner, (k,)."""
    # The sum of the potentials of a pair is what its mass says. New points are mapped by each of
    # them, so their difference is that of the potentials which the points would have beside the
    # plan of the others.
    pairs, kept = reduction.pairs, reduction.kept
    # the potentials of the smaller problem are of weights that sum to one, alike on both sides
    logs = [weight.log() for weight in reduction.problem.marginals]
    blocks = (pairs.source, slice(None)), (kept.source, pairs.target)
    near, far = (gradient.block(coupling, *each).to(torch.float64) for each in blocks)
    paired = near.at(torch.arange(len(pairs.target), device=pairs.target.device), pairs.target)
    f, g = (part.double() for part in plan.potentials)
    rows = softmin(near.transpose().rows(kept.target), logs[1], g, plan.epsilon, axis=0)
    columns = softmin(far, logs[0], f, plan.epsilon, axis=0)
    return paired, rows - columns


def _paired(
    reduction: Reduction, plan: Any, paired: Tensor | None = None, leaning: Tensor | float = 0.0
) -> PairedPlan:
    """Put a plan of the points that are left and known pairs together."""
    kept, pairs, weights = reduction.kept, reduction.pairs, reduction.whole.marginals
    paired = torch.zeros_like(reduction.mass) if paired is None else paired
    own = Marginals(*(part[index] for part, index in zip(weights, kept, strict=True)))
    left = reduction.left
    # the product of the weights is left^2 times that of the normalised ones, the plan left times
    shift = plan.epsilon * math.log(left) / 2
    inner = plan.replaced(
        Potentials(*(part - shift for part in plan.potentials)), own,
        Marginals(*(left * part for part in plan.masses)),
    )  # fmt: skip
    both = paired - plan.epsilon * _log(reduction.mass)
    known = (both + leaning) / 2, (both - leaning) / 2
    potentials = Potentials(
        *(
            weight.new_zeros(len(weight)).index_copy(0, rest, part).index_copy(0, index, own_part)
            for weight, rest, part, index, own_part in zip(
                weights, kept, inner.potentials, pairs, known, strict=True
            )
        )
    )
    return PairedPlan(inner, pairs, kept, potentials, weights, paired)


def _linear(linear: Cost | None, plan: PairedPlan, reduction: Reduction) -> float:
    """Compute <M, P>."""
    if linear is None:
        return 0.0
    if isinstance(linear, DenseCost):
        rows, columns = reduction.kept
        inner = linear.matrix[rows][:, columns].double() * plan.inner.stored().double()
        return float(inner.sum() + plan.mass @ linear.at(*reduction.pairs).double())
    return factored_linear(cast(TransportPlan, plan), linear)


def _search_of_all(search: Search, reduction: Reduction) -> Search:
    """Name the points of optima by their numbers among all; value them as plans of all."""
    problem, kept = reduction.whole, reduction.kept
    shape = len(problem.marginals.a), len(problem.marginals.b)
    left, constant = reduction.left, _constant(reduction)
    entropy = left * math.log(left) + float(reduction.mass @ _log(reduction.mass))
    alternatives = tuple(
        replace(
            one, source=kept.source[one.source], target=kept.target[one.target], shape=shape,
            value=left * one.value + constant,
        )
        for one in search.alternatives
    )  # fmt: skip
    trials = tuple(
        one._replace(
            objective=left * one.objective + constant - one.epsilon * entropy,
            value=left * one.value + constant,
        )
        for one in search.trials
    )
    return search._replace(alternatives=alternatives, trials=trials)


def _constant(reduction: Reduction) -> float:
    """Compute what known pairs cost among themselves."""
    problem, (i, j), mass = reduction.whole, reduction.pairs, reduction.mass
    ways = both_ways(*problem.sides)
    tables = ((near.columns(i)[i].double(), far.columns(j)[j].double()) for near, far in ways)
    costs = sum(float(mass @ problem.loss(near, far) @ mass) for near, far in tables)
    value = problem.alpha * costs / len(ways)
    if problem.linear is not None:
        value += (1 - problem.alpha) * float(mass @ problem.linear.at(i, j).double())
    return value
