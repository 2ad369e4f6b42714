"""Spaces of constant curvature by name: solved, mapped, stored, differentiated, refused."""

import numpy as np
import pytest
import torch
from problems import solve_by_name
from torch.autograd import gradcheck

import torchgw
from benchmarks.distances.trees import tree_and_copy
from torchgw.cli import main
from torchgw.distances import CurvedDistance

# points obey an equation, to roundings
pytestmark = pytest.mark.exact
MODELS = ["poincare", "lorentz", "sphere"]


def points_of(model, n, seed=0, curvature=1.0):
    rng = np.random.default_rng(seed)
    direction = rng.normal(size=(n, 3))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    radius = rng.uniform(0.2, 3, (n, 1))
    points = {
        "poincare": np.tanh(radius / 2) * direction,
        "lorentz": np.concatenate([np.cosh(radius), np.sinh(radius) * direction], 1),
        "sphere": direction
        * [1, 1, 0.5]
        / np.linalg.norm(direction * [1, 1, 0.5], axis=1)[:, None],
    }[model]
    return torch.from_numpy(points / np.sqrt(curvature))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("model", MODELS)
def test_a_shuffled_copy_is_found_by_name_mapped_and_stored(model, dtype, tmp_path):
    X = points_of(model, 60, curvature=0.5).to(dtype)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    Y = X[order]
    options = {"distances": model, "curvature": 0.5, "random_state": 0, "epsilon": 1e-4}
    result = solve_by_name(X, Y, **options)
    assert (order[result.lazy_plan.argmax()] == torch.arange(60)).all()
    assert result.value < 1e-4
    # a known point goes where the plan sends it, by its points or its distances, before and after
    expected = result.lazy_plan.barycentric(Y)[:9]
    mapped = result.transform(X[:9])
    assert (mapped - expected).abs().max() < 1e-4
    table = CurvedDistance(X, model, curvature=0.5).columns(torch.arange(9)).T
    assert (result.transform(D_new=table) - mapped).abs().max() < 1e-4
    result.save(tmp_path / "result.npz")
    loaded = torchgw.load(tmp_path / "result.npz")
    assert (loaded.transform(X[:9]) - mapped).abs().max() < 1e-6
    assert (loaded.matching().target == result.matching().target).all()


@pytest.mark.parametrize("gradient", ["dense", "factored", "sampled"])
def test_every_gradient(gradient):
    X, Y = points_of("poincare", 70), points_of("poincare", 70).flip(0)
    factors = {"n_landmarks": 70} if gradient == "factored" else {}
    result = solve_by_name(
        X, Y, distances="poincare", gradient=gradient, epsilon=1e-3, random_state=0, **factors
    )
    assert result.gradient == gradient
    assert (result.lazy_plan.argmax().flip(0) == torch.arange(70)).double().mean() > 0.9
    if gradient == "factored":
        report = result.report.landmarks["X"]
        assert (report["count"], report["error"]) == (70, 0.0)
        # new points find their factors by their distances to the landmarks
        assert (result.transform(X[:5]) - result.lazy_plan.barycentric(Y)[:5]).abs().max() < 1e-3


def test_each_side_has_a_curvature():
    # the same points in balls of other sizes: distances are those of unit curvature over sqrt(c)
    X = points_of("poincare", 20)
    pair = torchgw.solve(
        X, X / 2, distances="poincare", scale=None, epsilon=0.01, random_state=0,
        options=torchgw.Options(curvature=(1.0, 4.0)),
    )  # fmt: skip
    given = torchgw.solve(
        CurvedDistance(X), CurvedDistance(X / 2, curvature=4.0), epsilon=0.01, random_state=0
    )
    assert pair.value == pytest.approx(given.value, rel=1e-6)
    # one start: whether a search is sure of unrelated spaces depends on the processor
    mixed = torchgw.solve(
        X, points_of("sphere", 15), distances=("poincare", "sphere"), n_init=1, random_state=0
    )
    assert mixed.converged


