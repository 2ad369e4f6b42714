"""What joins a finished solve: plans that carry gradients to its inputs, and its loss."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchgw._boundary.checks import as_index, as_points_of
from torchgw._derivatives.balanced import BalancedSolve
from torchgw._derivatives.loss import Solved, Step, call, loss_of, refused
from torchgw._derivatives.relaxed import RelaxedSolve
from torchgw._derivatives.tracked import Definition, Model
from torchgw._derivatives.unrolled import unroll
from torchgw._plans.contract import Plan
from torchgw._plans.transport import ZERO, TransportPlan
from torchgw._problem.table import Differentiable
from torchgw._results.result import GWResult
from torchgw._typing import Potentials

_TWICE_PLAN = (
    "The plan can be differentiated once; the derivative of its implicit derivative is not "
    "implemented. Pass differentiable='unrolled' on a small problem."
)
_FORWARD = (
    "The plan has reverse derivatives only: torch.func.vjp, grad and jacrev. Forward ones, "
    "as of jvp, jacfwd and hessian, are those of the loss."
)


def attach(
    result: GWResult,
    definition: Definition,
    inputs: dict[str, Tensor],
    mode: Differentiable,
    generator: torch.Generator,
    slopes: Mapping[str, float],
) -> GWResult:
    """Attach the loss of a finished solve, and its plan, to the inputs that require gradients."""
    # `slopes` are the derivatives by alpha, <L(P), P> - <M, P>, and by epsilon, KL(P | a x b).
    tensors, plan = tuple(inputs.values()), result.lazy_plan
    if mode == "unrolled":
        matrix, loss = unroll(Model.of(definition, inputs), plan)
        # the value is that of the solve, which may not have added up all terms in float64
        loss = result.report.objective + (loss - loss.detach())

        def product(turned: bool, values: Tensor) -> Tensor:
            return (matrix.T if turned else matrix).to(values.dtype) @ values

        return replace(result, tracked=loss, lazy_plan=DifferentiablePlan(plan, product))
    potentials = Potentials(*result.potentials)
    objective = potentials.f.new_tensor(result.report.objective)
    names = tuple(inputs)
    solved: Solved
    if definition.rule is not None:
        solved = RelaxedSolve(definition, plan, objective, names, definition.rule)
    else:
        count = result.report.n_anchors
        anchors = None if count is None else plan.sample(count, generator)
        solved = BalancedSolve(definition, plan, objective, names, potentials, anchors, slopes)
    lazy = implicit_plan(solved, tensors) if mode == "implicit" else plan
    return replace(result, tracked=loss_of(solved, tensors), lazy_plan=lazy)


class DifferentiablePlan(TransportPlan):
    """A plan whose products, rows and matrix carry gradients to the inputs of its solve."""

    def __init__(
        self,
        plan: TransportPlan,
        product: Callable[[bool, Tensor], Tensor],
        *,
        transposed: bool = False,
    ) -> None:
        # product(transposed, values) is plan @ values, or plan.T @ values, with a graph
        super().__init__(plan.cost, plan.potentials, plan.weights, plan.epsilon, plan.backend)
        self._differentiable, self._transposed = product, transposed

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the graph behind, for pickle and deepcopy, which make a constant plan."""
        return TransportPlan, self._parts()

    def __copy__(self) -> "DifferentiablePlan":
        """Share everything, the graph too."""
        return DifferentiablePlan(self, self._differentiable, transposed=self._transposed)

    @property
    def T(self) -> "DifferentiablePlan":  # noqa: N802 - the name of every array library
        return DifferentiablePlan(super().T, self._differentiable, transposed=not self._transposed)

    _moved = Plan._moved  # each call has a graph of its own

    def _product(self, table: Tensor) -> Tensor:
        return self._differentiable(self._transposed, table)

    def barycentric(self, points: Any) -> Tensor:
        """Map source points as a :class:`TransportPlan` does; weight zero has no gradient."""
        points = as_points_of(points, self.shape[1], self.device)
        fallback = super().barycentric(points.detach())
        sums = self @ torch.cat([points, torch.ones_like(points[:, :1])], dim=1)
        used = (self.weights.a > 0)[:, None]
        return torch.where(used, sums[:, :-1] / torch.where(used, sums[:, -1:], 1.0), fallback)

    def rows(self, index: Any) -> Tensor:
        index = as_index(index, self.shape[0], self.device)
        chosen = torch.zeros(self.shape[0], len(index), dtype=self.dtype, device=self.device)
        chosen[index, torch.arange(len(index), device=self.device)] = 1.0
        return torch.threshold((self.T @ chosen).T, ZERO, 0.0)

    def stored(self) -> Tensor:
        every = torch.eye(self.shape[1], dtype=self.dtype, device=self.device)
        return torch.threshold(self @ every, ZERO, 0.0)


def implicit_plan(solved: Solved, inputs: tuple[Tensor, ...]) -> DifferentiablePlan:
    """Give the plan of a finished solve implicit derivatives by its inputs."""

    def product(transposed: bool, table: Tensor) -> Tensor:
        return call(_Product, solved, transposed, table, *inputs)

    return DifferentiablePlan(solved.plan, product)


class _Product(Step):
    """plan @ values, differentiable in the values and the inputs of the solve."""

    @staticmethod
    def forward(solved: Solved, transposed: bool, values: Tensor, *inputs: Tensor) -> Tensor:
        return (solved.plan.T if transposed else solved.plan) @ values

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.solved, ctx.transposed, *tensors = inputs
        ctx.save_for_backward(*tensors)

    jvp = refused(_FORWARD)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        (gradient,) = upstream
        solved, transposed = ctx.solved, ctx.transposed
        values, *inputs = ctx.saved_tensors
        by_values = None
        if ctx.needs_input_grad[2]:
            by_values = call(_Product, solved, not transposed, gradient, *inputs)
        if not any(ctx.needs_input_grad[3:]):
            return None, None, by_values, *(None for _ in inputs)
        left, right = (values, gradient) if transposed else (gradient, values)
        return None, None, by_values, *call(_PlanGradient, solved, left, right, *inputs)


class _PlanGradient(Step):
    """The derivatives by the inputs of a function whose gradient in the plan is left @ right.T."""

    @staticmethod
    def forward(solved: Solved, left: Tensor, right: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(solved.plan_gradient(inputs, left, right))

    backward = jvp = refused(_TWICE_PLAN)
