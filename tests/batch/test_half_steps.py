"""Half-steps of partial programs, beside those of the engine in float64."""

from __future__ import annotations

import pytest
import torch
from problems import skip_unless_kernels_run

from torchgw._batch.sweep import Relaxed

pytest.importorskip("triton")
import triton
import triton.language as tl

from torchgw._batch.half_step_triton import begun

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


@triton.jit
def _begun_kernel(weight, sums, potential, level, mass, grown_out, N: tl.constexpr):
    points = tl.arange(0, N)
    grown, _ = begun(
        tl.load(weight + points), tl.load(sums + points), tl.load(potential + points),
        tl.load(level), 1.0, tl.load(mass), True,
    )  # fmt: skip
    tl.store(grown_out + points, grown)


@pytest.mark.filterwarnings("ignore:overflow")  # to infinity, in comparisons
@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("start", "spread"), [(-400.0, 1.0), (-400.0, 250.0), (0.0, 50.0), (400.0, 1.0), (400.0, 250.0)]
)
@pytest.mark.parametrize("mass", [0.3, 54 / 60, 0.97])
def test_partial_half_steps_are_those_of_the_engine(mass, start, spread, dtype, device):
    # 60 of 64 places are points: one mass is that of 54 of them exactly
    skip_unless_kernels_run(device)
    generator = torch.Generator().manual_seed(int(spread))
    weight = torch.zeros(64, dtype=torch.float64)
    weight[:60] = 1 / 60
    potential = spread * torch.rand(64, dtype=torch.float64, generator=generator)
    sums = torch.rand(64, dtype=torch.float64, generator=generator) / 20
    potential[60:] = sums[60:] = 0
    parts = [part.to(device, dtype) for part in (weight, sums, potential)]
    level, limit = (torch.tensor([one], dtype=dtype, device=device) for one in (start, mass))
    found = torch.empty_like(parts[0])
    _begun_kernel[(1,)](*parts, level, limit, found, N=64)
    found = found.double().cpu()
    plan = sums * found.exp()
    assert float((plan - weight).max()) < 1e-7
    assert float(plan.sum()) == pytest.approx(mass, abs=1e-6 if dtype == torch.float32 else 1e-12)
    engine = Relaxed(None, torch.tensor([mass], dtype=torch.float64))
    weights, totals, start = (part[None, None] for part in (weight, sums, potential))
    factor = engine.half_step(0, weights, start, torch.ones(1).double())(totals)
    torch.testing.assert_close(plan, sums * factor[0, 0], rtol=1e-4, atol=1e-6)
