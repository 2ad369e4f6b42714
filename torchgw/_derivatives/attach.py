"""Derivatives join a result.

A solve ends as always, without a graph. Then its objective and its plan are attached to the inputs
that require gradients.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from torchgw._derivatives.balanced import BalancedSolve
from torchgw._derivatives.loss import Solved, loss_of
from torchgw._derivatives.plan import DifferentiablePlan, implicit_plan
from torchgw._derivatives.relaxed import RelaxedSolve
from torchgw._derivatives.tracked import Definition, Model
from torchgw._derivatives.unrolled import unroll
from torchgw._results.result import GWResult
from torchgw._solve.options import Differentiable
from torchgw._typing import Potentials


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

        def product(turned: bool, values: Tensor) -> Tensor:
            return (matrix.T if turned else matrix).to(values.dtype) @ values

        return replace(result, loss=loss, lazy_plan=DifferentiablePlan(plan, product))
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
    return replace(result, loss=loss_of(solved, tensors), lazy_plan=lazy)
