"""Derivatives against differences, and problems whose answer is known, for ``fuzz_run.py``.

Differences are of the same fixed point, followed in NumPy: what is judged is used nowhere.
"""

from __future__ import annotations

import itertools
import warnings

import networkx
import numpy as np
import reference
import scipy
import torch
from fuzz_cases import GOOD, logsumexp, tree_distances
from problems import solve_by_name
from scipy.spatial.distance import cdist

import torchgw
from torchgw import ConvergenceWarning, SearchWarning, TorchGWError
from torchgw._boundary.arrays import to_numpy

# Share of a derivative that it may differ from differences by: what docs/differentiation.md says.
AGREED = 1e-5
# Share of the product plan's value by which an optimum may lie above the known one.
MISSED = 2e-3


def tables(given, metric):
    """Distances of both sides, and the linear cost, of arrays by name."""
    sides = [given.get("D_X"), given.get("D_Y")]
    for index, name in enumerate("XY"):
        if sides[index] is None:
            sides[index] = cdist(given[name], given[name], metric)
        else:
            sides[index] = (sides[index] + sides[index].T) / 2
    return *sides, given.get("M")


def iterate(d_x, d_y, a, b, plan, epsilon, alpha=1.0, linear=0.0, most=500, tol=1e-6):
    """Linearise, scale a few times, repeat; return the plan and its last change."""
    log_a, log_b = np.log(a)[:, None], np.log(b)
    g = None
    for _ in range(most):
        cost = 2 * alpha * reference.gw_cost(d_x, d_y, plan) + (1 - alpha) * linear
        kernel = log_a + log_b - (cost - cost.min()) / epsilon
        count = 6
        if g is None:
            # that of the plan itself, up to a constant
            g, count = np.zeros(len(b)), 300
            if plan.min() > 0:
                g = np.median(np.log(plan) - kernel, axis=0)
        for _ in range(count):
            f = log_a[:, 0] - logsumexp(kernel + g, axis=1)
            g = log_b - logsumexp(kernel + f[:, None], axis=0)
        following = np.exp(kernel + f[:, None] + g)
        change, plan = np.abs(following - plan).sum(), following
        if change < tol:
            break
    return plan, change


def balance(flat, d_x, d_y, a, b, epsilon, alpha, linear):
    """What one iteration changes of a plan, in units of a x b."""
    product = a[:, None] * b
    plan = np.maximum(flat.reshape(product.shape), 1e-290) * product
    return (
        iterate(d_x, d_y, a, b, plan, epsilon, alpha, linear, 1, 0.0)[0] / product
    ).ravel() - flat


def settle(given, metric, alpha, epsilon, plan, *, newton):
    """Follow the fixed point of entropic iteration; return objective, plan and last change.

    Iteration leaves saddle points, to which Newton's method comes as well.
    """
    d_x, d_y, linear = tables(given, metric)
    linear = 0.0 if linear is None else linear
    a, b = (given[name] / given[name].sum() for name in "ab")
    if newton:
        given_here = d_x, d_y, a, b, epsilon, alpha, linear
        product = a[:, None] * b
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            try:
                flat = scipy.optimize.newton_krylov(
                    lambda flat: balance(flat, *given_here), (plan / product).ravel(),
                    f_tol=1e-11, maxiter=20,
                )  # fmt: skip
            except (scipy.optimize.NoConvergence, ValueError):
                return np.nan, plan, np.inf
        plan, change = flat.reshape(plan.shape) * product, 1e-13
    else:
        plan, change = iterate(d_x, d_y, a, b, plan, epsilon, alpha, linear, 3000, 1e-13)
    quadratic = alpha * reference.gw_value(d_x, d_y, plan)
    density = plan / (a[:, None] * b)
    entropy = scipy.special.xlogy(plan, density).sum()
    return quadratic + (1 - alpha) * (linear * plan).sum() + epsilon * entropy, plan, change


