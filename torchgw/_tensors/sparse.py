"""Sparse tensors are constructed here, where PyTorch is told whether to check them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


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
