"""The contract of a backend: what it offers to the Sinkhorn loop and to plans.

A backend *prepares* a linear problem, once; everything else is asked of the prepared problem:
half-steps, sweeps of full iterations, and what is read off a plan. :class:`PreparedProblem` does
all of it by PyTorch operations, block by block, as it is defined. A backend overrides what it does
faster; the two must agree up to rounding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchgw._sinkhorn.problem import (
    EntropicPlan,
    LinearProblem,
    block_height,
    checked,
    row_blocks,
    softmin,
)
from torchgw._tensors.operations import sample_categories
from torchgw._typing import Marginals, Potentials


class Backend(Protocol):
    """A way of computing half-steps, and what is read off a plan."""

    name: str

    def prepare(self, problem: LinearProblem) -> "PreparedProblem":
        """Prepare a linear problem; what takes time or memory waits until it is needed."""


class Sweep(NamedTuple):
    """Potentials after some full Sinkhorn iterations."""

    f: Tensor  # (n,) softmin of g: the rows of the plan (f, g) have mass a
    g: Tensor  # (m,)
    g_next: Tensor  # (m,) softmin of f; its distance to g measures the column error
    state: Potentials  # where the iteration goes on
    check: Tensor  # (2,) float64: one if no sum over- or underflowed, else zero; the column error


class Sweeper(Protocol):
    """Sweeps of one linear problem that share a kernel, or whatever else is made near their start.

    One of two levels also removes slow errors, between its iterations, by a small problem of its
    own. It needs no over-relaxation, and few iterations.
    """

    @property
    def two_level(self) -> bool:
        """Whether it has two levels."""

    def __call__(self, start: Potentials, count: int, relaxation: float) -> Sweep:
        """Run ``count`` full iterations from ``start``: :func:`torchgw.backends.softmin_sweep`."""


class Kernel(NamedTuple):
    """A stored kernel E_ij = exp((f_i + g_j - C_ij) / epsilon), to be multiplied by vectors."""

    rows: Callable[[Tensor], Tensor]  # from a vector (m,) to E @ vector, (n,)
    columns: Callable[[Tensor], Tensor]  # from a vector (n,) to E.T @ vector, (m,)
    slack: float | None = None  # how far scalings of both sides may rise together, in logarithms


class PreparedProblem:
    """A linear problem that is ready to be solved, and whose plans can be read.

    Operands and tiles are made of the cost when they are first needed, and live as long as this
    object. ``EntropicPlan`` says what a plan is; potentials are given in cost units.

    Parameters
    ----------
    problem : LinearProblem
    backend : Backend
        The backend that has prepared it.
    """

    # whether the last sweeps went over few entries: what is stored has all in the next ones
    left_entries = False

    def __init__(self, problem: LinearProblem, backend: Backend) -> None:
        self.problem, self.backend = problem, backend
        self._sweeper: Sweeper | None = None

    @property
    def T(self) -> "PreparedProblem":  # noqa: N802 - the name of every array library
        """The problem with source and target exchanged."""
        return self.backend.prepare(self.problem.T)

    def rows(self, part: slice) -> "PreparedProblem":
        """Prepare the problem of some source points, whose half-steps and plan are its rows."""
        a, b = self.problem.marginals
        cost = self.problem.cost.rows(part)
        return self.backend.prepare(
            self.problem._replace(cost=cost, marginals=Marginals(a[part], b))
        )

    def kernel(self, start: Potentials) -> Kernel:
        """Store the kernel whose entries are the density of a plan."""
        matrix = self.plan(start).density()
        return Kernel(partial(torch.mv, matrix), partial(torch.mv, matrix.T))

    def softmin(self, potential: Tensor, axis: int) -> Tensor:
        """Compute the half-step of :func:`torchgw.backends.softmin`, without ``tau``.

        For ``axis=1`` it takes g, shape (m,), and gives (n,); for ``axis=0`` f, shape (n,), and
        gives (m,).
        """
        cost, marginals, epsilon, _ = self.problem
        log_weight = marginals.log_b if axis == 1 else marginals.log_a
        return softmin(cost, log_weight, potential, epsilon, axis)

    def softmin_rows(self, g: Tensor) -> Tensor:
        """Compute the f that follows from g, tau[0] * softmin, (n,)."""
        return self.problem.tau[0] * self.softmin(g, axis=1)

    def softmin_columns(self, f: Tensor) -> Tensor:
        """Compute the g that follows from f, tau[1] * softmin, (m,)."""
        return self.problem.tau[1] * self.softmin(f, axis=0)

    def half_steps(self, g: Tensor) -> Potentials:
        """Take an exact half-step each way: sweeps can start from almost any potentials."""
        f = self.softmin_rows(g)
        return Potentials(f, self.softmin_columns(f))

    def sweeper(self, start: Potentials) -> Sweeper:
        """Make sweeps that begin at or near ``start``: the place to override them."""
        return SoftminSweeper(self)

    def sweep(self, start: Potentials, count: int, relaxation: float = 1.0) -> Sweep:
        """Run full iterations as :func:`torchgw.backends.softmin_sweep`.

        The first sweep makes what all of them share, such as a kernel, near its start.
        """
        if self._sweeper is None:
            self._sweeper = self.sweeper(start)
        return self._sweeper(start, count, relaxation)

    def safe_sweep(self, start: Potentials, count: int) -> Sweep:
        """Run full iterations from any potentials, by half-steps that follow their maxima."""
        return softmin_sweep(self, start, count)

    @property
    def two_level(self) -> bool:
        """Whether the next sweep is that of a :class:`Sweeper` of two levels."""
        return self._sweeper is not None and self._sweeper.two_level

    def end_sweeps(self) -> None:
        """Drop what sweeps share, which may be as large as the cost; a later sweep begins anew."""
        self._sweeper = None

    def plan(self, potentials: Potentials) -> EntropicPlan:
        """Describe the plan that some potentials stand for."""
        return EntropicPlan(
            self.problem.cost, self.problem.marginals, potentials, self.problem.epsilon
        )

    def apply(self, potentials: Potentials, values: Tensor) -> Tensor:
        """Compute plan @ values, shape (n, c), for values of shape (m, c)."""
        plan, (a, b) = self.plan(potentials), self.problem.marginals
        weighted = (b[:, None] * values).to(plan.dtype)
        product = torch.cat([density @ weighted for _, density in plan.densities()])
        return product.to(values.dtype) * a[:, None]

    def block(self, potentials: Potentials, index: Tensor | slice) -> Tensor:
        """Compute rows of the plan, shape (s, m), a new tensor."""
        return self.plan(potentials).rows(index)

    def dense(self, potentials: Potentials) -> Tensor:
        """Build the plan as a matrix, shape (n, m)."""
        plan = self.plan(potentials)
        a, b = (weight.to(plan.dtype) for weight in plan.marginals)
        if next(row_blocks(plan.cost)).stop == len(a):
            return plan.density().mul_(a[:, None]).mul_(b)
        matrix = torch.empty(plan.shape, dtype=plan.dtype, device=plan.device)
        for rows, density in plan.densities():
            matrix[rows] = density.mul_(a[rows, None]).mul_(b)
        return matrix

    def topk(self, potentials: Potentials, k: int) -> tuple[Tensor, Tensor]:
        """Find the k largest entries of each row: values (n, k), and their columns (n, k), int64.

        A row of weight zero has the columns of its conditional plan.
        """
        plan = self.plan(potentials)._replace(marginals=self.problem.conditional.marginals)
        a, b = (weight.to(plan.dtype) for weight in self.problem.marginals)
        best = [density.mul_(b).topk(k, dim=1) for _, density in plan.densities()]
        values = torch.cat([part.values for part in best])
        return values.mul_(a[:, None]), torch.cat([part.indices for part in best])

    def draw(self, potentials: Potentials, rows: Tensor, generator: torch.Generator) -> Tensor:
        """Draw one column from each of ``rows``, shape (s,); none may have weight zero."""
        drawn = [
            sample_categories(self.block(potentials, part), 1, generator)[:, 0]
            for part in rows.split(block_height(self.problem.cost))
        ]
        return torch.cat(drawn)


def softmin_sweep(
    prepared: PreparedProblem, start: Potentials, count: int, relaxation: float = 1.0
) -> Sweep:
    """Run full iterations by two softmins each: the definition of a sweep, always safe.

    An iteration is f = softmin_rows(g), g = softmin_columns(f). With tau = rho / (rho + epsilon)
    below one its fixed point solves the problem whose marginal is held by rho KL (equation 15).

    ``relaxation`` w moves each potential w times as far, f <- f + w (softmin(g) - f), successive
    over-relaxation. Relaxed potentials have no exact marginal, so a relaxed sweep ends with a plain
    iteration that is read off and not continued from.
    """
    f, g = start
    for _ in range(count - (relaxation == 1)):
        f = f + relaxation * (prepared.softmin_rows(g) - f)
        g = g + relaxation * (prepared.softmin_columns(f) - g)
    exact = prepared.half_steps(g)
    state = exact if relaxation == 1 else Potentials(f, g)
    ok = torch.isfinite(exact.g).all()
    problem = prepared.problem
    check = checked(ok, g, exact.g, problem.marginals.b, problem.epsilon)
    return Sweep(exact.f, g, exact.g, state, check)


@dataclass(frozen=True)
class SoftminSweeper:
    """Sweeps as they are defined."""

    prepared: PreparedProblem
    two_level: bool = False

    def __call__(self, start: Potentials, count: int, relaxation: float = 1.0) -> Sweep:
        return softmin_sweep(self.prepared, start, count, relaxation)
