"""Random geometries and options, and a judge in float64 that knows nothing of the package.

A case is made from its number alone, so that one that failed can be solved again.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import reference
import torch
from problems import solve_by_name
from scipy.optimize import brentq, linprog
from scipy.spatial.distance import cdist
from scipy.special import xlogy

import torchgw
from torchgw import Status, TorchGWError
from torchgw._api import as_arguments
from torchgw._boundary.arrays import to_numpy

GOOD = (Status.CONVERGED, Status.STATIONARY, Status.FLAT)
# CPU seconds that a solve of at most 100 points may take, unless its route says that it takes
# longer; and seconds that it is given then.
MOST_SECONDS, GIVEN_SECONDS = 10.0, 60.0


# Penalty, over the spread of the cost, from which on a side may count as strict: 1e8 of a spread
# that is measured otherwise.
HEAVY = 1e7


def _points(rng, kind, n):
    """Points of one of many shapes, kind and awkward."""
    d = int(rng.integers(1, 5))
    if kind == "normal":
        return rng.normal(size=(n, d))
    if kind == "collinear":
        return rng.normal(size=(n, 1)) * rng.normal(size=(1, d))
    if kind == "duplicates":
        return rng.normal(size=(max(1, n // 4), d))[rng.integers(max(1, n // 4), size=n)]
    if kind == "clusters":
        return rng.normal(size=(n, d)) * 1e-2 + 10 * rng.integers(3, size=(n, 1))
    if kind == "heavy":
        return rng.standard_cauchy(size=(n, d))
    if kind == "grid":
        return np.stack([np.arange(n) % 4, np.arange(n) // 4], axis=1).astype(float)
    if kind == "circle":
        angle = 2 * np.pi * np.arange(n) / n
        return np.stack([np.cos(angle), np.sin(angle)], axis=1)
    if kind == "far":
        return rng.normal(size=(n, d)) + 1e4
    assert kind == "tiny"
    return 1e-6 * rng.normal(size=(n, d))


POINTS = "normal", "collinear", "duplicates", "clusters", "heavy", "grid", "circle", "far", "tiny"


def tree_distances(rng, n):
    """Distances of a random tree with edges of length one: many ties."""
    table = np.zeros((n, n))
    for node in range(1, n):
        parent = rng.integers(node)
        table[node, :node] = table[parent, :node] + 1
        table[:node, node] = table[node, :node]
    return table


def _adjacency(rng, n):
    """A network of noughts and ones, which is no metric."""
    upper = np.triu(rng.random((n, n)) < 0.4, 1)
    return (upper + upper.T).astype(float)


def _weights(rng, n):
    kind = rng.choice(["none", "none", "random", "zeros", "decades"])
    if kind == "none":
        return None
    weights = rng.uniform(0.2, 1, size=n)
    if kind == "zeros" and n > 1:
        weights[rng.random(n) < 0.3] = 0
        weights[rng.integers(n)] = 1
    if kind == "decades":
        weights = 10 ** rng.uniform(-12, 0, size=n)
    return weights / weights.sum()


@dataclass
class Case:
    """Arguments of one solve, and the distances that they stand for."""

    number: int
    arguments: dict[str, Any]
    d_x: np.ndarray
    d_y: np.ndarray
    linear: np.ndarray | None = None
    described: dict[str, Any] = field(default_factory=dict)


# One case of so many has up to so many points, others up to 24; the absolute loss fewer.
LARGE, LARGEST, LARGEST_ABSOLUTE = 25, 400, 120


def make_case(number, most=None):
    """Make the case of a number, of at most so many points per side."""
    rng = np.random.default_rng([18, number])
    if most is None:
        most = LARGEST if number % LARGE == 7 else 24
    sizes = [int(rng.choice([1, 2, 3, 7, rng.integers(4, most + 1), most])) for _ in range(2)]
    arguments: dict[str, Any] = {"random_state": 0, "max_iter": 60, "inner_max_iter": 500}
    given = rng.choice(["points", "points", "tree", "adjacency", "copy"])
    if given in ("points", "copy"):
        kinds = [str(kind) for kind in rng.choice(POINTS, size=2)]
        sides = [_points(rng, kind, n) for kind, n in zip(kinds, sizes, strict=True)]
        if given == "copy":
            sizes[1] = sizes[0]
            sides[1] = sides[0][rng.permutation(sizes[0])] * rng.choice([-1, 1])
            kinds[1] = "copy"
        metric = str(rng.choice(["euclidean", "sqeuclidean"]))
        arguments |= {"X": sides[0], "Y": sides[1], "distances": metric}
        tables = [cdist(side, side, metric) for side in sides]
    else:
        kinds = [str(given)] * 2
        make = tree_distances if given == "tree" else _adjacency
        tables = [make(rng, n) for n in sizes]
        arguments |= {"D_X": tables[0], "D_Y": tables[1]}
    for name, n in zip("ab", sizes, strict=True):
        arguments[name] = _weights(rng, n)

    def maybe(share, **choices):
        for name, values in choices.items():
            if rng.random() < share:
                arguments[name] = values[rng.integers(len(values))]

    linear = None
    if rng.random() < 0.25:
        linear = rng.random(sizes)
        arguments |= {"M": linear, "alpha": float(rng.choice([0, 0.1, 0.5, 0.99, 1]))}
    maybe(0.25, loss=["kl", "absolute"])
    if arguments.get("loss") == "absolute" and max(sizes) > LARGEST_ABSOLUTE:
        del arguments["loss"]
    maybe(0.4, gradient=["dense", "factored", "sampled"])
    maybe(0.4, precision=["float32", "float32", "mixed", "float64"])
    maybe(0.3, storage=["stored", "streamed"])
    maybe(0.3, unbalanced=[0.1, 5.0, (np.inf, 0), (0, np.inf), (np.inf, 1.0)], mass=[0.3, 0.7, 1.0])
    maybe(0.1, regularization=["proximal"], polish=[True], skip_tiles=[True, False])
    maybe(0.3, n_init=[1, 4], search=["fast"], scale=[None, "max", "mean"])
    maybe(0.4, objective_tol=[0, 1e-2, 1e-3, 1e-3])
    maybe(0.2, tol=[1e-3, 1e-8], inner_tol=[1e-3, 1e-9])
    if rng.random() < 0.6:
        spread = _spread(tables, arguments)
        arguments["epsilon"] = float(spread * 10 ** rng.uniform(-5, 1))
    # last, so that cases keep what they were before there was this option
    maybe(0.05, resolution=[None, 1e-3])
    described = {"kinds": kinds, "sizes": sizes}
    return Case(number, arguments, *tables, linear, described)


def _spread(tables, arguments):
    """A natural scale of the cost, as it would be without weights; one where there is none."""
    scaled = []
    for table in tables:
        scale = arguments.get("scale", "auto")
        by = {"max": table.max(), "mean": table.mean(), None: 1.0}.get(scale, table.max())
        if scale == "auto" and "D_X" in arguments:
            by = 1.0
        scaled.append((table / (by or 1.0)).std())
    return float(np.prod(scaled)) or 1.0


@dataclass
class Verdict:
    """What became of a case: a refusal, a result, and what is wrong with it."""

    refusal: str = ""
    result: Any = None
    wrong: list[str] = field(default_factory=list)
    said: set[str] = field(default_factory=set)  # names of the warnings
    seconds: float = 0.0  # of the solve, CPU time


def run(case):
    """Solve a case and judge it; errors that are not refusals come through."""
    clock = time.process_time()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", torchgw.TorchGWWarning)
        try:
            result = solve_by_name(**case.arguments)
        except TorchGWError as error:
            return Verdict(refusal=f"{type(error).__name__}: {error}")
    seconds = time.process_time() - clock
    names = {one.category.__name__ for one in said}
    return Verdict(result=result, wrong=list(judge(case, result)), said=names, seconds=seconds)


def limited(arguments, most=MOST_SECONDS):
    """Limit the time of a solve whose route says that it takes long; return how long it may."""
    try:
        longest = torchgw.explain(**as_arguments(arguments)).most
    except TorchGWError:
        # refused, as the solve will be
        return most
    if longest > GIVEN_SECONDS:
        arguments["time_limit"] = GIVEN_SECONDS
    # a limit holds within two seconds
    return min(max(most, longest), GIVEN_SECONDS + 2)


def attempt(number, device):
    """Try the case of a number, for ``fuzz_run.py``."""
    case = make_case(number)
    if device:
        case.arguments["device"] = device
    most = limited(case.arguments)
    verdict = run(case)
    ended = "refused" if verdict.refusal else verdict.result.status.name
    outcome = {
        "ended": ended, "wrong": verdict.wrong, "refusal": verdict.refusal,
        "notes": sorted(verdict.said), "seconds": round(verdict.seconds, 2),
        "family": family_of(case), "said": bool(verdict.said),
    }  # fmt: skip
    if max(case.described["sizes"]) <= 100:
        outcome["most"] = most
    return outcome


def family_of(case):
    """The loss of a case, what holds of its marginals, and how it is sharpened."""
    (rho_a, rho_b), mass = rule(case)
    strict = np.isinf([rho_a, rho_b])
    held = "strict" if strict.all() else "one penalty" if strict.any() else "penalties"
    if 0 in (rho_a, rho_b):
        held = "semi-relaxed"
    parts = [case.arguments.get("loss", "square"), "partial" if mass is not None else held]
    parts += [case.arguments[name] for name in ("regularization",) if name in case.arguments]
    return ", ".join(parts)


def judge(case, result):
    """Tell what a result says that an evaluation of its plan in float64 does not bear out."""
    plan = torch.as_tensor(result.plan).double().cpu().numpy()
    n, m = len(case.d_x), len(case.d_y)
    if plan.shape != (n, m) or not np.isfinite(plan).all() or plan.min() < 0:
        yield "the plan is none"
        return
    a, b = weights_of(case)
    single = result.lazy_plan.dtype.itemsize == 4
    if not blurred(case, result, plan):
        yield from judge_marginals(case, result, plan, (a, b), single)
        yield from judge_value(case, result, plan, (a, b), single)
    yield from judge_fixed_point(case, result, plan, (a, b), single)
    yield from judge_polish(case, result, plan, (a, b))
    yield from judge_limit(case, result, plan, single)


def rounding(case, result, plan):
    """What float64 leaves unknown of the exponents of a plan, a share of its entries."""
    if result.epsilon == 0:
        return 0.0
    return 2.2e-16 * np.ptp(own_cost(case, result, plan)) / result.epsilon


def blurred(case, result, plan):
    """Whether rounding of exponents in float64 decides, and the status says so."""
    unknown = rounding(case, result, plan)
    return result.status is Status.PRECISION_LIMIT and unknown > 1e-5


def weights_of(case):
    """Weights of both sides, equal unless given."""
    return [
        np.full(len(table), 1 / len(table)) if weights is None else weights
        for weights, table in zip(
            (case.arguments[name] for name in "ab"), (case.d_x, case.d_y), strict=True
        )
    ]


def judge_marginals(case, result, plan, weights, single):
    arguments = case.arguments
    sums = plan.sum(1), plan.sum(0)
    over = [mass - weight for mass, weight in zip(sums, weights, strict=True)]
    mass, rho = arguments.get("mass"), arguments.get("unbalanced")
    if mass is not None and mass < 1:
        error = max(part.clip(0).sum() for part in over)
        if abs(plan.sum() - mass) > (1e-3 if single else 1e-6):
            yield f"a mass of {plan.sum()} is moved"
    else:
        pair = (rho, rho) if np.isscalar(rho) else rho or (np.inf, np.inf)
        # a penalty that outweighs the cost by more than float64 tells is taken as strict
        heavy = HEAVY * own_cost(case, result, np.outer(*weights)).std()
        missed = [np.abs(part).sum() for part in over]
        counted = [[part * (each >= least) for part, each in zip(missed, pair, strict=True)]
                   for least in (np.inf, heavy)]  # fmt: skip
        error = min(map(max, counted), key=lambda one: abs(one - result.marginal_error))
    # sums in float32 differ by the rounding of exponents, which is at most 2e-4
    # and an error that is large is known to a share of itself: 2e-9 of .19, as exponents of 1e5 are
    slack = 4e-4 if single else 1e-9 + 1e-7 * error + 8 * rounding(case, result, plan)
    if result.precision == "float32":
        # which it was told in, whatever the plan is kept in
        slack = max(slack, 1e-6)
    if abs(error - result.marginal_error) > slack:
        yield f"marginal error {result.marginal_error:.3g} for one of {error:.3g}"
    asked = arguments.get("inner_tol")
    allowed = 10 * (asked or (1e-5 if single else 5e-7))
    # of such a solve the plan may have been computed anew in float64
    if asked is None and (single or result.precision == "float32"):
        allowed = 2e-4
    # as for sums: what is reported is what was promised, up to their rounding
    if result.status in GOOD and error > allowed + slack:
        yield f"{result.status.name} at a marginal error of {error:.3g}"


def own_tables(case, result):
    """Distances as the result has scaled them."""
    return [table * scale for table, scale in zip((case.d_x, case.d_y), result.scale, strict=True)]


def own_quadratic(case, result, plan):
    """L(P), float64."""
    d_x, d_y = own_tables(case, result)
    loss = case.arguments.get("loss", "square")
    if loss == "absolute":
        return reference.loss_cost(reference.absolute_loss, d_x, d_y, plan)
    if loss == "kl":
        # x log(x / y) - x + y, term by term
        p, q, tiny = plan.sum(1), plan.sum(0), 1e-18
        row, column = (d_x * np.log(d_x + tiny) - d_x) @ p, d_y @ q
        return row[:, None] + column - d_x @ plan @ np.log(d_y + tiny).T
    return reference.gw_cost(d_x, d_y, plan)


def own_cost(case, result, plan):
    """C(P), the derivative of the objective without entropy."""
    cost = 2 * result.alpha * own_quadratic(case, result, plan)
    return cost if case.linear is None else cost + (1 - result.alpha) * case.linear


def own_value(case, result, plan):
    """The two parts of the value of a plan."""
    quadratic = result.alpha * float((own_quadratic(case, result, plan) * plan).sum())
    linear = 0.0 if case.linear is None else (1 - result.alpha) * float((case.linear * plan).sum())
    return quadratic, linear


def own_squares(case, result, plan):
    """What cancels in a value: rounding is a share of this."""
    d_x, d_y = own_tables(case, result)
    p, q = plan.sum(1), plan.sum(0)
    if rule(case) != ((np.inf, np.inf), None):
        # of what could have moved as well
        p, q = (
            np.maximum(mass, weight) for mass, weight in zip((p, q), weights_of(case), strict=True)
        )
    squares = p @ d_x**2 @ p + q @ d_y**2 @ q
    if case.arguments.get("loss", "square") != "square":
        squares += 40 * max(d_x.max(initial=0), d_y.max(initial=0))
    return squares if case.linear is None else max(squares, float(np.abs(case.linear).max()))


def judge_value(case, result, plan, weights, single):
    quadratic, linear = own_value(case, result, plan)
    squares = own_squares(case, result, plan)
    noise = 8 * np.nan_to_num(result.report.value_standard_error)
    # products in float32, of the distances and of the plan; in float64 the cancellation alone
    exact = result.precision == "float64" or (
        # a sample keeps the dtype of its columns
        result.precision == "mixed" and not single and result.gradient != "sampled"
    )
    loose = single or not exact
    share = 1e-5 if loose else 1e-9 + 8 * rounding(case, result, plan)
    slack = share * max(squares, abs(quadratic)) + noise + 1e-14
    if single:
        # a plan in float32 is read twice, each time with entries off by the rounding of exponents,
        # and so is its mass where that is free
        free = not np.isinf(rule(case)[0]).any()
        # which are costs over epsilon: points of little weight may have far larger ones
        exponents = 2e-7 * np.ptp(own_cost(case, result, plan)) / max(result.epsilon, 1e-300)
        slack += max(8e-4 if free else 4e-4, exponents) * max(squares, abs(quadratic))
        # beside one point of nearly all the mass the others weigh as little as what is missed
        most = max(float(table.max()) for table in own_tables(case, result))
        slack += 2 * result.marginal_error * most**2
    for name, found, own in (
        ("value_quad", result.value_quad, quadratic),
        ("value_linear", result.value_linear, linear),
    ):
        if abs(found - own) > slack + share * abs(own):
            yield f"{name} {found:.8g} for one of {own:.8g}"
    worst = sum(own_value(case, result, np.outer(*weights)))
    balanced = "unbalanced" not in case.arguments and case.arguments.get("mass", 1) == 1
    spare = (1e-6 + 8 * result.marginal_error) * squares + slack + 1e-5 * abs(worst)
    if result.status in GOOD and balanced and result.value > worst + spare:
        yield f"{result.status.name} at {result.value:.6g}, above the product's {worst:.6g}"
    implausible = result.value_quad < spare or (balanced and result.value > worst - spare)
    if result.status is Status.IMPLAUSIBLE and not implausible:
        yield f"IMPLAUSIBLE at {result.value:.6g}, the product's is {worst:.6g}"


def rule(case):
    """The weights of both marginals, and the mass of a partial plan."""
    rho = case.arguments.get("unbalanced")
    pair = (rho, rho) if np.isscalar(rho) else rho or (np.inf, np.inf)
    mass = case.arguments.get("mass")
    return pair, mass if mass is not None and mass < 1 else None


def logsumexp(table, axis=None):
    """SciPy's takes ten times as long for small tables."""
    most = np.maximum(table.max(axis, keepdims=True), -1e300)
    sums = np.exp(table - most).sum(axis, keepdims=True)
    sums = np.log(np.maximum(sums, 1e-300)) + most
    return sums.squeeze() if axis is None else sums.squeeze(axis)


