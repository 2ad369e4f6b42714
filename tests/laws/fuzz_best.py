"""Problems whose best plan is found by trying all, and batches, for ``fuzz_run.py``."""

from __future__ import annotations

import itertools
import warnings

import fuzz_cases
import numpy as np
import reference
import test_batches
from fuzz_twins import says_so
from problems import random_weights, solve_by_name
from test_batches import KINDS, SAME, table

import torchgw
from torchgw import TorchGWError

# What a problem that is enumerated is solved with; maps are tried where the second side is free.
RULES = {
    "matchings": {},
    "polished": {"polish": True},
    "matchings, absolute": {"loss": "absolute"},
    "matchings, kl": {"loss": "kl"},
    "maps": {"unbalanced": (np.inf, 0)},
}
# What batches are solved with.
BATCHES = {
    "searched": {},
    "single start": {"n_init": 1},
    "polished": {"polish": True},
    "proximal": {"regularization": "proximal"},
    "partial": {"mass": 0.7},
    "penalties": {"unbalanced": 0.5},
    "semi-relaxed": {"unbalanced": (np.inf, 0)},
    "other semi-relaxed": {"unbalanced": (0, np.inf)},
    "fused": {"alpha": 0.6},
}


def losses(loss, x, y):
    """The loss of each pair of distances; that of ``kl`` takes no log of nought."""
    if loss == "square":
        return (x - y) ** 2
    if loss == "absolute":
        return np.abs(x - y)
    return x * np.log((x + 1e-18) / (y + 1e-18)) - x + y


