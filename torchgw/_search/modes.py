"""Products of dense tables with plans by the modes that can move a plan."""

from __future__ import annotations

import torch
from torch import Tensor

from torchgw._problem.limits import limits_of
from torchgw._search.coarse import CoarseProblem

# Growth of a pair of modes in an outer iteration below which it is left out. [L1171]
_GROWTH = 0.25


class Modes:
    """-4 alpha x P y by those eigenvectors u_i of x and v_j of y that can move a plan.

    Near the product plan, a change of it along u_i v_j' is multiplied by lambda_i mu_j /
    (epsilon |x| |y|) in an outer iteration, at epsilon as a share of the natural scale: a pair for
    which that is small dies out, and need not be computed.
    """

    def __init__(self, problem: CoarseProblem) -> None:
        self.shape = problem.base.shape
        # the largest eigenvalues first
        sides = [torch.linalg.eigh(side[0].float()) for side in (problem.x, problem.y)]
        order = [values.abs().argsort(descending=True) for values, _ in sides]
        values = [side[0][by] for side, by in zip(sides, order, strict=True)]
        self.vectors = [side[1][:, by] for side, by in zip(sides, order, strict=True)]
        self.factors = float(-4 * problem.alpha) * torch.outer(*values)
        x, y = (each.abs() / each.norm() for each in values)
        self.growth = x * y[0], y * x[0]

    @classmethod
    def of(cls, problem: CoarseProblem) -> Modes | None:
        """Make them where products take long: on a CPU, of one symmetric table on either side."""
        # products of small matrices take less
        small = problem.base.numel() <= limits_of(problem.base.device).stacked
        on_cpu = problem.base.device.type == "cpu"
        return cls(problem) if on_cpu and len(problem.x) == 1 and not small else None

    def ranks(self, share: float) -> tuple[int, int] | None:
        """Count the modes of x and of y that matter at an epsilon; all if ``None``."""
        p, q = (int((growth > _GROWTH * share).sum()) for growth in self.growth)
        return (p, q) if self.work((p, q)) < self.work(None) else None

    def work(self, ranks: tuple[int, int] | None) -> int:
        """Count the multiplications of a product with so many modes, or with the tables."""
        s, t = self.shape
        if ranks is None:
            return s * t * (s + t)
        p, q = ranks
        return 2 * min(p * t * (s + q), q * s * (t + p))

    def __call__(self, base: Tensor, plans: Tensor, share: float) -> Tensor | None:
        """Add the products at plans (B, s, t) to the base, unless they take less by the tables."""
        ranks = self.ranks(share)
        if ranks is None:
            return None
        p, q = ranks
        x, y = self.vectors[0][:, :p], self.vectors[1][:, :q]
        factors, in_turn = self.factors[:p, :q], torch.linalg.multi_dot
        found = torch.empty_like(plans)
        for plan, costs, own in zip(plans, found, base.expand_as(plans), strict=True):
            inner = in_turn((x.mT, plan, y)).mul_(factors)
            torch.add(own, in_turn((x, inner, y.mT)), out=costs)
        return found
