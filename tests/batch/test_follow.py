"""Problems that begin next to where they end, beside the engine's answers."""

from __future__ import annotations

import pytest
import torch

from torchgw._batch.follow import Nearby, begin, follow
from torchgw.losses import GWLoss, _Problem

EPSILON = 0.1


def points(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("fused", [False, True])
def test_ends_where_the_engine_does(fused):
    """From a plan of other points near by; one point of each side has no weight."""
    X, Y, moved = points(3, 9, 2, seed=0), points(3, 11, 3, seed=1), points(3, 9, 2, seed=2)
    a, b = (torch.rand(3, k, generator=torch.Generator().manual_seed(k)).double() for k in (9, 11))
    a[:, 2], b[:, 5] = 0.0, 0.0
    a, b = (part / part.sum(1, keepdim=True) for part in (a, b))
    M = points(3, 9, 11, seed=3).square() if fused else None
    loss = GWLoss(epsilon=EPSILON, reduction="none", tol=1e-8, inner_tol=1e-10, max_iter=500)
    loss(X + 0.02 * moved, Y, M, a=a, b=b)
    ((before, _),) = loss._kept.values()
    tables = [torch.cdist(part, part) for part in (X, Y)]
    alpha = torch.full((3,), 0.5 if fused else 1.0, dtype=torch.float64)
    near = Nearby(
        *tables, None if M is None else 0.5 * M, a, b, alpha, torch.full_like(alpha, EPSILON)
    )
    place = begin(near, before.plan, before.g, before.moved)
    for _ in range(12):
        place = follow(near, place)
    expected = loss._go_on(_Problem(*tables, M, a, b), float(alpha[0]), before.plan)
    torch.testing.assert_close(place.objective, expected.objective, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(place.plan, expected.plan, rtol=0, atol=1e-6)
    # potentials are those of the plan, at the cost linearised there
    kernel = b[:, None, :] * ((place.g[:, None, :] - place.cost) / EPSILON).exp()
    product = a[:, :, None] * kernel / kernel.sum(2, keepdim=True)
    torch.testing.assert_close(product, place.plan, rtol=0, atol=1e-6)
    assert float(place.change.max()) < 1e-6
    assert float(place.error.max()) < 1e-8
