"""Cross terms of a loss under stored distances: sum_kl h(DX_ik, DY_jl) P_kl for all (i, j)."""

from typing import Any

import numpy as np
import scipy
import torch
from torch import Tensor

# Share of entries that are not zero up to which a CPU multiplies by these alone: an adjacency
# matrix takes a fifth to a fifteenth of the time. Dense products are free on a GPU. [L140]
_SPARSE_SHARE = 0.03
# Plans of this many entries and more are searched for few entries that are more than rounding.
# [L592]
_LOOKED_AT = 2**18
# Entries that a plan may have for each point, so that sparse tables are looked up for these alone.
# [L1237]
_FEW = 2


class BothWays:
    """The mean of a directed cross term and its reverse: half the derivative of their sum."""

    def __init__(self, there: "Cross", back: "Cross") -> None:
        self._ways = there, back

    def __call__(self, plan: Tensor) -> Tensor:
        """Evaluate the mean at a plan (n, m)."""
        there, back = self._ways
        return there(plan).add_(back(plan)).div_(2)

    def total(self, a: Tensor, b: Tensor) -> Tensor:
        there, back = self._ways
        return (there.total(a, b) + back.total(a, b)) / 2

    def tables(self) -> tuple[Tensor, ...]:
        there, back = self._ways
        return (*there.tables(), *back.tables())


class ProductCross:
    """h(x, y) = x y by two matrix products, DX P DY for tables DX (n, n) and DY (m, m)."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._source, self._target = source, target
        self._left, self._right = _sparse(source), _sparse(target.T)
        self._arrays: tuple[Any, Any] | None = None  # both, for plans of few entries

    def __call__(self, plan: Tensor) -> Tensor:
        left, right = self._left, self._right
        if left is not None and right is not None:
            few = self._of_few(plan, left._nnz() * right._nnz())
            if few is not None:
                return few
        sharp = _sharp(plan) if left is None else None
        if sharp is not None:
            inner = torch.sparse.mm(sharp.T, self._source.T).T
        else:
            inner = self._source @ plan if left is None else torch.sparse.mm(left, plan)
        if right is None:
            full: Tensor = inner @ self._target
            return full
        # a sparse table comes first, and the other matrix has to be contiguous to be fast
        found: Tensor = torch.sparse.mm(right, inner.T.contiguous()).T.contiguous()
        return found

    def _of_few(self, plan: Tensor, pairs: int) -> Tensor | None:
        """Multiply a plan by its entries if these are few, given pairs of those of the tables."""
        # in float32 whole products take no longer [L1237]
        if plan.dtype != torch.float64 or plan.requires_grad:
            return None
        # NumPy lists the entries in a fifth of the time that PyTorch takes [L1259]
        table, size = plan.numpy(), plan.numel()
        used = table != 0
        entries = np.count_nonzero(used)
        # a mean row of each table meets an entry
        if entries > _FEW * sum(plan.shape) or entries * pairs > size**2:
            return None
        if self._arrays is None:
            self._arrays = _array(self._source), _array(self._target)
        source, target = self._arrays
        row, column = np.divmod(np.flatnonzero(used), plan.shape[1])
        few = scipy.sparse.csr_array((table[row, column], (row, column)), table.shape)
        return torch.from_numpy((source @ few @ target).toarray())

    def total(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute (a' DX a) (b' DY b)."""
        return (a @ (self._source @ a)) * (b @ (self._target @ b))

    def tables(self) -> tuple[Tensor, ...]:
        return self._source, self._target


def _sparse(table: Tensor) -> Tensor | None:
    """Convert a table to coordinate format if that makes products faster."""
    if table.is_cuda or int(table.count_nonzero()) > _SPARSE_SHARE * table.numel():
        return None
    return table.to_sparse()


def _array(table: Tensor) -> Any:
    """Make a table a sparse array of SciPy, by its entries."""
    row, column = table.nonzero().T
    places = row.numpy(), column.numpy()
    return scipy.sparse.csr_array((table[row, column].numpy(), places), tuple(table.shape))


def _sharp(plan: Tensor) -> Tensor | None:
    """Make a plan sparse where all but few entries vanish by rounding in its sums."""
    if plan.is_cuda or plan.numel() < _LOOKED_AT:
        return None
    size = plan.abs()
    kept = size > torch.finfo(plan.dtype).eps / plan.shape[1] * size.max()
    if int(kept.count_nonzero()) > _SPARSE_SHARE * plan.numel():
        return None
    # a constructor takes twice as long, and warns in torch 2.11 whatever it is told
    return plan.sparse_mask(kept.to_sparse())


class MinimumCross:
    """h(x, y) = min(x, y), exactly, in O(n k m log l + k l m) for DX (n, k) and DY (m, l)."""

    # For one target point j and one k the sum over l of min(x, DY_jl) P_kl is a function of x
    # alone, and linear between the distances of j. So those are sorted once, P_kl and DY_jl P_kl
    # are added up in their order, and the sum is read at x = DX_ik for all i. The sides change
    # places where that is less work.

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._turned = len(target) * source.numel() > len(source) * target.numel()
        if self._turned:
            source, target = target, source
        self._source = source.T.contiguous()
        self._target, self._order = target.contiguous().sort(dim=1)

    def __call__(self, plan: Tensor) -> Tensor:
        """Evaluate the cross term at a plan (k, l), shape (n, m)."""
        plan = plan.T if self._turned else plan
        x, mass = self._source, plan.sum(1, keepdim=True)
        columns = []
        for y, order in zip(self._target, self._order, strict=True):
            ordered = plan[:, order]
            below = torch.nn.functional.pad(ordered.cumsum(1), (1, 0))
            moment = torch.nn.functional.pad((ordered * y).cumsum(1), (1, 0))
            count = torch.bucketize(x, y, right=True)
            above = mass - below.gather(1, count)
            columns.append(moment.gather(1, count).addcmul_(x, above).sum(0))
        return torch.stack(columns, dim=0 if self._turned else 1)

    def total(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ self(torch.outer(a, b)) @ b

    def tables(self) -> tuple[Tensor, ...]:
        return self._source, self._target, self._order


# The cross term as a linear function of plans (n, m), with ``total(a, b)``, its sum at a x b with
# the weights a x b, and ``tables()``, the tensors that it reads.
Cross = BothWays | ProductCross | MinimumCross
