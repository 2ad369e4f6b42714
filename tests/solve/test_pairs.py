"""Known pairs as a smaller problem, whose answer is that of all points."""

from __future__ import annotations

import copy
import pickle
from unittest import mock

import numpy as np
import pytest
import torch
from problems import check_reads

import torchgw
from torchgw import InvalidInputError, Options, UnsupportedError
from torchgw._answer import reduced
from torchgw._plans.paired import PairedPlan
from torchgw._problem import limits
from torchgw._solve import pipeline

RNG = np.random.default_rng(5)
N, K = 26, 5
X, ORDER = RNG.normal(size=(N, 3)), RNG.permutation(N)
Y = X[ORDER] + 0.05 * RNG.normal(size=(N, 3))
PAIRS = np.stack([ORDER[:K], np.arange(K)], 1)
MASK = np.ones((N, N), dtype=bool)
MASK[PAIRS[:, 0]] = False
MASK[:, PAIRS[:, 1]] = False
MASK[PAIRS[:, 0], PAIRS[:, 1]] = True
FIXED = {"epsilon": 0.05, "tol": 1e-8, "random_state": 0, "n_init": 1}
WEIGHTS = RNG.random(N) + 0.5
WEIGHTS /= WEIGHTS.sum()
DIRECTED = [
    torchgw.distances.DirectedDistance(np.abs(points[:, :1] - 1.3 * points[:, 1]))
    for points in (X, Y)
]

WAYS = {
    "points": {"distances": "sqeuclidean"}, "table": {"distances": "euclidean"},
    "paths": {"distances": "dijkstra", "n_neighbors": 6},
    "landmarks": {"options": Options(n_landmarks=10)},
    "one side in factors": {"distances": ("sqeuclidean", "euclidean")},
    "features": {"distances": "sqeuclidean", "features": (X[:, :2], Y[:, :2])},
    "M": {"distances": "sqeuclidean", "M": RNG.random((N, N))},
    "linear": {"alpha": 0.0, "M": RNG.random((N, N))},
    "kl": {"loss": "kl", "distances": "euclidean"},
    "absolute": {"loss": "absolute", "distances": "euclidean"},
    "weights": {"distances": "euclidean", "a": WEIGHTS, "b": WEIGHTS[ORDER]},
    "streamed": {"distances": "sqeuclidean", "options": Options(storage="streamed")},
    "dense": {"distances": "sqeuclidean", "gradient": "dense"},
    "directed": {"epsilon": 1.0},
}  # fmt: skip


def test_pairs_may_be_a_dictionary():
    listed, named = (
        torchgw.solve(X, Y, pairs=known, distances="euclidean", **FIXED)
        for known in (PAIRS, dict(PAIRS.tolist()))
    )
    assert (listed.plan == named.plan).all()


@pytest.mark.filterwarnings("ignore::torchgw.GraphWarning")
@pytest.mark.parametrize("way", WAYS)
def test_pairs_and_a_mask_of_them_have_one_answer(way: str):
    options = FIXED | WAYS[way]
    data = (X, Y)
    if way == "directed":
        data = DIRECTED
    elif way == "linear":
        data = ()
    pairs = torchgw.solve(*data, pairs=PAIRS, **options)
    mask = torchgw.solve(*data, allowed=MASK, **options)
    assert pairs.gradient == mask.gradient
    assert isinstance(pairs.lazy_plan, PairedPlan)
    assert (pairs.plan[~MASK] == 0).all()
    # two ways to the same fixed point, each to 1e-8
    assert abs(pairs.plan - mask.plan).sum() < 1e-6
    for name in ("value", "value_quad", "value_linear"):
        assert getattr(pairs, name) == pytest.approx(getattr(mask, name), abs=1e-7), name
    assert pairs.report.kl == pytest.approx(mask.report.kl, abs=1e-6)
    assert pairs.report.objective == pytest.approx(mask.report.objective, abs=1e-7)
    sums = [(one.potential_a[:, None] + one.potential_b)[MASK] for one in (pairs, mask)]
    # where an entry is small its potentials are known less well than the plan
    assert sums[0] == pytest.approx(sums[1], abs=1e-5)
    assert pairs.report.allowed == pytest.approx(mask.report.allowed)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("solve_many", "allowed"), ("solve_many", "groups"), ("solve_many", "pairs"),
        ("pairwise", "groups"), ("solve_low_rank", "allowed"), ("solve_low_rank", "pairs"),
        ("barycenter", "groups"), ("solve_all", "pairs"),
    ],
)  # fmt: skip
def test_what_is_known_is_refused_by_name_before_any_work(function: str, name: str):
    """Where it is not taken; the data are not even read."""
    with pytest.raises(TypeError, match=f"no argument '{name}'. What is known of pairs is taken"):
        getattr(torchgw, function)(object(), **{name: PAIRS})