def lowest(x, y, loss, maps):
    """Return the lowest value of all matchings, or of all maps of the first side."""
    tried = itertools.product(range(len(y)), repeat=len(x)) if maps else (
        itertools.permutations(range(len(y)))
    )  # fmt: skip
    orders = np.array(list(tried))
    return min(
        losses(loss, x, y[part[:, :, None], part[:, None, :]]).mean((1, 2)).min()
        for part in np.array_split(orders, 1 + len(orders) // 10_000)
    )


def attempt_enumerated(number, device):
    """Solve a problem of few points by the defaults; none of all its plans of one kind is better.

    The objective has the entropy of such a plan beside the product plan: log m.
    """
    rng = np.random.default_rng([59, number])
    family, options = list(RULES.items())[number % len(RULES)]
    maps, loss = family == "maps", options.get("loss", "square")
    kinds = KINDS
    if loss != "square":
        # without negative entries, of which these losses say nothing
        kinds = [kind for kind in KINDS if kind not in ("negative", "products")]
    kind = str(rng.choice(kinds))
    if maps:
        sizes = rng.integers(2, 6, size=2)
    else:
        sizes = [int(rng.integers(3, 8 if rng.random() < 0.9 else 9))] * 2
    d_x, d_y = (table(kind, rng, int(n)) for n in sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.TorchGWWarning)
        try:
            result = solve_by_name(
                D_X=d_x, D_Y=d_y, scale=None, random_state=0, device=device, **options
            )
        except TorchGWError as error:
            return {"ended": "refused", "wrong": [], "refusal": f"{type(error).__name__}: {error}"}
    best = lowest(d_x, d_y, loss, maps) + result.epsilon * np.log(sizes[1])
    own = result.report.objective
    unit = reference.gw_value(d_x, d_y, np.full(sizes, 1 / np.prod(sizes)))
    missed = own > best + SAME * abs(best) + 1e-9 * unit
    said = says_so(result)
    notes = [f"missed, {'said' if said else 'silent'}: {kind}"] if missed else []
    text = f"{kind}, {sizes[0]} x {sizes[1]} points: {own:.8g}, the best of all {best:.8g}"
    return {
        "ended": result.status.name, "wrong": [text] if missed and not said else [],
        "family": family, "said": bool(missed and said), "notes": notes,
    }  # fmt: skip


def own_values(given, k, plan, batch):
    """Both parts of the value of a plan, and what cancels in them."""
    d_x, d_y = given["D_X"][k], given["D_Y"][k]
    alpha = float(batch.alpha[k])
    quadratic = alpha * reference.gw_value(d_x, d_y, plan)
    linear = (1 - alpha) * float((given["M"][k] * plan).sum()) if "M" in given else 0.0
    p, q = plan.sum(1), plan.sum(0)
    return quadratic, linear, p @ d_x**2 @ p + q @ d_y**2 @ q


def judge_batch(given, options, batch):
    """Tell what a batch says of its plans that an evaluation in float64 does not bear out."""
    for k, plan in enumerate(batch.plans()):
        plan = np.asarray(plan, np.float64)
        arguments = {name: given[name][k] for name in "ab"} | options
        case = fuzz_cases.Case(k, arguments, given["D_X"][k], given["D_Y"][k])
        if not np.isfinite(plan).all() or plan.min() < 0:
            yield k, "the plan is none"
            continue
        quadratic, linear, squares = own_values(given, k, plan, batch)
        for name, own in (("value_quad", quadratic), ("value_linear", linear)):
            found = float(getattr(batch, name)[k])
            if abs(found - own) > 1e-8 * (squares + abs(own)):
                yield k, f"{name} {found:.8g} for one of {own:.8g}"
        (rho, mass), weights = fuzz_cases.rule(case), fuzz_cases.weights_of(case)
        over = [plan.sum(1 - axis) - weight for axis, weight in enumerate(weights)]
        if mass is not None:
            errors = [abs(plan.sum() - mass), *(part.clip(0).sum() for part in over)]
        else:
            errors = [
                np.abs(part).sum() for part, one in zip(over, rho, strict=True) if np.isinf(one)
            ]
        status = batch.statuses[k]
        if status in fuzz_cases.GOOD and max(errors, default=0.0) > 5e-6:
            yield k, f"{status.name} at a marginal error of {max(errors):.3g}"


def attempt_batch(number, device):
    """Solve problems together: plans are judged, and one of the problems is solved by itself.

    By turns in a batch of one, where it has the same bits, and by ``solve``, which finds nothing
    better. Of a single start nothing is promised but where it ends.
    """
    rng = np.random.default_rng([60, number])
    family, options = list(BATCHES.items())[number % len(BATCHES)]
    count = int(rng.integers(2, 4))
    given = {name: [] for name in ("D_X", "D_Y", "a", "b")}
    for _ in range(count):
        kind, weighted = str(rng.choice(KINDS)), rng.random() < 0.5
        for name, n in zip("XY", rng.integers(2, 10, size=2), strict=True):
            given[f"D_{name}"].append(table(kind, rng, int(n)))
            weights = random_weights(int(n), int(rng.integers(2**31))) if weighted else None
            given["a" if name == "X" else "b"].append(weights)
    if family == "fused":
        shapes = [(len(x), len(y)) for x, y in zip(given["D_X"], given["D_Y"], strict=True)]
        given["M"] = [rng.random(shape) for shape in shapes]
    options = options | {"device": device}

    def one(k):
        return {name: parts[k] for name, parts in given.items()}

    batch = test_batches.listed([one(k) for k in range(count)], **options)
    asked = {name: value for name, value in options.items() if name != "device"}
    wrong = [f"problem {k}: {text}" for k, text in judge_batch(given, asked, batch)]
    chosen = int(rng.integers(count))
    said = False
    if number // len(BATCHES) % 2:
        alone = test_batches.listed([one(chosen)], **options)
        if not np.array_equal(np.asarray(alone.plan(0)), np.asarray(batch.plan(chosen))):
            wrong.append(f"problem {chosen}: other bits alone")
    elif "n_init" not in options:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", torchgw.TorchGWWarning)
            single = solve_by_name(**one(chosen), scale=None, random_state=0, **options)
        own, other = float(batch.objective[chosen]), single.report.objective
        squares = own_values(given, chosen, np.asarray(batch.plan(chosen)), batch)[2]
        # of free mass the least objective may be next to nothing
        if own > other + SAME * abs(other) + 1e-6 * squares:
            said = bool(test_batches.in_doubt(batch)[chosen])
            if not said:
                wrong.append(f"problem {chosen}: {own:.8g}, and {other:.8g} by itself")
    return {
        "ended": "solved" if batch.converged.all() else "some at a limit", "wrong": wrong,
        "family": family, "said": said,
    }  # fmt: skip
