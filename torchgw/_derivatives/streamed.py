"""How a plan responds, by GMRES: the unknowns are v and the coupling of Z, and u follows from v.

docs/algorithm.md, equation 25. C'(Z) needs nothing but the coupling of Z. Every product is two
passes over the plan.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchgw._derivatives.density import Equation, Response
from torchgw._derivatives.krylov import gmres, growth, unit_of
from torchgw._gradients.contract import Gradient
from torchgw._gradients.dense import DenseGradient
from torchgw._gradients.factored import FactoredGradient
from torchgw._sinkhorn.cost import Cost, added


def by_gmres(equation: Equation) -> Response:
    """Solve for the response of any plan.

    Columns are divided by what a change of v does to their sums, and both parts count alike,
    whatever their units.
    """
    density, problem, upstream, forced, tables, tol, max_iter = equation
    a, b, dtype = density.a, density.b, density.plan.dtype
    gradient: Gradient = DenseGradient(problem) if tables else FactoredGradient(problem)
    generator = torch.Generator(device=density.plan.device)
    start = gradient.start()
    root = density.what_moves(b, a).sqrt()
    null = root / root.norm()

    def curvature(coupling: Tensor) -> Cost:
        """Compute C' at a coupling."""
        return gradient.linearise(start.with_vector(coupling)).cost.to(dtype)

    def step(v: Tensor, term: Cost, sums: tuple[Tensor, Tensor]) -> tuple[Response, Tensor]:
        """Make Z for a v so that rows have given sums; also the errors of its column sums."""
        u = torch.empty_like(a)
        column = -sums[1]
        weighted = b * v
        for rows, block in density.blocks():
            change = term.rows(rows).dense().matrix
            u[rows] = (block * change) @ b - block @ weighted + sums[0][rows]
            column += a[rows] @ (block * (u[rows, None] + v - change))
        return Response(density, u, v, term), column

    def errors(
        v: Tensor, coupling: Tensor, term: Cost, sums: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Compute the errors of the column sums and of the coupling of Z."""
        response, column = step(v, term, sums)
        answer = gradient.update(response, None, generator)  # type: ignore[arg-type]
        scaled = torch.where(root > 0, b * column / root, 0.0)
        # potentials are defined up to a constant, which rounding must not excite
        scaled = scaled - (scaled @ null) * null
        return scaled, (coupling - answer.vector()).to(dtype)

    def unpack(x: Tensor) -> tuple[Tensor, Tensor]:
        v = torch.where(root > 0, x[: len(b)] / root, 0.0)
        return v, (x[len(b) :] / unit).to(nothing[1].dtype)

    def operator(x: Tensor) -> Tensor:
        v, coupling = unpack(x)
        column, rest = errors(v, coupling, curvature(coupling), unforced)
        return torch.cat([column, rest * unit])

    nothing = torch.zeros_like(b), torch.zeros_like(start.vector())
    unforced = torch.zeros_like(a), torch.zeros_like(b)
    column, rest = errors(*nothing, upstream, forced)
    unit = unit_of(column, rest)
    right = -torch.cat([column, rest * unit])
    x, reached, products = gmres(operator, right, tol=tol, max_iter=max_iter)
    v, coupling = unpack(x)
    total = added(upstream, curvature(coupling))
    response, column = step(v, total, forced)
    # columns of weight zero take the potential that their conditional plan defines
    v = torch.where(root > 0, v, -column)
    # the system is about the identity where a change of the plan dies out at once
    return Response(density, response.u, v, total, reached, products, growth(x, right))
