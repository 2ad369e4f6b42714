"""Operations that all rooms share: draws, sums by index, tuples of tensors.

On a GPU PyTorch loads the code of a source file at the first launch of any operation in it, a
millisecond or two for each megabyte. [L1020, L1216] Sparse tensors are constructed here, too, where
PyTorch is told whether to check them.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")

# Two numbers of float64 are the same, but for rounding, if they differ by no more than this share
# of themselves, or of the largest of their kind. [L1443]
EQUAL = 1e-9
# Numbers below this share of the largest of their kind are what rounding has left of zero. [L1446]
NOTHING = 1e-12
# Divisor in place of zero, and mass that is none: its inverse is a number, and so is its logarithm.
# [L1443]
TINY = 1e-300
# Largest logarithm of a number whose square is a number of float64. [L1443]
LARGEST_LOGARITHM = 350.0


@contextmanager
def plainly(device: torch.device) -> Iterator[None]:
    """Record no graph in a block, and keep autocast out, which would round its products."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def lengths(vectors: Tensor, dim: int, *, keepdim: bool = False) -> Tensor:
    """Compute Euclidean norms along a dimension."""
    if vectors.is_cuda:
        return (vectors * vectors).sum(dim, keepdim=keepdim).sqrt()
    return torch.linalg.vector_norm(vectors, dim=dim, keepdim=keepdim)


def straight(x: Tensor, y: Tensor) -> Tensor:
    """Compute Euclidean distances (..., n, m) pair by pair, so that no bit depends on others."""
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


