"""What is known of a match, row by row of its issue: ``python -m benchmarks known --shows``.

Each row prints what was asked and what was found, on one tree, one thread, by defaults: 12 points
of two types, masks beside POT with 1e6 in place of what is forbidden, seeds beside SciPy's FAQ,
cells with types as groups, molecules beside all matchings, infeasible weights, derivatives beside
differences. Named rows alone, if some are. Exit status 1 if one is not met.
"""

from __future__ import annotations

import functools
import itertools
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy.optimize import linprog, quadratic_assignment
from scipy.sparse.csgraph import shortest_path
from scipy.spatial.distance import cdist

import torchgw
from benchmarks.solves import snare
from torchgw.metrics import label_accuracy

# met, and what was found
Found = tuple[bool, str]


def twelve() -> Found:
    """Match 12 points of two types to themselves, without what is forbidden, or in groups."""
    right, outside = [], 0.0
    warnings.simplefilter("error", torchgw.TorchGWWarning)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        points, order, kind = rng.normal(size=(12, 3)), rng.permutation(12), np.arange(12) % 2
        allowed = kind[:, None] == kind[order]
        ways: list[dict[str, Any]] = [
            {"M": np.where(allowed, 0.0, np.inf), "alpha": 0.5},
            {"groups": (kind, kind[order])},
        ]
        for known in ways:
            result = torchgw.solve(points, points[order], random_state=0, **known)
            right.append(np.mean(order[result.matching().target] == np.arange(12)))
            outside += float(result.plan[~allowed].sum())
    text = f"{min(right):.0%} right, {outside:g} outside, no warning"
    return min(right) == 1 and outside == 0, text


def masks(n: int = 400, seeds: int = 6) -> Found:
    """Match unrelated points where a tenth of the pairs is allowed; POT has 1e6 elsewhere."""
    import ot

    lower, outside, error = [], 0.0, 0.0
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        sides = [cdist(points, points) for points in rng.normal(size=(2, n, 3))]
        mask, weights = rng.random((n, n)) < 0.1, np.full(n, 1 / n)
        theirs = ot.gromov.fused_gromov_wasserstein(
            np.where(mask, 0, 1e6), *sides, weights, weights, "square_loss", alpha=0.5,
            max_iter=1000,
        )  # fmt: skip
        for way in ({}, {"regularization": "proximal"}):
            ours = torchgw.solve(
                D_X=sides[0], D_Y=sides[1], allowed=mask, random_state=0, scale=None, **way
            )
            values = [ot.gromov.gwloss(*_gw(*sides, plan), plan) for plan in (ours.plan, theirs)]
            lower.append(values[0] <= values[1] * (1 + 1e-6))
            outside = max(outside, float(ours.plan[~mask].sum()))
            error = max(error, ours.marginal_error)
    text = f"no higher than POT in {sum(lower)} of {len(lower)}"
    return (
        all(lower) and outside == 0 and error < 1e-6,
        f"{text}, {outside:g} outside, marginals to {error:.1e}",
    )


def _gw(first: Any, second: Any, plan: Any) -> tuple[Any, Any, Any]:
    """Return the constant and the factors of POT's squared loss."""
    import ot

    found = ot.gromov.init_matrix(first, second, plan.sum(1), plan.sum(0), "square_loss")
    return found[0], found[1], found[2]


def seeds(graphs: int = 3, n: int = 300) -> Found:
    """Match correlated random graphs with some known nodes, beside FAQ from the same seeds."""
    met, cells = True, []
    for rho, known in itertools.product((0.5, 0.7, 0.9), (5, 10, 20)):
        shares = []
        for graph in range(graphs):
            rng = np.random.default_rng([graph, int(rho * 10), known])
            first, fresh = (np.triu(rng.random((n, n)) < 0.5, 1) for _ in range(2))
            second = np.triu(np.where(rng.random((n, n)) < rho, first, fresh), 1)
            order = rng.permutation(n)
            a, b = (1.0 * (side | side.T) for side in (first, second))
            b, place = b[np.ix_(order, order)], order.argsort()
            chosen = rng.choice(n, known, replace=False)
            pairs = np.stack([chosen, place[chosen]], 1)
            options = {"maximize": True, "partial_match": pairs, "rng": np.random.default_rng(0)}
            theirs = quadratic_assignment(a, b, method="faq", options=options).col_ind
            ours = torchgw.solve(D_X=a, D_Y=b, pairs=pairs, random_state=0).matching().target
            rest = np.setdiff1d(np.arange(n), chosen)
            shares.append([np.mean(found[rest] == place[rest]) for found in (theirs, ours)])
        faq, torch_gw = np.mean(shares, 0)
        met &= bool(torch_gw >= faq)
        cells.append(f"rho {rho}, {known} seeds: {faq:.2f}, {torch_gw:.2f}")
    return met, "FAQ, torchgw: " + "; ".join(cells)