@pytest.mark.parametrize(
    ("model", "mode"), [("poincare", "implicit"), ("lorentz", "value"), ("sphere", "value")]
)
def test_gradients_in_the_points(model, mode):
    X, Y = points_of(model, 5), points_of(model, 4, 1)
    weights = torch.linspace(-1, 2, 5, dtype=torch.float64)

    def function(x):
        result = torchgw.solve(
            x, Y, distances=model, epsilon=0.6, differentiable=mode, tol=1e-9, max_iter=400,
            n_init=1, options=torchgw.Options(curvature=1.0, inner_tol=1e-10),
        )  # fmt: skip
        return result.loss if mode == "value" else result.lazy_plan.T @ weights

    def free(x):
        # moves that stay on the surface: radially on the sphere, in space on the hyperboloid
        if model == "lorentz":
            return torch.cat([(1 + x[:, 1:].square().sum(1, keepdim=True)).sqrt(), x[:, 1:]], 1)
        return x / x.norm(dim=1, keepdim=True) if model == "sphere" else x

    assert gradcheck(
        lambda x: function(free(x)), (X.requires_grad_(),), eps=1e-4, atol=1e-5, rtol=1e-4,
        fast_mode=True,
    )  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_finite_where_points_coincide(model):
    X = points_of(model, 8)
    X[3] = X[2]
    if model != "sphere":
        # the origin
        X[5] = torch.tensor([1.0, 0, 0, 0] if model == "lorentz" else [0.0, 0, 0])
    else:
        X[5] = -X[4]
    result = torchgw.solve(
        X.requires_grad_(), X.detach().flip(0), distances=model, epsilon=0.1, differentiable="value"
    )
    result.loss.backward()
    assert X.grad.isfinite().all()
    assert X.grad.any()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"distances": "euclidean", "curvature": 1.0}, torchgw.InvalidInputError, "`curvature`"),
        ({"distances": "poincare", "curvature": 0.0}, torchgw.InvalidInputError, "curvature"),
        ({"distances": "poincare", "curvature": (1, 2, 3)}, torchgw.InvalidInputError, "pair"),
        ({"distances": "sphere"}, torchgw.InvalidInputError, "row 0 does not lie on the sphere"),
        ({"distances": "lorentz"}, torchgw.InvalidInputError, "row 0 does not lie on"),
        ({"distances": "poincare", "n_neighbors": 3}, torchgw.InvalidInputError, "n_neighbors"),
        (
            {"distances": "poincare", "loss": "kl", "n_landmarks": 9},
            torchgw.UnsupportedError,
            "drop `n_landmarks`",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(options, error, message):
    X = points_of("poincare", 12)
    with pytest.raises(error, match=message):
        solve_by_name(X, X, **options)


def test_factors_from_landmarks_have_no_gradient():
    X = points_of("poincare", 12).requires_grad_()
    with pytest.raises(torchgw.UnsupportedError, match="Drop `n_landmarks`"):
        torchgw.solve(
            X, X.detach(), distances="poincare", epsilon=0.5, differentiable="value",
            options=torchgw.Options(n_landmarks=9),
        )  # fmt: skip


def test_the_command_line_and_the_estimator(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    X = points_of("poincare", 30, curvature=2.0).numpy()
    np.save("X.npy", X)
    np.save("Y.npy", X[::-1].copy())
    flags = ["--distances", "poincare", "--curvature", "2", "--epsilon", "1e-3", "--seed", "0"]
    assert main(["align", "X.npy", "Y.npy", "-o", "out.npz", *flags]) == 0
    assert (np.load("out.npz")["matching"] == np.arange(30)[::-1]).all()
    estimator = pytest.importorskip("torchgw.sklearn").GWAligner(
        distances="poincare", curvature=2.0, epsilon=1e-3, random_state=0
    )
    assert np.abs(estimator.fit(X, X[::-1].copy()).transform(X) - X).max() < 0.05


@pytest.mark.slow
def test_low_rank_plans_and_barycenters():
    X = points_of("poincare", 40)
    low = torchgw.solve_low_rank(
        X, X.flip(0), rank=4, distances="poincare", curvature=1.0, random_state=0
    )
    assert low.value >= 0
    mean = torchgw.barycenter([X, X.flip(0)], n=20, distances="poincare", random_state=0)
    assert mean.distances.n == 20


@pytest.mark.parametrize("n", [150, pytest.param(600, marks=pytest.mark.slow)])
def test_a_tree_is_matched_with_its_copy_under_an_isometry(n):
    X, Y, order, classes = tree_and_copy(n, 2.0)
    result = torchgw.solve(X, Y, distances="poincare", random_state=0, polish=True)
    found = order[np.asarray(result.lazy_plan.argmax())]
    # nothing but exact distances tells some leaves from others; polished plans are that sharp
    assert (classes[found] == classes).all()
    assert result.value < 1e-9
