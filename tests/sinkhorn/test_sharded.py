"""Rows of a prepared problem, which ranks share: those of the whole, by every backend."""

from __future__ import annotations

import pytest
import torch

from torchgw._sinkhorn.choose import choose_backend
from torchgw._sinkhorn.problem import DenseCost, FactoredCost, LinearProblem
from torchgw._tensors.ranks import pieces
from torchgw._typing import Marginals, Potentials

pytest.importorskip("triton")
N, M, RANK = 70, 45, 5
BACKENDS = ["eager", pytest.param("compile", marks=pytest.mark.slow), "triton"]


@pytest.mark.parametrize("kind", ["factored", "dense"])
@pytest.mark.parametrize("name", BACKENDS)
def test_rows_of_a_prepared_problem(name, kind):
    generator = torch.Generator().manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def draw(*shape):
        return torch.rand(shape, generator=generator, dtype=torch.float64).to(device)

    cost = FactoredCost(draw(N, RANK), draw(M, RANK), draw(N), draw(M)).to(torch.float32)
    cost = cost.dense() if kind == "dense" else cost
    assert isinstance(cost, DenseCost) == (kind == "dense")
    a, b = draw(N), draw(M)
    problem = LinearProblem(cost, Marginals(a / a.sum(), b / b.sum()), 0.2)
    backend = choose_backend(name, device, torch.float32)
    for prepared in (backend.prepare(problem), backend.prepare(problem).T):
        n, m = prepared.problem.cost.shape
        f, g, values = draw(n), draw(m), draw(m, 3)
        whole = Potentials(f, g)
        part = slice(32, n)
        rows, own = prepared.rows(part), Potentials(f[part], g)
        close = {"rtol": 2e-5, "atol": 2e-5}
        assert torch.allclose(rows.softmin(g, 1), prepared.softmin(g, 1)[part], **close)
        assert torch.allclose(rows.softmin(f[part], 0), rows.T.softmin(f[part], 1), **close)
        product = prepared.apply(whole, values)[part]
        assert torch.allclose(rows.apply(own, values), product, **close)
        assert torch.equal(rows.topk(own, 1)[1], prepared.topk(whole, 1)[1][part])


def test_pieces_do_not_leave_a_row_out():
    for n, unit in ((1, 1), (31, 1), (100, 32), (70_000, 128), (1_000_003, 256)):
        parts = pieces(n, unit)
        assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
        assert (parts[0].start, parts[-1].stop) == (0, n)
        assert all(part.start % unit == 0 for part in parts)
        assert len(parts) <= 256