def cells() -> Found:
    """Align SNARE-seq with and without cell lines as groups."""
    return _with_types(snare.load(snare.data_path()))


def _with_types(data: snare.Snare) -> Found:
    (before, far), (now, near) = (
        (
            float(np.mean(data.atac_type == data.rna_type[plan.argmax(1)])),
            snare.score(data, np.asarray(plan, np.float64))["foscttm"],
        )
        for known in ({}, {"groups": (data.atac_type, data.rna_type)})
        for plan in (torchgw.solve(data.atac, data.rna, random_state=0, **known).plan,)
    )
    text = f"lines {before:.1%} -> {now:.1%}, FOSCTTM {far:.3f} -> {near:.3f}"
    return now == 1 and near <= far, text


def kept_aside() -> Found:
    """Align three draws of SNARE-seq, and the stages of scNMT-seq, with types as groups."""
    told, met = [], True
    for draw in range(3):
        data = snare.load(snare.data_path(), 1 + draw)
        some = np.random.default_rng([59, draw]).permutation(len(data.rna))[:600]
        place = np.empty(len(data.rna), int)
        place[some] = np.arange(600)
        rows = np.flatnonzero(np.isin(data.match, some))
        drawn = snare.Snare(
            data.atac[rows], data.rna[some], data.atac_type[rows], data.rna_type[some],
            place[data.match[rows]], data.d_atac[np.ix_(rows, rows)],
            data.d_rna[np.ix_(some, some)],
        )  # fmt: skip
        better, text = _with_types(drawn)
        met &= better
        told.append(text)
    with np.load(snare.data_path().with_name("scnmt.npz")) as data:
        sides, stages = (data["rna"], data["met"]), (data["rna_stage"], data["met_stage"])
    # stages have other shares on the two sides; weights with which they have the same
    shares = np.mean([np.bincount(side) / len(side) for side in stages], 0)
    a, b = ((shares / np.bincount(side))[side] for side in stages)
    right, moved = [], []
    for known in ({}, {"groups": stages}):
        plan = torchgw.solve(*sides, a=a, b=b, random_state=0, **known).plan
        right.append(float(np.mean(stages[0] == stages[1][plan.argmax(1)])))
        projected = plan @ sides[1] / plan.sum(1, keepdims=True)
        moved.append(label_accuracy(projected, stages[0], sides[1], stages[1]))
    met &= right[1] == 1 and moved[1] >= moved[0]
    told.append(f"scNMT stages {right[0]:.0%} -> {right[1]:.0%}, projected {moved[0]:.0%} -> "
                f"{moved[1]:.0%}")  # fmt: skip
    return met, "; ".join(told)


def molecules(count: int = 50, n: int = 9) -> Found:
    """Match bonded trees with a ring by elements, beside the best of all allowed matchings."""
    met = 0
    for seed in range(count):
        rng = np.random.default_rng(1000 + seed)
        kinds = np.full(n, 0)
        while np.bincount(kinds).max() > 5:
            kinds = rng.choice(4, n, p=[0.4, 0.3, 0.2, 0.1])
        others = rng.permutation(kinds)
        x, y = (shortest_path(_tree(rng, n)) for _ in range(2))
        found = torchgw.solve(D_X=x, D_Y=y, groups=(kinds, others), random_state=0)
        met += found.matching().value <= _least(x, y, kinds, others) * (1 + 1e-6) + 1e-12
    return met == count, f"{met} of {count} as low as the best of all"


def _tree(rng: np.random.Generator, n: int) -> Any:
    table = np.zeros((n, n))
    for node in range(1, n):
        table[node, rng.integers(node)] = 1
    table[0, n - 1] = 1
    return np.maximum(table, table.T)


