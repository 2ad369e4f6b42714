"""Gradients of many objectives by the envelope theorem: at a solution the plan stands still."""

from typing import Any

import torch
from torch import Tensor

from torchgw._derivatives.loss import call
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
    found = []
    with torch.enable_grad():
        for number in range(len(asked)):
            plan = kept[number].plan
            x = _table(inputs["X"], number, distances, 0, plan)
            y = _table(inputs["Y"], number, distances, 1, plan)
            given = (None if inputs[name] is None else inputs[name][number] for name in "Mab")
            # arrays of NumPy have no gradients, but M tells that there is a linear cost
            parts = [
                part
                if part is None
                else torch.as_tensor(part, dtype=plan.dtype, device=plan.device)[None]
                for part in given
            ]
            solved = *(part[None] for part in kept[number][1:]), objective[number][None]
            found.append(
                call(Envelope, x[None], y[None], *parts, solved, float(asked.alpha[number]))
            )
    return torch.cat(found)


class Envelope(torch.autograd.Function):
    """Objectives of solved problems, whose derivatives are those at fixed plans."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, linear: Tensor | None, a: Tensor, b: Tensor,
        kept: Any, alpha: float,
    ) -> Tensor:  # fmt: skip
        # `kept` begins with the plans, their potentials f and g, and the objectives
        ctx.kept, ctx.alpha, ctx.fused = kept, alpha, linear is not None
        ctx.save_for_backward(x, y)
        objective: Tensor = kept[3].clone()
        return objective

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        if torch.is_grad_enabled():
            # plans would have to follow the inputs
            raise UnsupportedError(
                "This loss has first derivatives: leave `create_graph` out, or use the second ones "
                'of torchgw.solve(..., differentiable="value").'
            )
        x, y = ctx.saved_tensors
        (plan, f, g, *_), alpha = ctx.kept, ctx.alpha
        unit = upstream[:, None, None]
        p, q = plan.sum(2), plan.sum(1)
        of_x, of_y, of_linear, of_a, of_b = ctx.needs_input_grad[:5]
        found: list[Tensor | None] = [None] * 5
        if of_x:
            crossed = p[:, :, None] * p[:, None, :] * x - plan @ y @ plan.mT
            found[0] = 2 * alpha * unit * crossed
        if of_y:
            crossed = q[:, :, None] * q[:, None, :] * y - plan.mT @ x @ plan
            found[1] = 2 * alpha * unit * crossed
        if ctx.fused and of_linear:
            found[2] = (1 - alpha) * unit * plan
        sides = ((3, of_a, x, p, f), (4, of_b, y, q, g))
        for place, wanted, table, mass, potential in sides:
            if wanted:
                # that of the whole cost, up to a constant that weights of sum one do not see
                whole = potential + 2 * alpha * (table.square() @ mass[:, :, None])[:, :, 0]
                whole = whole - (whole * mass).sum(1, keepdim=True)
                found[place] = upstream[:, None] * whole
        return (*found, None, None)


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
