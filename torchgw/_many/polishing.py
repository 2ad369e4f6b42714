"""The end of problems that are polished: conditional gradient steps, one problem after another."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchgw._batch.worth import Terms
from torchgw._many.questions import Questions
from torchgw._problem.problem import MarginalRule, check_marginal_rule
from torchgw._search.tabu import exchange
from torchgw._sinkhorn.annealing import VALUE_ROUNDING
from torchgw._solve.polish import descend
from torchgw._solve.state import Status
from torchgw._typing import Marginals


class Sharp(NamedTuple):
    """A plan without entropy, and its numbers."""

    plan: Tensor  # (n, m) float64, on the CPU
    value_quad: float
    value_linear: float
    marginal_error: float
    status: Status


def sharpen(asked: Questions, number: int, plan: Tensor) -> Sharp:
    """Lead the plan (n, m) of a problem to a stationary one of the objective without entropy."""
    given = asked.arguments(number)
    tables = {name: part.cpu() for name, part in given.items() if isinstance(part, Tensor)}
    weights = Marginals(tables["a"], tables["b"])
    alpha = float(asked.alpha[number])
    problem = _Problem(tables["D_X"], tables["D_Y"], tables.get("M"), alpha)
    rule = check_marginal_rule(given["unbalanced"], given["mass"])
    # steps are between plans of mass one
    mass = 1.0 if rule is None or rule.fixed_mass is None else rule.fixed_mass
    near = -2 * alpha * problem.x[None]
    better: Tensor | None = plan.cpu()
    while better is not None:
        matrix, polished = descend(
            better, weights, rule, lambda matrix: problem.gradient(matrix, mass)
        )
        better = exchange(near, problem.y[None], problem.gradient(matrix, mass), matrix)
    matrix = mass * matrix
    terms = problem.terms(matrix)
    status = Status.CONVERGED if polished.stationary else Status.POLISH_LIMIT
    if rule is None and polished.stationary:
        product = problem.terms(torch.outer(*weights))
        slack = VALUE_ROUNDING * (terms.squares + abs(product.linear))
        if terms.quadratic + terms.linear > product.quadratic + product.linear + slack:
            status = Status.IMPLAUSIBLE
    masses = Marginals(matrix.sum(1), matrix.sum(0))
    error = (rule or MarginalRule()).violation(masses, weights)
    return Sharp(matrix, float(terms.quadratic), float(terms.linear), error, status)


class _Problem(NamedTuple):
    """A problem of square loss, in float64."""

    x: Tensor  # (n, n)
    y: Tensor  # (m, m)
    linear: Tensor | None  # (n, m)
    alpha: float

    def _own(self, plan: Tensor) -> tuple[Tensor, Tensor]:
        """Compute what the squares of both sides cost a point, (n,) and (m,)."""
        return self.x.square() @ plan.sum(1), self.y.square() @ plan.sum(0)

    def gradient(self, plan: Tensor, mass: float) -> Tensor:
        """Compute the gradient at a plan of mass one, (n, m), over the square of the real mass."""
        rows, columns = self._own(plan)
        cost = torch.add(rows[:, None], columns[None, :]).sub_(2 * (self.x @ plan @ self.y))
        cost.mul_(2 * self.alpha)
        return cost if self.linear is None else cost.add_((1 - self.alpha) / mass * self.linear)

    def terms(self, plan: Tensor) -> Terms:
        """Evaluate a plan."""
        rows, columns = self._own(plan)
        own = rows @ plan.sum(1) + columns @ plan.sum(0)
        crossed = ((self.x @ plan @ self.y) * plan).sum()
        linear = own.new_zeros(()) if self.linear is None else (self.linear * plan).sum()
        return Terms.of_sums(own.new_tensor(self.alpha), crossed, (1 - self.alpha) * linear, own)
