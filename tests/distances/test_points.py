import pytest
import torch

from torchgw import _errors
from torchgw.distances import PointDistance, points


@pytest.mark.parametrize("metric", ["euclidean", "sqeuclidean", "cosine"])
def test_near_duplicates_far_from_the_origin_keep_their_distance(metric, device):
    # x.x + y.y - 2 x.y in float32 is off by 1e-7 * 1e6 here, ten times the distance it looks for.
    base = torch.tensor([1000.0, 1000.0, 0.0])
    step = torch.tensor([0.0, 0.0, 0.1])
    pair = torch.stack([base, base + step, -base]).to(device)
    distance = PointDistance(pair, metric)
    squared = float(distance.columns(torch.tensor([0], device=device))[1, 0])
    # The angle is 0.1 / 1414.2, and 1 - cos is half its square. float32 inputs leave 1e-3.
    expected = {"euclidean": 0.1, "sqeuclidean": 0.01, "cosine": (0.1 / 1414.2136) ** 2 / 2}
    assert squared == pytest.approx(expected[metric], rel=1e-3)


@pytest.mark.parametrize("metric", ["euclidean", "sqeuclidean", "cosine"])
def test_the_diagonal_is_exactly_zero(metric, device):
    cloud = torch.randn(200, 40, device=device, generator=torch.Generator(device).manual_seed(0))
    every = PointDistance(cloud, metric).columns(torch.arange(200, device=device))
    assert bool((every.diagonal() == 0).all())
    assert bool((every + torch.eye(200, device=device) > 0).all())


def test_factors_have_rank_d_plus_two():
    cloud = torch.randn(30, 4)
    assert PointDistance(cloud, "sqeuclidean").factors().matrix.shape == (30, 6)
    assert PointDistance(cloud, "cosine").factors().matrix.shape == (30, 6)
    assert PointDistance(cloud, "euclidean").factors() is None


def test_factors_do_not_lose_digits_to_an_offset(device):
    # Without centring the float32 squares would be 1e8 and the error 10.
    cloud = torch.randn(100, 3, generator=torch.Generator().manual_seed(0)) + 1e4
    exact = torch.cdist(cloud.double(), cloud.double()).square()
    matrix, signs = PointDistance(cloud.to(device), "sqeuclidean").factors()
    error = ((matrix * signs) @ matrix.T).cpu().double() - exact
    # The squared distances are up to 50; float32 leaves 6e-8 of that, a few times.
    assert float(error.abs().max()) < 5e-5


