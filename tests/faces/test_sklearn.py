"""The estimators are scikit-learn's: its own checks, pipelines, names, and the same answers."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
import torch
from problems import isometric_copy, solve_by_name
from scipy.spatial.distance import cdist

pytest.importorskip("sklearn", reason="needs scikit-learn")

from sklearn.base import clone  # noqa: E402
from sklearn.exceptions import NotFittedError  # noqa: E402
from sklearn.model_selection import GridSearchCV, cross_val_score  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402
from sklearn.svm import SVC  # noqa: E402
from sklearn.utils import estimator_checks as checks  # noqa: E402

import torchgw  # noqa: E402
from torchgw import InvalidInputError  # noqa: E402
from torchgw.sklearn import (  # noqa: E402
    GWAligner,
    GWDistance,
    GWKernel,
    GWTransport,
    agreement_score,
)

# Fitted on two samples of any sizes, y is points: nothing has to be excepted. GWTransport's fit
# takes (Xs, ys, Xt, yt), as ot.da has it, so only the checks of its parameters can be run.
PARAMETER_CHECKS = [
    checks.check_parameters_default_constructible,
    checks.check_no_attributes_set_in_init,
    checks.check_get_params_invariance,
    checks.check_set_params,
]


# no iteration has to converge for an estimator to be well behaved
@pytest.mark.filterwarnings("ignore::torchgw.TorchGWWarning")
@checks.parametrize_with_checks(
    [GWAligner(distances="euclidean", max_iter=4, n_init=1, random_state=0)]
)
def test_scikit_learn_checks(estimator, check):
    check(estimator)


@pytest.mark.parametrize("check", PARAMETER_CHECKS, ids=lambda check: check.__name__)
def test_parameter_checks(check):
    check("GWTransport", GWTransport())


def test_pipeline_names_and_new_points():
    pd = pytest.importorskip("pandas", reason="needs pandas")
    x, y, answer = isometric_copy(60)
    X = pd.DataFrame(x[:50] * [2, 2, 2] + 7, columns=["a", "b", "c"])
    Y = pd.DataFrame(y, columns=["u", "v", "w"])
    scaler = StandardScaler(with_std=False)
    options = {"epsilon": 1e-3, "distances": "euclidean", "n_init": 1}
    pipeline = make_pipeline(scaler, GWAligner(**options))
    pipeline.set_output(transform="pandas")
    moved = pipeline.fit(X, Y).transform(X)
    assert list(moved.columns) == ["u", "v", "w"]
    np.testing.assert_array_equal(moved, pipeline.fit_transform(X, Y))
    aligner = clone(pipeline[-1])
    assert aligner.get_params() == pipeline[-1].get_params()
    assert not hasattr(aligner, "result_")
    result = solve_by_name(scaler.transform(X), y, **options)
    np.testing.assert_allclose(moved, result.lazy_plan.barycentric(y), atol=1e-10)
    assert list(GWAligner(n_init=1).fit(X, Y.to_numpy()).get_feature_names_out()) == [
        "gwaligner0", "gwaligner1", "gwaligner2",
    ]  # fmt: skip


def test_new_points_and_back():
    x, y, answer = isometric_copy(80)
    seen, unseen = slice(0, 70), slice(70, 80)
    aligner = GWAligner(distances="euclidean", epsilon=2e-3).fit(x[seen], y[answer[seen]][::-1])
    size = np.linalg.norm(y - y.mean(0), axis=1).mean()
    error = np.linalg.norm(aligner.transform(x[unseen]) - y[answer[unseen]], axis=1)
    # as far as the nearest known point is; the mean of all points would be off by `size`
    assert error.mean() < 0.5 * size
    back = aligner.inverse_transform(y[answer[seen]])
    assert np.linalg.norm(back - x[seen], axis=1).mean() < 0.1 * size
    with pytest.raises(NotFittedError):
        GWAligner().transform(x)
    with pytest.raises(ValueError, match="requires y to be passed"):
        GWAligner().fit(x)


def test_weights_reach_the_solve():
    x, y, _ = isometric_copy(30)
    weights = np.arange(1, 31) / np.arange(1, 31).sum()
    aligner = GWAligner(distances="euclidean", n_init=1).fit(x, y, a=weights)
    np.testing.assert_allclose(aligner.result_.marginal_a, weights, atol=1e-7)


def test_transport_like_ot_da():
    x, y, answer = isometric_copy(60)
    labels = (x[:, 0] > 0).astype(int) + 2 * (x[:, 1] > 0)
    transport = GWTransport(distances="euclidean", epsilon=1e-3)
    moved = transport.fit_transform(Xs=x, Xt=y)
    assert np.linalg.norm(moved - y[answer], axis=1).mean() < 0.1
    shares = transport.transform_labels(labels)
    coupling = transport.coupling_
    assert shares.shape == (60, 4)
    expected = (coupling / coupling.sum(0)).T @ np.eye(4)[labels]
    np.testing.assert_allclose(shares, expected, atol=1e-6)
    np.testing.assert_array_equal(shares[answer].argmax(1), labels)
    back = transport.inverse_transform_labels(labels)
    np.testing.assert_array_equal(back.argmax(1), labels[answer])
    names = np.array(list("wxyz"))[labels]
    np.testing.assert_array_equal(transport.transform_labels(names), shares)
    # the plan is the one of its cost
    off = transport.cost_ + transport.result_.epsilon * np.log(coupling)
    assert np.abs(off - off.mean(1)[:, None] - off.mean(0) + off.mean()).max() < 1e-6
    assert transport.log_["objective"] == transport.result_.log["objective"]
    back = transport.inverse_transform(y)
    assert np.linalg.norm(back[answer] - x, axis=1).mean() < 0.1
    assert transport.transform(x[:3] + 0.01).shape == (3, 3)
    assert clone(transport).get_params() == transport.get_params()
    for wrong in (labels[:5], labels[:, None]):
        with pytest.raises(InvalidInputError, match=r"`ys` must have shape \(60,\)"):
            transport.transform_labels(wrong)
    with pytest.raises(InvalidInputError, match="needs both domains"):
        GWTransport().fit(Xs=x)


def test_labels_break_a_symmetry():
    """A square matches itself in eight ways; labels, some unknown, leave one."""
    square = np.array([[0.0, 0], [1, 0], [1, 1], [0, 1]])
    offsets = np.random.default_rng(0).normal(size=(10, 2)) * 0.02
    x = np.concatenate([corner + offsets for corner in square])
    labels = np.repeat(np.arange(4), 10)
    known = labels.copy()
    known[::2] = -1
    order = np.random.default_rng(1).permutation(40)
    transport = GWTransport(distances="euclidean", alpha=0.5)
    transport.fit(x, labels, x[order], known[order])
    np.testing.assert_array_equal(transport.transform_labels(labels).argmax(1), labels[order])
    assert transport.result_.value_linear < 1e-3
    assert torch.isfinite(torch.as_tensor(transport.transform(x[:3] + 1e-3))).all()


def test_unknown_parameters_name_the_nearest_one():
    with pytest.raises(TypeError, match=r"GWAligner\(\) has no argument 'eps'. Did you mean"):
        GWAligner(eps=1)
    with pytest.raises(TypeError, match=r"no argument 'sample_weight'. Did you mean 'a'"):
        GWAligner().fit(np.eye(4), np.eye(4), sample_weight=np.ones(4))


def test_momentum_is_the_former_name_of_redraw():
    X = np.random.default_rng(0).normal(size=(30, 2))
    options = {"gradient": "sampled", "epsilon": 0.1, "n_anchors": 64, "n_init": 1}
    aligner = GWAligner(distances="euclidean", random_state=0, **options)
    expected = aligner.set_params(redraw=0.5).fit(X, X).result_.plan
    aligner.set_params(redraw=0.9, momentum=0.5)
    with pytest.warns(DeprecationWarning, match=r"`momentum` is now .*redraw"):
        assert np.array_equal(aligner.fit(X, X).result_.plan, expected)


def test_missing_labels_are_refused():
    x = np.eye(4)
    with pytest.raises(InvalidInputError, match="`yt` has 1 missing labels, of 4"):
        GWTransport().fit(Xs=x, ys=[0, 1, 0, 1], Xt=x, yt=[0, 1, np.nan, 1])


def test_coupling_is_the_plan():
    transport = GWTransport(distances="euclidean", random_state=0, n_init=1)
    assert not hasattr(transport, "coupling_")
    x = np.random.default_rng(0).normal(size=(20, 2))
    assert transport.fit(Xs=x, Xt=x[:15]).coupling_.sum(1) == pytest.approx(np.full(20, 1 / 20))


def test_transport_of_tensors_gives_tensors():
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    transport = GWTransport(distances="euclidean", epsilon=0.01, random_state=0)
    moved = transport.fit(Xs=x, Xt=x[:15]).transform(x)
    found = (moved, transport.coupling_, transport.cost_, transport.inverse_transform(x[:15]))
    found += (transport.transform_labels((x[:, 0] > 0).int()),)
    assert all(part.dtype == x.dtype and part.device == x.device for part in found)
    assert isinstance(transport.fit(Xs=x.numpy(), Xt=x[:15]).transform(x), np.ndarray)
    with pytest.raises(torchgw.UnsupportedError, match="drop `polish`"):
        transport.set_params(polish=True).fit(Xs=x, Xt=x).cost_  # noqa: B018


class SelfTransport(GWTransport):
    """Aligns a domain with itself, as checks have one domain only."""

    def fit(self, X, y=None):
        super().fit(Xs=X, Xt=X)
        return self

    def fit_transform(self, X, y=None):
        return self.fit(X).transform(X)


@pytest.mark.filterwarnings("ignore::torchgw.TorchGWWarning")
@pytest.mark.slow
@checks.parametrize_with_checks([SelfTransport(distances="euclidean", max_iter=4, random_state=0)])
def test_transport_passes_the_checks_of_scikit_learn(estimator, check):
    check(estimator)


def test_transport_in_a_pipeline():
    x, y, answer = isometric_copy(40)
    pipeline = make_pipeline(StandardScaler(with_std=False), GWTransport(distances="euclidean"))
    pipeline.fit(x, None, gwtransport__Xt=y)
    assert np.linalg.norm(pipeline.transform(x) - y[answer], axis=1).mean() < 0.1
    with pytest.raises(InvalidInputError, match="gwtransport__Xt"):
        pipeline.fit(x)


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False], ids=["partners", "no partners"])
def test_a_grid_search_finds_what_works(known):
    """A blur maps everything to the middle; other sizes on both sides, rows held out."""
    x, y, answer = isometric_copy(60)
    search = GridSearchCV(
        GWAligner(distances="euclidean", n_init=4, random_state=0),
        {"epsilon": [1e-3, 10.0]}, cv=3, error_score="raise",
    )  # fmt: skip
    if known:
        search.fit(x, y[answer])
    else:
        search.fit(x, target=y[:55])
    assert search.best_params_ == {"epsilon": 1e-3}
    scores = search.cv_results_["mean_test_score"]
    assert scores[0] > 0.9 > scores[1]
    by_name = cross_val_score(
        search.best_estimator_, x, cv=3, scoring=agreement_score, params={"target": y[:55]}
    )
    assert by_name.min() > 0.8


@pytest.mark.parametrize("kind", ["matrix", "sparse"])
def test_precomputed_is_scikit_learns(kind):
    x, y, answer = isometric_copy(40)
    D_X, D_Y = cdist(x, x), cdist(y, y)
    if kind == "sparse":
        D_X, D_Y = (scipy.sparse.csr_array(part) for part in (D_X, D_Y))
    aligner = GWAligner(metric="precomputed", random_state=0).fit(D_X, D_Y)
    np.testing.assert_array_equal(aligner.result_.lazy_plan.argmax(), answer)
    shares = aligner.transform(cdist(x, x))
    assert shares.shape == (40, 40)
    np.testing.assert_allclose(shares.sum(1), 1)
    np.testing.assert_array_equal(shares.argmax(1), answer)
    assert aligner.score(cdist(x, x)) > 0.99
    if kind == "matrix":
        search = GridSearchCV(aligner, {"epsilon": [1e-3, 10.0]}, cv=3, error_score="raise")
        search.fit(D_X / D_X.max(), target=D_Y[:35, :35] / D_Y.max())
        assert search.best_params_ == {"epsilon": 1e-3}
        transport = GWTransport(metric="precomputed", random_state=0).fit(Xs=D_X, Xt=D_Y)
        np.testing.assert_array_equal(transport.coupling_.argmax(1), answer)
        with pytest.raises(torchgw.UnsupportedError, match="no coordinates"):
            transport.transform(D_X)
    with pytest.raises(InvalidInputError, match="'precomputed' or None; .*`distances`"):
        GWAligner(metric="cosine").fit(x, y)


def test_graphs_are_precomputed():
    networkx = pytest.importorskip("networkx", reason="needs networkx")
    graph = networkx.barabasi_albert_graph(40, 3, seed=0)
    sparse = networkx.to_scipy_sparse_array(graph, dtype=float)
    options = {"metric": "precomputed", "n_init": 1, "random_state": 0}
    values = [
        GWTransport(**options).fit(Xs=given, Xt=given).result_.value for given in (graph, sparse)
    ]
    assert values[0] == pytest.approx(GWAligner(**options).fit(graph, graph).result_.value)
    assert values[0] == pytest.approx(values[1])
    transport = GWTransport(**options).fit(Xs=sparse, Xt=sparse)
    assert transport.transform_labels(np.arange(40) % 3).shape == (40, 3)
    for given in (graph, sparse):
        with pytest.raises(torchgw.InvalidTypeError, match="sparse .*metric='precomputed'"):
            GWAligner().fit(given, given)
        with pytest.raises(torchgw.InvalidTypeError, match="sparse .*metric='precomputed'"):
            GWTransport().fit(Xs=given, Xt=given)
    with pytest.raises(InvalidInputError, match="rows of `y` alone: pass fit.X, target=Y."):
        GWAligner(**options).fit(np.zeros((30, 30)), np.zeros((30, 40)))


def test_transports_are_compared_by_a_grid_search():
    x, y, _ = isometric_copy(60)
    grid = {"epsilon": [1e-3, 10.0]}
    transport = GWTransport(distances="euclidean", random_state=0)
    search = GridSearchCV(transport, grid, cv=3, error_score="raise").fit(x, Xt=y[:50])
    assert search.best_params_ == {"epsilon": 1e-3}
    scores = search.cv_results_["mean_test_score"]
    assert scores[0] > 0.9 > scores[1]


@pytest.mark.parametrize("estimator", [GWAligner, GWTransport, GWDistance, GWKernel])
def test_parameter_errors_do_not_count_self(estimator):
    match = rf"^{estimator.__name__}\(\) takes no arguments without a name; got 1\."
    with pytest.raises(torchgw.InvalidTypeError, match=match):
        estimator(3)
    with pytest.raises(torchgw.InvalidTypeError, match="has no argument 'colour'") as caught:
        estimator(colour=3)
    assert "self" not in str(caught.value)
    with pytest.raises(torchgw.InvalidTypeError, match=r"solve\(\) takes 2 arguments .* got 3"):
        torchgw.solve(1, 2, 3)
    with pytest.raises(torchgw.InvalidTypeError, match=r"fit\(\) takes 4 arguments .* got 5"):
        GWTransport().fit(1, 2, 3, 4, 5)


def test_spaces_are_samples_of_distances_and_kernels():
    rng = np.random.default_rng(0)
    spaces = [
        rng.normal(size=(n, 2)) * [1, 0.1 if k < 3 else 1] for k, n in enumerate(range(6, 12))
    ]
    distance, kernel = GWDistance(epsilon=0.1), GWKernel(epsilon=0.1)
    among = distance.fit_transform(spaces)
    assert among.shape == (6, 6)
    np.testing.assert_array_equal(among, among.T)
    values = torchgw.pairwise(spaces, epsilon=0.1, progress=False)
    np.testing.assert_array_equal(among**2 == 0, values <= 0)
    # a pair is solved from either side, which ends at the same value up to the tolerance of a solve
    np.testing.assert_allclose(among**2, values, rtol=1e-5)
    again = kernel.fit_transform(spaces)
    others = values[~np.eye(6, dtype=bool)]
    assert kernel.gamma_ == pytest.approx(1 / np.median(others), rel=1e-5)
    np.testing.assert_allclose(again, np.exp(-values * kernel.gamma_), rtol=1e-5)
    np.testing.assert_allclose(kernel.fit(spaces).transform(spaces[:1]), again[:1], rtol=1e-4)
    assert clone(GWKernel(gamma=2.0)).get_params()["gamma"] == 2.0
    with pytest.raises(NotFittedError):
        GWDistance().transform(spaces)
    with pytest.raises(TypeError, match=r"`X` must be a list of spaces.*got \(5, 2\)"):
        GWDistance().fit(np.zeros((5, 2)))


def test_an_aligner_takes_tensors_that_require_gradients():
    rng = np.random.default_rng(0)
    X, Y = rng.normal(size=(12, 2)), rng.normal(size=(14, 2))
    options = {"distances": "euclidean", "random_state": 0, "verbose": np.False_, "n_init": 1}
    tracked = torch.tensor(X, requires_grad=True)
    aligner = GWAligner(**options).fit(tracked, torch.tensor(Y, requires_grad=True))
    assert np.array_equal(aligner.transform(tracked), GWAligner(**options).fit(X, Y).transform(X))
    assert aligner.score(tracked, tracked) == aligner.score(X, X)
    assert aligner.score(tracked) == aligner.score(X)


def test_a_search_computes_each_pair_once(monkeypatch):
    from torchgw.sklearn import GWKernel, _spaces

    rng = np.random.default_rng(7)
    spaces = [rng.normal(size=(8, 2)) * [1, 0.1 if k % 2 else 1] for k in range(8)]
    asked = []

    def counted(*lists, pairs, **options):
        asked.append(len(pairs))
        return torchgw.pairwise(*lists, pairs=pairs, **options)

    monkeypatch.setattr(_spaces, "pairwise", counted)
    options = {"epsilon": 0.02, "n_init": 1}
    first = GWKernel(**options, gamma=3.0).fit_transform(spaces)
    assert asked == [36]
    # other arrays of the same content, another gamma, some of them, against some of them
    GWKernel(**options, gamma=1.0).fit([space.copy() for space in spaces]).fit_transform(spaces)
    model = GWKernel(**options, gamma=3.0)
    np.testing.assert_array_equal(model.fit_transform(spaces[2:6]), first[2:6, 2:6])
    assert asked == [36]
    # either of a pair may come first; other options and other points are other problems
    later = GWKernel(**options, gamma=3.0).fit(spaces[2:6])
    np.testing.assert_array_equal(later.transform(spaces), first[:, 2:6])
    assert asked == [36]
    GWKernel(epsilon=0.03, n_init=1, gamma=1.0).fit_transform(spaces)
    GWKernel(**options, gamma=1.0).fit_transform([spaces[0] + 1e-6, spaces[1]])
    assert asked == [36, 36, 2]
    values = torchgw.pairwise(spaces, **options, progress=False)
    np.testing.assert_allclose(first, np.exp(-3.0 * np.maximum(values, 0)), rtol=1e-6)
    # all folds of all parameters of a search
    asked.clear()
    search = GridSearchCV(
        make_pipeline(GWKernel(**options), SVC(kernel="precomputed")),
        {"gwkernel__gamma": [0.1, 1.0, 10.0], "svc__C": [0.1, 1.0, 10.0]}, cv=4,
        error_score="raise",
    )  # fmt: skip
    search.fit([space + 1 for space in spaces], [0, 1] * 4)
    assert sum(asked) == 36


def test_spaces_have_features_by_name():
    networkx = pytest.importorskip("networkx")
    from torchgw.sklearn import GWDistance

    graphs = [networkx.cycle_graph(6) for _ in range(3)]
    for graph, kinds in zip(graphs, ("ababab", "ababab", "aaabbb"), strict=True):
        networkx.set_node_attributes(graph, dict(enumerate(kinds)), "kind")
        networkx.set_node_attributes(
            graph, {k: 100.0 * (c == "b") for k, c in enumerate(kinds)}, "x"
        )
    options = {"epsilon": 1e-3, "alpha": 0.5}
    for name in ("kind", "x"):
        distances = GWDistance(features=name, **options).fit_transform(graphs)
        assert distances[0, 1] < 0.1 < distances[0, 2]
        values = torchgw.pairwise(graphs, features=name, **options, progress=False)
        np.testing.assert_allclose(distances**2, np.maximum(values, 0), rtol=1e-6, atol=1e-12)
        single = torchgw.solve(graphs[0], graphs[2], features=name, alpha=0.5, epsilon=1e-3)
        if name == "kind":
            assert values[0, 2] == pytest.approx(single.value, rel=0.02)
    # what is not seen in fit may come
    model = GWDistance(features="kind", **options).fit(graphs[:2])
    assert model.transform(graphs[2:]).shape == (1, 2)
    with pytest.raises(torchgw.InvalidInputError, match="nodes of `Xs.0.` have 'kind', 'x'"):
        torchgw.pairwise(graphs, features="colour", progress=False)
