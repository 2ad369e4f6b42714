"""The linear problem and its plan, as data: all that a backend is given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._sinkhorn.cost import Cost, exp_
from torchgw._sinkhorn.softmin import row_blocks
from torchgw._typing import Marginals, Potentials

# Factors of the half-steps of f and g under strict marginals.
STRICT = (1.0, 1.0)


class LinearProblem(NamedTuple):
    """min <C, P> + epsilon KL(P | a x b) over plans P with row sums a and column sums b."""

    cost: Cost  # (n, m)
    marginals: Marginals
    epsilon: float
    # Factors of the half-steps of f and g: rho / (rho + epsilon) for a marginal that rho KL holds.
    tau: tuple[float, float] = STRICT

    @property
    def T(self) -> LinearProblem:  # noqa: N802 - the name of every array library
        """The problem with source and target exchanged."""
        a, b = self.marginals
        return LinearProblem(self.cost.transpose(), Marginals(b, a), self.epsilon, self.tau[::-1])

    @property
    def conditional(self) -> LinearProblem:
        """The problem whose plans have rows of mass one each, where weights of zero count too."""
        ones = torch.ones_like(self.marginals.a)
        return self._replace(marginals=Marginals(ones, self.marginals.b))


class EntropicPlan(NamedTuple):
    """P_ij = a_i b_j exp((f_i + g_j - C_ij) / epsilon), shape (n, m), in terms of what makes it."""

    cost: Cost  # (n, m)
    marginals: Marginals
    potentials: Potentials
    epsilon: float

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)."""
        return self.cost.shape

    @property
    def device(self) -> torch.device:
        """Where the cost lies."""
        return self.cost.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the cost, and of the entries of the plan."""
        return self.cost.dtype

    @property
    def T(self) -> EntropicPlan:  # noqa: N802 - the name of every array library
        """The plan from target to source."""
        (a, b), (f, g) = self.marginals, self.potentials
        return EntropicPlan(self.cost.transpose(), Marginals(b, a), Potentials(g, f), self.epsilon)

    @property
    def problem(self) -> LinearProblem:
        """The linear problem that the plan solves, if its marginals are strict."""
        return LinearProblem(self.cost, self.marginals, self.epsilon)

    def density(self) -> Tensor:
        """Compute P_ij / (a_i b_j), shape (n, m), a new tensor."""
        return exp_(self.cost.exponent(*self._finite_potentials(), self.epsilon))

    def densities(self) -> Iterator[tuple[slice, Tensor]]:
        """Go through blocks of rows of the density, shape (s, m), each a new tensor."""
        f, g = self._finite_potentials()
        for rows in row_blocks(self.cost):
            yield rows, exp_(self.cost.rows(rows).exponent(f[rows], g, self.epsilon))

    def rows(self, index: Tensor | slice) -> Tensor:
        """Compute rows of the plan, shape (s, m), a new tensor."""
        f, g = self._finite_potentials()
        a, b = (part.to(self.dtype) for part in self.marginals)
        density = exp_(self.cost.rows(index).exponent(f[index], g, self.epsilon))
        return density.mul_(a[index, None]).mul_(b)

    def _finite_potentials(self) -> Potentials:
        """Round potentials to the dtype of the cost, and let no density overflow."""
        return Potentials(*(part.to(self.dtype) for part in self.marginals.mask(self.potentials)))
