"""What every distance provider must satisfy, run over all of them."""

import pickle
from functools import partial

import numpy as np
import pytest
import scipy.spatial.distance
import torch
from scipy.sparse.csgraph import dijkstra

from torchgw.distances import (
    CallableDistance,
    CurvedDistance,
    DijkstraDistance,
    LandmarkDistance,
    ManifoldDistance,
    NystromDistance,
    PointDistance,
    PrecomputedDistance,
    ProductDistance,
    ScaledDistance,
    geodesic_matrix,
    knn_graph,
)

# Relative to the largest distance, or to 0.1 if that is less: what cosine distances are rounded at
# does not shrink with them. float32 rounds at 6e-8 and sums some hundreds of terms; the
# factored forms subtract numbers a few times larger than the distances.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def make_points(n: int) -> np.ndarray:
    """Points away from the origin, of which two pairs are duplicates."""
    points = np.random.default_rng(n).normal(size=(n, 3)) + [5.0, 0.0, -2.0]
    if n > 10:
        points[7], points[9] = points[2], points[2]
    return points.astype(np.float32).astype(np.float64)


def make_graph(n: int):
    # A cloud's graph of 8 neighbours, connected for the sizes used here.
    return knn_graph(make_points(n), n_neighbors=min(8, n - 1) if n > 1 else None)


def point_case(metric, n, device, dtype):
    points = make_points(n)
    reference = scipy.spatial.distance.cdist(points, points, metric)
    return PointDistance(torch.tensor(points, dtype=dtype, device=device), metric), reference


def precomputed_case(n, device, dtype):
    reference = scipy.spatial.distance.cdist(make_points(n), make_points(n), "cityblock")
    return PrecomputedDistance(torch.tensor(reference, dtype=dtype, device=device)), reference


def geodesic_case(n, device, dtype):
    matrix = geodesic_matrix(make_graph(n)).to(device, dtype)
    return PrecomputedDistance(matrix), dijkstra(make_graph(n), directed=False)


def dijkstra_case(n, device, dtype):
    # A cache smaller than most requests.
    provider = DijkstraDistance(make_graph(n), device=device, dtype=dtype, cache_size=5)
    return provider, dijkstra(make_graph(n), directed=False)


def landmark_case(n, device, dtype):
    # With every vertex a landmark the approximation is exact.
    provider = LandmarkDistance(make_graph(n), n, device=device, dtype=dtype)
    return provider, dijkstra(make_graph(n), directed=False)


class Table:
    """A function that pickles."""

    def __init__(self, matrix):
        self.matrix = matrix

    def __call__(self, index):
        return self.matrix[:, index]


def callable_case(n, device, dtype):
    reference = scipy.spatial.distance.cdist(make_points(n), make_points(n))
    table = Table(torch.tensor(reference, device=device))
    return CallableDistance(n, table, device=device, dtype=dtype), reference


def curved_case(model, n, device, dtype):
    points = make_points(n) / 10
    square = (points**2).sum(1)
    if model == "sphere":
        points /= np.sqrt(square)[:, None]
        reference = 2 * np.arcsin(np.minimum(scipy.spatial.distance.cdist(points, points) / 2, 1))
    else:
        gaps = np.sqrt(np.outer(1 - square, 1 - square))
        reference = 2 * np.arcsinh(scipy.spatial.distance.cdist(points, points) / gaps)
    if model == "lorentz":
        points = np.c_[1 + square, 2 * points] / (1 - square)[:, None]
    return CurvedDistance(torch.tensor(points, dtype=dtype, device=device), model), reference


def product_case(n, device, dtype):
    pairs = [curved_case("poincare", n, device, dtype), point_case("cosine", n, device, dtype)]
    (first, one), (second, two) = pairs
    return ProductDistance([first, second], [1.0, 9.0]), np.sqrt(one**2 + 9 * two**2)


def between(x, y):
    """A function that pickles."""
    return torch.cdist(x, y, p=1)


def manifold_case(n, device, dtype):
    points = make_points(n)
    reference = scipy.spatial.distance.cdist(points, points, "cityblock")
    given = torch.tensor(points, dtype=dtype, device=device)
    return ManifoldDistance(given, between), reference


def nystrom_case(n, device, dtype):
    # with every point a landmark the approximation is exact
    provider, reference = curved_case("poincare", n, device, dtype)
    return NystromDistance(provider, n), reference


def scaled(case, n, device, dtype):
    provider, reference = case(n, device, dtype)
    return ScaledDistance(provider, 0.25), 0.25 * reference


CASES = {
    "euclidean": partial(point_case, "euclidean"),
    "sqeuclidean": partial(point_case, "sqeuclidean"),
    "cosine": partial(point_case, "cosine"),
    "precomputed": precomputed_case,
    "geodesic": geodesic_case,
    "dijkstra": dijkstra_case,
    "landmark": landmark_case,
    "callable": callable_case,
    "poincare": partial(curved_case, "poincare"),
    "lorentz": partial(curved_case, "lorentz"),
    "sphere": partial(curved_case, "sphere"),
    "product": product_case,
    "manifold": manifold_case,
    "nystrom": nystrom_case,
}
CASES |= {f"scaled-{name}": partial(scaled, case) for name, case in CASES.items()}


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request):
    return request.param


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture(params=[1, 2, 60])
def problem(request, case, device, dtype):
    return case(request.param, device, dtype)


