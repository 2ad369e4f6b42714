import numpy as np
import pytest
import scipy.sparse
import torch

import torchgw
from torchgw._errors import TorchGWWarning
from torchgw._problem import given


def cloud(n=120, d=2, seed=0):
    return np.random.default_rng(seed).normal(size=(n, d))


def test_a_row_far_away_is_named():
    X = cloud()
    X[37] = 1e6
    with pytest.warns(
        TorchGWWarning, match=r"`X` has points far .* row 37 is 1\.41e\+06 away.*no weight in `a`"
    ):
        torchgw.solve(X, cloud(80, seed=1), random_state=0, distances="euclidean", n_init=1)
    weights = np.full(120, 1 / 119)
    weights[37] = 0
    # without weight it has no say in the scale; heavy tails are no error
    torchgw.solve(X, cloud(80, seed=1), a=weights, random_state=0, distances="euclidean", n_init=1)
    with pytest.warns(TorchGWWarning, match="`Y` has points far .* row 120"):
        given.warn_of_far_points(
            "Y", "b", torch.from_numpy(np.concatenate([cloud(), [[1e4, 0]]])), torch.ones(121) > 0
        )


def test_a_row_far_away_of_many_is_named():
    points = torch.from_numpy(cloud(6000))
    given.warn_of_far_points("X", "a", points, None)
    points[6] = 1e4
    given.warn_of_far_points("X", "a", points, torch.arange(6000) != 6)
    with pytest.warns(TorchGWWarning, match="`X` has points far .* row 6"):
        given.warn_of_far_points("X", "a", points, None)


def test_a_row_far_away_of_a_matrix_is_named():
    X, Y = cloud(), cloud(80, seed=1)
    X[37] = 1e6
    D_X, D_Y = (np.linalg.norm(one[:, None] - one, axis=2) for one in (X, Y))
    with pytest.warns(TorchGWWarning, match=r"`D_X` has points far .* row 37 is 1\.41e\+06 away"):
        torchgw.solve(D_X=D_X, D_Y=D_Y, random_state=0, n_init=1)
    with pytest.warns(TorchGWWarning, match="`D_Y` has points far .* row 37 .* in `b`"):
        torchgw.solve(D_X=D_Y, D_Y=D_X, random_state=0, n_init=1)
    weights = np.full(120, 1 / 119)
    weights[37] = 0
    # no weight, no say; similarities and matrices of zeros and ones are no distances
    torchgw.solve(D_X=D_X, D_Y=D_Y, a=weights, random_state=0, n_init=1)
    for matrix in ((D_Y < 0.5).astype(float), np.exp(-D_Y), -D_Y):
        given.warn_of_far_points(
            "D_X", "a", torchgw.distances.PrecomputedDistance(torch.from_numpy(matrix)), None
        )


def test_a_row_far_away_that_decides_for_angles_is_named():
    X = cloud(100, 5)
    Y = X[::-1].copy()
    X[3] = 1e6
    with pytest.warns(TorchGWWarning, match="`X` has .* row 3 .* angles are compared instead"):
        result = torchgw.solve(X, Y, random_state=0, n_init=1)
    assert result.log["distances"]["chosen"] == "cosine"


def test_heavy_tails_and_two_clusters_are_no_error():
    rng = np.random.default_rng(0)
    for points in (rng.standard_t(2, size=(500, 3)), np.concatenate([cloud(90), cloud(30) + 1e5])):
        given.warn_of_far_points("X", "a", torch.from_numpy(points), None)


def test_transposed_points_are_warned_of():
    X, Y = cloud(500), cloud(400, seed=1)
    with (
        pytest.warns(TorchGWWarning, match="2 rows and 500 columns.*pass X.T"),
        pytest.warns(TorchGWWarning, match="2 rows and 400 columns.*pass Y.T"),
    ):
        torchgw.solve(X.T, Y.T, random_state=0)
    # a few dozen samples of thousands of genes are no mistake
    torchgw.solve(cloud(24, 400), cloud(20, 300, seed=1), random_state=0, n_init=1)


@pytest.mark.parametrize(
    ("options", "what"),
    [({"gradient": "dense"}, "gradient='dense'"), ({"distances": "precomputed"}, "landmark")],
)
def test_what_cannot_fit_is_refused_before_the_work(monkeypatch, options, what):
    monkeypatch.setattr(given, "free_memory", lambda device: 2**20)
    monkeypatch.setattr(given, "fits", lambda needed, device: needed <= 2**20)
    stages = "torchgw._problem.named.Preparation"
    monkeypatch.setattr(stages, lambda *_, **__: pytest.fail("work was begun"))
    with pytest.raises(torchgw.UnsupportedError, match=r"at least 0\.0 GiB.*Pass") as refused:
        torchgw.solve(cloud(600), cloud(600, seed=1), random_state=0, **options)
    assert what in str(refused.value)


def test_two_units_of_a_relaxed_problem_are_named():
    """Part of Y is X; the rest of it must not change the unit of that part."""
    rng = np.random.default_rng(30)
    angle = rng.uniform(0, 1.5 * np.pi, 60)
    X = np.c_[np.cos(angle) * (1 + angle / 4), np.sin(angle), 0.3 * angle]
    Y = np.concatenate([X[:, [1, 2, 0]], rng.uniform(-2, 2, (20, 3))])
    options = {"distances": "euclidean", "random_state": 0, "n_init": 1}
    options |= {"unbalanced": (float("inf"), 0)}

    def missed(**scale):
        partners = torchgw.solve(X, Y, **options, **scale).lazy_plan.argmax()
        return np.abs(np.append(angle, np.full(20, 9))[partners] - angle).mean()

    assert missed(scale="max") > 1
    # points without a partner do not change the unit
    assert missed() < 0.1
    assert missed(scale=None) < 0.1
    # a unit of their own where nothing says that it is one
    torchgw.solve(X[:30], Y[:40, :2], **options)
    with pytest.warns(TorchGWWarning, match=r"of X is 3\.\d+, that of Y 3\d\d.*scale='max'"):
        torchgw.solve(X[:30], 100 * Y[:40], **options)


def test_two_units_of_graphs_are_named():
    path = scipy.sparse.diags_array([np.ones(29)] * 2, offsets=[-1, 1]).tocsr()
    with pytest.warns(TorchGWWarning, match=r"distance of X is 9, that of Y 29\."):
        torchgw.solve(path[:10, :10], path, mass=0.3, random_state=0)


def test_two_units_of_tables_are_named_where_points_are_left_out():
    """Metres beside kilometres were matched as they are, and the result was CONVERGED."""
    line = np.abs(np.subtract.outer(np.arange(30.0), np.arange(30.0)))
    tables = {"D_X": 1000 * line, "D_Y": line}
    for options in ({"mass": 0.7}, {"unbalanced": 1.0}):
        with pytest.warns(TorchGWWarning, match="largest entry of `D_X` is 2.9e.04, that of"):
            torchgw.explain(**tables, **options)
    for options in ({}, {"mass": 0.7, "scale": "max"}, {"mass": 0.7, "scale": None}):
        torchgw.explain(**tables, **options)
