"""How a plan at a Gromov-Wasserstein fixed point changes with its inputs, without storing it.

docs/algorithm.md, equations 23 to 26. An entropic plan changes with its cost by S(E) =
P o (u + v - E) / epsilon, entry by entry, with u and v such that no row or column sum changes. A
fixed point changes by dP = S(dC + C'(dP)), where C'(dP) = -4 alpha DX dP DY. So a function whose
gradient in P is W changes by <Z, dC> + <u, da> + <v, db>, where

    Z = S(W + C'(Z)).

The unknowns are v and the coupling of Z, which is all that C'(Z) needs; u follows from v.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from torchgw._derivatives.conjugate import by_conjugate_gradients
from torchgw._derivatives.density import Density
from torchgw._derivatives.encoded import MOST_NUMBERS, Encoded, Moved, what_moves
from torchgw._derivatives.krylov import gmres
from torchgw._errors import ConvergenceWarning, warn_user
from torchgw._gradients.contract import Gradient
from torchgw._gradients.dense import DenseGradient
from torchgw._gradients.factored import FactoredGradient
from torchgw._plans.transport import TransportPlan
from torchgw._problem.problem import Problem
from torchgw._sinkhorn.cost import Cost, added

# Relative residual of the linear system. [L242, L266]
_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
_MAX_ITER = 1000
# Residual worth a warning: the marginal error of the plan leaves some that no iteration removes.
# [L244]
_WORRYING = 1e-4
# Products of tables that conjugate gradients take, in units of those of moments, and operations
# below which only calls count. [L730]
_TABLES = 20
_FEW_OPERATIONS = 2.5e8
# Size of the solution over that of the right side from which the fixed point counts as nearly
# singular: then the default `tol`, 1e-5, leaves two digits of a derivative. [L355]
_NEARLY_SINGULAR = 1e3


class Response:
    """Z, shape (n, m), read block by block; ``u`` and ``v`` are derivatives by the weights."""

    def __init__(
        self,
        density: Density,
        u: Tensor,
        v: Tensor,
        cost: Cost,
        transposed: bool = False,
        residual: float = 0.0,
        iterations: int = 0,
    ) -> None:
        # how well the linear system is solved, relative to its right side, and by how many products
        self.residual = residual
        self.iterations = iterations
        self.u = u
        self.v = v
        self._density = density
        self._cost = cost
        self._transposed = transposed

    @property
    def converged(self) -> bool:
        """Whether the linear system is solved; a warning said so otherwise."""
        return self.residual <= _WORRYING

    @property
    def T(self) -> Response:  # noqa: N802 - the name of every array library
        """The response from target to source."""
        return Response(
            self._density, self.u, self.v, self._cost, not self._transposed, self.residual,
            self.iterations,
        )  # fmt: skip

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m), or (m, n) when transposed."""
        n, m = self._density.plan.shape
        return (m, n) if self._transposed else (n, m)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield Z by blocks of rows."""
        plan, density = self._density.plan, self._density
        for rows, block in density.blocks():
            change = self._cost.rows(rows).exponent(self.u[rows], self.v, plan.epsilon)
            yield rows, change.mul_(block).mul_(density.a[rows, None]).mul_(density.b)

    def __matmul__(self, values: Tensor) -> Tensor:
        """Multiply by values of shape (m, c)."""
        table = values.to(self._density.plan.dtype)
        if self._transposed:
            result = table.new_zeros(self.shape[0], *table.shape[1:])
            for rows, block in self.blocks():
                result += block.T @ table[rows]
            return result.to(values.dtype)
        return torch.cat([block @ table for _, block in self.blocks()]).to(values.dtype)

    def stored(self) -> Tensor:
        """Build the matrix."""
        matrix = torch.cat([block for _, block in self.blocks()])
        return matrix.T if self._transposed else matrix


def respond(
    plan: TransportPlan,
    given: Problem,
    upstream: Cost,
    masses: tuple[Tensor, Tensor] | None = None,
) -> Response:
    """Solve for the response of a plan at a fixed point, given a function's gradient in the plan.

    ``given`` is the problem of the plan; C' does not depend on its linear term. The response is
    also the change of the plan with a cost that changes by ``upstream``, S being symmetric;
    ``masses`` are then the changes of the weights over the weights, (n,) and (m,).
    """
    density = Density(plan)
    upstream = upstream.to(plan.dtype)
    problem = Problem(given.source, given.target, given.marginals, given.alpha, None)
    problem = problem.to(plan.dtype)
    forced = torch.zeros_like(density.a), torch.zeros_like(density.b)
    if masses is not None:
        forced = masses[0].to(density.a) * plan.epsilon, masses[1].to(density.b) * plan.epsilon
    positive = all(bool((weight > 0).all()) for weight in plan.weights)
    small = density.is_stored and _is_small(problem)
    if positive and not small:
        response = _by_moments(density, problem, upstream, forced)
        if response is not None:
            return response
    system = _Streamed(density, problem, upstream, forced, small)
    tol = _TOLERANCE[plan.dtype]
    found = by_conjugate_gradients(
        density, system.gradient, upstream, forced, tol=tol, max_iter=_MAX_ITER
    )
    # at saddle points and where rounding ends conjugate gradients, small problems take moments
    if found is not None and not (positive and small and found.residual > _WORRYING):
        _warn_of_growth(found.growth)
        _warn_of_residual(found.residual)
        return system.response(found.v, found.response, found.residual, found.products)
    if positive and small:
        response = _by_moments(density, problem, upstream, forced)
        if response is not None:
            return response
    right = -system.error_at_zero
    x, reached = gmres(system.times, right, tol=tol, max_iter=_MAX_ITER)
    # the system is about the identity where a change of the plan dies out at once
    _warn_of_growth(float(x.norm()) / max(float(right.norm()), torch.finfo(right.dtype).tiny))
    _warn_of_residual(reached)
    return system.response(*system.unpack(x), reached, system.products)


class _Streamed:
    """The linear system in v and the coupling of Z, whose every product is two passes over a plan.

    Columns are divided by what a change of v does to their sums, and both parts count alike,
    whatever their units.
    """

    def __init__(
        self,
        density: Density,
        problem: Problem,
        upstream: Cost,
        forced: tuple[Tensor, Tensor],
        stored: bool,
    ) -> None:
        stored |= problem.source.factors() is None and problem.target.factors() is None
        self.gradient: Gradient = DenseGradient(problem) if stored else FactoredGradient(problem)
        self.products = 0
        self._density, self._upstream, self._forced = density, upstream, forced
        self._unforced = torch.zeros_like(density.a), torch.zeros_like(density.b)
        self._generator = torch.Generator(device=density.plan.device)
        self._product = self.gradient.start()
        self._root = what_moves(density.b, density.squares(density.a)).sqrt()
        self._null = self._root / self._root.norm()

    @cached_property
    def error_at_zero(self) -> Tensor:
        """The error of the equations at zero, in units of both parts."""
        column, rest = self._parts_at_zero
        return torch.cat([column, rest * self._unit])

    @cached_property
    def _parts_at_zero(self) -> tuple[Tensor, Tensor]:
        zero = torch.zeros_like(self._density.b), torch.zeros_like(self._product.vector())
        return self._error(*zero, self._upstream, self._forced)

    @cached_property
    def _unit(self) -> float:
        sizes = [float(part.norm()) for part in self._parts_at_zero]
        return sizes[0] / sizes[1] if min(sizes) > 0 else 1.0

    def times(self, x: Tensor) -> Tensor:
        """Multiply by the matrix of the system."""
        self.products += 1
        v, coupling = self.unpack(x)
        column, rest = self._error(v, coupling, self._curvature(coupling), self._unforced)
        return torch.cat([column, rest * self._unit])

    def unpack(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Read v and the coupling off the unknowns."""
        count = len(self._root)
        v = torch.where(self._root > 0, x[:count] / self._root, 0.0)
        return v, (x[count:] / self._unit).to(self._product.vector().dtype)

    def response(self, v: Tensor, coupling: Tensor, reached: float, count: int) -> Response:
        """Read Z off the solution of the system."""
        total = added(self._upstream, self._curvature(coupling))
        response, column = self._step(v, total, self._forced)
        # columns of weight zero take the potential that their conditional plan defines
        v = torch.where(self._root > 0, v, -column)
        return Response(self._density, response.u, v, total, residual=reached, iterations=count)

    def _step(self, v: Tensor, term: Cost, sums: tuple[Tensor, Tensor]) -> tuple[Response, Tensor]:
        """Make Z for a v so that rows have given sums; also the errors of its column sums."""
        density = self._density
        u = torch.empty_like(density.a)
        column = -sums[1]
        weighted = density.b * v
        for rows, block in density.blocks():
            change = term.rows(rows).dense().matrix
            u[rows] = (block * change) @ density.b - block @ weighted + sums[0][rows]
            column += density.a[rows] @ (block * (u[rows, None] + v - change))
        return Response(density, u, v, term), column

    def _curvature(self, coupling: Tensor) -> Cost:
        """Compute C' at a coupling."""
        cost = self.gradient.linearise(self._product.with_vector(coupling)).cost
        return cost.to(self._density.plan.dtype)

    def _error(
        self, v: Tensor, coupling: Tensor, term: Cost, sums: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Compute the errors of the column sums and of the coupling of Z."""
        density, root = self._density, self._root
        response, column = self._step(v, term, sums)
        answer = self.gradient.update(response, None, self._generator)  # type: ignore[arg-type]
        scaled = torch.where(root > 0, density.b * column / root, 0.0)
        # potentials are defined up to a constant, which rounding must not excite
        scaled = scaled - (scaled @ self._null) * self._null
        return scaled, (coupling - answer.vector()).to(density.plan.dtype)


def _is_small(problem: Problem) -> bool:
    """Whether some products of tables are less work than the moments of factors."""
    one, two = problem.source.factors(), problem.target.factors()
    if one is None or two is None:
        return False
    (n, r), (m, s) = one.matrix.shape, two.matrix.shape
    moments = s * s * n * (m + r * r)
    return _TABLES * n * m * (n + m) < moments + _FEW_OPERATIONS


def _by_moments(
    density: Density, problem: Problem, upstream: Cost, forced: tuple[Tensor, Tensor]
) -> Response | None:
    """Solve between spaces that both have factors; ``None`` for others and large ranks."""
    plan = density.plan
    one, two = problem.source.factors(), problem.target.factors()
    if one is None or two is None or one.signs.numel() * two.signs.numel() > MOST_NUMBERS:
        return None
    system = Encoded(
        (one, two), (density.times, density.times_transposed), density.squares, problem.alpha,
        plan.epsilon,
    )  # fmt: skip
    sums = forced[0] * density.a, forced[1] * density.b
    given = added(upstream, system.forced(sums[0] / plan.epsilon, sums[1] / plan.epsilon))
    columns = torch.cat([torch.ones_like(system.B[:, :1]), system.B], 1) * density.b[:, None]
    means, column = [], torch.zeros_like(density.b)
    for rows, block in density.blocks():
        change = block * given.rows(rows).dense().matrix
        means.append(change @ columns)
        column += density.a[rows] @ change
    table = torch.cat(means) * density.a[:, None]
    moved = Moved(table[:, 0], column * density.b, system.A.T @ table[:, 1:])
    found = system.solve(moved, sums, tol=_TOLERANCE[plan.dtype], max_iter=_MAX_ITER)
    _warn_of_growth(found.growth)
    _warn_of_residual(found.residual)
    return Response(
        density, found.u, found.v, added(given, found.curve), residual=found.residual,
        iterations=found.products,
    )  # fmt: skip


def _warn_of_growth(growth: float) -> None:
    """Warn of a solution far larger than the right side."""
    if growth > _NEARLY_SINGULAR:
        warn_user(
            "The fixed point of the solve is nearly singular: the implicit derivative enlarges "
            f"errors of the plan {growth:.1e} times. Lower `tol` and `inner_tol`, or raise "
            "`epsilon`.",
            ConvergenceWarning,
        )


def _warn_of_residual(reached: float) -> None:
    """Warn of a linear system that is not solved."""
    if reached > _WORRYING:
        warn_user(
            f"The implicit derivative of the plan has a relative residual of {reached:.1e}. "
            "Raise `epsilon`, or lower `tol` and `inner_tol`.",
            ConvergenceWarning,
        )