def test_factors_of_a_narrow_cone_are_as_precise_as_its_distances(device):
    # 1 - cos from unit vectors would round at 1e-16, distances of 1e-12 here
    generator = torch.Generator().manual_seed(0)
    cloud = 1 + 1e-6 * torch.randn(60, 5, dtype=torch.float64, generator=generator).to(device)
    distance = PointDistance(cloud, "cosine")
    exact = distance.columns(torch.arange(60, device=device))
    matrix, signs = distance.factors()
    # the angles, of 1e-6, round at 1e-16
    torch.testing.assert_close(
        (matrix * signs) @ matrix.T, exact, rtol=0, atol=1e-9 * float(exact.max())
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vectors_of_one_direction_have_no_cosine_distance(dtype, device):
    generator = torch.Generator().manual_seed(0)
    lengths = 0.1 + torch.rand(300, 1, dtype=dtype, generator=generator)
    cloud = lengths * torch.randn(40, dtype=dtype, generator=generator)
    distance = PointDistance(cloud.to(device), "cosine")
    assert distance.maximum() == 0
    assert not bool(distance.columns(torch.arange(300, device=device)).any())
    assert not bool(distance.factors().matrix.any())


def test_points_on_a_sphere_and_equal_points_have_factors():
    # |x|^2 has no spread on a sphere, and no size at all when all points are equal.
    circle = torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
    for cloud in (circle, torch.ones(5, 2), torch.zeros(1, 3)):
        matrix, signs = PointDistance(cloud, "sqeuclidean").factors()
        exact = torch.cdist(cloud, cloud).square()
        torch.testing.assert_close((matrix * signs) @ matrix.T, exact, rtol=0, atol=1e-6)


def test_apply_in_several_blocks_is_the_same(monkeypatch):
    cloud = torch.randn(50, 3, dtype=torch.float64)
    values = torch.randn(50, 2, dtype=torch.float64)
    whole = PointDistance(cloud).apply(values)
    monkeypatch.setattr("torchgw.distances.base.BLOCK_BYTES", 7 * 50 * 8)
    assert len(PointDistance(cloud)._column_blocks()) == 8
    torch.testing.assert_close(PointDistance(cloud).apply(values), whole)


@pytest.mark.parametrize("d", [1, 2, 20])
@pytest.mark.parametrize("metric", ["euclidean", "sqeuclidean", "cosine"])
def test_maximum_is_exact_within_blocks(metric, d, device, monkeypatch):
    monkeypatch.setattr(points, "BLOCK_ENTRIES", 1000)
    for seed in range(5):
        cloud = torch.randn(150, d, generator=torch.Generator().manual_seed(seed)).to(device)
        distance = PointDistance(cloud, metric)
        exact = distance.columns(torch.arange(150, device=device)).max()
        assert distance.maximum() == pytest.approx(float(exact), rel=1e-5)


def test_maximum_of_too_many_points_is_a_close_lower_bound(monkeypatch):
    monkeypatch.setattr(points, "EXACT_MAXIMUM_POINTS", 0)
    ratios = []
    for seed in range(20):
        cloud = torch.randn(150, 30, generator=torch.Generator().manual_seed(seed))
        exact = torch.cdist(cloud, cloud).max()
        ratios.append(PointDistance(cloud).maximum() / float(exact))
    # Half is guaranteed; the sweeps do far better.
    assert min(ratios) > 0.85
    assert max(ratios) <= 1 + 1e-6


@pytest.mark.parametrize("metric", ["euclidean", "sqeuclidean", "cosine"])
def test_few_points_are_measured_as_many_are(metric, monkeypatch, device):
    cloud = torch.randn(90, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights, provider = torch.linspace(0, 1, 90).double().to(device), PointDistance(cloud, metric)
    provider = provider.to(device, torch.float64)
    few = provider.maximum(), provider.mean_square(weights)
    monkeypatch.setattr(points, "_FEW_POINTS", 0)
    assert few[0] == pytest.approx(provider.maximum(), rel=1e-12)
    torch.testing.assert_close(few[1], provider.mean_square(weights), rtol=1e-11, atol=0)


def test_squares_of_few_points_have_second_derivatives():
    cloud = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    total = PointDistance(cloud, "euclidean").mean_square(torch.ones(6).double()).sum()
    slope = torch.autograd.grad(total, cloud, create_graph=True)[0]
    # 2 n times the sum of squares about the mean
    torch.testing.assert_close(slope, 24 * (cloud - cloud.mean(0)))
    curve = torch.autograd.grad(slope.square().sum() / 48, cloud)[0]
    torch.testing.assert_close(curve, 24 * (cloud - cloud.mean(0)))


@pytest.mark.slow
def test_columns_are_differentiable():
    cloud = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([1, 4])
    assert torch.autograd.gradcheck(
        lambda x: PointDistance(x, "sqeuclidean").columns(index), (cloud,)
    )


@pytest.mark.parametrize(
    ("cloud", "metric", "message"),
    [
        (torch.randn(4), "euclidean", r"must have shape \(n, d\).*got \(4,\)"),
        (torch.randn(0, 2), "euclidean", "n >= 1"),
        (torch.ones(3, 2, dtype=torch.int64), "euclidean", r"int64.*points\.float\(\)"),
        (torch.tensor([[1.0, torch.nan]]), "euclidean", "must be finite"),
        (torch.randn(3, 2), "manhattan", "must be one of .euclidean.*'manhattan'"),
        (torch.tensor([[1.0, 0.0], [0.0, 0.0]]), "cosine", "zero vector.*row 1"),
        (torch.zeros(2, 0), "cosine", "zero vector"),
    ],
)
def test_refused_input(cloud, metric, message):
    with pytest.raises(_errors.InvalidInputError, match=message):
        PointDistance(cloud, metric)


def test_tiny_and_huge_vectors_have_a_direction():
    rows = torch.tensor([[1e-30, 0.0], [0.0, 1e30], [1e-30, 1e-30]])
    every = PointDistance(rows, "cosine").columns(torch.arange(3))
    half = 1 - 2**-0.5
    expected = torch.tensor([[0.0, 1.0, half], [1.0, 0.0, half], [half, half, 0.0]])
    torch.testing.assert_close(every, expected)


@pytest.mark.parametrize("metric", ["euclidean", "sqeuclidean"])
def test_points_that_coincide_are_no_distance_apart(metric):
    """Their mean is rounded: they would lie apart from it, at a scale of its own, 1e-39 or so."""
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        point = torch.randn(1, 3, generator=generator, dtype=torch.float64)
        provider = PointDistance(point.expand(200, 3), metric)
        weights = torch.full((200,), 1 / 200, dtype=torch.float64)
        assert float(provider.mean_square(weights).abs().max()) == 0
        assert float(provider.apply(weights[:, None]).abs().max()) == 0


@pytest.mark.parametrize("metric", ["euclidean", "sqeuclidean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("few", [0, 128])
def test_points_that_are_not_used_may_lie_far_away(metric, dtype, few, monkeypatch):
    """Factors about the mean of all points left rounding of 1% and more (fuzz, solves:202748)."""
    monkeypatch.setattr(points, "_FEW_POINTS", few)
    generator = torch.Generator().manual_seed(0)
    cloud = torch.randn(12, 3, dtype=torch.float64, generator=generator)
    used = torch.arange(14) < 12
    both = torch.cat([cloud, cloud[:2] + 1e4])
    weights = used.double() / 12
    distance = PointDistance(both, metric).centred_on(weights).to(torch.device("cpu"), dtype)
    weights = weights.to(dtype)
    table = torch.cdist(both, both, compute_mode="donot_use_mm_for_euclid_dist")
    table = table if metric == "euclidean" else table.square()
    expected = table.square() @ weights.double()
    rounding = 100 * torch.finfo(dtype).eps
    found = distance.mean_square(weights).double()
    torch.testing.assert_close(found, expected, rtol=max(rounding, 1e-12), atol=0.0)
    if metric == "sqeuclidean":
        matrix, signs = distance.factors()
        products = (matrix * signs) @ matrix[:12].T
        close = torch.testing.assert_close
        close(products.double(), table[:, :12], rtol=max(rounding, 1e-10), atol=100 * rounding)
