"""Linear systems known by their products only.

Restarted GMRES: Y. Saad, M. Schultz, SIAM Journal on Scientific and Statistical Computing 1986.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["gmres"]

# Vectors kept before a restart. [L243]
_RESTART = 60


def gmres(
    operator: Callable[[Tensor], Tensor], right: Tensor, *, tol: float, max_iter: int
) -> tuple[Tensor, float]:
    """Solve operator(x) = right, vectors of shape (n,); return x and its relative residual.

    The operator is linear, and may be singular if ``right`` is in its range. It is called at most
    ``max_iter`` times, until the relative residual is ``tol``.
    """
    size = float(right.norm())
    x = torch.zeros_like(right)
    if size == 0:
        return x, 0.0
    done, residual, error = 0, right, 1.0
    while done < max_iter and error > tol:
        length = min(_RESTART, max_iter - done)
        before = error
        x, used = _cycle(operator, residual, x, length, tol * size)
        done += used + 1
        residual = right - operator(x)
        error = float(residual.norm()) / size
        if error > 0.99 * before:
            break
    return x, error


def _cycle(
    operator: Callable[[Tensor], Tensor], residual: Tensor, x: Tensor, length: int, goal: float
) -> tuple[Tensor, int]:
    """Improve x within the Krylov space of the residual; return it and the number of products."""
    start = float(residual.norm())
    basis = residual.new_zeros(length + 1, len(residual))
    basis[0] = residual / start
    hessenberg = torch.zeros(length + 1, length, dtype=torch.float64, device="cpu")
    for k in range(length):
        w = operator(basis[k])
        # Gram-Schmidt twice, which keeps the basis orthogonal to rounding
        for _ in range(2):
            projection = basis[: k + 1] @ w
            w = w - projection @ basis[: k + 1]
            hessenberg[: k + 1, k] += projection.cpu().double()
        norm = float(w.norm())
        hessenberg[k + 1, k] = norm
        rhs = hessenberg.new_zeros(k + 2, 1)
        rhs[0] = start
        small = hessenberg[: k + 2, : k + 1]
        weights = torch.linalg.lstsq(small, rhs, driver="gelsd").solution
        left = float((rhs - small @ weights).norm())
        if left <= goal or norm <= 1e-14 * start:
            break
        basis[k + 1] = w / norm
    return x + weights[:, 0].to(basis) @ basis[: k + 1], k + 1
