"""Squares of sums that strengthen the first level of liftings: a semidefinite relaxation.

A square is not negative, so that any G (n m, r) proves F(P) >= F(P) - |G' vec P|^2, and the bound
of the first level holds for what is left. The best G is the dual of the semidefinite relaxation of
matchings with all signs and zeros, which is found by alternating directions [1]_: with y = (1,
vec X) of a permutation matrix X,

    min <L, Y>,  Y = V R V',  R semidefinite,  0 <= Y <= 1,  Y_ijkl = 0 unless i = k and j = l or
    i != k and j != l

References
----------
.. [1] D. Oliveira, H. Wolkowicz, Y. Xu. ADMM for the SDP relaxation of the QAP. Mathematical
   Programming Computation 2018.
"""

from time import monotonic
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._certify.question import Question
from torchgw._sinkhorn.duals import Array
from torchgw._tensors.operations import EQUAL

# Weight of what Y and V R V' differ by, over n, where the norm of L is n^2; the length of dual
# steps; the share of L by which the dual may change at the end; and iterations at most. [L1377]
_PENALTY, _STEP, _SETTLED, _ITERATIONS = 1 / 3, 1.618, 1e-5, 5000


class Squares(NamedTuple):
    """Sums of entries, and potentials of the first level for what their squares leave."""

    sums: Array  # (n n, r)
    f: Tensor  # (n, n, n)
    g: Tensor  # (n, n, n)


def squares(question: Question, device: torch.device, seconds: float) -> Squares:
    """Find the sums of entries whose squares leave the highest bound."""
    end, n = monotonic() + seconds, len(question.a)
    x, y = (torch.from_numpy(part).to(device) for part in (question.D_X, question.D_Y))
    # what matchings do not change is left out: sums of squares
    cross = torch.einsum("ik,jl->ijkl", x, y).reshape(n * n, n * n)
    table = x.new_zeros(n * n + 1, n * n + 1)
    table[1:, 1:] = -question.alpha * (cross + cross.T) / n**2
    if question.M is not None:
        own = torch.from_numpy((1 - question.alpha) * question.M / n).to(device)
        table.diagonal()[1:] += own.flatten()
    unit = float(table.norm()) / n**2 or 1.0
    table /= unit
    basis, closed = _hull(n, x), _closed(n, device)
    beta = _PENALTY * n
    ones = torch.full((n * n,), 1 / n, dtype=x.dtype, device=device)
    lifted = x.new_zeros(n * n + 1, n * n + 1)
    lifted[0, 0] = 1.0
    lifted[0, 1:] = lifted[1:, 0] = ones
    # the mean over all permutations
    eye = torch.eye(n, dtype=x.dtype, device=device)
    pairs = torch.einsum("ik,jl->ijkl", eye, eye) / n
    pairs = pairs + torch.einsum("ik,jl->ijkl", 1 - eye, 1 - eye) / (n * max(n - 1, 1))
    lifted[1:, 1:] = pairs.reshape(n * n, n * n)
    dual = torch.zeros_like(lifted)
    for _ in range(_ITERATIONS):
        values, vectors = torch.linalg.eigh(basis.T @ (lifted + dual / beta) @ basis)
        kept = values > 0
        root = basis @ (vectors[:, kept] * values[kept].sqrt())
        whole = root @ root.T
        lifted = whole - (table + dual) / beta
        lifted.clamp_(0.0, 1.0).masked_fill_(closed, 0.0)
        lifted[0, 0] = 1.0
        change = lifted - whole
        dual += _STEP * beta * change
        if monotonic() > end or float(change.norm()) * beta <= _SETTLED * n**2:
            break
    values, vectors = torch.linalg.eigh(basis.T @ dual @ basis)
    kept = values < EQUAL * float(values.min())
    sums = basis @ (vectors[:, kept] * (-values[kept] * unit).sqrt())
    # the total of X is n, and X = n P
    found: Array = (n * (sums[1:] + sums[:1] / n)).cpu().numpy()
    f, g = (-2 * n**2 * unit * part for part in _potentials(dual, n))
    return Squares(found, f, g)


def _potentials(dual: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Read the part of the dual that vanishes on all X of row and column sums 1.

    It is A' W + W' A with A y = 0: for each row and column i, j of X and each entry.
    """
    eye = torch.eye(n, dtype=dual.dtype, device=dual.device)
    one = torch.ones_like(eye[:1])
    sums = torch.cat([torch.kron(eye, one), torch.kron(one, eye)])
    sums = torch.cat([-torch.ones_like(sums[:, :1]), sums], 1)
    inverse = torch.linalg.pinv(sums).T
    w = inverse @ dual
    w = w - w @ sums.T @ inverse / 2
    rows, columns = w[:, 1:].view(2, n, n, n)
    return rows.permute(1, 2, 0), columns.permute(1, 2, 0)


def _hull(n: int, like: Tensor) -> Tensor:
    """Make an orthonormal basis of (1, vec X) times numbers, for X of row and column sums 1."""
    kept = torch.linalg.qr(torch.eye(n, n - 1, dtype=like.dtype, device=like.device) - 1 / n).Q
    basis = like.new_zeros(n * n + 1, (n - 1) ** 2 + 1)
    basis[0, 0], basis[1:, 0] = 0.5**0.5, 0.5**0.5 / n
    basis[1:, 1:] = torch.kron(kept, kept)
    return basis


def _closed(n: int, device: torch.device) -> Tensor:
    """Mark the pairs of pairs that no matching has."""
    eye = torch.eye(n, dtype=torch.bool, device=device)
    apart = (eye[:, None, :, None] ^ eye[None, :, None, :]).reshape(n * n, n * n)
    return torch.nn.functional.pad(apart, (1, 0, 1, 0))