def test_a_sampled_cost_takes_pairs():
    found = torchgw.solve(X, Y, pairs=PAIRS, gradient="sampled", distances="euclidean", **FIXED)
    assert found.gradient == "sampled"
    assert (found.plan[~MASK] == 0).all()
    assert found.marginal_error < 1e-5
    exact = torchgw.solve(X, Y, pairs=PAIRS, distances="euclidean", **FIXED)
    assert found.report.objective == pytest.approx(exact.report.objective, rel=1e-2)


def test_costs_in_factors_need_no_pass_over_all_points_for_their_pairs():
    options = FIXED | {"distances": "sqeuclidean", "pairs": PAIRS}
    with mock.patch.object(reduced, "_coupling", return_value=None):
        passed = torchgw.solve(X, Y, **options)
    with mock.patch.object(PairedPlan, "_product", side_effect=AssertionError):
        found = torchgw.solve(X, Y, **options)
    first, second = (np.asarray(each.transform(X + 0.01)) for each in (found, passed))
    assert first == pytest.approx(second, abs=1e-5)


def test_costs_in_factors_have_the_rank_that_they_have_without_pairs():
    options = FIXED | {"distances": "sqeuclidean", "options": Options(storage="streamed")}
    plain, pairs = (torchgw.solve(X, Y, pairs=known, **options) for known in (None, PAIRS))
    assert pairs.lazy_plan.inner.cost.rank == plain.lazy_plan.cost.rank


@pytest.mark.filterwarnings("ignore::torchgw.SearchWarning")
@pytest.mark.parametrize("way", ["points", "table", "proximal", "groups"])
def test_searches_with_pairs_are_as_good(way: str):
    kind = np.arange(N) % 2
    more = {
        "points": {"distances": "sqeuclidean"}, "table": {"distances": "euclidean"},
        "proximal": {"distances": "euclidean", "regularization": "proximal"},
        "groups": {"groups": (kind, kind[ORDER]), "distances": "euclidean"},
    }[way]  # fmt: skip
    found = torchgw.solve(X, Y, pairs=PAIRS, random_state=0, **more)
    same = MASK & (kind[:, None] == kind[ORDER]) if way == "groups" else MASK
    more.pop("groups", None)
    if way != "proximal":
        more["epsilon"] = found.epsilon
    other = torchgw.solve(X, Y, allowed=same, random_state=0, **more)
    # within which objectives of a search are the same
    assert found.report.objective == pytest.approx(other.report.objective, rel=1e-3)
    assert (found.plan[~same] == 0).all()
    for one in found.alternatives:
        assert one.shape == (N, N)
        again = torchgw.solve(X, Y, pairs=PAIRS, init=one, **more)
        assert again.report.objective >= found.report.objective * (1 - 1e-3)


@pytest.fixture(scope="module", params=["sqeuclidean", "euclidean"])
def result(request):
    return torchgw.solve(X, Y, pairs=PAIRS, distances=request.param, **FIXED | {"epsilon": 0.01})


def test_every_way_to_read_a_plan_gives_its_entries(result):
    for plan in (result.lazy_plan, result.lazy_plan.T):
        mask = MASK if plan is result.lazy_plan else MASK.T
        check_reads(plan, mask, (1, 3, N))
        table, values = plan.to_dense(), RNG.normal(size=(N, 2))
        assert plan.argmax().tolist() == table.argmax(1).tolist()
        generator = torch.Generator().manual_seed(0)
        rows, columns = plan.sample(4000, generator)
        drawn = np.bincount(rows, minlength=N) / 4000
        assert drawn == pytest.approx(table.sum(1), abs=0.02)
        assert plan.to_sparse().toarray() == pytest.approx(table, abs=1e-4)
        assert plan.barycentric(values) == pytest.approx(table @ values / table.sum(1)[:, None])
        rounded = plan.rounded().to_dense()
        assert rounded.sum(1) == pytest.approx(np.full(N, 1 / N), abs=1e-12)
        assert (rounded[~mask] == 0).all()
    with pytest.raises(UnsupportedError, match="inner"):
        _ = result.lazy_plan.cost


