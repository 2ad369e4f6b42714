"""Linear systems known by their products only.

Restarted GMRES: Y. Saad, M. Schultz, SIAM Journal on Scientific and Statistical Computing 1986.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

# Vectors kept before a restart at least. [L243]
_RESTART = 60
# Vectors kept at most; fewer, if all of them would have more than so many numbers. [L527]
_MOST = 240
_NUMBERS = 2**25
# Products at most, before a derivative is refused. [L266, L492, L1321]
MOST_PRODUCTS = 1000


def gmres(
    operator: Callable[[Tensor], Tensor], right: Tensor, *, tol: float, max_iter: int
) -> tuple[Tensor, float, int]:
    """Solve operator(x) = right, shape (n,); return x, its relative residual and the products."""
    # The operator is linear, and may be singular if `right` is in its range. It is called at most
    # `max_iter` times, until the relative residual is `tol`.
    size = float(right.norm())
    x = torch.zeros_like(right)
    if size == 0:
        return x, 0.0, 0
    done, residual, error = 0, right, 1.0
    kept = max(_RESTART, min(_MOST, _NUMBERS // len(right)))
    while done < max_iter and error > tol:
        length = min(kept, max_iter - done)
        before = error
        x, used = _cycle(operator, residual, x, length, tol * size)
        done += used + 1
        residual = right - operator(x)
        error = float(residual.norm()) / size
        if error > 0.99 * before:
            break
    return x, error, done


def growth(x: Tensor, right: Tensor) -> float:
    """Divide the size of a solution by that of its right side."""
    return float(x.norm()) / max(float(right.norm()), torch.finfo(right.dtype).tiny)


def unit_of(one: Tensor, other: Tensor) -> float:
    """Find the factor for the second part of a right side with which both parts count alike."""
    sizes = float(one.norm()), float(other.norm())
    return sizes[0] / sizes[1] if min(sizes) > 0 else 1.0


def _cycle(
    operator: Callable[[Tensor], Tensor], residual: Tensor, x: Tensor, length: int, goal: float
) -> tuple[Tensor, int]:
    """Improve x within the Krylov space of the residual; return it and the number of products."""
    start = float(residual.norm())
    basis = residual.new_zeros(length + 1, len(residual))
    basis[0] = residual / start
    hessenberg = torch.zeros(length + 1, length, dtype=torch.float64, device="cpu")
    turns: list[tuple[float, float]] = []
    left = start
    for k in range(length):
        w = operator(basis[k])
        # Gram-Schmidt twice, which keeps the basis orthogonal to rounding
        for _ in range(2):
            projection = basis[: k + 1] @ w
            w = w - projection @ basis[: k + 1]
            hessenberg[: k + 1, k] += projection.cpu().double()
        norm = float(w.norm())
        hessenberg[k + 1, k] = norm
        left *= _turned(hessenberg[: k + 1, k].tolist(), norm, turns)
        if left <= goal or norm <= 1e-14 * start:
            break
        basis[k + 1] = w / norm
    rhs = hessenberg.new_zeros(k + 2, 1)
    rhs[0] = start
    weights = torch.linalg.lstsq(hessenberg[: k + 2, : k + 1], rhs, driver="gelsd").solution
    return x + weights[:, 0].to(basis) @ basis[: k + 1], k + 1


def _turned(column: list[float], below: float, turns: list[tuple[float, float]]) -> float:
    """Turn a column as those before, then its tail away; return by what the residual shrinks."""
    for i, (c, s) in enumerate(turns):
        column[i : i + 2] = [c * column[i] + s * column[i + 1], c * column[i + 1] - s * column[i]]
    length = math.hypot(column[-1], below)
    c, s = (column[-1] / length, below / length) if length > 0 else (1.0, 0.0)
    turns.append((c, s))
    return s
