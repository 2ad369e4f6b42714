"""Sums over many points, in float64: float32 would leave too little of their differences."""

from __future__ import annotations

import torch
from torch import Tensor

# Rows that are converted at once: 34 MB of 64 columns. [L423]
_ROWS = 2**16


def inner_products(first: Tensor, second: Tensor) -> Tensor:
    """Compute first.T @ second of tables (n, r) and (n, c), summed in float64, in their dtype.

    A Gromov-Wasserstein value is a small difference of two such sums: of a million points in
    float32 it would be wrong in the third digit.
    """
    if first.dtype == torch.float64 and second.dtype == torch.float64:
        return first.T @ second
    total = torch.zeros(first.shape[1], second.shape[1], dtype=torch.float64, device=first.device)
    for rows, others in zip(first.split(_ROWS), second.split(_ROWS), strict=True):
        total = total + rows.double().T @ others.double()
    return total.to(torch.promote_types(first.dtype, second.dtype))
