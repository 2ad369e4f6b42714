"""Problems that are solved side by side, each at its own pace."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchgw._batch.costs import (
    AUTO_EPSILON,
    cross_product,
    first_rows,
    gradient,
    start_noise,
    units,
    whole,
)
from torchgw._batch.packing import Packed, natural_scale
from torchgw._batch.relaxed import Relaxed
from torchgw._batch.stopping import Descent
from torchgw._batch.sweep import BUDGET, exact_rows
from torchgw._sinkhorn.annealing import ANNEALING_TOLERANCE
from torchgw._sinkhorn.loop import MOST_RESTARTS

# Column error and iterations of the first linear problem of a plan that begins at its target: it
# may be next to where it ends, and a plan that misses its marginals leads away. [L1313]
_BEGUN_TOLERANCE, _BEGUN_BUDGET = 1e-4, 512


@dataclass
class Pool:
    """Problems that are being solved; every tensor has a row for each."""

    number: Tensor  # int64, which problem; -1 where there is none
    cost: Tensor  # (A, n, m) where it was linearised
    point: Tensor  # (A, n, m) the plan that it was linearised at
    plan: Tensor  # (A, n, m) the present plan
    x: Tensor  # (A, n, n)
    y: Tensor  # (A, m, m)
    a: Tensor
    b: Tensor
    f: Tensor  # of the plan
    f_next: Tensor  # from which the next iterations go on
    g: Tensor
    alpha: Tensor
    target: Tensor  # epsilon to reach
    epsilon: Tensor  # of the linear problem
    tol: Tensor  # column error at which it ends
    budget: Tensor  # iterations that it may take
    spent: Tensor  # iterations that it has taken
    error: Tensor
    relaxation: Tensor
    restarts: Tensor
    last_error: Tensor  # error at the end of the linear problem before
    stuck: Tensor
    change: Tensor  # L1 change of the plan by the last outer iteration, zero where it is not known
    rate: Tensor  # change over the change before, zero where it is not known
    done: Tensor  # outer iterations
    inner: Tensor  # Sinkhorn iterations in all
    settling: Tensor  # -1 in the loop, then how it has ended
    linear: Tensor | None
    descent: Descent
    # for relaxed marginals: `rho` and `mass` as in ``Relaxed``, the last step, and how much of a
    # step is taken
    rho: Tensor | None = None
    mass: Tensor | None = None
    step: Tensor | None = None
    share: Tensor | None = None
    # L1 change of the plans, and <cost, plan>, if the iterations have computed them
    told: tuple[Tensor, Tensor] | None = None
    # for proximal steps: epsilon at which plans are sharp
    sharp: Tensor | None = None

    def relaxed(self) -> Relaxed | None:
        """Tell which marginals the plans must have, if not all."""
        return None if self.share is None else Relaxed(self.rho, self.mass)

    def names(self) -> list[str]:
        """List the tensors that belong to problems."""
        names = [name for name, part in vars(self).items() if isinstance(part, Tensor)]
        return [name for name in names if name != "plan"]

    def put(self, places: Tensor, other: Pool) -> None:
        """Replace some problems by others."""
        for name in self.names():
            getattr(self, name)[places] = getattr(other, name)
        for mine, its in zip(self.descent.parts(), other.descent.parts(), strict=True):
            mine[places] = its

    def done_with(self) -> Tensor:
        """Tell which linear problems are solved, or given up, (A,) bool."""
        solved = (self.error <= self.tol) | (self.restarts >= MOST_RESTARTS)
        over = solved | (self.spent >= self.budget) | ~self.error.isfinite()
        return (self.number >= 0) & over

    def cut(self, places: Tensor) -> None:
        """Keep some problems only."""
        for name in self.names():
            setattr(self, name, getattr(self, name)[places])
        for name, part in vars(self.descent).items():
            setattr(self.descent, name, part[places])
        self.plan = torch.empty_like(self.cost)


def enter(problems: Packed, numbers: Tensor) -> Pool:
    """Begin some problems: linearise at a x b, or take the cost that a start gives."""
    i, j = problems.i[numbers], problems.j[numbers]
    x, y = problems.x.tables[i], problems.y.tables[j]
    a, b = problems.x.weights[i], problems.y.weights[j]
    alpha = problems.alpha[numbers]
    linear, target, epsilon, relaxed = units(problems, numbers)
    zero, count = torch.zeros_like(alpha), torch.zeros_like(i)
    point = a[:, :, None] * b[:, None, :]
    g = torch.zeros_like(b) if problems.columns is None else problems.columns[numbers]
    noise = start_noise(problems.shape, problems.device)
    cost = gradient(cross_product(x, y, point * noise), alpha, None)
    if problems.begin is not None:
        given, chosen = problems.begin(numbers)
        cost = torch.where(chosen[:, None, None], given * alpha[:, None, None], cost)
    if linear is not None:
        cost += linear
    f_next = exact_rows(cost, b, g, epsilon)
    tol, budget = torch.full_like(alpha, ANNEALING_TOLERANCE), torch.full_like(i, BUDGET)
    if problems.begin is not None:
        begun = chosen & (epsilon <= target)
        tol[begun], budget[begun] = _BEGUN_TOLERANCE, _BEGUN_BUDGET
    free: dict[str, Any] = {}
    if problems.proximal:
        free["sharp"] = AUTO_EPSILON * natural_scale(problems, numbers, linear)
    if relaxed is not None:
        cost = whole(cost, alpha, (x, y), (a, b))
        f_next = first_rows(relaxed, cost, (a, b), g, epsilon)
        free = {**relaxed._asdict(), "step": torch.zeros_like(cost), "share": zero + 1}
    return Pool(
        number=numbers.clone(), cost=cost, point=point, plan=torch.empty_like(cost),
        x=x, y=y, a=a, b=b, f=torch.zeros_like(a), f_next=f_next, g=g,
        alpha=alpha, target=target, epsilon=epsilon, tol=tol,
        budget=budget, spent=count.clone(), error=zero + math.inf, relaxation=zero + 1,
        restarts=count.clone(), last_error=zero + math.inf, stuck=count.clone(),
        change=zero.clone(), rate=zero.clone(),
        done=count.clone(), inner=count.clone(), settling=count - 1, linear=linear,
        descent=Descent(len(numbers), alpha), **free,
    )  # fmt: skip
