"""Problems that begin next to where they end: a few Newton steps, and nothing read in between.

Where a training step has moved the distances a little, the last plan and its potentials are near
the next ones. An iteration solves the linear problem by a short sweep and a Newton step, and goes
on from where the last two plans lead. Every number of it stays on the device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._batch.costs import cross_product, gradient
from torchgw._batch.newton import newton_step
from torchgw._batch.sweep import exact_rows, sweep
from torchgw._batch.worth import own_squares

# Sinkhorn iterations before a Newton step; how far a plan is led on, in last changes. [L1570]
# [L1410]
_SHORT, _FURTHEST = 4, 10.0


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
    f: Tensor  # (B, n) potentials of the plan
    g: Tensor  # (B, m)
    objective: Tensor  # (B,) with the entropy
    most: Tensor  # (B,) what it was where the iterations began
    cost: Tensor  # (B, n, m) linearised at the plan
    point: Tensor  # (B, n, m) a plan, or one that the last two lead to
    ahead: Tensor  # (B, n, m) the cost linearised there
    step: Tensor  # (B, n, m) from the point before to the plan
    change: Tensor  # (B,) its L1 norm
    error: Tensor  # (B,) L1 distance of the columns of the plan to b


def begin(problems: Nearby, plan: Tensor, g: Tensor) -> Place:
    """Begin at plans, and at the potentials of their columns."""
    cost, far = linearised(problems, plan), torch.full_like(problems.alpha, torch.inf)
    most, rows = objective(problems, plan, cost), torch.zeros_like(problems.a)
    # a step without a length leads nowhere
    parts = (plan, rows, g, most, most, cost, plan, cost, plan - plan, far, far)
    # each has memory of its own, so that an iteration can be written there
    return Place(*map(torch.clone, parts))


def objective(problems: Nearby, plan: Tensor, cost: Tensor) -> Tensor:
    """Compute the objectives (B,) of plans, with the entropy, given the costs linearised there."""
    share = plan / (problems.a[:, :, None] * problems.b[:, None, :]).clamp_min(1e-300)
    return _worth(problems, plan, cost, problems.epsilon * torch.xlogy(plan, share).sum((1, 2)))


def follow(problems: Nearby, last: Place) -> Place:
    """Take one outer iteration of all problems."""
    masses, unit = (problems.a, problems.b), problems.epsilon[:, None]
    cost, rows = last.ahead, exact_rows(last.ahead, problems.b, last.g, problems.epsilon)
    out = torch.empty_like(cost)
    made = sweep(cost, masses, (rows, last.g), problems.epsilon, None, out, count=_SHORT)
    newton = newton_step(made.plan, *masses)
    f, g = made.f + unit * newton.rows, made.g + unit * newton.columns
    plan = made.plan * newton.rows.exp()[:, :, None] * newton.columns.exp()[:, None, :]
    p, q = plan.sum(2), plan.sum(1)
    error = (q - problems.b).abs().sum(1)
    entropy = (f * p).sum(1) + (g * q).sum(1) - (plan * cost).sum((1, 2))
    after = linearised(problems, plan)
    worth = _worth(problems, plan, after, entropy)
    # the step that the last two would make zero, if they changed by the same share of each other
    step = plan - last.point
    turn = step - last.step
    share = (step * turn).sum((1, 2)) / turn.square().sum((1, 2)).clamp_min(1e-300)
    known = last.change.isfinite()
    share = torch.where(known, share.clamp(-_FURTHEST, 1.0), 0.0)[:, None, None]
    point = plan - share * (plan - last.plan)
    ahead = after - share * (after - last.cost)
    change = step.abs().sum((1, 2))
    return Place(plan, f, g, worth, last.most, after, point, ahead, step, change, error)


def linearised(problems: Nearby, plan: Tensor) -> Tensor:
    """Linearise at plans."""
    return gradient(cross_product(problems.x, problems.y, plan), problems.alpha, problems.linear)


def _worth(problems: Nearby, plan: Tensor, cost: Tensor, entropy: Tensor) -> Tensor:
    """Compute the objectives of plans, given the costs linearised there."""
    # <cost, P> is -4 alpha <X P Y, P>, and the linear term
    whole = cost if problems.linear is None else cost + problems.linear
    own = own_squares(problems.x, plan.sum(2)) + own_squares(problems.y, plan.sum(1))
    return problems.alpha * own + (whole * plan).sum((1, 2)) / 2 + entropy