def derivative_case(number):
    """Return arrays, options and a direction."""
    rng = np.random.default_rng([19, number])
    n, m = (int(size) for size in rng.integers(3, 13, size=2))
    metric = str(rng.choice(["sqeuclidean", "euclidean"]))
    given = {"X": rng.normal(size=(n, 2)), "Y": rng.normal(size=(m, 3))}
    if rng.random() < 0.25:
        given = {f"D_{name}": cdist(given[name], given[name], metric) + 0.1 for name in ("X", "Y")}
    given["a"], given["b"] = (rng.uniform(0.3, 1, size=size) for size in (n, m))
    given["a"], given["b"] = (given[name] / given[name].sum() for name in "ab")
    alpha = 1.0
    if rng.random() < 0.4:
        given["M"], alpha = rng.random((n, m)), float(rng.choice([0.2, 0.5, 0.9]))
    d_x, d_y, _ = tables(given, metric)
    epsilon = float(4 * alpha * d_x.std() * d_y.std() * 10 ** rng.uniform(-1.7, 0.3))
    names = [name for name in given if rng.random() < 0.6] or [next(iter(given))]
    directions = {name: rng.normal(size=given[name].shape) for name in names}
    for name in set(names) & {"a", "b"}:
        # the weights stay weights
        directions[name] *= given[name] / len(given[name])
        directions[name] -= directions[name].mean()
    options = {
        "alpha": alpha, "epsilon": epsilon, "differentiable": str(rng.choice(
            ["value", "implicit", "unrolled"])), "tol": 1e-10, "inner_tol": 1e-11,
        "max_iter": 1000, "inner_max_iter": 5000, "random_state": 0,
        "n_init": int(rng.choice([1, 16])),
    }  # fmt: skip
    if "X" in given:
        options["distances"] = metric
    else:
        directions = {
            name: (step + step.T) / 2 * (1 - np.eye(len(step))) if name[0] == "D" else step
            for name, step in directions.items()
        }
    if "M" not in given:
        del options["alpha"]
    weights = rng.normal(size=(n, m))
    return given, metric, alpha, options, directions, weights


def attempt_derivative(number, device):
    """Solve, differentiate, and compare with differences; say what a warning said."""
    given, metric, alpha, options, directions, weights = derivative_case(number)
    tensors = {name: torch.tensor(value, device=device) for name, value in given.items()}
    for name in directions:
        tensors[name].requires_grad_()
    follows = options["differentiable"] != "value"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            result = solve_by_name(**tensors, **options)
            found = _along(result.loss, tensors, directions)
            pushed = None
            if follows:
                total = (result.plan * torch.tensor(weights, device=device)).sum()
                pushed = _along(total, tensors, directions)
        except TorchGWError as error:
            return {"ended": "refused", "wrong": [], "family": options["differentiable"],
                    "refusal": f"{type(error).__name__}: {error}"}  # fmt: skip
    warned = any(issubclass(one.category, ConvergenceWarning) for one in said)
    wrong, notes = [], [options["differentiable"]]
    plan = to_numpy(result.plan)
    case, fixed = (given, metric, alpha, options["epsilon"]), False
    off = None
    for newton in (False, True):
        known = settle(*case, plan, newton=newton)
        differences = None
        if known[2] < 1e-11 and np.abs(known[1] - plan).sum() < 1e-6:
            fixed = True
            differences = _differences(case, directions, weights, known[1], newton=newton)
        if differences is None:
            notes.append("no fixed point" if newton else "a saddle point, or slow")
            continue
        off = [*_far_from((found, pushed), differences)]
        # what is iterated slowly seems to stay before it does
        if not off:
            break
    if off is None:
        # there are no differences to compare with; where Newton's method has not followed the fixed
        # point of moved input that says nothing of the plan, which may be one
        if not fixed and result.status in GOOD and not warned:
            wrong.append(f"{result.status.name} at no fixed point: {known[2]:.2g}")
        return _outcome(result, warned, notes, wrong)
    if warned:
        notes += ["warned: off"] * len(off)
    else:
        wrong += off
    return _outcome(result, warned, notes, wrong)


def _far_from(pairs, differences):
    """Say which derivatives are not those that differences have."""
    for name, pair, (expected, error) in zip(("loss", "plan"), pairs, differences, strict=True):
        if pair is None:
            continue
        value, size = pair
        if abs(value - expected) > AGREED * (size + abs(expected)) + 20 * error + 1e-9:
            share = abs(value - expected) / (size + abs(expected))
            yield f"{name} {value:.9g} for {expected:.9g}, off by {share:.2g}"


