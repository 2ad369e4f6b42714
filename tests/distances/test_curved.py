"""Spaces of constant curvature, products, any function, factors of any of them."""

import itertools

import mpmath
import numpy as np
import pytest
import torch

import torchgw
from torchgw.distances import (
    CurvedDistance,
    ManifoldDistance,
    NystromDistance,
    PointDistance,
    ProductDistance,
)

MODELS = ["poincare", "lorentz", "sphere"]
INSIDE = np.random.default_rng(3).uniform(-0.6, 0.6, (30, 2))


def coordinates(model, radius, direction, curvature=1.0):
    """Place points by their distances from the origin, in units of the curvature."""
    radius, root = radius[:, None], np.sqrt(curvature)
    if model == "poincare":
        return np.tanh(radius / 2) * direction / root
    if model == "lorentz":
        return np.concatenate([np.cosh(radius), np.sinh(radius) * direction], 1) / root
    return direction / root


def exact(x, y, model, curvature):
    """Compute a distance as it is defined, in 60 digits."""
    with mpmath.workdps(60):
        x, y = ([mpmath.mpf(float(item)) for item in point] for point in (x, y))
        c = mpmath.mpf(curvature)
        inner = mpmath.fdot(x, y)
        if model == "poincare":
            square = sum((p - q) ** 2 for p, q in zip(x, y, strict=True))
            gaps = (1 - c * mpmath.fdot(x, x)) * (1 - c * mpmath.fdot(y, y))
            angle = mpmath.acosh(1 + 2 * c * square / gaps)
        elif model == "lorentz":
            space = inner - x[0] * y[0]
            times = [mpmath.sqrt(1 / c + mpmath.fdot(p[1:], p[1:])) for p in (x, y)]
            angle = mpmath.acosh(c * (times[0] * times[1] - space))
        else:
            angle = mpmath.acos(inner / mpmath.sqrt(mpmath.fdot(x, x) * mpmath.fdot(y, y)))
        return float(angle / mpmath.sqrt(c))


def on_hyperboloid(points):
    """Add the time coordinate."""
    return np.column_stack([np.sqrt(1 + (points**2).sum(1)), points])