def sums_along(parts: Tensor) -> Tensor:
    """Add along rows (k, n), in an order that does not depend on k, as that of PyTorch on a GPU."""
    if not parts.is_cuda:
        return parts.sum(1)
    while (count := parts.shape[1]) > 1:
        left, right = parts.split((count + 1) // 2, 1)
        parts = torch.cat([left[:, : count // 2] + right, left[:, count // 2 :]], 1)
    return parts[:, 0]


def sums_of(tables: Tensor) -> Tensor:
    """Add the entries of tables (k, n, m), each as if it were alone."""
    # there are so many rows, always, that they are added in one way
    return sums_along(tables.sum(2)) if tables.is_cuda else tables.sum((1, 2))


class Few(NamedTuple):
    """How to compute few numbers: on a CPU by NumPy, whose calls take a part of PyTorch's time."""

    library: Any
    array: Callable[[Tensor], Any]  # on a CPU of the same memory
    tensor: Callable[[Any], Tensor]


def _itself(part: Any) -> Any:
    return part


_BY_NUMPY, _BY_TORCH = Few(np, Tensor.numpy, torch.from_numpy), Few(torch, _itself, _itself)


def few_on(device: torch.device) -> Few:
    """Choose how to compute few numbers on a device."""
    return _BY_NUMPY if device.type == "cpu" else _BY_TORCH


def weighted(weights: Tensor, tables: Tensor) -> Tensor:
    """Add the rows of tables (k, n, m) times weights (k, n), each as if it were alone, (k, m)."""
    if tables.is_cuda:
        # where a library chooses its way by the number of products
        return (weights[:, :, None] * tables).sum(1)
    # NumPy multiplies vectors by tables in half of PyTorch's time; kernels of BLAS compute lanes
    # beyond the edge of small matrices, whose flags it warns of
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.matmul(weights.numpy()[:, None, :], tables.numpy())[:, 0])


def lesser(x: Tensor, y: Tensor) -> Tensor:
    """Take the lesser of each two entries."""
    return torch.stack([x, y]).amin(0)


def same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have the same entries."""
    return not int((x != y).sum()) if x.is_cuda and x.shape == y.shape else torch.equal(x, y)


def both(x: Tensor, y: Tensor) -> Tensor:
    """Whether both of two conditions hold."""
    return x * y


def greater(x: Tensor, y: Tensor) -> Tensor:
    """Take the greater of each two entries."""
    return torch.stack([x, y]).amax(0)


def average(x: Tensor) -> Tensor:
    """Average along the first dimension."""
    return x.sum(0) / len(x)


def negative(x: Tensor) -> Tensor:
    """Compute -x."""
    return x * -1


def quotient(x: Tensor, y: Tensor | int) -> Tensor:
    """Divide whole numbers below 2^52 that are not negative, rounded down."""
    # their quotient in float64 is rounded up to no whole number that it does not reach
    return (x.double() / y).long() if x.is_cuda else x // y


def inverse(x: Tensor) -> Tensor:
    """Compute 1 / x."""
    return torch.ones_like(x) / x


def power(x: Tensor, exponent: int) -> Tensor:
    """Multiply entries by themselves."""
    return reduce(torch.mul, exponent * [x])


def power_of_two(exponent: Tensor) -> Tensor:
    """Compute 2^x."""
    # PyTorch itself compiles exp2 when it is first launched, for half a second
    return (exponent.double() * math.log(2)).exp_().to(exponent.dtype)


def exponentiate_(x: Tensor) -> Tensor:
    """Compute e^x in place."""
    # PyTorch computes the other by a library that takes three times as long on some CPUs
    slow = x.device.type == "cpu" and x.dtype == torch.float32
    return x.mul_(1 / math.log(2)).exp2_() if slow else x.exp_()


@contextmanager
def _told() -> Iterator[None]:
    """Keep from users what PyTorch asks of whoever constructs a sparse tensor."""
    # torch 2.11 and 2.12 read the state of the process, and warn of it, before they read the
    # keyword that is given below; their own context would leave that state changed
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse invariant checks", UserWarning)
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
        yield


def sparse_tensor(places: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """Make a checked COO tensor of some values (e,) at places (2, e)."""
    with _told():
        return torch.sparse_coo_tensor(
            places, values, shape, check_invariants=True, device=values.device
        )


def in_rows(table: Tensor) -> Tensor:
    """Convert a table to a CSR tensor."""
    with _told():
        return table.to_sparse_csr()


def csr_tensor(start: Tensor, column: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """Make a CSR tensor (n, m) of values (e,) whose places are known to be right."""
    with _told():
        return torch.sparse_csr_tensor(
            start, column, values, shape, check_invariants=False, device=values.device
        )


# torch.multinomial refuses more categories than this. [L300]
_MULTINOMIAL_LIMIT = 2**24
# Up to so many pairs of points all are compared: the first call of a process then need not import
# SciPy's trees, which takes longer; all distances among them take less time than a launch.
# [L406, L447, L881, L930]
FEW_PAIRS = 2**18
# Up to so many random numbers are made on the host, as are those of a CPU, and permuted to draw
# some of them: 10 ms for a million, 300 for ten. [L701, L790]
HOST_DRAWN = 2**20
# Up to so many pairs of points or numbers a GPU takes all: that needs fewer launches than any other
# way to neighbours, and no sort, which takes 35 to 100 ms to load. [L303, L930, L1020]
ALL_PAIRS = 2**24
# Bytes of a block of a table that is made and read at once, and that are taken to be free without
# asking, which takes half a millisecond on a GPU. [L190, L308, L751]
BLOCK_BYTES = 2**26
# Steps of Newton's method at most, where far fewer lead to what rounding leaves. [L246, L780]
# [L301, L1202]
NEWTON_STEPS = 30
# Rows of factors that are copied at once, to float64 or weighted: 34 MB of 64. [L423, L1500]
ROWS = 2**16


def distinct(n: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw distinct numbers below n, (count,), in random order on the CPU."""
    if n > HOST_DRAWN:
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
    if values.is_cuda and size * len(index) <= ALL_PAIRS:
        chosen = values.new_zeros(size, len(index))
        one, number = values.new_ones(()), torch.arange(len(index), device=index.device)
        return chosen.index_put_((index, number), one) @ values
    result = values.new_zeros(size, *values.shape[1:])
    if values.is_cuda:
        # index_add_ adds by atomics there, in any order; this sorts first
        return result.index_put_((index,), values, accumulate=True)
    return result.index_add_(0, index, values)


def centred(table: Tensor) -> Tensor:
    """Take the means of rows and columns off a symmetric table (n, n)."""
    return table - table.mean(0) - table.mean(1, keepdim=True) + table.mean()


def inner_products(first: Tensor, second: Tensor) -> Tensor:
    """Compute first.T @ second of tables (n, r) and (n, c), summed in float64, in their dtype."""
    # A Gromov-Wasserstein value is a small difference of two such sums: of a million points in
    # float32 it would be wrong in the third digit.
    if first.dtype == torch.float64 and second.dtype == torch.float64:
        return first.T @ second
    total = torch.zeros(first.shape[1], second.shape[1], dtype=torch.float64, device=first.device)
    for rows, others in zip(first.split(ROWS), second.split(ROWS), strict=True):
        total = total + rows.double().T @ others.double()
    return total.to(torch.promote_types(first.dtype, second.dtype))


# A way to call functions: (name, function, *arguments, in_place=0) -> function(*arguments); see
# :class:`Captured` for ``in_place``.
Call = Callable[..., Any]


def call_directly(name: str, function: Callable[..., T], *arguments: Any, in_place: int = 0) -> T:
    """Call function(*arguments)."""
    return function(*arguments)


def copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensors of pairs to where the first ones lie, by few launches."""
    # one launch for those of a dtype that are laid out alike; a list of others has one for each
    alike: defaultdict[Hashable, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for ours, given in pairs:
        some = alike[ours.dtype, given.dtype, given.device, ours.stride() == given.stride()]
        some[0].append(ours)
        some[1].append(given)
    for some in alike.values():
        torch._foreach_copy_(*some)


def clone(item: T) -> T:
    """Copy the tensors of a tuple, which may be nested and named, by few launches."""
    made: T = _made_like(item)
    copy(list(zip(*map(tensors_of, (made, item)), strict=True)))
    return made


def _made_like(item: Any) -> Any:
    """Make tensors of the same kind."""
    if isinstance(item, Tensor):
        return torch.empty_like(item)
    return mapped(_made_like, item) if isinstance(item, tuple) else item


def mapped(function: Callable[[Any], Any], item: tuple[Any, ...]) -> Any:
    """Apply a function to the parts of a tuple, which may be named."""
    parts = map(function, item)
    return type(item)(*parts) if hasattr(item, "_fields") else tuple(parts)


def to_device(item: Any, device: torch.device) -> Any:
    """Move a tensor, or a tuple of them, which may be nested and named, to a device."""
    if isinstance(item, tuple):
        return mapped(lambda part: to_device(part, device), item)
    return item if item is None else item.to(device)


def tensors_of(item: Any) -> tuple[Tensor, ...]:
    """List the tensors of a tuple, which may be nested and named, in order."""
    found: list[Tensor] = []
    _collect(item, found)
    return tuple(found)


def _collect(item: Any, found: list[Tensor]) -> None:
    if isinstance(item, Tensor):
        found.append(item)
    elif isinstance(item, tuple):
        for part in item:
            _collect(part, found)
