"""Problems that begin next to where they end: a few Newton steps, and nothing read in between.

Where a training step has moved the distances a little, the last plan and its potentials are near
the next ones, and nearer still if they go on as in the step before. An iteration solves the linear
problem by a short sweep and a Newton step, and goes on from where the last two plans lead. Every
number of it stays on the device.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._batch.newton import column_step
from torchgw._batch.packing import cross_product, gradient
from torchgw._batch.sweep import LARGEST_EXPONENT
from torchgw._batch.worth import own_squares
from torchgw._tensors.operations import TINY

# Sinkhorn iterations before a Newton step; how far a plan is led on, in last changes. [L1570]
# [L1410]
_SHORT, _FURTHEST = 4, 10.0
# Weight of points without one, which no sum sees, so that nothing is divided by zero. A choice.
_LIGHTEST = 1e-100


class Nearby(NamedTuple):
    """B problems."""

    x: Tensor  # (B, n, n)
    y: Tensor  # (B, m, m)
    linear: Tensor | None  # (B, n, m), (1 - alpha) M
    a: Tensor  # (B, n)
    b: Tensor  # (B, m)
    alpha: Tensor  # (B,)
    epsilon: Tensor  # (B,)


class Place(NamedTuple):
    """Where B problems are."""

    plan: Tensor  # (B, n, m)
    g: Tensor  # (B, m) potentials of its columns; its rows have their masses
    objective: Tensor  # (B,) with the entropy
    most: Tensor  # (B,) what it was where the iterations began
    own: Tensor  # (B,) of the objective: what the masses of the rows cost
    prices: Tensor  # (B, m) and what those of the columns do
    cost: Tensor  # (B, n, m) linearised at the plan
    ahead: Tensor  # (B, n, m) the cost linearised where the last two plans lead to, `point`
    point: Tensor  # (B, n, m)
    step: Tensor | None  # (B, n, m) from the point before to the plan
    change: Tensor  # (B,) its L1 norm
    error: Tensor  # (B,) L1 distance of the columns of the plan to b


def begin(problems: Nearby, plan: Tensor, g: Tensor, toward: Tensor) -> Place:
    """Begin at plans and at potentials of their columns, linearised a step ahead of the plans."""
    x, y, _, a, b, alpha, epsilon = problems
    cost, far = linearised(problems, plan), torch.full_like(alpha, torch.inf)
    most, point = objective(problems, plan, cost), plan + toward
    # rows will have their masses, and columns so nearly that the square of the rest is nothing
    of_x, of_y = ((table.square() @ part[:, :, None])[:, :, 0] for table, part in ((x, a), (y, b)))
    own = alpha * ((of_x * a).sum(1) - (of_y * b).sum(1)) + epsilon * entropy(a)
    prices = (2 * alpha)[:, None] * of_y - epsilon[:, None] * b.clamp_min(_LIGHTEST).log()
    ahead = linearised(problems, point)
    return Place(plan, g, most, most, own, prices, cost, ahead, point, None, far, far)


def entropy(part: Tensor) -> Tensor:
    """Compute - sum p log p (B,)."""
    found: Tensor = torch.special.entr(part)
    return found.flatten(1).sum(1)


def objective(problems: Nearby, plan: Tensor, cost: Tensor) -> Tensor:
    """Compute the objectives (B,) of plans, with the entropy, given the costs linearised there."""
    share = plan / (problems.a[:, :, None] * problems.b[:, None, :]).clamp_min(TINY)
    own = own_squares(problems.x, plan.sum(2)) + own_squares(problems.y, plan.sum(1))
    entropic = problems.epsilon * torch.xlogy(plan, share).sum((1, 2))
    return problems.alpha * own + _linear(problems, plan, cost) + entropic


def follow(problems: Nearby, last: Place) -> Place:
    """Take one outer iteration of all problems."""
    a, b = (part.clamp_min(_LIGHTEST)[:, None, :] for part in (problems.a, problems.b))
    unit = problems.epsilon[:, None, None]
    # a kernel whose rows have sum one
    exponent = torch.addcmul(last.g[:, None, :], unit, b.log()).sub(last.ahead).div_(unit)
    kernel = exponent.softmax(2).clamp_min_(math.exp(-LARGEST_EXPONENT))
    turned, s = kernel.mT, a
    for _ in range(_SHORT):
        t = b / torch.bmm(s, kernel)
        s = a / torch.bmm(t, turned)
    plan = (kernel * s.mT).mul_(t)
    step, _ = column_step(plan, a[:, 0], plan.sum(1), b[:, 0], 0.0)
    t = t * step[:, None, :].exp()
    s = a / torch.bmm(t, turned)
    plan = kernel.mul_(s.mT).mul_(t)
    q, after = plan.sum(1), linearised(problems, plan)
    g = torch.addcmul(last.g, unit[:, 0], t[:, 0].log())
    error = torch.linalg.vector_norm(q - problems.b, 1, 1)
    worth = last.own + (q * last.prices).sum(1) - problems.epsilon * entropy(plan)
    worth = worth + _linear(problems, plan, after)
    moved = plan - last.point
    point, ahead = plan, after
    if last.step is not None:
        # the step that the last two would make zero, if they changed by the same share of each
        # other
        turn = moved - last.step
        share = (moved * turn).sum((1, 2)) / turn.square().sum((1, 2)).clamp_min(TINY)
        back = share.clamp(-_FURTHEST, 1.0)[:, None, None]
        point, ahead = torch.lerp(plan, last.plan, back), torch.lerp(after, last.cost, back)
    change = torch.linalg.vector_norm(moved, 1, (1, 2))
    return last._replace(
        plan=plan, g=g, objective=worth, cost=after, ahead=ahead, point=point, step=moved,
        change=change, error=error,
    )  # fmt: skip


def linearised(problems: Nearby, plan: Tensor) -> Tensor:
    """Linearise at plans."""
    return gradient(cross_product(problems.x, problems.y, plan), problems.alpha, problems.linear)


def _linear(problems: Nearby, plan: Tensor, cost: Tensor) -> Tensor:
    """Compute the part of objectives that is left of costs, linearised at plans."""
    # <cost, P> is -4 alpha <X P Y, P>, and the linear term
    whole = cost if problems.linear is None else cost + problems.linear
    return (whole * plan).sum((1, 2)) / 2