@pytest.mark.parametrize("dense", [False, True])
def test_files_and_copies_keep_everything(result, dense: bool, tmp_path):
    path = tmp_path / "pairs.npz"
    result.save(path, dense=dense)
    for again in (torchgw.load(path), copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
        assert again.value == result.value
        assert np.asarray(again.plan) == pytest.approx(result.plan, abs=1e-12)
        assert np.asarray(again.transform(X[:4])) == pytest.approx(result.transform(X[:4]))
        assert again.matching().pairs.tolist() == result.matching().pairs.tolist()


def test_new_points_go_where_known_ones_do(result):
    mapped = result.transform(X)
    # copies may also go to partners of known points; where rows go far, theirs do not
    truth, other = (np.linalg.norm(mapped - Y[i], axis=1).mean() for i in (ORDER.argsort(), ORDER))
    assert truth < other / 3
    assert np.isfinite(result.inverse_transform(Y)).all()


def test_matchings_hold_known_pairs(result):
    known = set(map(tuple, PAIRS.tolist()))
    for kind in ("one_to_one", "many_to_one"):
        assert known <= set(map(tuple, result.matching(kind).pairs.tolist()))
    assert result.lower_bound <= result.value + 1e-9


def test_any_start_is_cut_to_the_points_that_are_left():
    options = FIXED | {"distances": "euclidean"}
    first = torchgw.solve(X, Y, pairs=PAIRS, **options)
    starts = {
        "result": first, "plan": first.lazy_plan, "table": first.plan,
        "matching": first.lazy_plan.argmax(), "pairs": first.matching().pairs,
        "potentials": first.potentials, "tensor": torch.from_numpy(first.plan),
    }  # fmt: skip
    for name, init in starts.items():
        again = torchgw.solve(X, Y, pairs=PAIRS, init=init, **options)
        assert np.abs(again.plan - first.plan).sum() < 1e-5, name
    # the plan is a start of a problem without pairs too
    torchgw.solve(X, Y, init=first, **options)
    with pytest.raises(InvalidInputError, match="no two points"):
        torchgw.solve(X, Y, pairs=PAIRS, init=PAIRS, **options)
    with pytest.raises(InvalidInputError, match="shape"):
        torchgw.solve(X, Y, pairs=PAIRS, init=first.plan[1:], **options)


@pytest.mark.parametrize("count", [1, N - 1, N])
def test_few_or_all_points_may_be_known(count: int):
    pairs = np.stack([ORDER, np.arange(N)], 1)[:count]
    found = torchgw.solve(X, Y, pairs=pairs, distances="euclidean", random_state=0)
    assert found.plan[pairs[:, 0], pairs[:, 1]] == pytest.approx(1 / N)
    assert found.report.allowed["decided"] == (N if count >= N - 1 else count)
    assert found.report.allowed["mass"] == pytest.approx(1.0 if count >= N - 1 else count / N)
    if count == N:
        both = [np.linalg.norm(p[:, None] - p, axis=-1) for p in (X, Y[ORDER.argsort()])]
        scale = found.scale
        expected = ((both[0] * scale[0] - both[1] * scale[1]) ** 2).mean()
        assert found.value == pytest.approx(expected, rel=1e-9)


def test_points_without_weight_may_have_partners():
    a = np.where(np.isin(np.arange(N), PAIRS[:2, 0]), 0.0, 1.0)
    a /= a.sum()
    found = torchgw.solve(X, Y, a=a, b=a[ORDER], pairs=PAIRS, distances="euclidean", random_state=0)
    assert np.isfinite(found.plan).all()
    assert found.plan.sum(1) == pytest.approx(a, abs=1e-6)
    assert np.isfinite(found.potential_a).all()


def test_pairs_of_no_weight_and_of_single_points_change_nothing():
    a = np.where(np.arange(N) == PAIRS[0, 0], 0.0, 1.0)
    options = {"a": a / a.sum(), "b": a[ORDER] / a.sum(), "distances": "euclidean", **FIXED}
    found, plain = (torchgw.solve(X, Y, pairs=pairs, **options) for pairs in (PAIRS[:1], None))
    assert found.value == pytest.approx(plain.value, rel=1e-6)
    assert torchgw.solve(X[:1], Y[:1], pairs=[(0, 0)], distances="euclidean").plan == 1


def test_pairs_that_something_else_forbids_are_refused():
    mask = np.ones((N, N), dtype=bool)
    mask[tuple(PAIRS[2])] = False
    with pytest.raises(InvalidInputError, match=r"pairs\[2\]"):
        torchgw.solve(X, Y, pairs=PAIRS, allowed=mask)


def test_relaxed_and_differentiable_solves_take_pairs_too():
    for options in ({"unbalanced": 1.0}, {"mass": 0.9}, {"differentiable": "value"}):
        more = {"epsilon": 0.05, "n_init": 1, "scale": None, "distances": "euclidean", **options}
        found = torchgw.solve(X, Y, pairs=PAIRS, **more)
        assert (np.asarray(found.plan)[~MASK] == 0).all()


def test_many_points_store_no_table(monkeypatch):
    """All that is read is of the size of the factors."""
    from torchgw._problem.limits import Limits

    monkeypatch.setattr(Limits, "stores", lambda self, n, m: False)
    found = torchgw.solve(X, Y, pairs=PAIRS, distances="sqeuclidean", **FIXED)
    assert found.report.allowed["decided"] == K
    assert PAIRS[:, 1].tolist() == found.lazy_plan.argmax()[PAIRS[:, 0]].tolist()
    known = set(map(tuple, PAIRS.tolist()))
    assert known <= set(map(tuple, found.matching().pairs.tolist()))
    with pytest.raises(UnsupportedError, match="no factors"):
        torchgw.solve(X, Y, pairs=PAIRS, loss="absolute", distances="euclidean", **FIXED)


def sure(confidence: float, pairs=PAIRS):
    return np.column_stack([pairs, np.full(len(pairs), confidence)])


def test_the_route_says_which_points_are_left_out():
    route = torchgw.explain(X, Y, pairs=PAIRS, **FIXED)
    assert f"{N - K} x {N - K} points" in route.size
    assert f"beside {K} known pairs" in route.size
    found = torchgw.solve(X, Y, pairs=PAIRS[:1], **FIXED)
    assert "beside 1 known pair\n" in found.report.route


def test_infinite_confidence_is_a_known_pair():
    options = FIXED | {"distances": "euclidean"}
    one, two = (torchgw.solve(X, Y, pairs=pairs, **options) for pairs in (PAIRS, sure(np.inf)))
    assert np.array_equal(one.plan, two.plan)
    assert two.alpha == 1


@pytest.mark.parametrize(
    "way", ["points", "table", "absolute", "M", "features", "sampled", "mixed"]
)
def test_likely_pairs_are_the_linear_cost_that_their_mass_would_be(way: str):
    options = FIXED | (WAYS | {"sampled": {"gradient": "sampled"}, "mixed": {}})[way]
    pairs = sure(2.0)
    if way == "mixed":
        pairs[0, 2] = np.inf
    found = torchgw.solve(X, Y, pairs=pairs, scale=None, **options)
    assert found.alpha == 0.5
    metric = options.get("distances", "euclidean")
    D, E = (np.linalg.norm(p[:, None] - p, axis=-1) for p in (X, Y))
    if metric == "sqeuclidean":
        D, E = D**2, E**2
    if way not in ("sampled", "mixed"):
        given = options.get("M", 0.0)
        if way == "features":
            given = ((X[:, None, :2] - Y[:, :2]) ** 2).sum(-1)
        loss = np.abs if way == "absolute" else np.square
        M = sum(2 * 2.0 / N * loss(D[:, i, None] - E[j]) for i, j in PAIRS) + given
        options.pop("features", None)
        other = torchgw.solve(X, Y, scale=None, **options | {"M": M})
        assert np.abs(found.plan - other.plan).sum() < 1e-6
        assert found.value_linear == pytest.approx(other.value_linear, rel=1e-6)
        if way in ("points", "table"):
            mapped = found.transform(X[:6])
            assert mapped == pytest.approx(other.transform(X[:6], M_new=M[:6]), abs=1e-5)
    assert found.matching().value > 0


def test_confidence_counts_by_degrees():
    """Wrong pairs are overruled by the distances until they are certain."""
    wrong = np.stack([ORDER[:3], [1, 2, 0]], 1)
    found = [
        torchgw.solve(X, Y, pairs=sure(c, wrong), distances="euclidean", random_state=0)
        for c in (0.0, 0.1, 1e3)
    ]
    mass = [one.plan[wrong[:, 0], wrong[:, 1]].sum() * N / 3 for one in found]
    assert max(mass[:2]) < 0.1
    # twice in a list of likely pairs
    torchgw.solve(X, Y, pairs=[[0, 1, 0.5], [0, 2, 0.5]], **FIXED)
    relaxed = torchgw.solve(X, Y, pairs=sure(1.0), unbalanced=1.0, n_init=1, scale=None)
    assert np.isfinite(relaxed.value)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("distances", ["sqeuclidean", "euclidean"])
def test_files_keep_likely_pairs(distances: str, dense: bool, tmp_path):
    found = torchgw.solve(X, Y, pairs=sure(2.0), distances=distances, **FIXED)
    found.save(tmp_path / "likely.npz", dense=dense)
    again = torchgw.load(tmp_path / "likely.npz")
    assert np.asarray(again.transform(X[:4])) == pytest.approx(found.transform(X[:4]))
    if dense or distances == "sqeuclidean":
        assert again.lower_bound == pytest.approx(found.lower_bound)
    else:
        with pytest.raises(UnsupportedError, match="likely pairs"):
            _ = again.lower_bound


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([[0.0, 1.0, -1.0]], "not be negative"), ([[0.0, 1.5, 1.0]], "whole numbers"),
        ([[0.0, N, 1.0]], "within 0 and"), ([[0.0, 1.0]], "integers of shape"),
        ([[0, 1, np.inf], [0, 2, np.inf]], "row 0 of X twice"),
        ([[0.0, 1.0, np.nan]], "NaN"),
    ],
)  # fmt: skip
def test_confidences_that_mean_nothing_are_refused(pairs, message: str):
    with pytest.raises(InvalidInputError, match=message):
        torchgw.solve(X, Y, pairs=pairs)
    with pytest.raises(UnsupportedError, match="no derivatives"):
        torchgw.solve(X, Y, pairs=sure(1.0), differentiable="value", epsilon=0.1)