def _least(x: Any, y: Any, kinds: Any, others: Any) -> float:
    """Return the least value of all matchings within kinds."""
    each = [np.flatnonzero(kinds == kind) for kind in np.unique(kinds)]
    ways = [itertools.permutations(np.flatnonzero(others == kind)) for kind in np.unique(kinds)]
    least, order = np.inf, np.empty(len(kinds), dtype=int)
    for parts in itertools.product(*map(list, ways)):
        for place, part in zip(each, parts, strict=True):
            order[place] = part
        least = min(least, float(((x - y[np.ix_(order, order)]) ** 2).mean()))
    return least


def infeasible(count: int = 20) -> Found:
    """Draw weights that leave no plan; the error names how much can move, and that works."""
    tried = named = draw = 0
    while tried < count:
        rng, draw = np.random.default_rng([59, draw]), draw + 1
        n, m = rng.integers(6, 31, 2)
        a, b = (side / side.sum() for side in (rng.random(n) + 0.2, rng.random(m) + 0.2))
        mask = rng.random((n, m)) < rng.choice([0.1, 0.2, 0.3])
        i, j = np.nonzero(mask)
        table = np.zeros((n + m, len(i)))
        table[i, range(len(i))] = table[n + j, range(len(i))] = 1
        most = -linprog(-np.ones(len(i)), A_ub=table, b_ub=np.r_[a, b]).fun if len(i) else 1.0
        if most > 1 - 1e-6:
            continue
        tried += 1
        x, y = rng.normal(size=(n, 3)), rng.normal(size=(m, 3))
        try:
            torchgw.solve(x, y, a=a, b=b, allowed=mask)
        except torchgw.InvalidInputError as error:
            said = str(error)
            advice = float(said.split("mass=")[1].split(",")[0].split("`")[0].rstrip(". "))
            result = torchgw.solve(x, y, a=a, b=b, allowed=mask, mass=advice, n_init=1)
            named += f"{most:.6g} of the mass" in said and bool(result.plan[~mask].sum() == 0)
    return named == count, f"{named} of {count} named, and the way out works"


def derivatives() -> Found:
    """Differentiate objectives and plans with what is known, beside central differences."""
    rng, worst, count = np.random.default_rng(0), 0.0, 0
    tight = torchgw.Options(inner_tol=1e-13, tol=1e-12, max_iter=2000)
    for n, m in ((7, 8), (24, 20), (40, 40)):
        x, y, direction = (torch.from_numpy(rng.normal(size=(k, 3))) for k in (n, m, n))
        weights, mask = torch.from_numpy(rng.normal(size=(n, m))), rng.random((n, m)) < 0.6
        mask[:, 0] = mask[0] = True
        known: list[dict[str, Any]] = [{"allowed": mask}]
        if n == m:
            known += [{"groups": 2 * (np.arange(n) % 2,)}, {"pairs": [(0, 3), (2, 1)]}]
        for given, gradient in itertools.product(known, ("dense", "factored")):
            solved = functools.partial(
                torchgw.solve, epsilon=0.3, distances="sqeuclidean", scale=None, n_init=1,
                gradient=gradient, options=tight, **given,
            )  # fmt: skip
            told_at = [
                (end.report.objective, float((end.plan * weights).sum()))
                for end in (solved(x + 3e-4 * step * direction, y) for step in (-2, -1, 1, 2))
            ]
            slopes = np.array([1, -8, 8, -1]) @ np.array(told_at) / 36e-4
            for mode, of_plan in (("value", 0), ("implicit", 0), ("implicit", 1), ("unrolled", 1)):
                moved = x.clone().requires_grad_()
                result = solved(moved, y, differentiable=mode)
                told = (result.plan * weights).sum() if of_plan else result.loss
                (grad,) = torch.autograd.grad(told, moved)
                off = abs(float((grad * direction).sum()) - slopes[of_plan])
                worst, count = max(worst, off / max(1.0, abs(slopes[of_plan]))), count + 1
    return worst < 1e-6, f"{count} derivatives off by {worst:.1e} at most"


ROWS: dict[str, Callable[[], Found]] = {
    row.__name__: row
    for row in (
        twelve,
        masks,
        seeds,
        cells,
        kept_aside,
        molecules,
        infeasible,
        derivatives,
    )
}


def shows(rows: Sequence[str]) -> bool:
    """Print rows; tell whether all are met."""
    torch.set_num_threads(1)
    print("| | found | met | CPU s |\n|---|---|---|---|", flush=True)
    every = True
    for name in rows:
        clock = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            met, text = ROWS[name]()
        every &= met
        seconds = time.process_time() - clock
        print(f"| {name} | {text} | {'yes' if met else 'no'} | {seconds:.1f} |", flush=True)
    return every
