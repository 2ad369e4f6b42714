"""Losses: how the distance of two source points is compared with that of two target points.

Every loss has the form (docs/algorithm.md, equations 33 and 34)

    loss(x, y) = f_X(x) + f_Y(y) - 2 h(x, y)

with terms of one side alone and a cross term h. For the square and the KL loss h is a function of x
times one of y, so that whatever serves the square loss serves the others on these functions of the
distances. |x - y| = x + y - 2 min(x, y) has no such h.

A loss is one entry of ``LOSSES``; everything in which losses differ is written there.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import scipy
import torch
from torch import Tensor

from torchgw._boundary.checks import check_choice
from torchgw._errors import UnsupportedError
from torchgw._typing import Points
from torchgw.distances.base import DistanceProvider, Entrywise, ScaledDistance
from torchgw.distances.landmark import NystromDistance

LossName = Literal["square", "kl", "absolute"]
# Added to distances inside logarithms, as in POT: zero has no logarithm. [L274]
LOG_OFFSET = 1e-18


def identity(distance: Tensor) -> Tensor:
    """Give the distances back as they are."""
    return distance


def _log(distance: Tensor) -> Tensor:
    # approximate distances may be slightly negative
    return distance.clamp_min(0).add_(LOG_OFFSET).log_()


def _half_log(distance: Tensor) -> Tensor:
    return _log(distance).div_(2)


def _entropy(distance: Tensor) -> Tensor:
    """Compute x log x - x."""
    return (_log(distance) - 1).mul_(distance)


def _absolute_difference(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).abs()


@dataclass(frozen=True)
class Loss:
    """A loss of a source distance x and a target distance y, own[0](x) + own[1](y) - 2 h(x, y)."""

    name: LossName
    own: tuple[Entrywise, Entrywise]  # of x and of y
    cross: tuple[Entrywise, Entrywise] | None  # h(x, y) is their product; None for min(x, y)
    # The whole loss, where the sum of its terms loses digits to rounding.
    direct: Callable[[Tensor, Tensor], Tensor] | None = None
    order: int | None = None  # power p of the loss |x - y|^p; None for other losses
    singular: bool = False  # whether the loss is unbounded for target distances near zero
    # Change of a plan below which outer iterations can be extrapolated: they are close to linear
    # then, and no longer at a saddle point.
    linear_below: float = 1e-2
    pot: str | None = None  # POT's name of it

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Evaluate the loss of distances of any shape."""
        if self.direct is not None:
            return self.direct(x, y)
        own = self.own[0](x) + self.own[1](y)
        if self.cross is None:
            return own - 2 * torch.minimum(x, y)
        return own - 2 * (self.cross[0](x) * self.cross[1](y))

    @property
    def is_square(self) -> bool:
        """Whether this is (x - y)^2, for which closed forms are known."""
        return self.own == SQUARE.own and self.cross == SQUARE.cross

    @property
    def parts(self) -> int:
        """Number of products that the cross term is the mean of."""
        return 1

    def part(self, side: int, distance: Tensor, parts: Tensor) -> Tensor:
        """Evaluate the factor of side 0 or 1, (..., s), in the products named by ``parts`` (s,)."""
        assert self.cross is not None
        return self.cross[side](distance)

    def crossed(
        self, source: DistanceProvider, target: DistanceProvider
    ) -> tuple[DistanceProvider, DistanceProvider] | None:
        """Pair the functions of the distances whose product h is; ``None`` if it is no product."""
        if self.cross is None:
            return None
        return transformed(source, self.cross[0]), transformed(target, self.cross[1])


SQUARE = Loss("square", (torch.square, torch.square), (identity, identity), order=2, pot="L2")
KL = Loss(
    "kl", (_entropy, identity), (identity, _half_log), singular=True, linear_below=1e-4, pot="KL"
)
ABSOLUTE = Loss("absolute", (identity, identity), None, direct=_absolute_difference, order=1)
LOSSES: dict[str, Loss] = {loss.name: loss for loss in (SQUARE, KL, ABSOLUTE)}


def find_loss(name: Any) -> Loss:
    """Look a loss up by its name; InvalidInputError for an unknown one."""
    check_choice("loss", name, tuple(LOSSES))
    return LOSSES[name]


def check_loss(loss: Loss, target: DistanceProvider) -> None:
    """Refuse target distances that are too inexact for a loss."""
    inner = target.provider if isinstance(target, ScaledDistance) else target
    if loss.singular and isinstance(inner, NystromDistance):
        raise UnsupportedError(
            f"`loss={loss.name!r}` depends on the ratios of small distances of Y, and small "
            "distances from landmarks have large relative errors. Pass distances='dijkstra' (or "
            "'precomputed', up to a few thousand points) for Y, or drop `n_landmarks`."
        )


def spread_parts(count: int, parts: int, device: torch.device) -> Tensor:
    """Assign one of some parts to each sample, so that any run of samples has all parts evenly."""
    order = torch.arange(count, dtype=torch.float64, device=device)
    # multiples of the golden ratio modulo one fill [0, 1] evenly
    return ((order * 0.6180339887498949) % 1 * parts).long()