def _outcome(result, warned, notes, wrong):
    notes = [*notes, "warned"] if warned else notes
    return {"ended": result.status.name, "wrong": wrong, "notes": notes, "family": notes[0],
            "said": warned}  # fmt: skip


def _along(value, tensors, directions):
    """Derivative of a number in a direction, and the size of what it is a sum of."""
    gradients = torch.autograd.grad(
        value, [tensors[name] for name in directions], retain_graph=True, allow_unused=True
    )
    parts = [
        (gradient.cpu().numpy() * step).ravel()
        for gradient, step in zip(gradients, directions.values(), strict=True)
        if gradient is not None
    ]
    parts = np.concatenate(parts) if parts else np.zeros(1)
    return float(parts.sum()), float(np.abs(parts).sum())


def _differences(case, directions, weights, plan, *, newton):
    """Central differences of objective and plan, extrapolated, each with an error.

    None where what is iterated goes elsewhere from next to the plan.
    """
    given, metric, alpha, epsilon = case

    def at(step):
        moved = {
            name: value + step * directions[name] if name in directions else value
            for name, value in given.items()
        }
        objective, found, change = settle(moved, metric, alpha, epsilon, plan, newton=newton)
        moves.append(np.abs(found - plan).sum())
        return np.array([objective, (found * weights).sum()]), change

    slopes, noise, moves = [], 0.0, []
    # Newton's method ends at other solutions, or at none, where the first guess is far
    for step in (2e-4, 1e-4, 5e-5) if newton else (2e-3, 1e-3, 5e-4):
        (up, first), (down, second) = at(step), at(-step)
        slopes.append((up - down) / (2 * step))
        noise = max(noise, (first + second) / step)
    # a quarter of the step moves a plan by about a quarter
    if max(moves[-2:]) > max(moves[:2]) / 2 + 1e-6:
        return None
    rough, fine = ((4 * slopes[k + 1] - slopes[k]) / 3 for k in (0, 1))
    best = (16 * fine - rough) / 15
    error = np.abs(best - fine) + 1e-12 + noise
    return list(zip(best, error, strict=True))


def network(rng, n):
    """An unweighted network, sparse at random or by preference."""
    seed = int(rng.integers(2**31))
    if rng.random() < 0.7:
        graph = networkx.fast_gnp_random_graph(n, 4 / n, seed=seed)
    else:
        graph = networkx.barabasi_albert_graph(n, 2, seed=seed)
    return networkx.to_numpy_array(graph)


