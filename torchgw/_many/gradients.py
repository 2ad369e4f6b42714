"""Gradients of many objectives by the envelope theorem: at a solution the plan stands still."""

from typing import Any

import torch
from torch import Tensor

from torchgw._errors import UnsupportedError
from torchgw._many.questions import Questions
from torchgw._many.solver import Kept
from torchgw._many.spaces import Listed


def attach_losses(
    asked: Questions,
    kept: dict[int, Kept],
    objective: Tensor,
    inputs: dict[str, Any],
    distances: Any,
) -> Tensor:
    """Return the objectives (B,) as a tensor whose gradients reach the inputs."""
    # `inputs` holds, as the user gave them, the lists X and Y, M, a and b.
    terms = []
    with torch.enable_grad():
        for number in range(len(asked)):
            plan, alpha = kept[number].plan, float(asked.alpha[number])
            x = _table(inputs["X"], number, distances, 0, plan)
            y = _table(inputs["Y"], number, distances, 1, plan)
            p, q = plan.sum(1), plan.sum(0)
            own = torch.outer(p, p) * x.square(), torch.outer(q, q) * y.square()
            term = alpha * (own[0].sum() + own[1].sum() - 2 * ((x @ plan @ y) * plan).sum())
            if inputs["M"] is not None:
                cost = torch.as_tensor(inputs["M"][number], device=plan.device).to(plan)
                term = term + (1 - alpha) * (cost * plan).sum()
            potentials = kept[number].f, kept[number].g
            sides = zip("ab", (x, y), (p, q), potentials, strict=True)
            for name, table, mass, potential in sides:
                weights = None if inputs[name] is None else inputs[name][number]
                if isinstance(weights, Tensor) and weights.requires_grad:
                    # the potential of the whole cost, up to a constant, which weights of sum one do
                    # not see
                    whole = potential + 2 * alpha * (table.detach().square() @ mass)
                    whole = whole - mass @ whole
                    term = term + (whole * weights.to(plan)).sum()
            terms.append(term)
        surrogate = torch.stack(terms)
        return objective + (surrogate - surrogate.detach())


def _table(listed: Listed, number: int, distances: Any, place: int, plan: Tensor) -> Tensor:
    """Compute the distances of one space (n, n), attached to the tensors they are made of."""
    space = listed.items[number]
    if listed.are_tables:
        return torch.as_tensor(space, device=plan.device).to(plan)
    name = distances[place] if isinstance(distances, (tuple, list)) else distances
    if not isinstance(space, Tensor) or name not in ("auto", "euclidean", "sqeuclidean"):
        raise UnsupportedError(
            "`differentiable` knows tensors of points with Euclidean distances, and matrices. "
            "Compute the distances by PyTorch and pass them as D_X and D_Y."
        )
    points = space.to(plan)
    if name == "sqeuclidean":
        return (points[:, None] - points).square().sum(2)
    return torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
