"""The transport plan as an operator: everything one does with a plan, never stored."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from torchgw._boundary.checks import as_mass, check_equal_masses
from torchgw._plans.contract import Plan, exactly
from torchgw._sinkhorn.blocks import RestrictedBackend
from torchgw._sinkhorn.choose import alone, shared
from torchgw._sinkhorn.contract import Backend, PreparedProblem
from torchgw._sinkhorn.eager import EagerBackend
from torchgw._sinkhorn.problem import Cost, DenseCost, LinearProblem, row_blocks
from torchgw._tensors.ranks import Ranks, join
from torchgw._typing import Marginals, Potentials


class RoundedPlan(Plan):
    """diag(x) P diag(y) + u v', a plan with exact marginals that is never stored, shape (n, m).

    Returned by :meth:`torchgw.TransportPlan.rounded`.

    Parameters
    ----------
    scaled : Plan, shape (n, m)
        diag(x) P diag(y), which exceeds neither marginal.
    row, column : Tensor, shapes (n,) and (m,), float64
        u and v: the outer product of what is missing on each side.
    """

    def __init__(self, scaled: Plan, row: Tensor, column: Tensor) -> None:
        self.scaled, self.row, self.column = scaled, row, column

    def _like(self) -> Plan:
        return self.scaled

    @property
    def T(self) -> RoundedPlan:
        return RoundedPlan(self.scaled.T, self.column, self.row).giving(self.in_numpy)

    def stored(self) -> Tensor:
        matrix = self.scaled.stored()
        return matrix + torch.outer(self.row, self.column).to(matrix.dtype)

    def _product(self, table: Tensor) -> Tensor:
        product = self.scaled._product(table)
        extra = torch.tensordot(self.column, table.double(), dims=1)
        return (product + torch.tensordot(self.row, extra, dims=0)).to(product.dtype)

    def _block(self, index: Tensor | slice) -> Tensor:
        block = self.scaled._block(index)
        return block + torch.outer(self.row[index], self.column).to(block.dtype)


def round_plan(plan: Any, a: Tensor, b: Tensor) -> RoundedPlan:
    """Move a TransportPlan to marginals of equal sums as :func:`round_to_marginals` does."""
    tiny = torch.finfo(torch.float64).tiny
    x = (a / (plan @ torch.ones_like(b)).clamp_min(tiny)).clamp_max(1.0)
    y = (b / (plan.T @ x).clamp_min(tiny)).clamp_max(1.0)
    f, g = (
        potential + plan.epsilon * torch.where(factor > 0, factor, 1.0).log()
        for potential, factor in zip(plan.potentials, (x, y), strict=True)
    )
    # rows and columns of marginal zero are scaled to zero, as those of weight zero are
    used = [
        torch.where(factor > 0, weight, 0.0)
        for factor, weight in zip((x, y), plan.weights, strict=True)
    ]
    scaled = plan.replaced(Potentials(f, g), Marginals(*used))
    row, column = (
        (weight - mass).clamp_min(0.0)
        for weight, mass in zip((a, b), scaled.marginals(), strict=True)
    )
    return RoundedPlan(scaled, row, column / column.sum().clamp_min(tiny))


def round_to_marginals(plan: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Move plans (..., n, m) to exact marginals: shrink rows, then columns, and spread the rest."""
    # At an L1 distance of at most twice the marginal errors: J. Altschuler, J. Weed, P. Rigollet.
    # Near-linear time approximation algorithms for optimal transport via Sinkhorn iteration.
    # NeurIPS 2017, Algorithm 2. A plan that misses its marginals may have a value below the
    # optimum, so values are compared after this.
    tiny = torch.finfo(plan.dtype).tiny
    plan = plan * (a / plan.sum(-1).clamp_min(tiny)).clamp_max(1.0)[..., :, None]
    plan = plan * (b / plan.sum(-2).clamp_min(tiny)).clamp_max(1.0)[..., None, :]
    # what is missing is not negative, but for rounding
    row, column = (a - plan.sum(-1)).clamp_min(0.0), (b - plan.sum(-2)).clamp_min(0.0)
    missing = row.sum(-1)[..., None, None].clamp_min(tiny)
    return plan + row[..., :, None] * (column[..., None, :] / missing)


