"""Kernels of batch programs that are scaled until their columns are met."""

from __future__ import annotations

import pytest
import torch
from problems import skip_unless_kernels_run

pytest.importorskip("triton")
import triton
import triton.language as tl

from torchgw._batch.inner_triton import solved
from torchgw._batch.tile_triton import line, read, tiles_of, write

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
N, M, USED = 32, 16, 13


@triton.jit
def _solved_kernel(
    kernel, a, b, f, g, held, inverse, lines, out, numbers, wanted, most,
    RI: tl.constexpr, CI: tl.constexpr, RT: tl.constexpr, CT: tl.constexpr,
    SQUARE_RI: tl.constexpr, SQUARE_CI: tl.constexpr,
    SQUARE_RT: tl.constexpr, SQUARE_CT: tl.constexpr,
):  # fmt: skip
    rows, columns = line(RI, RT), line(CI, CT)
    plan, near, _, error, spent = solved(
        read(kernel, 0, RI, CI, RT, CT), tl.load(a + rows), tl.load(b + columns), a, b,
        f + rows, g + columns, 1.0, most * 0, tl.load(wanted) * 0.0 + 1.0, tl.load(wanted), most, 4,
        held, inverse, lines, 0, 16, 1e-2, RI, CI, RT, CT,
        SQUARE_RI, SQUARE_CI, SQUARE_RT, SQUARE_CT,
    )  # fmt: skip
    write(out, plan, 0, RI, CI, RT, CT)
    tl.store(numbers, error)
    tl.store(numbers + 1, spent)
    tl.store(numbers + 2, near)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_they_end_where_their_columns_are_met_or_where_they_must(device):
    skip_unless_kernels_run(device)
    points = torch.rand(2, N, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    start = (torch.cdist(points[0], points[1, :M]).square_() / -0.05).exp()
    start[:, USED:] = 0
    a, b = torch.full((N,), 1 / N).double(), torch.zeros(M, dtype=torch.float64)
    b[:USED] = torch.arange(1.0, 1 + USED) / sum(range(1 + USED))
    # of no weight, as programs have it: logarithms are finite
    start, a, b = (part.to(device) for part in (start, a, b.clamp_min(1e-30)))
    tiles, warps = tiles_of(N, M, 64)
    spent = {}
    for wanted, most in ((1e-2, 400), (1e-6, 400), (1e-6, 8)):
        out, held = torch.empty_like(start), torch.empty_like(start)
        f, g = torch.zeros_like(a), torch.zeros_like(b)
        inverse, lines = (torch.zeros(k, M, device=device) for k in (M, 4))
        numbers = torch.full((3,), torch.nan, dtype=torch.float64, device=device)
        _solved_kernel[1,](
            start, a, b, f, g, held, inverse, lines, out, numbers,
            torch.tensor([wanted], dtype=torch.float64, device=device), most,
            **tiles, num_warps=warps,
        )  # fmt: skip
        error, count, _ = numbers.tolist()
        spent[wanted, most] = count
        torch.testing.assert_close(out.sum(1), a, rtol=1e-12, atol=0)
        assert error == pytest.approx(float((out.sum(0) - b).abs().sum()), abs=1e-13)
        assert (error <= wanted) == (most == 400)
        scaled = start * (f[:, None] + g).exp()
        torch.testing.assert_close(out, scaled, rtol=1e-9, atol=1e-25)
    # no further than asked for, and a few more of a tick where they must end
    assert 0 < spent[1e-2, 400] < spent[1e-6, 400] < 100
    assert 8 <= spent[1e-6, 8] <= 12
