"""Values of relaxed problems, and the options that take longest, for ``fuzz_run.py``."""

from __future__ import annotations

import time
import warnings

import fuzz_cases
import numpy as np
import reference
import torch
from fuzz_cases import Case
from fuzz_twins import says_so
from problems import solve_by_name
from scipy.cluster.hierarchy import cophenet, linkage
from scipy.spatial.distance import cdist, squareform

import torchgw
from torchgw import TorchGWError
from torchgw.distances import CallableDistance, DirectedDistance

RULES = {
    "strict": {},
    "semi-relaxed": {"unbalanced": (np.inf, 0)},
    "other semi-relaxed": {"unbalanced": (0, np.inf)},
    "one penalty": {"unbalanced": (np.inf, 0.3)},
    "weak penalties": {"unbalanced": 0.02},
    "penalties": {"unbalanced": 1.0},
    "partial": {"mass": 0.6},
}
LOSSES = {
    "square": lambda x, y: (x - y) ** 2,
    "kl": reference.kl_loss,
    "absolute": reference.absolute_loss,
}
GRADIENTS = "dense", "factored", "sampled"
PROVIDERS = "euclidean", "sqeuclidean", "table", "function", "directed"


def function_of(distances):
    """A provider that knows a table only by its columns."""
    kept = torch.from_numpy(distances)
    return CallableDistance(len(kept), lambda index: kept[:, index.cpu()], dtype=torch.float64)


def value_case(number):
    """Make a small problem of some rule, loss, gradient and kind of distances."""
    rng = np.random.default_rng([61, number])
    rule, loss = str(rng.choice(list(RULES))), str(rng.choice(list(LOSSES)))
    gradient, provider = str(rng.choice(GRADIENTS)), str(rng.choice(PROVIDERS))
    if gradient == "factored":
        # that of distances and losses that have factors
        provider, loss = "sqeuclidean", str(rng.choice(["square", "kl"]))
    sides, tables = [], []
    for _ in range(2):
        n = int(rng.integers(2, 13))
        points = rng.normal(size=(n, 2))
        if rng.random() < 0.4:
            points = points[rng.integers(n, size=n)]
        metric = "sqeuclidean" if provider == "sqeuclidean" else "euclidean"
        sides.append(points)
        tables.append(cdist(points, points, metric))
    if provider == "directed":
        tables = [made * rng.uniform(0.5, 1.5, made.shape) for made in tables]
    options = {
        "loss": loss, "gradient": gradient, "random_state": 0, "max_iter": 60, "n_init": 1,
        "precision": "float64" if rng.random() < 0.7 else "mixed", **RULES[rule],
    }  # fmt: skip
    if provider == "table":
        options |= {"D_X": tables[0], "D_Y": tables[1]}
    elif provider == "directed":
        kept = (DirectedDistance(torch.from_numpy(made)) for made in tables)
        options |= dict(zip("XY", kept, strict=True))
    elif provider == "function":
        options |= {"X": function_of(tables[0]), "Y": function_of(tables[1])}
    else:
        options |= {"X": sides[0], "Y": sides[1], "distances": provider}
    for name, made in zip("ab", tables, strict=True):
        weights = rng.uniform(0.2, 1, size=len(made))
        options[name] = weights / weights.sum() if rng.random() < 0.5 else None
    if rng.random() < 0.5:
        options["scale"] = None
    if rng.random() < 0.6:
        options["epsilon"] = float(tables[0].std() * tables[1].std() * 10 ** rng.uniform(-3, 0.5))
        options["epsilon"] = options["epsilon"] or 0.1
    if rng.random() < 0.2 and rule in ("semi-relaxed", "other semi-relaxed", "partial", "strict"):
        options["polish"] = True
    return f"{loss}, {rule}", Case(number, options, *tables)


def attempt_values(number, device):
    """Compare the values of a result with those of its plan, quadruple by quadruple."""
    family, case = value_case(number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.TorchGWWarning)
        try:
            result = solve_by_name(**case.arguments, device=device)
        except TorchGWError as error:
            return {"ended": "refused", "wrong": [], "family": family,
                    "refusal": f"{type(error).__name__}: {error}"}  # fmt: skip
    wrong = list(judge_values(case, result))
    return {"ended": result.status.name, "wrong": wrong, "family": family,
            "said": says_so(result)}  # fmt: skip