# Smaller entries are zeros of polished plans, whose costs are logarithms of more than 1e-250.
# [L412]
ZERO = 1e-240


class DualPlan(Plan):
    """A plan that has potentials: a solve can go on from it, and it extends to other points."""

    potentials: Potentials  # cost units
    weights: Marginals  # a, b of the problem that the plan solves
    epsilon: float  # entropic regularisation of that problem
    masses: Marginals  # row and column sums, by which rows are drawn
    backend: Backend  # computes the plan of other points
    # marginals, once they have been asked for
    _sums: tuple[Tensor, Tensor] | None = None

    @abstractmethod
    def replaced(
        self, potentials: Potentials, weights: Marginals, masses: Marginals | None = None
    ) -> DualPlan:
        """Return the plan of other potentials and weights on the same cost."""

    def _moved(self) -> tuple[Tensor, Tensor]:
        if self._sums is None:
            self._sums = super()._moved()
        return self._sums

    def remember(self, rows: Tensor, columns: Tensor) -> None:
        """Keep marginals that were computed beside other sums."""
        self._sums = rows, columns

    @exactly
    def extend(self, cost: Cost) -> TransportPlan:
        """Return the plan of other source points, given their cost, (q, m), by one half-step.

        They get equal weights; conditional plans, such as :meth:`barycentric` reads, do not depend
        on them.
        """
        count, (a, b), g = cost.shape[0], self.weights, self.potentials.g
        equal = a.new_full((count,), 1 / count)
        # what new points may be matched with is not restricted
        backend = self.backend
        backend = backend.whole if isinstance(backend, RestrictedBackend) else backend
        prepared = backend.prepare(LinearProblem(cost, Marginals(equal, b), self.epsilon))
        return TransportPlan.of(prepared, Potentials(prepared.softmin(g, axis=1), g))

    def _row_masses(self) -> Tensor:
        return self.masses.a


