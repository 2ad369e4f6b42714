"""Operations written by others that solves use anyway: loading the code of each takes long.

On a GPU PyTorch loads the code of a source file at the first launch of any operation in it, a
millisecond or two for each megabyte. [L1020, L1216] Sparse tensors are constructed here, too, where
PyTorch is told whether to check them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce

import torch
from torch import Tensor


def lengths(vectors: Tensor, dim: int, *, keepdim: bool = False) -> Tensor:
    """Compute Euclidean norms along a dimension."""
    if vectors.is_cuda:
        return (vectors * vectors).sum(dim, keepdim=keepdim).sqrt()
    sizes: Tensor = torch.linalg.vector_norm(vectors, dim=dim, keepdim=keepdim)
    return sizes


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


def lesser(x: Tensor, y: Tensor) -> Tensor:
    """Take the lesser of each two entries."""
    return torch.stack([x, y]).amin(0)


def same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have the same entries."""
    if x.is_cuda and x.shape == y.shape:
        return not int((x != y).sum())
    return torch.equal(x, y)


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