def judge_values(case, result):
    """Tell which number of a result its plan does not have."""
    tables = fuzz_cases.own_tables(case, result)
    plan = torch.as_tensor(result.plan).double().cpu().numpy()
    loss = LOSSES[case.arguments["loss"]]
    terms = loss(tables[0][:, None, :, None], tables[1][None, :, None, :])
    moved = np.einsum("ij,kl->ijkl", plan, plan)
    quadratic, size = float((terms * moved).sum()), float((np.abs(terms) * moved).sum())
    # expanded losses are differences of larger terms
    size = max(size, fuzz_cases.own_squares(case, result, plan))
    noise = 8 * np.nan_to_num(result.report.value_standard_error)
    # a sample keeps the dtype of its columns
    rough = result.precision != "float64" and result.gradient == "sampled"
    share = 1e-5 if rough else 1e-9 + 8 * fuzz_cases.rounding(case, result, plan)
    slack = share * size + noise + 1e-14
    for name in ("value_quad", "value"):
        found = getattr(result, name)
        if abs(found - quadratic) > slack:
            yield f"{name} {found:.10g} for one of {quadratic:.10g}"
    if fuzz_cases.blurred(case, result, plan):
        return
    weights, free = fuzz_cases.weights_of(case), not np.isinf(fuzz_cases.rule(case)[0]).any()
    mass = plan.sum() if free else 1.0
    own = fuzz_cases.own_objective(
        case, result, plan / mass, weights, result.epsilon, quadratic / mass**2
    )
    found = result.report.objective
    # entropies are sums of logarithms of what is known up to the marginal error
    slack += 1e-9 * result.epsilon + 40 * result.marginal_error * (size + result.epsilon)
    if abs(found - own) > slack:
        yield f"objective {found:.10g} for one of {own:.10g}"


def ultrametric(rng, n):
    return squareform(cophenet(linkage(rng.normal(size=(n, 4)), "average"))) if n > 1 else (
        np.zeros((1, 1))
    )  # fmt: skip


def corner_case(number):
    """Make a problem of options of the slowest kinds: tiny epsilons, penalties, polish, units."""
    rng = np.random.default_rng([62, number])
    n, m = (int(size) for size in rng.integers(3, 40 if rng.random() < 0.9 else 100, size=2))
    kind = str(rng.choice(["points", "table", "graph", "ultrametric"]))
    tables = []
    for size in (n, m):
        if kind == "points":
            points = rng.normal(size=(size, 3))
            made = cdist(points, points)
        elif kind == "ultrametric":
            made = ultrametric(rng, size)
        else:
            made = rng.random((size, size)) < 0.3 if kind == "graph" else (
                rng.normal(size=(size, size))
            )  # fmt: skip
            made = np.triu(made, 1).astype(float)
            made = made + made.T
        tables.append(made)
    unit = 10.0 ** rng.choice([0, 0, 0, -8, 6])
    tables = [unit * made for made in tables]
    options = {"a": None, "b": None, "random_state": 0}
    if rng.random() < 0.4:
        weights = rng.random(n) * (rng.random(n) < 0.7)
        weights[rng.integers(n)] = 1
        if rng.random() < 0.3:
            weights *= 10.0 ** rng.uniform(-12, 0, n)
        options["a"] = weights / weights.sum()
    share = str(rng.choice(["auto", "1e-1", "1e-2", "1e-3", "1e-5", "1e-9"]))
    if share != "auto":
        spread = 4 * tables[0].std() * tables[1].std() or unit**2
        options["epsilon"] = float(share) * float(spread)
    rule = str(rng.choice(["strict", "strict", "kl", "l2", "partial", "semi-relaxed"]))
    if rule in ("kl", "l2"):
        options["unbalanced"] = float(10 ** rng.uniform(-3, 2)) * unit**2
        if rule == "l2":
            options["unbalanced_type"] = "l2"
    elif rule == "partial":
        options["mass"] = float(rng.uniform(0.2, 0.95))
    elif rule == "semi-relaxed":
        options["unbalanced"] = (np.inf, 0)
    if rng.random() < 0.4 and rule == "strict":
        options["regularization"] = "proximal"
    if rng.random() < 0.3 and rule in ("strict", "partial", "semi-relaxed"):
        options["polish"] = True
    if rng.random() < 0.25:
        options["loss"] = str(rng.choice(["kl", "absolute"])) if kind == "points" else "absolute"
    if rng.random() < 0.3:
        options["search"] = str(rng.choice(["fast", "thorough"]))
    options |= {"D_X": tables[0], "D_Y": tables[1]}
    family = f"{rule}, {options.get('regularization', 'entropic')}"
    if options.get("polish"):
        family += ", polished"
    return family, Case(number, options, *tables)


def attempt_corner(number, device):
    """Solve one of the slowest kinds, and judge the value of its plan.

    It ends within ten CPU seconds, or as many as its route has said that it may take; where that
    is a minute or more, within a minute by ``time_limit``.
    """
    family, case = corner_case(number)
    most, began = fuzz_cases.limited(case.arguments), time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.TorchGWWarning)
        try:
            result = solve_by_name(**case.arguments, device=device)
        except TorchGWError as error:
            return {"ended": "refused", "wrong": [], "family": family, "most": most,
                    "refusal": f"{type(error).__name__}: {error}"}  # fmt: skip
    taken = round(time.process_time() - began, 2)
    plan = torch.as_tensor(result.plan).double().cpu().numpy()
    single = result.lazy_plan.dtype.itemsize == 4
    wrong = []
    if not fuzz_cases.blurred(case, result, plan):
        l2 = case.arguments.get("unbalanced_type") == "l2"
        weights = fuzz_cases.weights_of(case)
        wrong = [] if l2 else [*fuzz_cases.judge_marginals(case, result, plan, weights, single)]
        wrong += fuzz_cases.judge_value(case, result, plan, weights, single)
    return {"ended": result.status.name, "wrong": wrong, "family": family, "seconds": taken,
            "most": most,
            "said": taken > fuzz_cases.MOST_SECONDS or says_so(result)}  # fmt: skip