def test_pairs_of_copies_leave_nothing_to_search_for():
    """Any other plan costs more by what the pairs say, so that there is no start to look for."""
    there = X[ORDER]
    for more in ({}, {"loss": "square", "regularization": "proximal"}):
        options = {"distances": "euclidean", "random_state": 0, **more}
        found = torchgw.solve(X, there, pairs=PAIRS, **options)
        assert "keeps all distances (any other costs more" in found.report.route
        assert not found.alternatives
        assert not found.doubt
        assert (np.asarray(found.plan).argmax(0) == ORDER).all()
        from_truth = torchgw.solve(X, there, pairs=PAIRS, init=ORDER.argsort(), **options)
        least = from_truth.report.objective
        assert found.report.objective <= least + 1e-6 * abs(least) + 1e-12
    for pairs, moved in ((PAIRS, Y), (np.column_stack([PAIRS[:, 0], PAIRS[::-1, 1]]), there)):
        # a copy with noise, or wrong pairs
        found = torchgw.solve(X, moved, pairs=pairs, distances="euclidean", random_state=0)
        assert "start: a search" in found.report.route


def test_few_pairs_among_many_points_say_where_all_go():
    """A few drawn points of a cloud that looks alike from all sides favour any match."""
    few = limits.LIMITS["cpu"]._replace(
        dense=1e4, subsample=1e5, chain_products=1e6, product=1_000, all_points=128
    )
    reached = []
    with (
        mock.patch.object(pipeline, "_COARSE_POINTS", 100),
        mock.patch.dict(limits.LIMITS, cpu=few),
    ):
        for seed in range(4):
            rng = np.random.default_rng(seed)
            points, order = rng.normal(size=(400, 3)), rng.permutation(400)
            turned = points @ np.linalg.qr(rng.normal(size=(3, 3)))[0]
            moved = (turned + 0.01 * rng.normal(size=turned.shape))[order]
            pairs = np.stack([order[:6], np.arange(6)], 1)
            options = {"pairs": pairs, "distances": "sqeuclidean", "epsilon": 0.003}
            found = torchgw.solve(points, moved, **options).value
            least = torchgw.solve(points, moved, init=order.argsort(), **options).value
            reached.append(found <= 1.05 * least)
    assert sum(reached) >= 3
