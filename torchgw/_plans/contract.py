"""The methods of every plan, computed from its products and its rows."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from numbers import Integral
from typing import Any, NamedTuple, TypeVar

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._boundary.arrays import in_kind, to_numpy
from torchgw._boundary.checks import (
    as_index,
    as_points_of,
    as_values,
    check_draw,
    check_threshold,
    check_within,
)
from torchgw._errors import InvalidInputError, PlanTooLargeError, UnsupportedError
from torchgw._sinkhorn.problem import Cost
from torchgw._tensors.machine import free_memory
from torchgw._tensors.operations import categories_at, sample_categories
from torchgw._typing import Seed
from torchgw.distances.base import BLOCK_ENTRIES

Own = TypeVar("Own", bound="Plan")
Method = TypeVar("Method", bound=Callable[..., Any])


def handed_out(method: Method) -> Method:
    """Turn what a method of a plan returns into NumPy's arrays where the plan gives these."""

    @functools.wraps(method)
    def run(plan: Any, *args: Any, **options: Any) -> Any:
        return plan._handed_out(method(plan, *args, **options))

    return run  # type: ignore[return-value]


def exactly(method: Method) -> Method:
    """Keep autocast, which would round products of exponents, out of a method of a plan."""

    @functools.wraps(method)
    def run(plan: Any, *args: Any, **options: Any) -> Any:
        kind = plan.device.type
        if not torch.is_autocast_enabled(kind):
            return method(plan, *args, **options)
        with torch.autocast(kind, enabled=False):
            return method(plan, *args, **options)

    return run  # type: ignore[return-value]


class Anchors(NamedTuple):
    """Pairs (source[s], target[s]) drawn from a plan, with repetition."""

    # Those of a sampled gradient come in strata: slots 2t and 2t + 1 hold independent draws from
    # stratum t, see torchgw._gradients.sampled.places.

    source: Tensor  # (s,) int64
    target: Tensor  # (s,) int64


