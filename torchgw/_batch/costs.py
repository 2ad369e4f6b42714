"""Costs of many problems: their units, gradients at plans, and first potentials."""

import torch
from torch import Tensor

from torchgw._batch.packing import LARGEST_ROUGH, Packed, has_triton, natural_scale
from torchgw._batch.relaxed import Relaxed
from torchgw._batch.sweep import exact_rows
from torchgw._problem.marginals import STRICT
from torchgw._sinkhorn.annealing import START_NOISE
from torchgw._tensors.operations import sums_along

# epsilon="auto", and that of proximal steps, as shares of the natural scale [L132, L391, L1269],
# times the mass that moves: in the plane it spans as much of the squared lengths that costs are
# made of. [L1530]
AUTO_EPSILON, AUTO_STEP = 0.0025, 0.1


def units(
    problems: Packed, numbers: Tensor
) -> tuple[Tensor | None, Tensor, Tensor, Relaxed | None]:
    """Compute (1 - alpha) M of some problems, their target and first epsilon, and penalties."""
    linear, relaxed = None, problems.relaxed and problems.relaxed.of(numbers)
    if problems.linear is not None:
        share = 1 - problems.alpha[numbers]
        linear = share[:, None, None] * problems.linear(numbers)
    target = problems.epsilon[numbers]
    if relaxed is not None and relaxed.mass is not None:
        # M is divided by the mass that is moved, as the plan is normalised
        mass = relaxed.mass
        linear, target = None if linear is None else linear / mass[:, None, None], target / mass
    scale = natural_scale(problems, numbers, linear)
    auto = (AUTO_STEP if problems.proximal else AUTO_EPSILON) * scale
    if relaxed is not None and relaxed.mass is not None:
        auto = auto * relaxed.mass
    target = torch.where(target.isnan(), auto, target)
    if relaxed is not None and relaxed.rho is not None:
        heavy = relaxed.rho >= STRICT * scale[:, None]
        relaxed = relaxed._replace(rho=torch.where(heavy, torch.inf, relaxed.rho))
    return linear, target, (problems.first[numbers] * scale).maximum(target), relaxed


def start_noise(shape: tuple[int, int], device: torch.device) -> Tensor:
    """Make factors next to one, (n, m), which depend on the place of an entry alone."""
    # The product plan of two spaces whose points all look alike is a saddle point.
    generator = torch.Generator(device="cpu").manual_seed(0)
    noise = torch.randn(shape, dtype=torch.float64, device="cpu", generator=generator)
    return (1 + START_NOISE * noise).to(device)


def cross_product(x: Tensor, y: Tensor, plan: Tensor) -> Tensor:
    """Compute X P Y of some problems."""
    return products(products(x, plan), y)


def gradient(cross: Tensor, alpha: Tensor, linear: Tensor | None) -> Tensor:
    """Compute the costs of plans from X P Y, which is overwritten."""
    cost = cross.mul_(-4 * alpha[:, None, None])
    return cost if linear is None else cost.add_(linear)


def whole(
    cost: Tensor, alpha: Tensor, tables: tuple[Tensor, Tensor], masses: tuple[Tensor, Tensor]
) -> Tensor:
    """Add the terms of rows and of columns to costs, and subtract the mean of the whole."""
    rows, columns = (
        2 * alpha[:, None] * (table.square() * mass[:, None, :]).sum(2)
        for table, mass in zip(tables, masses, strict=True)
    )
    cost = cost + rows[:, :, None] + columns[:, None, :]
    p, q = masses
    return cost - sums_along((cost * q[:, None, :]).sum(2) * p)[:, None, None]


def first_rows(
    relaxed: Relaxed | None, cost: Tensor, weights: tuple[Tensor, Tensor], g: Tensor, unit: Tensor
) -> Tensor:
    """Compute potentials of rows from which iterations go on from g, (k, n)."""
    a, rows = weights[0], exact_rows(cost, weights[1], g, unit)
    if relaxed is None:
        return rows
    rows_now, mass = (rows / unit[:, None])[:, None, :], a[:, None, :]
    return rows + unit[:, None] * relaxed.half_step(0, mass, rows_now, unit)(mass)[:, 0].log()


def products(left: Tensor, right: Tensor) -> Tensor:
    """Compute left (k, n, l) times right (k, l, m), float64; one pair alone is taken twice."""
    # a library chooses its way on a GPU by the number of products
    if has_triton(left.device) and max(*left.shape[1:], right.shape[2]) <= LARGEST_ROUGH:
        from torchgw._batch.product_triton import batch_product

        return batch_product(left, right)
    if len(left) == 1:
        return torch.bmm(left.expand(2, -1, -1), right.expand(2, -1, -1))[:1]
    return torch.bmm(left, right)
