"""The public boundary: a right answer or a clear error, for every argument and odd input.

No crash, no hang, no warning of NumPy or PyTorch, no silent change of what was asked.
"""

from __future__ import annotations

import os
import warnings

import numpy as np
import pytest
import scipy.sparse
import torch
from hostile import ANYTHING
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from problems import solve_by_name

import torchgw
from torchgw import TorchGWError, TorchGWWarning
from torchgw._api import DATA
from torchgw._problem.table import TABLE

# Small and loose: it is not about accuracy here.
QUICK = {"epsilon": 0.5, "max_iter": 6, "inner_max_iter": 20, "random_state": 0, "n_init": 1}
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(12, 2)), RNG.normal(size=(9, 3))
PARAMETERS = (*DATA, *TABLE)

# A number in the environment asks for as many new examples; the usual ones are always the same.
EXAMPLES = os.environ.get("BOUNDARY_EXAMPLES")
profile = settings(
    max_examples=int(EXAMPLES or 25),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=EXAMPLES is None,
)


def attempt(*arguments, **keywords):
    """Return the result, or ``None`` after a clear error; anything else fails the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TorchGWWarning)
        try:
            result = solve_by_name(*arguments, **keywords)
        except TorchGWError:
            return None
    check(result)
    return result


def check(result):
    """A result is finite, and its plan is the one that its marginals say."""
    n, m = result.lazy_plan.shape
    assert np.isfinite([result.value, result.marginal_error, result.epsilon]).all()
    plan = torch.as_tensor(result.plan).double()
    assert plan.shape == (n, m)
    assert bool(torch.isfinite(plan).all())
    assert float(plan.min()) >= 0
    moved, potential = map(torch.as_tensor, (result.marginal_a, result.potential_a))
    torch.testing.assert_close(plan.sum(1), moved, atol=1e-5, rtol=1e-3)
    assert bool(torch.isfinite(potential[moved > 0]).all())
    assert torch.as_tensor(result.lazy_plan.barycentric(np.zeros((m, 1)))).isfinite().all()


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_argument_takes_anything(name, monkeypatch, tmp_path):
    # any word is a folder to `cache`
    monkeypatch.chdir(tmp_path)
    for value in ANYTHING:
        # a giant number is a legal, long answer to "how many iterations"
        counts = ("max_iter", "inner_max_iter", "min_iter", "n_anchors", "n_init")
        if name in counts and isinstance(value, int) and value > 100:
            continue
        # what a callback does is its own affair
        if name == "callback" and callable(value):
            continue
        both = {"X": X, "Y": Y}
        if name in ("D_X", "D_Y"):
            both.pop(name[-1])
        attempt(**{**both, **QUICK, name: value})


SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=7)
NUMBERS = st.one_of(
    st.floats(-10, 10), st.sampled_from([0.0, np.nan, np.inf, -np.inf, 1e-30, 1e30, 1e200, 5e-324])
)


@profile
@given(points=hnp.arrays(np.float64, SHAPES, elements=NUMBERS))
def test_points_of_any_shape_and_size(points):
    attempt(points, Y, **QUICK)
    attempt(points, Y, distances="sqeuclidean", **QUICK)


@profile
@given(
    matrix=hnp.arrays(np.float64, st.tuples(*[st.integers(0, 5)] * 2), elements=NUMBERS),
    symmetric=st.booleans(),
)
def test_matrices_of_any_content(matrix, symmetric):
    if symmetric and matrix.shape[0] == matrix.shape[1]:
        with np.errstate(invalid="ignore"):
            matrix = np.abs(matrix + matrix.T)
    attempt(None, Y, D_X=matrix, **QUICK)


@profile
@given(
    a=hnp.arrays(np.float64, st.integers(10, 13), elements=NUMBERS),
    normalised=st.booleans(),
)
def test_weights_of_any_content(a, normalised):
    with np.errstate(all="ignore"):
        a = np.abs(a) / np.abs(a).sum() if normalised else a
    result = attempt(X, Y, a=a, distances="euclidean", **QUICK)
    if result is not None:
        assert a.shape == (12,)
        np.testing.assert_allclose(result.marginal_a, a / a.sum(), atol=1e-3)


@profile
@given(linear=hnp.arrays(np.float64, st.tuples(st.just(12), st.integers(8, 9)), elements=NUMBERS))
def test_linear_costs_of_any_content(linear):
    attempt(X, Y, M=linear, distances="euclidean", **QUICK)


def masses(n):
    """Weights of n points, some of them zero."""
    others = st.lists(st.sampled_from([0, 1, 2]), min_size=n - 1, max_size=n - 1)
    return others.map(lambda weights: np.array([1, *weights]) / (1 + sum(weights)))


FEATURES = RNG.normal(size=(12, 2)), RNG.normal(size=(9, 2))
POINTS = [
    X,
    X.astype(np.float32),
    torch.from_numpy(X),
    np.repeat(X[:4], 3, axis=0),
    scipy.sparse.diags_array([np.ones(11)] * 2, offsets=[-1, 1]),
]
COMBINATIONS = {
    "a": masses(12),
    "b": masses(9),
    "distances": ["auto", "dijkstra", "landmark", "euclidean", "sqeuclidean", ("cosine", "auto")],
    "gradient": ["auto", "dense", "factored", "sampled"],
    "storage": ["auto", "stored", "streamed"],
    "precision": ["auto", "mixed", "float64", "float32"],
    "regularization": ["entropic", "proximal"],
    "unbalanced": [0.1, 1e6, (np.inf, 0), (0.5, np.inf)],
    "unbalanced_type": ["kl", "l2"],
    "mass": [0.1, 0.5, 1.0],
    "polish": [True, False],
    "scale": ["auto", "max", "mean", None],
    "epsilon": ["auto", 0.5, 1e-2, 100.0],
    "alpha": [0.0, 0.3, 1.0],
    "M": [RNG.random((12, 9))],
    "features": [FEATURES],
    "feature_metric": ["sqeuclidean", "cosine", "euclidean"],
    "n_anchors": [1, 64],
    "n_init": [1, 4],
    "n_landmarks": [1, 9],
    "n_neighbors": [1, 8],
    "skip_tiles": [True, False],
    "resolution": [None, 1e-2],
    "disconnected": ["stitch", "fill"],
    "init": [np.full((12, 9), 1 / 108)],
    "differentiable": ["value", "implicit", "unrolled"],
}


@st.composite
def combinations(draw):
    """A few options: of many at once most would be refused."""
    names = draw(st.lists(st.sampled_from(list(COMBINATIONS)), max_size=4, unique=True))
    values = (COMBINATIONS[name] for name in names)
    return {
        name: draw(st.sampled_from(kinds) if isinstance(kinds, list) else kinds)
        for name, kinds in zip(names, values, strict=True)
    }


@profile
@given(points=st.sampled_from(POINTS), options=combinations())
def test_options_in_any_combination(points, options):
    """What does not go together is refused; what does is solved, and its plan can be used."""
    result = attempt(points, Y, **{**QUICK, **options})
    if result is None:
        return
    plan = result.lazy_plan
    assert plan.topk(2)[1].shape == (12, 2)
    assert (plan.T @ np.ones(12)).shape == (9,)
    rounded = plan.rounded().to_dense()
    assert np.isfinite(np.asarray(rounded)).all()


@pytest.mark.parametrize(
    "dtype", ["f2", "f4", "f8", "g", "i1", "i8", "u2", "?", ">f8", "c8", "O", "U3"]
)
@pytest.mark.parametrize("layout", ["C", "F", "reversed", "strided", "readonly"])
def test_dtypes_and_layouts(dtype, layout):
    points = np.round(X * 3).astype(dtype)
    points = {
        "C": lambda: points,
        "F": lambda: np.asfortranarray(points),
        "reversed": lambda: points[::-1],
        "strided": lambda: np.repeat(points, 2, axis=1)[:, ::2],
        "readonly": lambda: points.view(),
    }[layout]()
    if layout == "readonly":
        points.flags.writeable = False
    if dtype == "?":
        # booleans have few different rows: any answer will do
        attempt(points, Y, distances="euclidean", **QUICK)
        return
    result = attempt(points, Y, distances="euclidean", **QUICK)
    if dtype in ("c8", "U3"):
        assert result is None
    elif result is not None:
        plain = np.ascontiguousarray(points.astype(np.float64))
        expected = attempt(plain, Y, distances="euclidean", **QUICK)
        np.testing.assert_allclose(result.plan, expected.plan, atol=1e-4)
    else:
        assert dtype == "O"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int32])
def test_tensors_are_not_changed(dtype):
    points = (torch.from_numpy(X) * 3).round().to(dtype)
    before = points.clone()
    result = attempt(points, Y, distances="euclidean", **QUICK)
    assert torch.equal(points, before)
    assert points.dtype == dtype
    expected = attempt(points.double(), Y, distances="euclidean", **QUICK)
    np.testing.assert_allclose(result.plan, expected.plan, atol=1e-4)


@pytest.mark.parametrize("exponent", [-14, -6, 0, 6, 14])
@pytest.mark.parametrize("distances", ["euclidean", "sqeuclidean", "cosine", "precomputed"])
def test_units_do_not_matter(exponent, distances):
    """Distances are divided by their maximum, so metres or parsecs give one plan."""
    # squares of large units are near the bound of what is accepted
    if distances == "sqeuclidean" and abs(exponent) == 14:
        assert attempt(X * 10.0**exponent, Y, distances=distances, **QUICK) is not None
        return
    result = attempt(X * 10.0**exponent, Y, distances=distances, **QUICK)
    expected = attempt(X, Y, distances=distances, **QUICK)
    np.testing.assert_allclose(result.plan, expected.plan, atol=1e-6)


@pytest.mark.parametrize("device", ["meta", "mps", "xpu", "cuda:57", "nowhere", "cpu:1"])
def test_other_devices_are_refused(device):
    with pytest.raises(torchgw.InvalidInputError, match="device"):
        solve_by_name(X, Y, device=device, **QUICK)


def test_tiny_problems():
    for n in (1, 2, 3):
        for m in (1, 2):
            for distances in ("auto", "euclidean", "sqeuclidean", "landmark", "dijkstra"):
                points = np.arange(n, dtype=float)[:, None]
                assert attempt(points, Y[:m], distances=distances, **QUICK) is not None


@pytest.mark.parametrize(
    "distances", ["auto", "euclidean", "sqeuclidean", "cosine", "landmark", "dijkstra"]
)
def test_all_weight_on_one_point(distances):
    """There is one plan; what factors leave of a distance of zero is no unit for epsilon."""
    b = np.zeros(len(Y))
    b[3] = 1
    result = torchgw.solve(X, Y, b=b, distances=distances, random_state=0)
    assert result.converged
    assert result.epsilon > 1e-4
    np.testing.assert_allclose(result.plan[:, 3], 1 / len(X), rtol=1e-9)


def test_duplicated_and_constant_points():
    for distances in ("auto", "euclidean", "sqeuclidean", "landmark", "dijkstra"):
        assert attempt(np.ones((8, 2)), Y, distances=distances, **QUICK) is not None
        assert attempt(np.repeat(X[:3], 5, axis=0), Y, distances=distances, **QUICK) is not None