class Plan(ABC):
    """A coupling of n source and m target points, as an operator, shape (n, m).

    A kind of plan supplies its transpose, its products, and what it is like; all else follows.
    """

    # NumPy leaves ``values @ plan`` to the plan
    __array_ufunc__ = None
    # Whether arrays that are returned are NumPy's, as of a solve that was given no tensor. Products
    # with tensors give tensors in any case.
    in_numpy = False
    # The error for points without mass that are to be mapped.
    _unmapped = "carry no mass in this plan, so they are mapped nowhere. Leave them out."

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)."""
        n, m = self._like().shape
        return n, m

    @property
    def device(self) -> torch.device:
        """Where the plan computes."""
        return self._like().device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the entries."""
        return self._like().dtype

    @abstractmethod
    def _like(self) -> Tensor | Cost | Plan:
        """Return a tensor or a cost with the device, the dtype and the shape of the plan."""

    @property
    @abstractmethod
    def T(self) -> Plan:
        """The plan from target to source."""

    @abstractmethod
    def _product(self, table: Tensor) -> Tensor:
        """Compute the product with values of shape (m, c), of the dtype of the plan or a wider."""

    def _block(self, index: Tensor | slice) -> Tensor:
        """Compute rows as a matrix, shape (s, m)."""
        every = torch.arange(self.shape[0], device=self.device)
        chosen = (every[:, None] == every[index]).to(self.dtype)
        return self.T._product(chosen).T

    @exactly
    def __matmul__(self, values: Any) -> Any:
        """Return plan @ values, (n,) or (n, c), for values of shape (m,) or (m, c)."""
        given, values = values, as_values("values", values, self.device)
        if values.ndim not in (1, 2) or values.shape[0] != self.shape[1]:
            raise InvalidInputError(
                f"`plan @ values` needs values of shape ({self.shape[1]},) or "
                f"({self.shape[1]}, c); got {tuple(values.shape)}. "
                "Use `plan.T @ values` to map the other way."
            )
        dtype = values.dtype if values.dtype.is_floating_point else self.dtype
        table = values.to(torch.promote_types(dtype, self.dtype))
        result = self._product(table.reshape(len(values), -1))
        shaped = result.reshape(self.shape[0], *values.shape[1:])
        return self._handed_out(shaped.to(table.dtype), given)

    def giving(self: Own, in_numpy: bool) -> Own:
        """Return the same plan, nothing copied, that hands out NumPy arrays or tensors."""
        if self.in_numpy == in_numpy:
            return self
        plan = object.__new__(type(self))
        plan.__dict__.update(self.__dict__, in_numpy=in_numpy)
        return plan

    def _handed_out(self, result: Any, given: Any = None) -> Any:
        """Convert a result to the user's kind of array, which is that of ``given``."""
        return in_kind(given, result) if self.in_numpy else result

    def __rmatmul__(self, values: Any) -> Any:
        """Return values @ plan for values of shape (n,) or (c, n)."""
        given, values = values, as_values("values", values, self.device)
        if values.ndim not in (1, 2) or values.shape[-1] != self.shape[0]:
            raise InvalidInputError(
                f"`values @ plan` needs values of shape ({self.shape[0]},) or "
                f"(c, {self.shape[0]}); got {tuple(values.shape)}."
            )
        moved = self.T @ values.T if values.ndim == 2 else self.T @ values
        return self._handed_out(moved.T if values.ndim == 2 else moved, given)

    def push(self, values: Any) -> Any:
        """Map values (n, c) on the source to the target, ``plan.T @ values`` (moscot's name)."""
        return self.T @ values

    def pull(self, values: Any) -> Any:
        """Map values (m, c) on the target to the source, ``plan @ values`` (moscot's name)."""
        return self @ values

    def marginals(self) -> tuple[Any, Any]:
        """Return the masses actually moved, row sums (n,) and column sums (m,), in float64."""
        return self._handed_out(self._moved())

    def _moved(self) -> tuple[Tensor, Tensor]:
        """Compute the marginals."""
        ones_n, ones_m = (
            torch.ones(size, dtype=torch.float64, device=self.device) for size in self.shape
        )
        return self @ ones_m, self.T @ ones_n

    def barycentric(self, points: Any) -> Any:
        """Map each source point to the plan-weighted mean of target points.

        Parameters
        ----------
        points : array-like, shape (m, d)
            Coordinates of the target points.

        Returns
        -------
        Tensor or ndarray, shape (n, d)
            Row i is sum_j P_ij y_j / sum_j P_ij. A :class:`torchgw.TransportPlan` maps a source
            point of weight zero by its conditional plan, which is still defined. NumPy's for points
            that are no tensor, if the solve was given no tensor either.

        Raises
        ------
        UnsupportedError
            If a source point carries no mass in a plan of another kind.
        """
        given, points = points, as_points_of(points, self.shape[1], self.device)
        sums = self._sums_with_mass(torch.cat([points, torch.ones_like(points[:, :1])], dim=1))
        return self._handed_out(sums[:, :-1] / sums[:, -1:], given)

    def _sums_with_mass(self, table: Tensor) -> Tensor:
        """Multiply by values whose last column is one; refuse points that carry no mass."""
        sums: Tensor = self @ table
        empty = int((sums[:, -1] == 0).sum())
        if empty:
            raise UnsupportedError(f"{empty} points {self._unmapped}")
        return sums

    @exactly
    def rows(self, index: Any) -> Any:
        """Return rows of the plan, shape (s, m), for an integer index of shape (s,)."""
        return self._handed_out(self._block(as_index(index, self.shape[0], self.device)), index)

    def argmax(self, axis: int = 1) -> Any:
        """Return the likeliest partner of each source (axis 1) or target (axis 0) point, int64."""
        if not isinstance(axis, Integral) or axis not in (0, 1):
            raise InvalidInputError(f"`axis` must be 0 or 1; got {axis!r}.")
        return (self if axis == 1 else self.T).topk(1)[1][:, 0]

    @handed_out
    @exactly
    def topk(self, k: int) -> tuple[Any, Any]:
        """Return the k largest entries of each row: values (n, k), and their columns (n, k), int64.

        Raises
        ------
        InvalidInputError
            Unless 1 <= k <= m.
        """
        return self._largest(check_within("k", k, 1, self.shape[1]))

    def _largest(self, k: int) -> tuple[Tensor, Tensor]:
        """Find the k largest entries of each row, and their columns."""
        best = [block.topk(k, dim=1) for block in self._blocks()]
        return torch.cat([part.values for part in best]), torch.cat([part.indices for part in best])

    @handed_out
    @exactly
    def sample(self, count: int, random_state: Seed | None = None) -> Anchors:
        """Draw ``count`` pairs (i, j) from the plan, with repetition, as two arrays (count,).

        Parameters
        ----------
        count : int
        random_state : int, torch.Generator, numpy.random.Generator, RandomState or None
            Seed of the draws; a torch.Generator, on the device of the plan, is gone on with.
        """
        generator = check_draw(count, random_state, self.device)
        source = sample_categories(self._row_masses(), count, generator)
        return Anchors(source, self._partners(source, generator))

    @exactly
    def sample_at(self, places: Tensor, order: Tensor, generator: torch.Generator) -> Anchors:
        """Draw pairs whose source points are at places of the cumulative mass along an order."""
        # Uniform places (s,) in [0, 1) make the pairs a sample of the plan. The order is a
        # permutation of the source points; targets are independent given their sources.
        source = order[categories_at(self._row_masses()[order], places)]
        return Anchors(source, self._partners(source, generator))

    @handed_out
    def to_dense(self) -> Any:
        """Build the (n, m) matrix, in the dtype of the plan and on its device.

        Raises
        ------
        PlanTooLargeError
            If it would take more than the free memory of its device.
        """
        needed = self.shape[0] * self.shape[1] * self.dtype.itemsize
        if needed > (free := free_memory(self.device)):
            raise PlanTooLargeError(
                f"The dense plan of shape {self.shape} needs {needed:,} bytes and {free:,} are "
                f"free on {self.device}. Use `lazy_plan` (`plan @ V`, `topk`, `barycentric`) or "
                "`lazy_plan.to_sparse(k)`, which never store it."
            )
        return self.stored()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Build the matrix in NumPy, as :meth:`to_dense` does, for ``np.asarray(plan)``."""
        if copy is False:
            raise InvalidInputError(
                "The entries of a plan are computed, so an array of them is always new. Drop "
                "`copy=False`."
            )
        array = to_numpy(self.to_dense())
        return array if dtype is None else array.astype(dtype, copy=False)

    @exactly
    def stored(self) -> Tensor:
        """Build the (n, m) matrix for a caller that holds tables of this size anyway."""
        return torch.cat(list(self._blocks()))

    @exactly
    def to_sparse(self, k: int | None = None, threshold: float = 1e-4) -> scipy.sparse.csr_array:
        """Keep the entries that matter, as a SciPy matrix on the CPU.

        Parameters
        ----------
        k : int, optional
            Keep the k largest entries of each row.
        threshold : float
            Without ``k``: keep entries that carry at least this share of their row's mass, and the
            largest of each row in any case.

        Returns
        -------
        scipy.sparse.csr_array, shape (n, m), float64
            Its sum is the mass kept.
        """
        if k is not None:
            values, columns = map(to_numpy, self.topk(k))
            start = np.arange(0, values.size + 1, k)
            data = values.astype(np.float64).ravel()
            return scipy.sparse.csr_array((data, columns.ravel(), start), shape=self.shape)
        check_threshold(threshold)
        parts = []
        for block in self._blocks():
            keep = block >= threshold * block.sum(1, keepdim=True)
            keep.scatter_(1, block.argmax(1, keepdim=True), True)
            kept = torch.where(keep, block, 0.0).double().cpu().numpy()
            parts.append(scipy.sparse.csr_array(kept))
        return scipy.sparse.csr_array(scipy.sparse.vstack(parts, format="csr"))

    def _height(self) -> int:
        """Choose how many rows a block has."""
        return max(1, BLOCK_ENTRIES // self.shape[1])

    def _blocks(self) -> Iterator[Tensor]:
        """Go through the plan by blocks of rows."""
        height = self._height()
        for start in range(0, self.shape[0], height):
            yield self._block(slice(start, start + height))

    def _row_masses(self) -> Tensor:
        """Find the masses by which rows are drawn, (n,)."""
        return self._moved()[0]

    def _partners(self, source: Tensor, generator: torch.Generator) -> Tensor:
        """Draw a target point for each of some source points, (s,)."""
        drawn = [
            sample_categories(self._block(part), 1, generator)[:, 0]
            for part in source.split(self._height())
        ]
        return torch.cat(drawn)