# Distances of pairs of points as geomstats 2.8.0 computes them, in float64. [L526]
GEOMSTATS = {
    "poincare": (
        np.array([[0.1, -0.2], [0.5, 0.5], [-0.7, 0.6], [0.0, 0.999]]),
        [1.9929840220911164, 3.635041918861821, 4.373499460038084, 8.02325919008145,
         7.600403335500913, 9.066740564217127],
    ),
    "lorentz": (
        on_hyperboloid(np.array([[0.5, -2.0], [1.5, 1.0], [-1.0, 4.0], [4.0, 40.0]])),
        [2.473418039006065, 3.594974206282789, 2.5186871411164207, 5.829743279698768,
         4.301148912491614, 3.3733237452012914],
    ),
    "sphere": (
        np.array([[1.0, 2, 2], [2, -1, 2], [-2, -2, 1], [0, 3, 0]]) / 3,
        [1.1102423351135742, 2.031350318476219, 1.5707963267948966, 0.8410686705679302,
         1.9106332362490184, 2.300523983021863],
    ),
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_distances_equal_those_of_geomstats(model):
    points, expected = GEOMSTATS[model]
    table = CurvedDistance(torch.from_numpy(points), model).columns(torch.arange(4))
    rows, columns = np.tril_indices(4, -1)
    np.testing.assert_allclose(table[rows, columns], expected, rtol=1e-10)


@pytest.mark.parametrize("curvature", [1.0, 0.37])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("model", MODELS)
def test_distances_equal_their_definition_far_out_and_close_together(model, dtype, curvature):
    rng = np.random.default_rng(0)
    direction = rng.normal(size=(16, 3))
    # half of the points are close to others, at the same depth or not
    direction[8:] = direction[:8] + rng.normal(size=(8, 3)) * 10.0 ** -rng.uniform(1, 4, (8, 1))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    radius = rng.uniform(0, 15, 16)
    radius[:2], radius[8:12] = 15, radius[:4]
    points = coordinates(model, radius, direction, curvature).astype(dtype)
    distance = CurvedDistance(torch.from_numpy(points), model, curvature=curvature)
    found = distance.columns(torch.arange(16)).double().numpy()
    truth = np.zeros((16, 16))
    for i, j in itertools.combinations(range(16), 2):
        truth[i, j] = truth[j, i] = exact(points[i], points[j], model, curvature)
    assert np.allclose(found, found.T, rtol=1e-14, atol=0)
    assert not found.diagonal().any()
    # an output in float32 is rounded to 6e-8; directions in float64 to 1e-16, which is 3e-10 at 15
    off = ~np.eye(16, dtype=bool)
    if dtype == np.float32:
        assert (np.abs(found - truth)[off] / truth[off]).max() < 1e-7
    else:
        assert (np.abs(found - truth)[off] / np.maximum(truth[off], 3)).max() < 1e-10
    if dtype == np.float64 and model == "poincare":
        # coordinates in the ball lose nothing, however close points are
        assert (np.abs(found - truth)[off] / truth[off]).max() < 1e-9


def test_depths_reach_where_coordinates_cannot():
    # on one ray distances are differences of the radius, log((1 + r) / (1 - r)); on opposite rays
    # they are sums
    depth = torch.tensor([0.0, 20, 60, 61, 300, 300], dtype=torch.float64)
    direction = torch.tensor([[1.0, 0]] * 5 + [[-1.0, 0]])
    distance = CurvedDistance(direction, depth=depth)
    radius = (depth + (2 - (-depth).exp()).log()) * torch.tensor([1.0] * 5 + [-1])
    expected = (radius[:, None] - radius).abs()
    found = distance.to("cpu", torch.float64).columns(torch.arange(6))
    assert (found - expected).abs().max() < 1e-9
    assert distance.maximum() == pytest.approx(float(expected.max()), rel=1e-12)
    # where both can be given they agree
    points = torch.from_numpy(INSIDE)
    both = CurvedDistance(points), CurvedDistance(points, depth=-(1 - points.norm(dim=1)).log())
    index = torch.arange(30)
    assert (both[0].columns(index) - both[1].columns(index)).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("points", "options", "message"),
    [
        ([[0.1, 0], [0.6, 0.8]], {}, "row 1 lies on or outside"),
        ([[0.1, 0], [2.0, 0], [3.0, 0]], {}, r"row 1 .* \(2 rows in all\)"),
        ([[0.5, 0]], {"curvature": 4.0}, "row 0 lies on or outside"),
        ([[1.0, 0], [1.1, 0.1]], {"model": "lorentz"}, "row 1 does not lie on the hyperboloid"),
        ([[-1.0, 0]], {"model": "lorentz"}, "row 0 does not lie on the hyperboloid"),
        ([[0.6, 0.8], [0.6, 0.7]], {"model": "sphere"}, "row 1 does not lie on the sphere"),
        ([[1.0, 0]], {"model": "sphere", "curvature": 4.0}, "row 0 does not lie on the sphere"),
        ([[1.0]], {"model": "lorentz"}, "d >= 2"),
        ([[0.1, 0]], {"curvature": -1.0}, "curvature"),
        ([[0.1, 0]], {"model": "klein"}, "model"),
        ([[0.1, 0]], {"depth": torch.tensor([-1.0])}, "row 0 has the depth -1"),
        ([[0.1, 0]], {"depth": torch.tensor([351.0])}, "row 0 has the depth 351"),
        ([[0.0, 0]], {"depth": torch.tensor([1.0])}, "row 0 is a zero vector"),
        ([[0.1, 0]], {"depth": torch.tensor([1.0, 2])}, "one number per point"),
        ([[0.6, 0.8]], {"model": "sphere", "depth": torch.tensor([1.0])}, "drop it"),
        ([[np.nan, 0]], {}, "NaN"),
    ],
)
def test_points_off_their_space_are_refused_with_their_row(points, options, message):
    with pytest.raises(torchgw.InvalidInputError, match=message):
        CurvedDistance(torch.tensor(points), **options)


def test_the_border_is_found_without_rounding():
    # 1 - |x|^2 of these is a few roundings, and a square that is rounded says 0 or less
    angle = torch.linspace(0, 6, 200, dtype=torch.float64)
    points = torch.stack([angle.cos(), angle.sin()], 1) * (1 - 3e-16)
    inside = []
    for row in points:
        with mpmath.workdps(50):
            inside.append(sum(mpmath.mpf(float(x)) ** 2 for x in row) < 1)
        if inside[-1]:
            CurvedDistance(row[None])
        else:
            with pytest.raises(torchgw.InvalidInputError, match="border"):
                CurvedDistance(row[None])
    assert sum(inside) > 0


@pytest.mark.parametrize("model", MODELS)
def test_the_largest_distance_is_that_of_the_table(model, monkeypatch):
    rng = np.random.default_rng(1)
    direction = rng.normal(size=(300, 3))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    points = torch.from_numpy(coordinates(model, rng.uniform(0, 9, 300), direction))
    distance = CurvedDistance(points, model)
    largest = float(distance.columns(torch.arange(300)).max())
    assert distance.maximum() == pytest.approx(largest, rel=1e-7)
    monkeypatch.setattr("torchgw.distances.curved.EXACT_MAXIMUM_POINTS", 10)
    assert largest / 2 <= distance.maximum() <= largest * (1 + 1e-12)


