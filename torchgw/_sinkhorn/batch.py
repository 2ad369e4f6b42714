"""Sinkhorn on many small problems of one shape at once, by PyTorch operations."""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchgw._tensors.operations import exponentiate_
from torchgw._typing import Marginals

# Factor of a scaling up to which over-relaxation is applied. [L107]
RELAXED_FACTOR = 2.0
# Scalings and their sums are kept between these, so that float32 neither over- nor underflows.
# [L283]
SMALLEST, LARGEST = 1e-30, 1e30
# Smaller exponents are raised to this one. [L283]
LEAST_EXPONENT = -70.0
# Binary digits of a factor of e.
_DIGITS = 1 / math.log(2)
# Entries of a kernel up to which a CPU iterates by NumPy. [L405, L463, L1383]
_HOST_ENTRIES = 2**16


class BatchPlans(NamedTuple):
    """Plans of B problems, and the potentials that made them."""

    plans: Tensor  # (B, s, t)
    g: Tensor  # (B, 1, t) cost units


# Costs, marginals, g, epsilon, iterations and relaxation, as :func:`solve_batch` takes them.
BatchSolver = Callable[[Tensor, Marginals, Tensor, Tensor, int, float], BatchPlans]


def solve_batch(
    costs: Tensor,
    marginals: Marginals,
    g: Tensor,
    epsilon: Tensor,
    iterations: int,
    relaxation: float,
) -> BatchPlans:
    """Run over-relaxed Sinkhorn iterations of many problems (B, s, t), each at its own epsilon."""
    # The marginals (s,) and (t,) are positive; g (B, 1, t) is where to start, in cost units; a
    # relaxation of at least 1 says how many times as far each scaling moves, in logarithms.
    # Rows are shifted by their largest exponent, so that no row underflows, and over-relaxation is
    # bounded, so that none overflows. A plain iteration comes last. Nothing is read from the
    # device.
    if costs.device.type == "cpu" and costs[0].numel() <= _HOST_ENTRIES:
        return _solve_on_host(costs, marginals, g, epsilon, iterations, relaxation - 1)
    a, b = marginals.a.to(costs.dtype)[:, None], marginals.b.to(costs.dtype)
    epsilon = epsilon[:, None, None].to(costs.dtype)
    exponent = (g - costs).div_(epsilon)
    exponent = exponent.sub_(exponent.amax(-1, keepdim=True)).clamp_(min=LEAST_EXPONENT)
    kernel = exponentiate_(exponent)
    v = b.expand(len(costs), 1, -1)
    u = a / (v @ kernel.mT).mT
    for _ in range(iterations):
        v = _relax(v, b / (u.mT @ kernel), relaxation - 1)
        u = _relax(u, a / (v @ kernel.mT).mT, relaxation - 1)
    v = (b / (u.mT @ kernel)).clamp_(SMALLEST, LARGEST)
    u = a / (v @ kernel.mT).mT
    return BatchPlans(kernel.mul_(u).mul_(v), g + epsilon * (v / b).log())


def _solve_on_host(
    costs: Tensor, marginals: Marginals, g: Tensor, epsilon: Tensor, iterations: int, excess: float
) -> BatchPlans:
    """Do the same by NumPy, whose calls on few points take a fraction of PyTorch's."""
    start, kind = g.numpy(), g.numpy().dtype
    rows, columns = (weight.numpy().astype(kind) for weight in marginals)
    unit = epsilon.numpy().astype(kind)[:, None, None]
    # passes over all entries are left to PyTorch, by powers of two as in `exponentiate_`
    kernel = (g - costs).mul_(torch.from_numpy(_DIGITS / unit))
    kernel = kernel.sub_(kernel.amax(-1, keepdim=True)).clamp_(min=LEAST_EXPONENT * _DIGITS)
    forth = kernel.exp2_().numpy()  # (B, s, t)
    back = forth.swapaxes(1, 2)
    v = np.repeat(columns[None, None], len(forth), 0)
    u = rows / (v @ back)
    new_u, new_v = np.empty_like(u), np.empty_like(v)
    side_u, side_v = ((np.empty_like(old), *_bounds(old.shape, kind)) for old in (u, v))

    def relax(old: Any, new: Any, side: tuple[Any, ...]) -> None:
        factor, least, most, smallest, largest = side
        if excess:
            np.divide(new, old, out=factor)
            np.maximum(factor, least, out=factor)
            np.minimum(factor, most, out=factor)
            # a square root, which takes a third of the time of a power, where that is one
            factor **= excess
            np.multiply(new, factor, out=new)
        np.minimum(np.maximum(new, smallest, out=old), largest, out=old)

    for _ in range(iterations):
        np.divide(columns, np.matmul(u, forth, out=new_v), out=new_v)
        relax(v, new_v, side_v)
        np.divide(rows, np.matmul(v, back, out=new_u), out=new_u)
        relax(u, new_u, side_u)
    v = np.minimum(np.maximum(columns / (u @ forth), SMALLEST), LARGEST)
    kernel.mul_(torch.from_numpy(rows / (v @ back)).mT).mul_(torch.from_numpy(v))
    moved = unit * torch.from_numpy(v / columns).log_().numpy()
    return BatchPlans(kernel, torch.from_numpy(start + moved))


@lru_cache(maxsize=8)
def _bounds(shape: tuple[int, ...], kind: Any) -> list[Any]:
    """Make arrays of the bounds: NumPy takes longer to read a number."""
    bounds = (1 / RELAXED_FACTOR, RELAXED_FACTOR, SMALLEST, LARGEST)
    return [np.full(shape, bound, kind) for bound in bounds]


def _relax(old: Tensor, new: Tensor, excess: float) -> Tensor:
    """Multiply by (new / old)^(1 + excess), the excess factor bounded."""
    if not excess:
        return new.clamp_(SMALLEST, LARGEST)
    bounded = (new / old).clamp_(1 / RELAXED_FACTOR, RELAXED_FACTOR)
    return (new * bounded.pow_(excess)).clamp_(SMALLEST, LARGEST)