def _needed(log_weight, sums):
    """What sums lack of their weights; of points that have no mass nothing is asked."""
    given = log_weight > -np.inf
    return np.where(given, np.where(given, log_weight, 0.0) - sums, 0.0)


def level(sums, weight, mass):
    """The height at which exp(sums + height), at most the weights, are the mass."""

    def spare(height):
        # what is above its weight by far would overflow
        return np.minimum(weight, np.exp(np.minimum(sums + height, 1.0))).sum() - mass

    low, rise = np.log(mass) - logsumexp(sums), 1.0
    while spare(low + rise) < 0:
        rise *= 2
    return low if spare(low) >= 0 else brentq(spare, low, low + rise, xtol=1e-13, rtol=1e-15)


def following(case, result, weights, cost, epsilon):
    """The plan of a linear problem, solved here; None if that takes long."""
    (a, b), (pair, mass) = weights, rule(case)
    with np.errstate(divide="ignore"):
        log_a, log_b = np.log(a), np.log(b)
    kernel = log_a[:, None] + log_b - (cost - cost.min()) / epsilon
    taus = [1.0 if np.isinf(rho) else 2 * rho / (2 * rho + epsilon) for rho in pair]
    g = to_numpy(result.potential_b) / epsilon
    g = np.where(np.isfinite(g), g, 0.0)
    g, mean = g - g.max(), 0.0

    def half(log_weight, table, axis, tau):
        """Potential of one side by the sums of the other's, and the mean that goes with it."""
        sums = logsumexp(table, axis=axis)
        if mass is not None:
            height = level(sums, np.exp(log_weight), mass)
            return np.minimum(0.0, _needed(log_weight, sums + height)), height
        return tau * _needed(log_weight, sums + mean), mean

    if mass is not None:
        # nothing is seen of points that have yet to change partners, which takes long where epsilon
        # is small: it falls
        g = np.zeros_like(g)
        for factor in 4.0 ** np.arange(12, 0, -1):
            blurred = log_a[:, None] + log_b - (cost - cost.min()) / (factor * epsilon)
            for _ in range(50):
                f = half(log_a, blurred + g, 1, 1.0)[0]
                g = half(log_b, blurred + f[:, None], 0, 1.0)[0]
            g = 4 * g
    last = np.zeros_like(cost)
    for step in range(min(2000, 4_000_000 // cost.size)):
        f, mean = half(log_a, kernel + g, 1, taus[0])
        g, mean = half(log_b, kernel + f[:, None], 0, taus[1])
        table = kernel + f[:, None] + g
        if mass is None and not any(map(np.isinf, pair)):
            mean = -logsumexp(table)
        if step % 20 == 19:
            plan = np.exp(table + mean)
            over = plan.sum(1) - a, plan.sum(0) - b
            if mass is not None:
                error = max(part.clip(0).sum() for part in over)
            elif np.isinf(pair).any():
                error = max(
                    np.abs(part).sum() if np.isinf(rho) else 0.0
                    for part, rho in zip(over, pair, strict=True)
                )
            else:
                error = 0.0
            if error < 1e-7 and np.abs(plan - last).sum() < 1e-9:
                return plan
            last = plan
    return None


def linear_objective(plan, cost, weights, epsilon):
    """<C, P> + epsilon KL(P | a x b)."""
    product = weights[0][:, None] * weights[1]
    entropy = xlogy(plan, plan / np.where(product > 0, product, 1)).sum()
    return float((cost * plan).sum() + epsilon * entropy)


def own_objective(case, result, plan, weights, epsilon, value=None):
    """What is minimised, at the best mass where that is free; ``plan`` has the mass it is given."""
    (a, b), (pair, _) = weights, rule(case)
    product = a[:, None] * b
    entropy = float(xlogy(plan, plan / np.where(product > 0, product, 1)).sum())
    masses = plan.sum(1), plan.sum(0)
    apart = [
        0.0 if np.isinf(rho) else 2 * rho * float(xlogy(part, part / np.where(w > 0, w, 1)).sum())
        for part, w, rho in zip(masses, (a, b), pair, strict=True)
    ]
    if value is None:
        value = sum(own_value(case, result, plan))
    if any(map(np.isinf, pair)):
        return value + epsilon * entropy + sum(apart)
    # of a plan of mass one, times t = mass^2: t slope + weight (t log t - t + 1)
    weight = sum(pair) + epsilon / 2
    slope = value + epsilon * entropy + sum(apart)
    return weight * (1 - np.exp(-slope / weight))


def step_cost(case, result, plan, weights, epsilon, proximal):
    """C(P), and what keeps a proximal step to the plan."""
    cost = own_cost(case, result, plan)
    if not proximal:
        return cost
    with np.errstate(divide="ignore"):
        ratio = np.log(plan / np.maximum(weights[0][:, None] * weights[1], 1e-300))
    return cost - epsilon * np.maximum(ratio, -600)


def _is_loose(case, result, plan, weights, epsilon, change):
    """Whether rounding in float32 alone leads to plans as far apart, as where costs tie."""
    noise = np.random.default_rng(0).normal(size=plan.shape)
    off = max(1e-6, result.marginal_error / plan.max())
    moved = plan * (1 + off * noise)
    ends = [
        following(
            case, result, weights, step_cost(case, result, one, weights, epsilon, False), epsilon
        )
        for one in (plan, moved)
    ]
    if any(end is None for end in ends):
        return True
    return np.linalg.norm(ends[1] - ends[0]) > 0.1 * change * np.linalg.norm(plan)


def judge_fixed_point(case, result, plan, weights, single):
    """What another iteration would change is what the status says that it may."""
    status, arguments = result.status, case.arguments
    if status not in GOOD or result.report.polish_steps is not None:
        return
    epsilon = result.epsilon
    proximal = arguments.get("regularization") == "proximal"
    if not np.isinf(rule(case)[0]).any():
        if case.linear is not None and result.alpha > 0:
            # of a plan t P the objective is t^2 times that of P with M / t, except where M is all
            case = replace(case, linear=case.linear / plan.sum())
        plan = plan / plan.sum()
    if proximal:
        # a step has the weight that was asked for
        if "epsilon" not in arguments:
            return
        epsilon = arguments["epsilon"]
        # a step may bring back what is too small for a number, of which nothing is known
        unseen = (plan == 0) & (weights[0][:, None] * weights[1] > 0)
        if unseen.any() and np.ptp(own_cost(case, result, plan)) > 500 * epsilon:
            return
    cost = step_cost(case, result, plan, weights, epsilon, proximal)
    after = following(case, result, weights, cost, epsilon)
    if after is None:
        return
    if rule(case)[1] is not None and linear_objective(plan, cost, weights, epsilon) <= (
        linear_objective(after, cost, weights, epsilon)
    ):
        # the iteration here has crept, and the plan solves its linear problem better
        return
    change = np.linalg.norm(after - plan) / np.linalg.norm(plan)
    if result.precision != "float64" and _is_loose(case, result, plan, weights, epsilon, change):
        return
    tol = max(arguments.get("tol", 1e-5), 2e-4 if result.precision == "float32" else 0)
    if status is Status.CONVERGED:
        # what marginals are missed by is made up for here
        # and potentials of relaxed ones are as precise as was asked for
        missed = max(result.marginal_error, 10 * arguments.get("inner_tol", 0))
        if change > 100 * tol + 1e-3 + 2 * missed:
            yield f"CONVERGED, and its cost leads {change:.3g} away"
        return
    entropy = 0.0 if proximal else epsilon
    before = own_objective(case, result, plan, weights, entropy)
    steps = 5 if status is Status.FLAT else 1
    for _ in range(steps - 1):
        # it may go up and down: what counts is where some iterations lead
        scaled = after if np.isinf(rule(case)[0]).any() else after / after.sum()
        cost = step_cost(case, result, scaled, weights, epsilon, proximal)
        after = following(case, result, weights, cost, epsilon)
        if after is None:
            return
    fall = (before - own_objective(case, result, after, weights, entropy)) / steps
    squares = own_squares(case, result, plan)
    # the fixed point of a solve in float32 is that of its costs, whatever the plan is kept in
    rough = 4e-4 if single or result.precision == "float32" else 0
    slack = (1e-9 + rough + 8 * result.marginal_error) * squares + rough * epsilon + 1e-14
    if status is Status.FLAT:
        least = 0.01 * squares if proximal else 0
        allowed = 10 * arguments.get("objective_tol", 1e-4) * max(abs(before), least)
    else:
        noise = np.nan_to_num(result.report.cost_standard_error or 0.0)
        allowed = 0.01 * abs(before) + 3 * noise
    if fall > allowed + slack:
        yield f"{status.name}: {before:.4g} falls by {fall:.3g} more, not {allowed:.3g}"


def judge_polish(case, result, plan, weights):
    """A polished plan that is CONVERGED is stationary, and one at POLISH_LIMIT is not."""
    if result.report.polish_steps is None or rule(case) != ((np.inf, np.inf), None):
        return
    if result.status not in (Status.CONVERGED, Status.POLISH_LIMIT) or plan.size > 600:
        return
    n, m = plan.shape
    cost = own_cost(case, result, plan)
    rows, columns = np.kron(np.eye(n), np.ones(m)), np.kron(np.ones(n), np.eye(m))
    # the least tolerances that it takes: some points weigh less than the usual ones
    least = dict.fromkeys(("primal_feasibility_tolerance", "dual_feasibility_tolerance"), 1e-10)
    found = linprog(
        cost.ravel(),
        options=least,
        A_eq=np.vstack([rows, columns]),
        b_eq=np.concatenate([plan.sum(1), plan.sum(0)]),
    )
    if found.x is None:
        return
    here = float((cost * plan).sum())
    gap = here - float(found.fun)
    slack = 1e-6 * max(own_squares(case, result, plan), abs(here))
    # what the linear program may leave of each constraint
    slack += 1e-10 * (n + m) * np.ptp(cost)
    if result.status is Status.CONVERGED and gap > slack:
        yield f"CONVERGED, polished, and a vertex is lower by {gap:.3g} of {here:.4g}"
    if result.status is Status.POLISH_LIMIT and abs(gap - result.report.polish_gap) > slack:
        yield f"POLISH_LIMIT with a gap of {gap:.3g}, not {result.report.polish_gap:.3g}"


def judge_limit(case, result, plan, single):
    """A limit that is named was met."""
    report, status, arguments = result.report, result.status, case.arguments
    outer = report.outer_iterations >= report.max_iter
    if status in (Status.OUTER_LIMIT, Status.BOTH_LIMITS) and not outer:
        yield f"{status.name} after {report.outer_iterations} of {report.max_iter} iterations"
    if status in (Status.INNER_LIMIT, Status.BOTH_LIMITS):
        asked = arguments.get("inner_tol", 5e-7)
        # a marginal that is relaxed may be what was not met
        if rule(case) == ((np.inf, np.inf), None) and result.marginal_error <= asked / 2:
            yield f"{status.name} at a marginal error of {result.marginal_error:.3g}"
    if status is Status.STOPPED and "time_limit" not in arguments:
        yield "STOPPED by no callback"
    if status is Status.POLISH_LIMIT and result.report.polish_steps is None:
        yield "POLISH_LIMIT of no polish"
    if status is Status.PRECISION_LIMIT and result.epsilon > 0:
        # of a plan of free mass, what is solved for is that of mass one
        free = not np.isinf(rule(case)[0]).any()
        cost = own_cost(case, result, plan / plan.sum() if free else plan)
        precise = result.precision == "float64" or result.precision == "mixed"
        # entries that are equal may each be rounded: two points as far from the only other one
        rounding = (
            max(np.ptp(cost), np.abs(cost).max())
            / result.epsilon
            * (2.2e-16 if precise else 1.2e-7)
        )
        # sums in float32 may miss marginals by more than was asked for
        summed = result.precision == "float32" and arguments.get("inner_tol", 1e-5) < 1e-6
        if rounding < 1e-6 and not summed:
            yield f"PRECISION_LIMIT where exponents are known to {rounding:.2g}"
