"""Derivatives of solves with relaxed marginals: unbalanced, semi-relaxed and partial.

The objective F(theta, P) of docs/algorithm.md, equations 14 and 17, is written with stored plans. A
solved plan is stationary under the constraints that hold: sums of rows and columns of a strict side
or that have reached their bound, and the mass of a partial plan. With multipliers y of these,
A P = c(theta), derivatives follow from the Lagrangian F + y (A P - c) (equation 44).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from torchgw._derivatives.implicit import TOLERANCE, WORRYING
from torchgw._derivatives.krylov import MOST_PRODUCTS, gmres
from torchgw._derivatives.loss import Solved, System, derivatives
from torchgw._derivatives.tracked import Model
from torchgw._errors import ConvergenceWarning, warn_user
from torchgw._problem.problem import MarginalRule
from torchgw._tensors.operations import EQUAL

# Smaller entries are zero in every sum, but would be divided by. [L492]
_LEAST = 1e-200


class _Sums:
    """Sums of rows, columns and all of a table, (n + m + 1,), some of them held or penalised."""

    # `give` says how easily each sum changes: 0 if it is held, infinity if it is free, and
    # otherwise the inverse of the curvature of its penalty.

    def __init__(self, scale: Tensor, give: Tensor) -> None:
        self.scale = scale  # (n, m), inverse of the diagonal of the Hessian
        self.used = (give < math.inf).nonzero()[:, 0]
        rows, columns = scale.sum(1), scale.sum(0)
        full = torch.cat([rows, columns, rows.sum()[None]]).diag()
        n, m = scale.shape
        full[:n, n:-1], full[:n, -1], full[n:-1, -1] = scale, rows, columns
        full = full.triu() + full.triu(1).T
        small = full[self.used][:, self.used] + give[self.used].diag()
        self.size = n + m + 1
        self.factor = torch.linalg.lu_factor(small)

    def of(self, table: Tensor) -> Tensor:
        """Compute the sums of a table."""
        return torch.cat([table.sum(1), table.sum(0), table.sum()[None]])

    def spread(self, values: Tensor) -> Tensor:
        """Add values of rows, columns and all, (n, m): the transpose of :meth:`of`."""
        n = len(self.scale)
        return values[:n, None] + values[n:-1] + values[-1]

    def weigh(self, sums: Tensor) -> Tensor:
        """Find the multipliers that give such sums."""
        found = torch.linalg.lu_solve(*self.factor, sums[self.used, None])[:, 0]
        return sums.new_zeros(self.size).index_copy(0, self.used, found)

    def respond(self, force: Tensor, sums: Tensor | None = None) -> Tensor:
        """Solve with the diagonal of the Hessian, the penalties and given sums where held."""
        free = self.scale * force
        wanted = self.of(free) if sums is None else self.of(free) - sums
        return free - self.scale * self.spread(self.weigh(wanted))


@dataclass(eq=False)
class RelaxedSolve(Solved):
    """A finished solve with relaxed marginals."""

    rule: MarginalRule

    def __post_init__(self) -> None:
        """Store the plan, and find which sums are held."""
        definition, rule = self.definition, self.rule
        self.epsilon = self.plan.epsilon * (rule.mass or 1.0)
        self.table = self.plan.stored().detach().double().clamp_min(_LEAST)
        # whether entropy and penalties grow with the mass or with its square
        self.is_linear = definition.problem.alpha == 0 and rule.fixed_mass is None
        self.mass = 1.0 if rule.mass is not None or self.is_linear else float(self.table.sum())
        self.held = self._held()

    def _held(self) -> Tensor:
        """Say which sums of rows, columns and all are held."""
        (f, g), slack = self.plan.potentials, EQUAL * self.plan.epsilon
        if self.rule.mass is not None:
            # points below their bound have the largest potential
            held = [part < part.max() - slack for part in (f, g)]
        else:
            held = [
                torch.full_like(part, math.isinf(rho), dtype=torch.bool)
                for part, rho in zip((f, g), self.rule.rho, strict=True)
            ]
        return torch.cat([*held, torch.full_like(held[0][:1], self.rule.mass is not None)])

    def _weights(self, model: Model, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Give the weights as a penalty sees them, of the sum that they were given with."""
        found = []
        for name, weight, rho, total in zip(
            ("a", "b"), (model.a, model.b), self.rule.rho, self.rule.totals, strict=True
        ):
            own = self.rule.mass is None and math.isfinite(rho)
            moved = inputs[name].to(weight) if own and name in inputs else weight * total
            found.append(moved if own else weight)
        return found

    def lagrangian(self, inputs: tuple[Tensor, ...], plan: Tensor, multipliers: Tensor) -> Tensor:
        """Compute F(theta, P) + y (A P - c(theta))."""
        model = self.model(inputs)
        a, b = self._weights(model, dict(zip(self.names, inputs, strict=True)))
        epsilon = self.epsilon if model.epsilon is None else model.epsilon
        p, q, mass = plan.sum(1), plan.sum(0), plan.sum()
        quadratic = p @ model.source.mean_square(p) + q @ model.target.mean_square(q)
        total = model.alpha * (quadratic - 2 * (model.crossed(plan) * plan).sum())
        if model.linear is not None:
            table = model.linear.to(torch.float64).dense().matrix
            total = total + (1 - model.alpha) * (table * plan).sum()
        whole = (plan * (plan / (a[:, None] * b)).log()).sum()

        def divergence(entropy: Tensor, size: Tensor) -> Tensor:
            """Compute KL(p x p | a x a), or 2 KL(p | a) for a linear objective."""
            if self.is_linear:
                return 2 * (entropy - mass + size)
            return 2 * mass * entropy - mass**2 + size**2

        if self.rule.mass is not None:
            total = total + epsilon * whole
        else:
            total = total + epsilon / 2 * divergence(whole, a.sum() * b.sum())
            for rho, part, weight in zip(self.rule.rho, (p, q), (a, b), strict=True):
                if math.isfinite(rho) and rho > 0:
                    entropy = (part * (part / weight).log()).sum()
                    total = total + rho * divergence(entropy, weight.sum())
        sums = torch.cat([p - model.a, q - model.b, mass[None] - (self.rule.mass or 0.0)])
        return total + multipliers[self.held] @ sums[self.held]

    def _soft(self) -> Tensor:
        """Compute how easily each sum changes: the inverse curvature of its penalty."""
        n, m = self.table.shape
        give = self.table.new_full((n + m + 1,), math.inf)
        if self.rule.mass is None:
            for place, (rho, part) in enumerate(
                zip(self.rule.rho, (self.table.sum(1), self.table.sum(0)), strict=True)
            ):
                if 0 < rho < math.inf:
                    give[place * n : place * n + len(part)] = part / (2 * rho * self.mass)
        return torch.where(self.held, 0.0, give)

    def _scale(self) -> Tensor:
        """Compute the inverse of the diagonal of the Hessian that the entropy has."""
        return self.table / (self.epsilon * self.mass)

    def _multipliers(self, force: Tensor) -> Tensor:
        """Find the multipliers that are nearest to a force, y with A' y = force."""
        strict = _Sums(self._scale(), torch.where(self.held, 0.0, math.inf).double())
        return strict.weigh(strict.of(strict.scale * force))

    def _prepared(self, inputs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """Make inputs, a plan and the multipliers at it, to differentiate by."""
        still = tuple(part.detach() for part in inputs)
        plan = self.table.clone().requires_grad_()
        with torch.enable_grad():
            objective = self.lagrangian(still, plan, torch.zeros_like(self.held, dtype=plan.dtype))
            (force,) = torch.autograd.grad(objective, plan)
        copies = tuple(part.detach().requires_grad_() for part in inputs)
        return copies, plan, self._multipliers(-force).requires_grad_()

    def gradient(self, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        copies, _, multipliers = self._prepared(inputs)
        with torch.enable_grad():
            return derivatives(self.lagrangian(copies, self.table, multipliers.detach()), copies)

    def hessian_product(
        self, inputs: tuple[Tensor, ...], direction: tuple[Tensor, ...]
    ) -> tuple[list[Tensor], System]:
        copies, plan, multipliers = self._prepared(inputs)
        with torch.enable_grad():
            total = self.lagrangian(copies, plan, multipliers)
            first = torch.autograd.grad(total, copies, create_graph=True, allow_unused=True)
            slope = total.new_zeros(())
            for part, step in zip(first, direction, strict=True):
                if part is not None:
                    slope = slope + (part * step.to(part)).sum()
            force, sums = derivatives(slope, (plan, multipliers), retain=True)
            change, weights, system = self._solve(plan, multipliers, copies, -force, -sums)
            slope = slope + _along(total, (plan, multipliers), (change, weights))
            return derivatives(slope, copies), system

    def plan_gradient(
        self, inputs: tuple[Tensor, ...], left: Tensor, right: Tensor
    ) -> list[Tensor]:
        copies, plan, multipliers = self._prepared(inputs)
        with torch.enable_grad():
            wanted = left.double() @ right.double().T
            none = torch.zeros_like(multipliers)
            change, weights, _ = self._solve(plan, multipliers, copies, wanted, none)
            total = self.lagrangian(copies, plan, multipliers)
            slope = _along(total, (plan, multipliers), (change, weights))
            return derivatives(-slope, copies)

    def _solve(
        self, plan: Tensor, multipliers: Tensor, inputs: tuple[Tensor, ...], force: Tensor,
        sums: Tensor,
    ) -> tuple[Tensor, Tensor, System]:  # fmt: skip
        """Solve H dP + A' dy = force, A dP = sums for dP and dy, with H the Hessian in the plan."""
        still = tuple(part.detach() for part in inputs)
        with torch.enable_grad():
            total = self.lagrangian(still, plan, multipliers.detach())
            (slope,) = torch.autograd.grad(total, plan, create_graph=True)

        def bend(change: Tensor) -> Tensor:
            (found,) = torch.autograd.grad(slope, plan, change, retain_graph=True)
            return found

        def within(change: Tensor) -> Tensor:
            # in symmetric variables the preconditioned system is nearly the identity
            return (change / root).flatten()

        near = _Sums(self._scale(), self._soft())
        root, shape = near.scale.sqrt(), plan.shape
        start = near.respond(torch.zeros_like(plan), sums)
        bent = bend(start)
        right = within(near.respond(force - bent))
        # where forces cancel, or move multipliers only, there is nothing to solve but rounding
        whole = float((root * force).norm() + (root * bent).norm())
        share = max(float(right.norm()) / max(whole, _LEAST), _LEAST)

        def operator(x: Tensor) -> Tensor:
            return within(near.respond(bend(root * x.view(shape))))

        tol = min(1.0, TOLERANCE[torch.float64] / share)
        x, residual, count = gmres(operator, right, tol=tol, max_iter=MOST_PRODUCTS)
        residual *= share
        change = start + root * x.view(shape)
        if residual > WORRYING:
            warn_user(
                f"The derivative of the relaxed plan has a relative residual of {residual:.1e}. "
                "Raise `epsilon`, or lower `tol` and `inner_tol`.",
                ConvergenceWarning,
            )
        return (
            change,
            self._multipliers(force - bend(change)),
            System(residual, count, residual <= WORRYING),
        )


def _along(total: Tensor, inputs: tuple[Tensor, Tensor], step: tuple[Tensor, Tensor]) -> Tensor:
    """Differentiate a scalar along a step of the plan and the multipliers."""
    by_plan, by_multipliers = torch.autograd.grad(total, inputs, create_graph=True)
    return (by_plan * step[0]).sum() + by_multipliers @ step[1]