def copy_case(rng, kind):
    """Return arguments of a copy, its two tables and weights, and the true match."""
    n = int(rng.integers(8, 81))
    order = rng.permutation(n)
    weights = None
    options = {}
    if kind in ("cloud", "weighted", "lattice", "cross"):
        d = int(rng.integers(1, 6))
        x = rng.normal(size=(n, d)) * rng.uniform(0.3, 2, size=d)
        if kind == "lattice":
            side = int(np.ceil(np.sqrt(n)))
            x = np.stack([np.arange(n) % side, np.arange(n) // side], axis=1).astype(float)
        if kind == "cross":
            x = np.concatenate([x, -x])[:n]
        turn = np.linalg.qr(rng.normal(size=(x.shape[1],) * 2))[0]
        y = (x @ turn + rng.normal(size=x.shape[1]))[order]
        if kind == "weighted":
            weights = rng.uniform(0.2, 1, size=n)
            weights /= weights.sum()
        metric = str(rng.choice(["euclidean", "sqeuclidean"]))
        options |= {"X": x, "Y": y, "distances": metric}
        table = cdist(x, x, metric)
    else:
        table = tree_distances(rng, n) if kind == "tree" else network(rng, n)
        options |= {"D_X": table, "D_Y": table[np.ix_(order, order)]}
    if weights is not None:
        options |= {"a": weights, "b": weights[order]}
    a = np.full(n, 1 / n) if weights is None else weights
    match = np.zeros((n, n))
    match[order, np.arange(n)] = a[order]
    return options, table, table[np.ix_(order, order)], a, a[order], match


COPIES = ("cloud", "cloud", "weighted", "lattice", "cross", "tree", "network")


def attempt_known(number, device):
    """Solve a problem whose optimum is known, and say if the answer is another."""
    rng = np.random.default_rng([20, number])
    kind = str(rng.choice([*COPIES, "linear", "vertices", "subset"]))
    options = {"random_state": 0, "device": device}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ended, wrong = {"linear": linear_answer, "vertices": best_vertex, "subset": subset}.get(
            kind, copied
        )(rng, kind, options)
    searched = any(
        issubclass(one.category, SearchWarning | ConvergenceWarning)
        and one.category is not torchgw.AmbiguityWarning
        for one in said
    )
    notes, missed = [kind], bool(wrong)
    if searched:
        notes.append(f"warned {'rightly' if wrong else 'of a right answer'}: {kind}")
        wrong = []
    return {"ended": ended, "wrong": [f"{kind}: {one}" for one in wrong], "notes": notes,
            "family": kind, "said": searched and missed, "most": 5.0}  # fmt: skip


def copied(rng, kind, options):
    """A copy in another order: nothing is better than what the true match leads to."""
    given, d_x, d_y, a, b, match = copy_case(rng, kind)
    result = solve_by_name(**given, **options)
    d_x, d_y = (table * scale for table, scale in zip((d_x, d_y), result.scale, strict=True))
    own = _objective(d_x, d_y, a, b, to_numpy(result.plan), result.epsilon)
    plan, _ = iterate(d_x, d_y, a, b, match, result.epsilon)
    best = _objective(d_x, d_y, a, b, plan, result.epsilon)
    product = reference.gw_value(d_x, d_y, np.outer(a, b))
    if own > best + MISSED * product:
        return result.status.name, [f"{own:.6g}, the true match {best:.6g}, all {product:.4g}"]
    return result.status.name, []


def _objective(d_x, d_y, a, b, plan, epsilon):
    entropy = scipy.special.xlogy(plan, plan / (a[:, None] * b)).sum()
    return reference.gw_value(d_x, d_y, plan) + epsilon * float(entropy)


def linear_answer(rng, kind, options):
    """alpha=0, polished: the optimum of a linear program."""
    n = int(rng.integers(2, 40))
    cost = rng.random((n, n))
    x = rng.normal(size=(n, 2))
    result = solve_by_name(x, x, M=cost, alpha=0, distances="euclidean", polish=True, **options)
    best = cost[scipy.optimize.linear_sum_assignment(cost)].mean()
    off = abs(result.value - best) > 1e-9
    return result.status.name, [f"{result.value:.9g} for {best:.9g}"] if off else []


def best_vertex(rng, kind, options):
    """Few points, polished: the best of all permutations, as the objective is concave."""
    n = int(rng.integers(2, 7))
    x, y = rng.normal(size=(n, 2)), rng.normal(size=(n, 3))
    metric = str(rng.choice(["euclidean", "sqeuclidean"]))
    result = solve_by_name(x, y, distances=metric, scale=None, polish=True, **options)
    d_x, d_y = (cdist(side, side, metric) for side in (x, y))
    best = min(
        ((d_x - d_y[np.ix_(order, order)]) ** 2).mean()
        for order in map(list, itertools.permutations(range(n)))
    )
    off = result.value > best * (1 + MISSED) + 1e-12 or result.value < best * (1 - 1e-9) - 1e-12
    return result.status.name, [f"{result.value:.6g} for {best:.6g}"] if off else []


def subset(rng, kind, options):
    """Semi-relaxed: points that are among those of the other side are matched to these."""
    m = int(rng.integers(10, 41))
    n = int(rng.integers(5, m + 1))
    y = rng.normal(size=(m, 2))
    x = y[rng.permutation(m)[:n]]
    result = solve_by_name(
        x, y, distances="euclidean", scale=None, unbalanced=(np.inf, 0), **options
    )
    d_x, d_y = (cdist(side, side) for side in (x, y))
    product = reference.gw_value(d_x, d_y, np.full((n, m), 1 / (n * m)))
    # entropy blurs the match
    off = result.value > 0.1 * product
    return result.status.name, [f"{result.value:.6g}, all {product:.4g}"] if off else []
