"""What is known before a solve: masks, groups, known pairs and infinite costs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse
import torch
from problems import quick

import torchgw
from torchgw import InvalidInputError, InvalidTypeError, Options, UnsupportedError
from torchgw._problem.support import Known, _Flow, read_support, usable
from torchgw._typing import Marginals

INF = float("inf")


def drawn(n: int, m: int, share: float, seed: int = 0):
    """Points of both sides, and a mask with room for every point."""
    rng = np.random.default_rng(seed)
    mask = rng.random((n, m)) < share
    every = np.arange(n * m // np.gcd(n, m) if n < m else max(n, m))
    mask[every[: 2 * max(n, m)] % n, every[: 2 * max(n, m)] % m] = True
    return rng.normal(size=(n, 3)), rng.normal(size=(m, 3)), mask


def equal(n: int, m: int) -> Marginals:
    return Marginals(*(torch.full((k,), 1 / k, dtype=torch.float64) for k in (n, m)))


# M with and without infinite entries would be moved otherwise
@pytest.mark.exact
def test_a_support_can_be_given_in_any_form():
    X, Y, mask = drawn(9, 11, 0.6)
    M = np.random.default_rng(1).random((9, 11))
    forms = {
        "array": mask,
        "tensor": torch.from_numpy(mask),
        "sparse": scipy.sparse.coo_array(mask.astype(float)),
        "list": [row.nonzero()[0].tolist() for row in mask],
        "function": lambda i, j: mask[i, j],
    }
    first = torchgw.solve(X, Y, M=np.where(mask, M, INF), n_init=1)
    for name, form in forms.items():
        other = torchgw.solve(X, Y, M=M, allowed=form, n_init=1)
        assert np.array_equal(first.plan, other.plan), name
    assert first.report.allowed["entries"] == mask.sum()
    # costs that count for nothing
    changed = np.where(mask, M, 1e3)
    assert torchgw.solve(X, Y, M=changed, allowed=mask, n_init=1).epsilon == first.epsilon


RULES = {
    "strict": {}, "partial": {"mass": 0.5}, "unbalanced": {"unbalanced": 0.5},
    "half strict": {"unbalanced": (INF, 0.5)}, "semi-relaxed": {"unbalanced": (INF, 0)},
    "squares": {"unbalanced": 50.0, "options": Options(unbalanced_type="l2")},
}  # fmt: skip
WAYS = {
    "proximal": {"regularization": "proximal"}, "polished": {"polish": True},
    "kl": {"loss": "kl", "distances": "euclidean"},
    "absolute": {"loss": "absolute", "distances": "euclidean"},
    "sampled": {"gradient": "sampled"}, "factored": {"gradient": "factored"},
    "mixed": {"options": Options(precision="mixed")},
    "float32": {"options": Options(precision="float32")},
    "streamed": {"options": Options(storage="streamed")}, "blurred": {"epsilon": 10.0},
    "sharp": {"epsilon": 1e-4}, "linear alone": {"alpha": 0.0, "M": np.ones((8, 10))},
    "features": {"features": (np.eye(8, 3), np.eye(10, 3))},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::torchgw.SearchWarning")
@pytest.mark.parametrize("n_init", [1, None])
@pytest.mark.parametrize("way", [*RULES, *WAYS])
def test_nothing_lies_outside_of_a_support(way: str, n_init: int | None):
    X, Y, mask = drawn(8, 10, 0.4)
    options = {"distances": "sqeuclidean", "scale": None if way in RULES else "auto"}
    found = torchgw.solve(
        X, Y, allowed=mask, n_init=n_init, random_state=0, **options | RULES.get(way, {})
        | WAYS.get(way, {}),
    )  # fmt: skip
    assert found.status.converged
    assert (found.plan[~mask] == 0).all()
    assert found.plan[mask].sum() > 0.1
    assert found.marginal_error < 1e-5
    rows = found.lazy_plan.rows(np.arange(8))
    assert (np.asarray(rows)[~mask] == 0).all()


def test_what_is_allowed_throughout_changes_nothing():
    X, Y, mask = drawn(15, 12, 1.1)
    plain, all_ = (
        torchgw.solve(X, Y, n_init=1, tol=1e-9, **known) for known in ({}, {"allowed": mask})
    )
    # two ways to the same fixed point, each to 1e-9
    assert np.abs(plain.plan - all_.plan).sum() < 1e-6
    assert plain.epsilon == all_.epsilon


@pytest.mark.filterwarnings("ignore::torchgw.SearchWarning")
@pytest.mark.parametrize("seed", [1, 4])
def test_twins_have_the_same_optimum(seed: int):
    """Points in another order, and sides exchanged."""
    rng = np.random.default_rng(seed)
    X, Y, mask = drawn(14, 17, 0.4, seed)
    p, q = rng.permutation(14), rng.permutation(17)
    twins = (X, Y, mask), (X[p], Y[q], mask[np.ix_(p, q)]), (Y, X, mask.T)
    found = [
        torchgw.solve(x, y, allowed=table, distances="euclidean", random_state=0).report.objective
        for x, y, table in twins
    ]
    # within which objectives of a search are the same
    assert found[1:] == pytest.approx([found[0]] * 2, rel=1e-3)


@pytest.mark.filterwarnings("ignore::torchgw.SearchWarning")
def test_optima_of_a_search_keep_to_a_support():
    X, Y, _ = drawn(150, 150, 1.0)
    kind = np.arange(150) % 5
    found = torchgw.solve(X, Y, groups=(kind, kind), random_state=0, distances="euclidean")
    assert found.alternatives
    for one in found.alternatives:
        mixed = kind[np.asarray(one.source)][:, None] != kind[np.asarray(one.target)]
        assert (np.asarray(one.plan)[mixed] == 0).all()
    assert "some pairs not allowed" in found.report.route


def test_a_linear_problem_is_solved_to_the_optimum_on_its_support():
    _, _, mask = drawn(8, 8, 0.4)
    M = np.random.default_rng(2).random((8, 8))
    found = torchgw.solve(M=np.where(mask, M, INF), alpha=0.0, polish=True)
    rows, columns = scipy.optimize.linear_sum_assignment(np.where(mask, M, INF))
    assert found.value == pytest.approx(M[rows, columns].mean(), rel=1e-9)


@pytest.mark.filterwarnings("ignore::torchgw.SearchWarning")
def test_groups_are_matched_within_themselves():
    """Half of the mass went to forbidden partners where they cost 1e3 (issue 59)."""
    rng = np.random.default_rng(0)
    kind, order = np.repeat([0, 1], 6), rng.permutation(12)
    X = rng.normal(size=(12, 2))
    Y = X[order] + 0.01 * rng.normal(size=(12, 2))
    found = torchgw.solve(X, Y, groups=(kind, kind[order]), random_state=0)
    assert found.status.converged
    assert not found.doubt
    assert (found.plan.argmax(1) == order.argsort()).all()
    assert (found.plan[kind[:, None] != kind[order]] == 0).all()
    names = np.array(["cell", "neuron"])
    crossed = torchgw.solve(
        X, Y, groups=(names[kind], names[1 - kind[order]], [("cell", "neuron"),
        ("neuron", "cell")]), n_init=1,
    )  # fmt: skip
    assert (crossed.plan[kind[:, None] != kind[order]] == 0).all()


@pytest.mark.filterwarnings("ignore::torchgw.SearchWarning")
def test_known_pairs_are_kept_whole():
    X, Y, _ = drawn(10, 10, 1.0)
    pairs = np.array([[0, 3], [4, 4], [9, 1]])
    found = torchgw.solve(X, Y, pairs=pairs, random_state=0)
    assert found.plan[pairs[:, 0], pairs[:, 1]] == pytest.approx(0.1, rel=1e-6)
    assert found.report.allowed["decided"] >= 3
    matching = found.matching()
    assert {(int(i), int(j)) for i, j in pairs} <= set(map(tuple, matching.pairs.tolist()))


def _best(x, y, kinds, others) -> float:
    """The least value of all matchings that keep kinds, by going through them."""
    places = [np.flatnonzero(kinds == kind) for kind in np.unique(kinds)]
    choices = [itertools.permutations(np.flatnonzero(others == kind)) for kind in np.unique(kinds)]
    least = INF
    for parts in itertools.product(*map(list, choices)):
        order = np.empty(len(kinds), dtype=int)
        for place, part in zip(places, parts, strict=True):
            order[place] = part
        least = min(least, ((x - y[np.ix_(order, order)]) ** 2).mean())
    return least


@pytest.mark.filterwarnings("ignore::torchgw.SearchWarning")
def test_molecules_are_matched_as_by_enumeration():
    """Small graphs whose nodes have elements; all fifty of them in docs/known.md."""
    met = 0
    for seed in range(5):
        rng = np.random.default_rng(seed)
        kinds = rng.choice(3, 7, p=[0.5, 0.3, 0.2])
        others = rng.permutation(kinds)
        x, y = (scipy.sparse.csgraph.shortest_path(_tree(rng, 7)) for _ in range(2))
        found = torchgw.solve(D_X=x, D_Y=y, groups=(kinds, others), random_state=0)
        met += found.matching().value <= _best(x, y, kinds, others) * (1 + 1e-6)
    assert met >= 4


@pytest.mark.parametrize("n", [9, 24, 40])
def test_a_molecule_is_found_in_another_order(n: int):
    rng = np.random.default_rng(n)
    table, kinds = _tree(rng, n), rng.choice(4, n, p=[0.7, 0.12, 0.13, 0.05])
    order = rng.permutation(n)
    x, y = (scipy.sparse.csgraph.shortest_path(t) for t in (table, table[np.ix_(order, order)]))
    found = torchgw.solve(D_X=x, D_Y=y, groups=(kinds, kinds[order]), random_state=0).matching()
    assert found.value < 1e-9
    assert (kinds[found.source] == kinds[order][found.target]).all()


def _tree(rng, n: int):
    """Draw a tree with one more edge."""
    table = np.zeros((n, n))
    for node in range(1, n):
        table[node, rng.integers(node)] = 1
    table[0, n - 1] = 1
    return np.maximum(table, table.T)


@pytest.mark.parametrize("seed", quick(6, range(20)))
def test_points_that_outweigh_their_partners_are_named(seed: int):
    rng = np.random.default_rng(seed)
    n, m = rng.integers(5, 30, 2)
    few, theirs = rng.choice(n, n // 3, replace=False), rng.choice(m, m // 6, replace=False)
    X, Y, mask = drawn(n, m, 0.5, seed)
    mask[few] = False
    mask[np.ix_(few, theirs)] = True
    a, b = (np.full(n, 1 / n), rng.dirichlet(np.full(m, 50.0)))
    if seed % 2:
        b = np.full(m, 1 / m)
    with pytest.raises(InvalidInputError, match="allowed partners") as caught:
        torchgw.solve(X, Y, b=b, allowed=mask)
    flow = _Flow.of(mask, a, b)
    rows, columns = flow.violating()
    # a set of rows, all that is allowed for them, and not enough of it
    assert set(columns) == set(mask[rows].any(0).nonzero()[0])
    assert a[rows].sum() - b[columns].sum() == pytest.approx(1 - flow.moved, abs=1e-6)
    assert f"{flow.moved:.6g} of the mass can move" in str(caught.value)
    # and the way out that the message names
    mass = float(str(caught.value).split("pass mass=")[1].split(",")[0])
    found = torchgw.solve(X, Y, b=b, allowed=mask, mass=mass, scale=None, n_init=1)
    assert (found.plan[~mask] == 0).all()
    assert found.report.mass == pytest.approx(mass, rel=1e-3)


def test_entries_that_no_plan_has_are_left_out():
    """Of a triangle the diagonal is the only plan; Sinkhorn alone would come to it for ever."""
    mask = np.tri(12, dtype=bool)
    kept = usable(torch.from_numpy(mask), equal(12, 12), None)
    assert torch.equal(kept, torch.eye(12, dtype=torch.bool))
    X, Y, _ = drawn(12, 12, 1.0)
    found = torchgw.solve(X, Y, allowed=mask, n_init=1)
    assert found.status.converged
    assert np.diag(found.plan) == pytest.approx(1 / 12)
    # by a linear program for each entry
    rng = np.random.default_rng(3)
    mask = rng.random((5, 6)) < 0.45
    a, b = (torch.tensor(rng.dirichlet(np.ones(k)), dtype=torch.float64) for k in (5, 6))
    plan = rng.random((5, 6)) * mask
    plan[plan.sum(1) == 0] = 0
    a, b = torch.from_numpy(plan.sum(1) / plan.sum()), torch.from_numpy(plan.sum(0) / plan.sum())
    kept = usable(torch.from_numpy(mask), Marginals(a, b), None).numpy()
    rows, columns = mask.nonzero()
    sums = np.vstack([rows == i for i in range(5)] + [columns == j for j in range(6)]).astype(float)
    weights = np.concatenate([a, b])
    for place, (i, j) in enumerate(zip(rows, columns, strict=True)):
        cost = -np.eye(len(rows))[place]
        most = -scipy.optimize.linprog(cost, A_eq=sums, b_eq=weights, method="highs").fun
        assert kept[i, j] == (most > 1e-9)


@pytest.mark.filterwarnings("ignore::torchgw.SearchWarning")
@pytest.mark.parametrize("seed", [20, 32, 39, 43, 49, 53, 58])
def test_relaxed_problems_on_few_pairs_have_no_lower_start(seed: int):
    """Plans that creep were compared before they had come to their ends (L1540)."""
    n = 17
    rng = np.random.default_rng([n, seed])
    X, Y = rng.normal(size=(n, 3)), rng.normal(size=(n, 3))
    Y[: n // 2] = X[: n // 2] + 0.02 * rng.normal(size=(n // 2, 3))
    mask = rng.random((n, n)) < 0.3
    mask[np.arange(n), rng.permutation(n)] = True
    options = {"allowed": mask, "mass": 0.5, "epsilon": 0.002, "distances": "euclidean"}
    found, ends = torchgw.solve(X, Y, random_state=0, **options), []
    for place in range(8):
        noise = np.random.default_rng(place).normal(size=mask.shape)
        start = mask * np.exp([1, 3, 6][place % 3] * noise)
        again = torchgw.solve(X, Y, init=0.5 * start / start.sum(), **options)
        ends.append(again.report.objective)
    assert found.doubt or found.report.objective <= min(ends) * (1 + 1e-3)


@pytest.mark.filterwarnings("ignore::torchgw.SearchWarning")
@pytest.mark.parametrize("way", ["pairs", "paths", "cycle"])
def test_a_support_without_cycles_has_one_plan(way: str):
    rng = np.random.default_rng(7)
    X, Y, _ = drawn(9, 9, 1.0)
    plan = np.zeros((9, 9))
    plan[np.arange(9), rng.permutation(9)] = 1.0
    if way != "pairs":
        # a path of allowed pairs, closed or not
        plan[np.arange(9), np.arange(9)] = plan[np.arange(8), np.arange(1, 9)] = 1.0
        plan *= np.tri(9) + np.tri(9, k=1) > 0 if way == "paths" else 1.0
        plan *= np.abs(np.subtract.outer(np.arange(9), np.arange(9))) < 2
        plan = np.triu(plan)
        plan[8, 0] = way == "cycle"
    plan *= rng.uniform(1, 2, plan.shape)
    plan /= plan.sum()
    options = {"n_init": 1} if way == "cycle" else {"random_state": 0}
    found = torchgw.solve(X, Y, a=plan.sum(1), b=plan.sum(0), allowed=plan > 0, **options)
    alone = "what is allowed leaves one plan" in found.report.route
    assert alone == (way != "cycle")
    if alone:
        assert found.plan == pytest.approx(plan, abs=1e-6)
        assert not found.alternatives


def test_points_without_partners_move_nothing_where_they_may():
    X, Y, mask = drawn(8, 9, 0.6)
    mask[2] = False
    for relaxed in ({"unbalanced": 0.5}, {"unbalanced": (0.5, INF)}, {"mass": 0.5}):
        found = torchgw.solve(X, Y, allowed=mask, scale=None, n_init=1, **relaxed)
        assert found.status.converged
        assert (found.plan[~mask] == 0).all()
        assert found.marginal_a[2] < 1e-200
    with pytest.raises(InvalidInputError, match="point 2 of X must keep"):
        torchgw.solve(X, Y, allowed=mask, scale=None, unbalanced=(INF, 0.5))


@pytest.mark.parametrize("mode", ["value", "implicit", "unrolled"])
@pytest.mark.parametrize("rule", [{}, {"unbalanced": 1.0}, {"mass": 0.6}])
def test_derivatives_on_a_support(mode: str, rule: dict):
    if rule and mode == "unrolled":
        pytest.skip("refused with relaxed marginals")
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(k, 3, dtype=torch.float64, generator=generator) for k in (7, 8))
    M, weigh, d_m = (torch.rand(7, 8, dtype=torch.float64, generator=generator) for _ in range(3))
    d_x = torch.randn(7, 3, dtype=torch.float64, generator=generator)
    mask = torch.rand(7, 8, generator=generator) < 0.5
    mask[torch.arange(8) % 7, torch.arange(8)] = True
    mask[0] = True

    def solved(x, M, mode=None):
        tight = Options(inner_tol=1e-13, tol=1e-12, max_iter=2000)
        found = torchgw.solve(
            x, y, M=M.masked_fill(~mask, INF) if mode is None else M, allowed=mask, alpha=0.6,
            epsilon=0.3, distances="sqeuclidean", scale=None, n_init=1, differentiable=mode,
            options=tight, **rule,
        )  # fmt: skip
        loss = found.report.objective if mode is None else found.loss
        if mode != "value":
            loss = loss + (found.lazy_plan.stored() * weigh).sum()
        return loss

    def differs(x, M):
        found = torchgw.solve(
            x, y, M=M, allowed=mask, alpha=0.6, epsilon=0.3, distances="sqeuclidean", scale=None,
            n_init=1, options=Options(inner_tol=1e-13, tol=1e-12, max_iter=2000), **rule,
        )  # fmt: skip
        value = found.report.objective
        return value if mode == "value" else value + float((found.lazy_plan.stored() * weigh).sum())

    inputs = x.clone().requires_grad_(), M.clone().requires_grad_()
    grads = torch.autograd.grad(solved(*inputs, mode=mode), inputs)
    assert (grads[1][~mask] == 0).all()
    h = 1e-4
    ahead, back = (differs(x + s * h * d_x, M + s * h * d_m) for s in (1, -1))
    slope = float((grads[0] * d_x).sum() + (grads[1] * d_m).sum())
    assert slope == pytest.approx((ahead - back) / (2 * h), abs=1e-6)


def test_an_infinite_cost_has_no_derivative():
    X, Y, mask = drawn(6, 7, 0.6)
    M = torch.rand(6, 7, dtype=torch.float64).masked_fill(torch.from_numpy(~mask), INF)
    M.requires_grad_()
    found = torchgw.solve(X, Y, M=M, epsilon=0.1, differentiable="implicit", n_init=1)
    (grad,) = torch.autograd.grad(found.loss + found.lazy_plan.stored().square().sum(), M)
    assert torch.isfinite(grad).all()
    assert (grad[~mask] == 0).all()


def test_matchings_and_files_keep_to_it(tmp_path):
    X, Y, mask = drawn(20, 24, 0.3)
    found = torchgw.solve(X, Y, allowed=mask, n_init=1)
    for result in (found, _kept(found, tmp_path, dense=True)):
        for kind in ("one_to_one", "many_to_one"):
            pairs = result.matching(kind=kind)
            assert mask[pairs.source, pairs.target].all()
    with pytest.raises(UnsupportedError, match="dense=True"):
        _kept(found, tmp_path, dense=False).matching()
    assert found.transform(X[:2] + 0.1).shape == (2, 3)
    # two points that have one partner between them
    mask = np.array([[1, 0, 0], [1, 0, 0], [0, 1, 1]], dtype=bool)
    shared = torchgw.solve(
        X[:3], Y[:3], a=[0.25, 0.25, 0.5], b=[0.5, 0.25, 0.25], allowed=mask, n_init=1
    )
    with pytest.raises(InvalidInputError, match="left without a partner"):
        shared.matching()
    pairs = shared.matching(kind="many_to_one")
    assert mask[pairs.source, pairs.target].all()


def _kept(found, folder, *, dense: bool):
    path = folder / f"{dense}.npz"
    found.save(path, dense=dense)
    return torchgw.load(path)


REFUSED = {
    "numbers": ({"allowed": np.ones((4, 5))}, "table of bool"),
    "shape": ({"allowed": np.ones((5, 4), bool)}, r"shape \(4, 5\)"),
    "rows": ({"allowed": [[0], [1]]}, "each of 4 rows"),
    "function": ({"allowed": lambda i, j: np.ones(3, bool)}, "function of indices; got bool"),
    "column": ({"allowed": [[0], [1], [2], [5]]}, "within 0 and 4"),
    "bool list": ({"allowed": [[True] * 5] * 4}, "as an array"),
    "labels": ({"groups": ([0, 1], [0] * 5)}, r"groups\[0\]"),
    "no labels": ({"groups": "type"}, "labels_x, labels_y"),
    "table": ({"groups": ([0] * 4, [0] * 5, [0])}, "list pairs"),
    "floats": ({"pairs": [[0.0, 1.0]]}, "integers of shape"),
    "range": ({"pairs": [[4, 0]]}, "within 0 and 3"),
    "twice": ({"pairs": [[0, 1], [0, 2]]}, "row 0 of X twice"),
    "weights": ({"pairs": [[0, 1]]}, "weights 0.25 and 0.2"),
    "minus infinity": ({"M": np.full((4, 5), -INF)}, "NaN or infinite"),
    "M": ({"M": np.full((3, 5), INF)}, r"shape \(4, 5\)"),
    "distributed": ({"pairs": [[0, 1]], "options": Options(distributed=True)}, "distributed"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_meant_is_refused(case: str):
    named, message = REFUSED[case]
    rng = np.random.default_rng(0)
    X, Y = rng.normal(size=(4, 2)), rng.normal(size=(5, 2))
    with pytest.raises((InvalidInputError, InvalidTypeError, UnsupportedError), match=message):
        torchgw.solve(X, Y, **named)


def test_a_table_that_would_not_fit_is_refused():
    known, cpu = Known(allowed=lambda i, j: i == j), torch.device("cpu")
    with pytest.raises(UnsupportedError, match="too many"):
        read_support(known, None, None, (10**6, 10**6), cpu)


def test_no_pairs_and_equal_labels_are_what_they_say():
    X, Y, _ = drawn(9, 9, 0.6)
    kind, options = np.arange(9) % 3, {"epsilon": 0.1, "n_init": 1}
    plain, none = (torchgw.solve(X, Y, **options, pairs=each) for each in (None, []))
    assert np.array_equal(plain.plan, none.plan)
    same, told = (
        torchgw.solve(X, Y, **options, groups=(kind, kind, *more)) for more in ((), ("same",))
    )
    assert np.array_equal(same.plan, told.plan)


@pytest.mark.parametrize("rule", [{"unbalanced": 1.0}, {"unbalanced": (1.0, 0.0)}, {"mass": 0.5}])
@pytest.mark.parametrize("heavy", [9, 4])
def test_nothing_allowed_is_no_plan(rule: dict, heavy: int):
    """Nor is what is allowed between points without weight."""
    X, Y, _ = drawn(9, 9, 0.6)
    mask = np.zeros((9, 9), dtype=bool)
    mask[heavy:] = True
    a = np.where(np.arange(9) < heavy, 1 / heavy, 0.0)
    with pytest.raises(InvalidInputError, match="allowed"):
        torchgw.solve(X, Y, a=a, epsilon=0.1, allowed=mask, **rule)