def test_products_and_functions_of_two_blocks():
    points = torch.from_numpy(INSIDE)
    index = torch.tensor([3, 3, 20])
    curved, flat = CurvedDistance(points), PointDistance(points)
    product = ProductDistance([curved, flat], weights=[1.0, 4.0])
    expected = (curved.columns(index) ** 2 + 4 * flat.columns(index) ** 2).sqrt()
    assert (product.columns(index) - expected).abs().max() < 1e-12
    weights = torch.rand(30, dtype=torch.float64)
    table = product.columns(torch.arange(30))
    assert (product.mean_square(weights) - table**2 @ weights).abs().max() < 1e-9

    sizes = []

    def between(x, y):
        sizes.append(len(x) * len(y) * 2)
        return (x[:, None] - y).norm(dim=2)

    same = ManifoldDistance(points, between)
    assert (same.columns(index) - flat.columns(index)).abs().max() < 1e-12
    assert same.to("cpu", torch.float32).columns(index).dtype == torch.float32


def test_a_function_sees_blocks(monkeypatch):
    monkeypatch.setattr("torchgw.distances.callable.BLOCK_ENTRIES", 200)
    points, sizes = torch.from_numpy(INSIDE), []

    def between(x, y):
        sizes.append(len(x) * len(y) * x.shape[1])
        return (x[:, None] - y).norm(dim=2)

    found = ManifoldDistance(points, between).columns(torch.arange(30))
    assert max(sizes) <= 200
    assert (found - torch.cdist(points, points)).abs().max() < 1e-7


class Halves:
    """A manifold as geoopt and geomstats have them."""

    class metric:
        @staticmethod
        def dist(x, y):
            return (x - y).abs().sum(-1) / 2


def test_manifold_objects():
    points = torch.from_numpy(INSIDE)
    expected = torch.cdist(points, points, p=1) / 2
    for manifold in (Halves(), Halves.metric):
        found = ManifoldDistance(points, manifold).columns(torch.arange(30))
        assert (found - expected).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, y: torch.zeros(len(x)), "shape"),
        (lambda x, y: torch.full((len(x), len(y)), torch.nan), "finite"),
        (lambda x, y: torch.full((len(x), len(y)), -1.0), "non-negative"),
    ],
)
def test_what_a_function_returns_is_checked(function, message):
    with pytest.raises(torchgw.InvalidInputError, match=message):
        ManifoldDistance(torch.from_numpy(INSIDE), function).columns(torch.tensor([0]))


def test_what_no_space_is_made_of_is_refused():
    points = torch.from_numpy(INSIDE)
    with pytest.raises(torchgw.InvalidTypeError, match="callable"):
        ManifoldDistance(points, 3)
    with pytest.raises(torchgw.InvalidInputError, match="same points"):
        ProductDistance([PointDistance(points), PointDistance(points[:5])])
    with pytest.raises(torchgw.InvalidTypeError, match="parts"):
        ProductDistance([points])
    for parts in (None, [], [None]):
        with pytest.raises(torchgw.InvalidTypeError, match="`parts`"):
            ProductDistance(parts)
    for weights in ([1.0, 2.0], 0.0, [None], "a"):
        with pytest.raises(torchgw.InvalidInputError, match="`weights`"):
            ProductDistance([PointDistance(points)], weights)


def test_factors_of_curved_distances_have_one_positive_sign_and_say_their_error():
    rng = np.random.default_rng(0)
    direction = rng.normal(size=(600, 2))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    points = torch.from_numpy(coordinates("poincare", rng.uniform(0, 6, 600), direction))
    exact_distance = CurvedDistance(points)
    table = exact_distance.columns(torch.arange(600))
    errors = []
    for count in (20, 80):
        provider = NystromDistance(exact_distance, count)
        error = float((provider.columns(torch.arange(600)) - table).norm() / table.norm())
        # fifteen columns tell the error of all of them to within a half
        assert provider.error == pytest.approx(error, rel=0.5)
        # distances of negative type
        assert int((provider.factors().signs > 0).sum()) == 1
        assert provider.maximum() >= float(table.max()) * (1 - 1e-12)
        errors.append(error)
    assert errors[1] < errors[0] / 2 < 0.05


# PyTorch says that only the first time in a process
@pytest.mark.filterwarnings("ignore:.*not writable:UserWarning")
def test_a_function_may_write_into_the_points_that_it_gets(tmp_path):
    """They are copies: a file may be mapped to be read alone, and the next block has the same."""
    np.save(tmp_path / "points.npy", INSIDE)
    points = torch.from_numpy(np.load(tmp_path / "points.npy", mmap_mode="r"))

    def between(x, y):
        return torch.cdist(x.sub_(1.0), y.sub_(1.0))

    found = ManifoldDistance(points, between).columns(torch.arange(30))
    torch.testing.assert_close(found, torch.cdist(points, points))
