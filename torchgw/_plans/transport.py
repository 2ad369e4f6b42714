"""The transport plan as an operator: everything one does with a plan, never stored."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from torchgw._boundary.plans import (
    as_index,
    as_mass,
    as_points_of,
    as_values,
    check_draw,
    check_entries,
    check_equal_masses,
    check_threshold,
)
from torchgw._errors import InvalidInputError
from torchgw._plans.autograd import differentiable_product, exactly
from torchgw._plans.pairs import Anchors
from torchgw._plans.rounded import RoundedPlan, round_plan
from torchgw._sinkhorn.contract import Backend, PreparedProblem
from torchgw._sinkhorn.cost import Cost, DenseCost
from torchgw._sinkhorn.eager import EagerBackend
from torchgw._sinkhorn.problem import LinearProblem
from torchgw._sinkhorn.softmin import row_blocks
from torchgw._tensors.draws import categories_at, sample_categories
from torchgw._tensors.memory import check_fits
from torchgw._typing import Marginals, Potentials

__all__ = ["TransportPlan"]


class TransportPlan:
    """P_ij = a_i b_j exp((f_i + g_j - C_ij) / epsilon), shape (n, m), read without storing it.

    Memory is that of the cost's factors plus one block of rows. ``plan @ V`` and ``plan.T @ U``
    stream; :meth:`to_dense` builds the matrix when it fits.

    Parameters
    ----------
    cost : DenseCost or FactoredCost, shape (n, m)
    potentials : Potentials
        In cost units.
    marginals : Marginals
        The weights a, b of the formula.
    epsilon : float
    backend : Backend, optional
        What computes ``plan @ V``, partners and samples; PyTorch operations unless given.
    masses : Marginals, optional
        Row and column sums where they are not the weights, by which rows are drawn.
    """

    # NumPy leaves ``values @ plan`` to the plan
    __array_ufunc__ = None
    # marginals, once they have been asked for
    _sums: tuple[Tensor, Tensor] | None = None

    def __init__(
        self,
        cost: Cost,
        potentials: Potentials,
        marginals: Marginals,
        epsilon: float,
        backend: Backend | None = None,
        masses: Marginals | None = None,
    ) -> None:
        problem = LinearProblem(cost, marginals, epsilon)
        self._set((backend or EagerBackend()).prepare(problem), potentials, masses or marginals)

    def _set(self, prepared: PreparedProblem, potentials: Potentials, masses: Marginals) -> None:
        self.prepared = prepared
        self.potentials = potentials
        self.masses = masses

    @classmethod
    def of(
        cls, prepared: PreparedProblem, potentials: Potentials, masses: Marginals | None = None
    ) -> TransportPlan:
        """Return a plan of a problem that is prepared already: what it has made serves again."""
        plan = cls.__new__(cls)
        plan._set(prepared, potentials, masses or prepared.problem.marginals)
        return plan

    def released(self) -> TransportPlan:
        """Return the same plan without what its reads have prepared, as large as its factors."""
        plan = self.replaced(self.potentials, self.weights, self.masses)
        plan._sums = self._sums
        return plan

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave behind what its reads have prepared, for pickle and deepcopy."""
        parts = (self.cost, self.potentials, self.weights, self.epsilon, self.backend, self.masses)
        return TransportPlan, parts

    @property
    def cost(self) -> Cost:
        """The cost C of the formula, (n, m)."""
        return self.prepared.problem.cost

    @property
    def weights(self) -> Marginals:
        """The weights a, b of the formula."""
        return self.prepared.problem.marginals

    @property
    def epsilon(self) -> float:
        """Entropic regularisation of the formula."""
        return self.prepared.problem.epsilon

    @property
    def backend(self) -> Backend:
        """What computes the products."""
        return self.prepared.backend

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)."""
        return self.cost.shape

    @property
    def device(self) -> torch.device:
        """Where the plan computes."""
        return self.cost.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the entries."""
        return self.cost.dtype

    @property
    def T(self) -> TransportPlan:  # noqa: N802 - the name of every array library
        """The plan from target to source."""
        f, g = self.potentials
        return TransportPlan.of(self.prepared.T, Potentials(g, f), Marginals(*self.masses[::-1]))

    def replaced(
        self, potentials: Potentials, weights: Marginals, masses: Marginals | None = None
    ) -> TransportPlan:
        """Return the plan of other potentials and weights on the same cost."""
        return TransportPlan(self.cost, potentials, weights, self.epsilon, self.backend, masses)

    def __repr__(self) -> str:
        """Say what the plan is without computing it."""
        kind = "stored" if isinstance(self.cost, DenseCost) else f"rank {self.cost.rank}"
        return (
            f"TransportPlan(shape={self.shape}, epsilon={self.epsilon:.4g}, {kind} cost, "
            f"{self.dtype}, {self.device})"
        )

    @exactly
    def __matmul__(self, values: Any) -> Tensor:
        """Return plan @ values, (n,) or (n, c), for values of shape (m,) or (m, c)."""
        values = as_values("values", values, self.device)
        if values.ndim not in (1, 2) or values.shape[0] != self.shape[1]:
            raise InvalidInputError(
                f"`plan @ values` needs values of shape ({self.shape[1]},) or "
                f"({self.shape[1]}, c); got {tuple(values.shape)}. "
                "Use `plan.T @ values` to map the other way."
            )
        dtype = values.dtype if values.dtype.is_floating_point else self.dtype
        table = values.to(torch.promote_types(dtype, self.dtype))
        result = self._product(table.reshape(len(values), -1))
        shaped: Tensor = result.reshape(self.shape[0], *values.shape[1:]).to(table.dtype)
        return shaped

    def __rmatmul__(self, values: Any) -> Tensor:
        """Return values @ plan for values of shape (n,) or (c, n)."""
        values = as_values("values", values, self.device)
        if values.ndim not in (1, 2) or values.shape[-1] != self.shape[0]:
            raise InvalidInputError(
                f"`values @ plan` needs values of shape ({self.shape[0]},) or "
                f"(c, {self.shape[0]}); got {tuple(values.shape)}."
            )
        moved: Tensor = self.T @ values.T if values.ndim == 2 else self.T @ values
        return moved.T if values.ndim == 2 else moved

    def _product(self, table: Tensor) -> Tensor:
        """Return the product with values of shape (m, c), differentiable in them."""
        if not (table.requires_grad and torch.is_grad_enabled()):
            return self.prepared.apply(self.potentials, table.detach())
        return differentiable_product(self, table)

    def push(self, values: Any) -> Tensor:
        """Map values (n, c) on the source to the target, ``plan.T @ values`` (moscot's name)."""
        mapped: Tensor = self.T @ values
        return mapped

    def pull(self, values: Any) -> Tensor:
        """Map values (m, c) on the target to the source, ``plan @ values`` (moscot's name)."""
        mapped: Tensor = self @ values
        return mapped

    def marginals(self) -> tuple[Tensor, Tensor]:
        """Return the masses actually moved, row sums (n,) and column sums (m,), in float64."""
        if self._sums is None:
            self._sums = self._row_and_column_sums()
        return self._sums

    def _row_and_column_sums(self) -> tuple[Tensor, Tensor]:
        ones_n, ones_m = (
            torch.ones(size, dtype=torch.float64, device=self.device) for size in self.shape
        )
        return self @ ones_m, self.T @ ones_n

    def rounded(self, a: Tensor | None = None, b: Tensor | None = None) -> RoundedPlan:
        """Return the plan moved to exact marginals, an operator too: nothing (n, m) is stored.

        Rows and then columns that carry too much are scaled down, and what is missing is spread as
        an outer product: diag(x) P diag(y) + u v', at an L1 distance of at most twice the marginal
        errors.

        Parameters
        ----------
        a, b : Tensor, shapes (n,) and (m,), optional
            The marginals, of equal sums; the weights of the problem by default.

        Raises
        ------
        InvalidInputError
            If masses do not fit, are negative or not finite, or differ in sum.
        """
        a, b = (
            weight if given is None else as_mass(name, given, weight)
            for name, given, weight in zip("ab", (a, b), self.weights, strict=True)
        )
        check_equal_masses(a, b)
        return round_plan(self, a, b)

    def barycentric(self, points: Any) -> Tensor:
        """Map each source point to the plan-weighted mean of target points.

        Parameters
        ----------
        points : array-like, shape (m, d)
            Coordinates of the target points.

        Returns
        -------
        Tensor, shape (n, d)
            Row i is sum_j P_ij y_j / sum_j P_ij. A source point of weight zero is mapped by its
            conditional plan, which is still defined.
        """
        points = as_points_of("points", points, self.shape[1], self.device)
        ones = torch.ones_like(self.weights.a)
        conditional = self.replaced(self.potentials, Marginals(ones, self.weights.b))
        product = conditional @ torch.cat([points, torch.ones_like(points[:, :1])], dim=1)
        return product[:, :-1] / product[:, -1:]

    @exactly
    def extend(self, cost: Cost) -> TransportPlan:
        """Return the plan of other source points, whose potentials are one half-step.

        Parameters
        ----------
        cost : DenseCost or FactoredCost, shape (q, m)
            Of the other points. They get equal weights; conditional plans, such as
            :meth:`barycentric` reads, do not depend on them.
        """
        count, (a, b), g = cost.shape[0], self.weights, self.potentials.g
        equal = a.new_full((count,), 1 / count)
        problem = LinearProblem(cost, Marginals(equal, b), self.epsilon)
        prepared = self.backend.prepare(problem)
        return TransportPlan.of(prepared, Potentials(prepared.softmin(g, axis=1), g))

    def rows(self, index: Any) -> Tensor:
        """Return rows of the plan, shape (s, m), for an integer index of shape (s,)."""
        return self._block(as_index(index, self.shape[0], self.device))

    @exactly
    def _block(self, index: Tensor | slice) -> Tensor:
        return self.prepared.plan(self.potentials).rows(index)

    def argmax(self, axis: int = 1) -> Tensor:
        """Return the likeliest partner of each source (axis 1) or target (axis 0) point, int64."""
        if not isinstance(axis, Integral) or axis not in (0, 1):
            raise InvalidInputError(f"`axis` must be 0 or 1; got {axis!r}.")
        return self.topk(1)[1][:, 0] if axis == 1 else self.T.argmax(axis=1)

    @exactly
    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest entries of each row: values (n, k), and their columns (n, k), int64.

        Raises
        ------
        InvalidInputError
            Unless 1 <= k <= m.
        """
        k = check_entries(k, self.shape[1])
        return self.prepared.topk(self.potentials, k)

    @exactly
    def sample(self, count: int, generator: torch.Generator) -> Anchors:
        """Draw ``count`` pairs (i, j) from the plan, with repetition, as two tensors (count,).

        Parameters
        ----------
        count : int
        generator : torch.Generator, on the device of the plan
        """
        check_draw(count, generator, self.device)
        return self._with_partners(sample_categories(self.masses.a, count, generator), generator)

    def sample_at(self, places: Tensor, order: Tensor, generator: torch.Generator) -> Anchors:
        """Draw pairs whose source points are at places of the cumulative mass along an order.

        Parameters
        ----------
        places : Tensor, shape (s,)
            In [0, 1). Uniform ones make the pairs a sample of the plan.
        order : Tensor of int64, shape (n,)
            A permutation of the source points.
        generator : torch.Generator
            Draws the targets, independently given their sources.
        """
        source = order[categories_at(self.masses.a[order], places)]
        return self._with_partners(source, generator)

    def _with_partners(self, source: Tensor, generator: torch.Generator) -> Anchors:
        return Anchors(source, self.prepared.draw(self.potentials, source, generator))

    def to_dense(self) -> Tensor:
        """Build the (n, m) matrix, in the dtype of the plan and on its device.

        Raises
        ------
        PlanTooLargeError
            If it would take more than the free memory of its device.
        """
        others = "`lazy_plan` (`plan @ V`, `topk`, `barycentric`) or `lazy_plan.to_sparse(k)`"
        check_fits(self.shape, self.dtype, self.device, others)
        return self.stored()

    @exactly
    def stored(self) -> Tensor:
        """Build the (n, m) matrix for a caller that holds tables of this size anyway."""
        return self.prepared.dense(self.potentials)

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
            k = check_entries(k, self.shape[1])
            values, columns = (part.cpu().numpy() for part in self.topk(k))
            start = np.arange(0, values.size + 1, k)
            data = values.astype(np.float64).ravel()
            return scipy.sparse.csr_array((data, columns.ravel(), start), shape=self.shape)
        check_threshold(threshold)
        parts = []
        for rows in row_blocks(self.cost):
            block = self._block(rows)
            keep = block >= threshold * block.sum(1, keepdim=True)
            keep.scatter_(1, block.argmax(1, keepdim=True), True)
            kept = torch.where(keep, block, 0.0).double().cpu().numpy()
            parts.append(scipy.sparse.csr_array(kept))
        return scipy.sparse.csr_array(scipy.sparse.vstack(parts, format="csr"))