class TransportPlan(DualPlan):
    """P_ij = a_i b_j exp((f_i + g_j - C_ij) / epsilon), shape (n, m), read without storing it.

    Memory is that of the cost's factors, of what a backend makes of them when the plan is first
    read, and of one block of rows. ``plan @ V`` and ``plan.T @ U`` stream; :meth:`to_dense` builds
    the matrix when it fits.

    Parameters
    ----------
    cost : DenseCost or FactoredCost, shape (n, m)
    potentials : Potentials
        Reduced potentials, in cost units: those of ``cost``. The cost of a solve leaves out terms
        of rows and columns alone, which ``result.potentials`` contain.
    marginals : Marginals
        The weights a, b of the formula.
    epsilon : float
    backend : Backend, optional
        What computes ``plan @ V``, partners and samples; PyTorch operations unless given.
    masses : Marginals, optional
        Row and column sums where they are not the weights, by which rows are drawn.
    """

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
        self._set((backend or EagerBackend()).prepare(problem), potentials, masses)

    def _set(
        self, prepared: PreparedProblem, potentials: Potentials, masses: Marginals | None
    ) -> None:
        self.prepared, self.backend = prepared, prepared.backend
        self.cost, self.weights, self.epsilon, _ = prepared.problem
        self.potentials, self.masses = potentials, masses or self.weights

    @classmethod
    def of(
        cls, prepared: PreparedProblem, potentials: Potentials, masses: Marginals | None = None
    ) -> TransportPlan:
        """Make a plan of a prepared problem, and use its operands again."""
        plan = TransportPlan.__new__(TransportPlan)
        plan._set(prepared, potentials, masses)
        return plan

    def _parts(self, backend: Backend | None = None) -> tuple[Any, ...]:
        """List what makes the plan, without the operands that reads have prepared."""
        problem = self.cost, self.potentials, self.weights, self.epsilon
        return *problem, backend or self.backend, self.masses

    def released(self, backend: Backend) -> TransportPlan:
        """Copy the plan without the operands that reads prepare, as large as its factors."""
        plan = TransportPlan(*self._parts(backend))
        plan._sums = self._sums
        return plan

    def shared(self) -> TransportPlan:
        """Return the plan whose products and partners all processes compute together.

        For the processes of ``torch.distributed`` after a solve with ``distributed``, a GPU for
        each. Every process makes the same calls of it, computes some of the rows, and gets the
        whole; bits do not depend on how many there are.

        Raises
        ------
        UnsupportedError
            If there is no process group.
        """
        ranks = join(True, self.device)
        assert ranks is not None
        # the sums are left out: not every process may have asked for them
        parts = self._parts(shared(alone(self.backend), ranks))
        return TransportPlan(*parts).giving(self.in_numpy)

    @property
    def ranks(self) -> Ranks | None:
        """The processes that read the plan together, if it is :meth:`shared`."""
        return getattr(self.backend, "ranks", None)

    def part(self, rows: slice) -> TransportPlan:
        """Return some rows of the plan, as a plan of its own that holds nothing of the others."""
        (f, g), (a, b), (p, q) = self.potentials, self.weights, self.masses
        cost = self.cost.rows(rows)
        plan = TransportPlan(
            type(cost)(*(part.clone() for part in cost)),
            Potentials(f[rows].clone(), g),
            Marginals(a[rows].clone(), b),
            self.epsilon,
            self.backend.rows(rows)
            if isinstance(self.backend, RestrictedBackend)
            else alone(self.backend, cost.shape),
            Marginals(p[rows].clone(), q),
        )
        return plan.giving(self.in_numpy)

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave behind what reads have prepared, for pickle and deepcopy."""
        return TransportPlan, self._parts(), {"in_numpy": self.in_numpy}

    def _like(self) -> Cost:
        return self.cost

    @property
    def T(self) -> TransportPlan:
        """The plan from target to source."""
        (f, g), (p, q) = self.potentials, self.masses
        turned = TransportPlan.of(self.prepared.T, Potentials(g, f), Marginals(q, p))
        return turned.giving(self.in_numpy)

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

    def rounded(self, a: Tensor | None = None, b: Tensor | None = None) -> RoundedPlan:
        """Return the plan moved to exact marginals, an operator too: nothing (n, m) is stored.

        Rows and then columns that carry too much are scaled down, and what is missing is spread as
        an outer product: diag(x) P diag(y) + u v', at an L1 distance of at most twice the marginal
        errors; u v' may lie where no mass is allowed. In float64: of a plan in float32 whose cost
        is stored, a copy of the cost is made.

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
        plan = self
        if self.dtype != torch.float64:
            # float32 sums of the same plan differ, from one way of reading it to another
            cost = self.cost.to(torch.float64)
            plan = TransportPlan(cost, self.potentials, self.weights, self.epsilon, self.backend)
        return round_plan(plan, a, b).giving(self.in_numpy)

    def _sums_with_mass(self, table: Tensor) -> Tensor:
        """Multiply the conditional plan, which is defined for points of weight zero too."""
        ones = torch.ones_like(self.weights.a)
        return self.replaced(self.potentials, Marginals(ones, self.weights.b)) @ table

    def _largest(self, k: int) -> tuple[Tensor, Tensor]:
        values, columns = self.prepared.topk(self.potentials, k)
        return torch.threshold(values, ZERO, 0.0), columns

    @exactly
    def stored(self) -> Tensor:
        """Build the (n, m) matrix for a caller that holds tables of this size anyway."""
        return torch.threshold_(self.prepared.dense(self.potentials), ZERO, 0.0)

    def _product(self, table: Tensor) -> Tensor:
        """Compute the product, differentiable in the values."""
        if table.requires_grad and torch.is_grad_enabled():
            return times(self, table)
        return self.prepared.apply(self.potentials, table.detach())

    def _block(self, index: Tensor | slice) -> Tensor:
        return torch.threshold_(self.prepared.block(self.potentials, index), ZERO, 0.0)

    def _height(self) -> int:
        return int(next(row_blocks(self.cost)).stop)

    def _partners(self, source: Tensor, generator: torch.Generator) -> Tensor:
        return self.prepared.draw(self.potentials, source, generator)


def times(matrix: Any, values: Tensor) -> Tensor:
    """Multiply by a constant map over pairs, differentiable in the values any number of times."""
    return _Product.apply(matrix, values)  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    """matrix @ values for a matrix that is constant; its derivative is streamed likewise."""

    @staticmethod
    def forward(ctx: Any, matrix: Any, values: Tensor) -> Tensor:
        ctx.matrix = matrix
        return matrix @ values

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return None, ctx.matrix.T @ upstream[0]
