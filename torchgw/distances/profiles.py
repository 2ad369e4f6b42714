"""Sums over all distances of each point, in float64, whatever provides the distances."""

from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from torchgw.distances.base import DistanceProvider, ScaledDistance
from torchgw.distances.curved import CurvedDistance

# Distances read at once. [L588]
_BLOCK_ELEMENTS = {"cpu": 2**21, "cuda": 2**26}
# Kernels hold points of at most so many numbers on chip. [L588]
_WIDEST = 20
# Levels of the distance distributions that are compared. [L224]
_QUANTILES = 32
# Entries of a row from which on a CPU sorts by NumPy, which takes 40 to 70% of the time. [L1242]
_SORTED = 64


def moments(provider: DistanceProvider, weights: Tensor) -> Tensor:
    """Compute the mean and the mean square of each point's distances by weight, (n, 2)."""
    curved = _on_chip(provider)
    if curved is not None:
        from torchgw.distances.profiles_triton import sum_functions

        table, scale = curved
        return sum_functions(table, weights, None) * weights.new_tensor([scale, scale**2])
    return torch.cat(
        [torch.stack([weights @ d, weights @ d.square()], 1) for d in _columns(provider)]
    )


def decays(provider: DistanceProvider, weights: Tensor, length: float) -> Tensor:
    """Compute the means of exp(-|d| / length) and of its fourth power by weight, (n, 2)."""
    curved = _on_chip(provider)
    if curved is not None:
        from torchgw.distances.profiles_triton import sum_functions

        table, scale = curved
        return sum_functions(table, weights, scale / length)
    sums = []
    for d in _columns(provider):
        near = d.abs().div_(-length).exp_()
        sums.append(torch.stack([weights @ near, weights @ near.square_().square_()], 1))
    return torch.cat(sums)


def differences(
    source: DistanceProvider, target: DistanceProvider, partners: Tensor, weights: Tensor
) -> Tensor:
    """Compute the mean of (d_ij - d'_kl)^2 over all j by weight, for partners k of i, l of j."""
    near, far = _on_chip(source), _on_chip(target)
    if near is not None and far is not None:
        from torchgw.distances.profiles_triton import sum_differences

        tables = near[0], far[0][partners].contiguous()
        return sum_differences(*tables, weights, (near[1], far[1]))
    sums = []
    for block in _blocks(source):
        apart = source.columns(block).double() - target.columns(partners[block])[partners].double()
        sums.append(weights @ apart.square_())
    return torch.cat(sums)


def _blocks(provider: DistanceProvider) -> tuple[Tensor, ...]:
    width = max(1, _BLOCK_ELEMENTS[provider.device.type] // provider.n)
    found: tuple[Tensor, ...] = torch.arange(provider.n, device=provider.device).split(width)
    return found


def _columns(provider: DistanceProvider) -> Iterator[Tensor]:
    """Read all distances, some columns at a time."""
    for block in _blocks(provider):
        yield provider.columns(block).double()


def _on_chip(provider: DistanceProvider) -> tuple[Tensor, float] | None:
    """Give the table and the scale of hyperbolic distances on a GPU, for kernels."""
    inner, scale = provider, 1.0
    if isinstance(provider, ScaledDistance):
        inner, scale = provider.provider, provider.scale
    if not isinstance(inner, CurvedDistance) or inner.device.type != "cuda":
        return None
    table = inner.coordinates()
    if table is None or table.shape[1] > _WIDEST or find_spec("triton") is None:
        return None
    return table, scale / inner.curvature**0.5


def distance_quantiles(table: Tensor, weights: Tensor) -> Tensor:
    """Return quantiles of each row of distances (s, n) by weight, (s, q), each over sqrt(q)."""
    if table.device.type == "cpu" and bool((weights == weights[0]).all()):
        # NumPy sorts by vector instructions, without returning the order, which is not needed
        values = torch.from_numpy(np.sort(table.numpy(), axis=1))
        cumulative = weights.cumsum(0).expand_as(values).contiguous()
    else:
        order = _order(table)
        values, cumulative = table.gather(1, order), weights[order].cumsum(1)
    levels = torch.arange(_QUANTILES, dtype=values.dtype, device=values.device) + 0.5
    levels = (levels / _QUANTILES * cumulative[:, -1:]).contiguous()
    position = torch.searchsorted(cumulative, levels).clamp_(max=values.shape[1] - 1)
    found: Tensor = values.gather(1, position) / _QUANTILES**0.5
    return found


def _order(table: Tensor) -> Tensor:
    """Sort each row of a table: the places of its entries, ascending."""
    if table.device.type == "cpu" and table.shape[1] >= _SORTED:
        return torch.from_numpy(np.argsort(table.numpy(), axis=1))
    return table.argsort(dim=1)