def assert_close(value, reference, power=1):
    tolerance = TOLERANCE[value.dtype] * max(float(np.abs(reference).max()), 0.1)
    torch.testing.assert_close(
        value.cpu().double(), torch.as_tensor(reference), rtol=0, atol=tolerance * power
    )


def test_columns_are_those_of_the_matrix_and_may_repeat(problem):
    provider, reference = problem
    index = torch.tensor([0, provider.n - 1, 0, provider.n // 2], device=provider.device)
    block = provider.columns(index)
    assert block.device == provider.device
    assert block.dtype == provider.dtype
    assert_close(block, reference[:, index.cpu().numpy()])


def test_all_columns_are_symmetric(problem):
    provider, reference = problem
    every = provider.columns(torch.arange(provider.n, device=provider.device))
    assert_close(every, reference)
    # to the rounding of a product, which need not be that of its transpose
    assert_close(every.T, every.cpu().double().numpy())


def test_apply_is_a_matrix_product(problem):
    provider, reference = problem
    values = np.random.default_rng(0).normal(size=(provider.n, 3)) / provider.n
    product = provider.apply(torch.tensor(values, dtype=provider.dtype, device=provider.device))
    assert_close(product, reference @ values)


def test_mean_square_and_mean(problem):
    provider, reference = problem
    weights = np.random.default_rng(0).dirichlet(np.ones(provider.n))
    # A zero weight is ordinary.
    weights[0] = 0
    tensor = torch.tensor(weights, dtype=provider.dtype, device=provider.device)
    # Squares double the relative error, and the quadratic form sums over pairs of factors.
    assert_close(provider.mean_square(tensor), reference**2 @ weights, power=10)
    # The error of a weighted sum is that of its terms.
    allowed = TOLERANCE[provider.dtype] * max(reference.max(), 0.1)
    assert provider.mean(tensor) == pytest.approx(weights @ reference @ weights, rel=0, abs=allowed)


def test_maximum(problem):
    provider, reference = problem
    rounding = TOLERANCE[provider.dtype]
    assert provider.maximum() == pytest.approx(reference.max(), rel=rounding, abs=1e-7)


def test_factors_reproduce_the_matrix(problem):
    provider, reference = problem
    if (factors := provider.factors()) is None:
        return
    matrix, signs = factors
    assert set(signs.sign().tolist()) <= {-1.0, 1.0}
    assert_close((matrix * signs) @ matrix.T, reference)


def test_a_stored_matrix_is_the_matrix(problem):
    provider, reference = problem
    if (matrix := provider.matrix()) is not None:
        assert_close(matrix, reference)


def test_to_changes_dtype_and_keeps_what_is_right_already(problem):
    provider, reference = problem
    assert provider.to(provider.device, provider.dtype) is provider
    other = torch.float64 if provider.dtype == torch.float32 else torch.float32
    moved = provider.to(torch.device("cpu"), other)
    assert (moved.device.type, moved.dtype) == ("cpu", other)
    block = moved.columns(torch.arange(provider.n)).float()
    assert_close(block, reference)
    # The original is as it was.
    assert provider.columns(torch.zeros(1, dtype=torch.int64, device=provider.device)).dtype == (
        provider.dtype
    )


def test_pickles(problem):
    provider, _ = problem
    copied = pickle.loads(pickle.dumps(provider))
    index = torch.arange(provider.n, device=provider.device)
    assert torch.equal(copied.columns(index), provider.columns(index))


def test_who_has_factors_and_who_has_a_matrix():
    built = {name: CASES[name](20, torch.device("cpu"), torch.float64)[0] for name in CASES}
    factored = {name for name, provider in built.items() if provider.factors() is not None}
    stored = {name for name, provider in built.items() if provider.matrix() is not None}
    costly = {name for name, provider in built.items() if not provider.cheap_columns}
    assert {name for name in factored if "-" not in name} == {
        "sqeuclidean", "cosine", "landmark", "nystrom",
    }  # fmt: skip
    assert {name for name in stored if "-" not in name} == {"precomputed", "geodesic"}
    assert {name for name in costly if "-" not in name} == {"dijkstra"}
    for kinds in (factored, stored, costly):
        assert {f"scaled-{name}" for name in kinds if "-" not in name} <= kinds


def test_every_provider_is_covered():
    built = {type(CASES[name](20, torch.device("cpu"), torch.float64)[0]) for name in CASES}
    assert built == {
        CallableDistance,
        CurvedDistance,
        DijkstraDistance,
        LandmarkDistance,
        ManifoldDistance,
        NystromDistance,
        PointDistance,
        PrecomputedDistance,
        ProductDistance,
        ScaledDistance,
    }


def test_a_scaled_table_is_pickled_once():
    table = torch.rand(200, 200, dtype=torch.float64)
    provider = ScaledDistance(PrecomputedDistance(table + table.T), 0.3)
    pickled = pickle.dumps(provider)
    assert len(pickled) < 1.1 * table.nbytes
    assert torch.equal(pickle.loads(pickled).matrix(), provider.matrix())
