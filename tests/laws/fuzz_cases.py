"""Random geometries and options, and a judge in float64 that knows nothing of the package.

A case is made from its number alone, so that one that failed can be solved again.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import reference
from scipy.spatial.distance import cdist

import torchgw
from torchgw import Status, TorchGWError

GOOD = (Status.CONVERGED, Status.STATIONARY, Status.FLAT)


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


def _tree_distances(rng, n):
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


def make_case(number, most=24):
    """Make the case of a number, of at most so many points per side."""
    rng = np.random.default_rng([18, number])
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
        make = _tree_distances if given == "tree" else _adjacency
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
    maybe(0.4, gradient=["dense", "factored", "sampled"])
    maybe(0.4, precision=["float32", "float32", "mixed", "float64"])
    maybe(0.3, storage=["stored", "streamed"])
    maybe(0.3, unbalanced=[0.1, 5.0, (np.inf, 0), (0, np.inf), (np.inf, 1.0)], mass=[0.3, 0.7, 1.0])
    maybe(0.1, regularization=["proximal"], polish=[True], skip_tiles=[True, False])
    maybe(0.3, n_init=[1, 4], search=["fast"], scale=[None, "max", "mean"])
    maybe(0.2, tol=[1e-3, 1e-8], objective_tol=[0, 1e-2], inner_tol=[1e-3, 1e-9])
    if rng.random() < 0.6:
        spread = _spread(tables, arguments)
        arguments["epsilon"] = float(spread * 10 ** rng.uniform(-5, 1))
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


def run(case):
    """Solve a case and judge it; errors that are not refusals come through."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.TorchGWWarning)
        try:
            result = torchgw.solve(**case.arguments)
        except TorchGWError as error:
            return Verdict(refusal=f"{type(error).__name__}: {error}")
    return Verdict(result=result, wrong=list(judge(case, result)))


def judge(case, result):
    """Tell what a result says that an evaluation of its plan in float64 does not bear out."""
    plan = result.plan.double().cpu().numpy()
    n, m = len(case.d_x), len(case.d_y)
    if plan.shape != (n, m) or not np.isfinite(plan).all() or plan.min() < 0:
        yield "the plan is none"
        return
    a, b = (
        np.full(size, 1 / size) if weights is None else weights
        for weights, size in zip((case.arguments[name] for name in "ab"), (n, m), strict=True)
    )
    single = result.lazy_plan.dtype.itemsize == 4
    yield from judge_marginals(case, result, plan, (a, b), single)
    yield from judge_value(case, result, plan, (a, b), single)
    if result.status is Status.CONVERGED and _plain(case, result):
        yield from judge_fixed_point(case, result, plan, (a, b), single)


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
        error = max(
            np.abs(part).sum() if np.isinf(each) else 0.0
            for part, each in zip(over, pair, strict=True)
        )
    # sums in float32 differ by the rounding of exponents, which is at most 2e-4
    if abs(error - result.marginal_error) > (4e-4 if single else 1e-9):
        yield f"marginal error {result.marginal_error:.3g} for one of {error:.3g}"
    asked = arguments.get("inner_tol")
    allowed = 10 * (asked or (1e-5 if single else 5e-7))
    if single and asked is None:
        allowed = 2e-4
    # as for sums: what is reported is what was promised, up to their rounding
    if result.status in GOOD and error > allowed + (4e-4 if single else 1e-9):
        yield f"{result.status.name} at a marginal error of {error:.3g}"


def losses(case):
    name = case.arguments.get("loss", "square")
    return {"kl": reference.kl_loss, "absolute": reference.absolute_loss}.get(name)


def own_cost(case, result, plan):
    """L(P), float64, from the distances as the result has scaled them."""
    d_x, d_y = (
        table * scale for table, scale in zip((case.d_x, case.d_y), result.scale, strict=True)
    )
    loss = losses(case)
    if loss is None:
        return reference.gw_cost(d_x, d_y, plan), (d_x, d_y)
    return reference.loss_cost(loss, d_x, d_y, plan), (d_x, d_y)


def judge_value(case, result, plan, weights, single):
    cost, (d_x, d_y) = own_cost(case, result, plan)
    quadratic = result.alpha * float((cost * plan).sum())
    linear = 0.0 if case.linear is None else (1 - result.alpha) * float((case.linear * plan).sum())
    p, q = plan.sum(1), plan.sum(0)
    squares = p @ d_x**2 @ p + q @ d_y**2 @ q
    if losses(case) is not None:
        squares += 40 * max(d_x.max(initial=0), d_y.max(initial=0))
    noise = 8 * np.nan_to_num(result.report.value_standard_error)
    # products in float32, of the distances and of the plan; in float64 the cancellation alone
    exact = result.precision == "float64" or (result.precision == "mixed" and not single)
    loose = single or not exact
    slack = (1e-5 if loose else 1e-9) * max(squares, abs(quadratic)) + noise + 1e-14
    if single:
        # a plan in float32 is read twice, each time with entries off by the rounding of exponents
        slack += 4e-4 * max(squares, abs(quadratic))
    for name, found, own in (
        ("value_quad", result.value_quad, quadratic),
        ("value_linear", result.value_linear, linear),
    ):
        if abs(found - own) > slack + (1e-5 if loose else 1e-9) * abs(own):
            yield f"{name} {found:.8g} for one of {own:.8g}"
    balanced = "unbalanced" not in case.arguments and case.arguments.get("mass", 1) == 1
    if result.status in GOOD and balanced:
        product = np.outer(*weights)
        worst = result.alpha * float((own_cost(case, result, product)[0] * product).sum())
        worst += 0.0 if case.linear is None else (1 - result.alpha) * (case.linear * product).sum()
        spare = (1e-6 + 8 * result.marginal_error) * squares + slack + 1e-5 * abs(worst)
        if result.value > worst + spare:
            yield f"{result.status.name} at {result.value:.6g}, above the product's {worst:.6g}"


def _plain(case, result):
    """Whether the fixed point is that of the plain entropic iteration."""
    relaxed = "unbalanced" in case.arguments or case.arguments.get("mass", 1) < 1
    kind = case.arguments.get("regularization", "entropic")
    exact = result.gradient != "sampled"
    return not relaxed and kind == "entropic" and result.epsilon > 0 and exact


def judge_fixed_point(case, result, plan, weights, single):
    """A converged plan is near that of its own cost."""
    a, b = weights
    cost = 2 * result.alpha * own_cost(case, result, plan)[0]
    if case.linear is not None:
        cost = cost + (1 - result.alpha) * case.linear
    epsilon = result.epsilon
    g = result.potential_b.cpu().numpy()
    f, g, _ = reference.sinkhorn(cost, a, b, epsilon, 300, g=g)
    following = reference.plan(cost, a, b, f, g, epsilon)
    if np.abs(following.sum(0) - b).sum() > 1e-6:
        return
    change = np.linalg.norm(following - plan) / np.linalg.norm(plan)
    tol = max(case.arguments.get("tol", 1e-5), 2e-4 if single else 0)
    if change > 100 * tol + 1e-3:
        yield f"CONVERGED, and its cost leads {change:.3g} away"