def transformed(provider: DistanceProvider, function: Entrywise) -> DistanceProvider:
    """Wrap a provider so that it gives a function of its distances."""
    return provider if function is identity else provider.mapped(function)


def sums(provider: DistanceProvider, function: Entrywise, weights: Tensor) -> Tensor:
    """Compute function(D) @ weights, shape (n,), in the fastest way of the provider."""
    if function is torch.square:
        return provider.mean_square(weights)
    return transformed(provider, function).apply(weights[:, None])[:, 0]


# Share of entries that are not zero up to which a CPU multiplies by these alone: an adjacency
# matrix takes a fifth to a fifteenth of the time. Dense products are free on a GPU. [L140]
SPARSE_SHARE = 0.03
# Plans of this many entries and more are searched for few entries that are more than rounding.
# [L592]
_LOOKED_AT = 2**18
# Entries that a plan may have for each point, so that sparse tables are looked up for these alone.
# [L1237]
_FEW = 2


class AllWays:
    """The mean of cross terms, of each relation and its reverse: half the derivative of a sum."""

    def __init__(self, ways: Sequence["Cross"]) -> None:
        self._ways = ways

    def __call__(self, plan: Tensor) -> Tensor:
        """Evaluate the mean at a plan (n, m)."""
        total = self._ways[0](plan)
        for way in self._ways[1:]:
            total = total.add_(way(plan))
        return total.div_(len(self._ways))

    def block(self, rows: Points, columns: Points) -> "AllWays":
        return AllWays([way.block(rows, columns) for way in self._ways])

    def total(self, a: Tensor, b: Tensor) -> Tensor:
        totals = [way.total(a, b) for way in self._ways]
        return torch.stack(totals).sum(0) / len(totals)

    def tables(self) -> tuple[Tensor, ...]:
        return tuple(table for way in self._ways for table in way.tables())


def mean_of(ways: Sequence["Cross"]) -> "Cross":
    """Make the mean of cross terms, of which there may be one."""
    return ways[0] if len(ways) == 1 else AllWays(ways)


class ProductCross:
    """h(x, y) = x y by two matrix products, DX P DY for tables DX (n, n) and DY (m, m)."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._source, self._target = source, target
        self._left, self._right = _sparse(source), _sparse(target.T)
        self._arrays: tuple[Any, Any] | None = None  # both, for plans of few entries

    def __call__(self, plan: Tensor) -> Tensor:
        left, right = self._left, self._right
        (n, m), rows, columns = plan.shape, len(self._source), self._target.shape[1]
        if n * columns * (m + rows) < rows * m * (n + columns):
            # of a block with few columns
            return self._source @ (plan @ self._target)
        if left is not None and right is not None:
            few = self._of_few(plan, left._nnz() * right._nnz())
            if few is not None:
                return few
        sharp = _sharp(plan) if left is None and right is None else None
        if sharp is not None:
            return self._source @ _times(sharp, self._target)
        inner = self._source @ plan if left is None else _times(left, plan)
        if right is None:
            return inner @ self._target
        # a sparse table comes first
        return _times(right, inner.T).T.contiguous()

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

    def block(self, rows: Points, columns: Points) -> "ProductCross":
        return ProductCross(self._source[rows], self._target[:, columns])

    def total(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute (a' DX a) (b' DY b)."""
        return (a @ (self._source @ a)) * (b @ (self._target @ b))

    def tables(self) -> tuple[Tensor, ...]:
        return self._source, self._target


def _sparse(table: Tensor) -> Tensor | None:
    """Convert a table to coordinate format if that makes products faster."""
    if table.is_cuda or int(table.count_nonzero()) > SPARSE_SHARE * table.numel():
        return None
    return table.to_sparse()


def _times(entries: Tensor, table: Tensor) -> Tensor:
    """Multiply a sparse matrix by a table, of which PyTorch is to read rows."""
    # a table that lies by columns takes ten to twenty times as long [L1720]
    found: Tensor = torch.sparse.mm(entries, table.contiguous())
    return found


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
    if int(kept.count_nonzero()) > SPARSE_SHARE * plan.numel():
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

    def block(self, rows: Points, columns: Points) -> "MinimumCross":
        found = copy(self)
        inner, outer = (columns, rows) if self._turned else (rows, columns)
        found._source = self._source[:, inner]
        found._target, found._order = self._target[outer], self._order[outer]
        return found

    def total(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ self(torch.outer(a, b)) @ b

    def tables(self) -> tuple[Tensor, ...]:
        return self._source, self._target, self._order


# The cross term as a linear function of plans (n, m), with ``total(a, b)``, its sum at a x b with
# the weights a x b, ``block(rows, columns)``, its part for some points of either side, and
# ``tables()``, the tensors that it reads.
Cross = AllWays | ProductCross | MinimumCross


def check_products(name: str, loss: str, *, products: bool) -> None:
    """Refuse factors for a loss that has none."""
    if name == "factored" and not products:
        raise UnsupportedError(
            f"`gradient='factored'` needs a loss that is made of products, and loss={loss!r} "
            "is not. Pass gradient='auto', 'dense' or 'sampled'."
        )
