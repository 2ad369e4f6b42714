"""Sums over all distances of each point: by columns, and on chip."""

import pytest
import torch
from problems import skip_unless_kernels_run

from torchgw.distances import CurvedDistance, PointDistance, PrecomputedDistance
from torchgw.distances.base import ScaledDistance
from torchgw.distances.sampling import decays, differences, moments


def hyperbolic(model, n=70, d=3, curvature=1.0, seed=0):
    """Points out to about five from the origin."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(n, d, dtype=torch.float64, generator=generator)
    if model == "poincare":
        radius = torch.tanh(normal.norm(dim=1, keepdim=True))
        return radius * torch.nn.functional.normalize(normal) / curvature**0.5
    space = normal.sinh()
    return torch.cat([(1 / curvature + space.square().sum(1)).sqrt()[:, None], space], 1)


def weights(n, seed=1):
    drawn = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return drawn / drawn.sum()


@pytest.mark.parametrize("metric", ["euclidean", "stored"])
def test_sums_are_those_of_the_table(metric, monkeypatch):
    monkeypatch.setattr("torchgw.distances.sampling._BLOCK_ELEMENTS", {"cpu": 100})
    points, a = hyperbolic("poincare"), weights(70)
    table = torch.cdist(points, points)
    side = PointDistance(points) if metric == "euclidean" else PrecomputedDistance(table)
    expected = torch.stack([table @ a, table.square() @ a], 1)
    assert torch.allclose(moments(side, a), expected, rtol=1e-12)
    expected = torch.stack([(-table / 0.7).exp() @ a, (-4 * table / 0.7).exp() @ a], 1)
    assert torch.allclose(decays(side, a, 0.7), expected, rtol=1e-12)
    other = table.square()
    partners = torch.randperm(70, generator=torch.Generator().manual_seed(2))
    expected = (table - other[partners][:, partners]).square() @ a
    found = differences(side, PrecomputedDistance(other), partners, a)
    assert torch.allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("curvature", [1.0, 0.3])
@pytest.mark.parametrize("model", ["poincare", "lorentz"])
def test_kernels_add_up_what_columns_do(model, curvature, device):
    skip_unless_kernels_run(device)
    from torchgw.distances.profiles_triton import sum_differences, sum_functions

    near, far = (
        CurvedDistance(hyperbolic(model, d=d, curvature=curvature), model, curvature=curvature)
        for d in (2, 3)
    )
    a, unit = weights(70), curvature**-0.5
    tables = near.coordinates().to(device), far.coordinates().to(device)
    found = sum_functions(tables[0], a.to(device), None).cpu()
    assert torch.allclose(found * a.new_tensor([unit, unit**2]), moments(near, a), rtol=1e-11)
    found = sum_functions(tables[0], a.to(device), unit / 1.7).cpu()
    assert torch.allclose(found, decays(near, a, 1.7), rtol=1e-11)
    found = sum_differences(*tables, a.to(device), (unit, 0.9 * unit)).cpu()
    expected = differences(near, ScaledDistance(far, 0.9), torch.arange(70), a)
    assert torch.allclose(found, expected, rtol=1e-11)


@pytest.mark.gpu
def test_hyperbolic_sums_on_a_gpu_are_those_on_a_cpu():
    points, a = hyperbolic("poincare", n=500), weights(500)
    side = ScaledDistance(CurvedDistance(points), 0.2)
    there, b = side.to(torch.device("cuda"), torch.float64), a.cuda()
    partners = torch.randperm(500, generator=torch.Generator().manual_seed(0))
    for found, expected in (
        (moments(there, b), moments(side, a)),
        (decays(there, b, 0.4), decays(side, a, 0.4)),
        (differences(there, there, partners.cuda(), b), differences(side, side, partners, a)),
    ):
        assert torch.allclose(found.cpu(), expected, rtol=1e-11)


def test_spheres_have_no_such_coordinates():
    points = torch.nn.functional.normalize(hyperbolic("poincare"))
    assert CurvedDistance(points, "sphere").coordinates() is None
