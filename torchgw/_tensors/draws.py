"""Draws by weight; sums by index, of the same bits in every run, and over many points."""

import numpy as np
import torch
from torch import Tensor

# torch.multinomial refuses more categories than this. [L300]
_MULTINOMIAL_LIMIT = 2**24
# Numbers that are permuted to draw some of them: 10 ms for a million, 300 for ten. [L701]
_PERMUTED = 2**20
# Sums by index are made by a product on a GPU, if there are at most so many numbers times sums: the
# sort that index_put_ needs takes 100 ms to load. A choice. [L930] [L1020]
_TABLE = 2**24
# Rows that are converted at once: 34 MB of 64 columns. [L423]
_ROWS = 2**16


def distinct(n: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw distinct numbers below n, (count,), in random order on the CPU."""
    if n > _PERMUTED:
        drawn = torch.randint(n, (2 * count,), generator=generator, device="cpu")
        first = np.unique(drawn.numpy(), return_index=True)[1]
        # nearly all draws are distinct, unless most of the numbers are asked for
        if len(first) >= count:
            return drawn[np.sort(first)[:count]]
    return torch.randperm(n, generator=generator, device="cpu")[:count]


def at_even_steps(n: int, count: int, device: torch.device) -> Tensor:
    """Choose ``count`` of n places, the first and the last among them, at even steps."""
    # float32 would step beyond the last of more than 2^24
    return torch.linspace(0, n - 1, count, dtype=torch.float64, device=device).round().long()


def sample_categories(weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw categories (..., count) in proportion to weights (..., c) of positive sum."""
    # Infinite weights, as of plans whose exponents are rounding alone, are the largest there are.
    weights = weights.clamp(max=torch.finfo(weights.dtype).max / weights.shape[-1])
    if weights.shape[-1] <= _MULTINOMIAL_LIMIT:
        return torch.multinomial(weights, count, replacement=True, generator=generator)
    shape = (*weights.shape[:-1], count)
    uniform = torch.rand(shape, dtype=torch.float64, device=weights.device, generator=generator)
    return categories_at(weights, uniform)


def systematic_categories(weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw (count,) at equal steps of the cumulative weight (c,), the first at random."""
    offset = torch.rand((), dtype=weights.dtype, device=weights.device, generator=generator)
    steps = torch.arange(count, device=weights.device, dtype=weights.dtype) + offset
    return categories_at(weights, steps / count)


def categories_at(weights: Tensor, places: Tensor) -> Tensor:
    """Find the categories at places (..., s) in [0, 1) of the cumulative weight (..., c)."""
    # Categories exist whatever the weights: on a GPU an index beyond them would end the process.
    cumulative = weights.double().cumsum(-1)
    total = cumulative[..., -1:]
    # rounding must not reach the total, beyond which there is nothing
    sought, most = places * total, total * (1 - 2.0**-53)
    sought = torch.where(sought < most, sought, most)
    # right=True never selects a category of zero weight, whose cumulative sum repeats
    found = torch.searchsorted(cumulative, sought, right=True)
    # the place is beyond the last category where the total is NaN
    return found.clamp_(max=weights.shape[-1] - 1)


def accumulate(index: Tensor, values: Tensor, size: int) -> Tensor:
    """Add up the values (p, ...) that share an index (p,), shape (size, ...), in a fixed order."""
    if values.is_cuda and size * len(index) <= _TABLE:
        chosen = values.new_zeros(size, len(index))
        one, number = values.new_ones(()), torch.arange(len(index), device=index.device)
        return chosen.index_put_((index, number), one) @ values
    result = values.new_zeros(size, *values.shape[1:])
    if values.is_cuda:
        # index_add_ adds by atomics there, in any order; this sorts first
        return result.index_put_((index,), values, accumulate=True)
    return result.index_add_(0, index, values)


def inner_products(first: Tensor, second: Tensor) -> Tensor:
    """Compute first.T @ second of tables (n, r) and (n, c), summed in float64, in their dtype."""
    # A Gromov-Wasserstein value is a small difference of two such sums: of a million points in
    # float32 it would be wrong in the third digit.
    if first.dtype == torch.float64 and second.dtype == torch.float64:
        return first.T @ second
    total = torch.zeros(first.shape[1], second.shape[1], dtype=torch.float64, device=first.device)
    for rows, others in zip(first.split(_ROWS), second.split(_ROWS), strict=True):
        total = total + rows.double().T @ others.double()
    return total.to(torch.promote_types(first.dtype, second.dtype))
