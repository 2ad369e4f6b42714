"""Linear problems: a fixed number of iterations or half-steps, by us, PyTorch, flash-sinkhorn."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.harness.registry import (
    GWProblem,
    HalfStepProblem,
    Problem,
    SinkhornProblem,
    linear_clouds,
)
from torchgw._sinkhorn.choose import choose_backend
from torchgw._sinkhorn.loop import sinkhorn
from torchgw._sinkhorn.problem import Cost, FactoredCost, LinearProblem
from torchgw._typing import Marginals, Potentials

__all__ = [
    "Prepared", "Rows", "Unsupported", "compiled", "definition_rows", "eager", "flash",
    "linear_problem", "ours_linear", "potentials_error",
]  # fmt: skip

Rows = Callable[[Tensor | slice], Tensor]


class Unsupported(Exception):  # noqa: N818 - not an error: the record says why there is no number
    """The runner does not solve this kind of problem, or not here."""


class Prepared(NamedTuple):
    """A runner that is ready to go: everything but the timed call has been done."""

    call: Callable[[int], Any]  # seed -> result
    rows: Callable[[Any], Rows] | None  # result -> rows of its plan in float64
    info: Callable[[Any], dict[str, Any]]  # result -> what goes into the record
    per_call: int = 1  # units of work (half-steps) in one call


def linear_problem(
    problem: SinkhornProblem | HalfStepProblem, device: torch.device
) -> tuple[FactoredCost, Marginals, float]:
    """Return squared distances as factors, uniform weights, and epsilon, in the problem's dtype."""
    x, y, epsilon = linear_clouds(problem)
    dtype = getattr(torch, problem.dtype)
    x, y = (torch.from_numpy(points).to(device) for points in (x, y))
    cost = FactoredCost(2.0 * x, y, x.square().sum(1), y.square().sum(1)).to(dtype)
    weights = (torch.full((s,), 1 / s, dtype=dtype, device=device) for s in (problem.n, problem.m))
    return cost, Marginals(*weights), epsilon


def definition_rows(
    cost: Cost, marginals: Marginals, potentials: Potentials, epsilon: float
) -> Rows:
    """Return rows of a_i b_j exp((f_i + g_j - C_ij) / epsilon)."""
    wide = cost.to(torch.float64)
    f, g = (part.double() for part in potentials)
    a, b = (part.double() for part in marginals)

    def rows(index: Tensor | slice) -> Tensor:
        block = wide.rows(index).exponent(f[index], g, epsilon).exp_()
        return block.mul_(a[index, None]).mul_(b)

    return rows


class Solved(NamedTuple):
    """Potentials of a linear problem, and what they were computed for."""

    cost: Cost
    marginals: Marginals
    potentials: Potentials
    epsilon: float


def ours_linear(problem: Problem, device: torch.device, backend_name: Any) -> Prepared:
    """Run a fixed number of half-steps by one of our backends."""
    assert not isinstance(problem, GWProblem)
    factors, marginals, epsilon = linear_problem(problem, device)
    backend = choose_backend(backend_name, device, factors.dtype)
    linear = LinearProblem(factors, marginals, epsilon)
    zero = Potentials(torch.zeros_like(marginals.a), torch.zeros_like(marginals.b))
    if isinstance(problem, SinkhornProblem):
        cost = factors.dense()
        count = problem.iterations

        def call(seed: int) -> Solved:
            del seed
            inner = sinkhorn(
                backend.prepare(LinearProblem(cost, marginals, epsilon)), None, max_iter=count,
                tol=0.0, check_every=count,
            )  # fmt: skip
            return Solved(cost, marginals, inner.potentials, epsilon)

        return Prepared(call, _solved_rows, _solved_info(backend.name, "iterations, one check"))

    def alternate(seed: int) -> Solved:
        del seed
        f, g = zero
        for _ in range(problem.half_steps // 2):
            # each half-step prepares its own operands, as the others' do
            f = backend.prepare(linear).softmin(g, axis=1)
            g = backend.prepare(linear).softmin(f, axis=0)
        return Solved(factors, marginals, Potentials(f, g), epsilon)

    info = _solved_info(backend.name, "half-steps, preparation included")
    return Prepared(alternate, None, info, problem.half_steps)


def _solved_rows(solved: Solved) -> Rows:
    return definition_rows(*solved)


def _solved_info(backend: str, timed: str) -> Callable[[Solved], dict[str, Any]]:
    return lambda solved: {
        "timed": timed,
        "backend": backend,
        "epsilon": solved.epsilon,
        "exponent_error": potentials_error(solved),
    }


def potentials_error(solved: Solved, count: int = 256) -> float:
    """Return how far the potentials are from a half-step of one another, over epsilon.

    Either f is the softmin of g or g that of f, whichever was updated last, up to a constant. The
    float64 softmin of some rows (or columns) says by how much it is missed.
    """
    f, g = (part.double() for part in solved.potentials)
    a, b = (part.double().log() for part in solved.marginals)
    errors = []
    for cost, own, other, weight in (
        (solved.cost, f, g, b),
        (solved.cost.transpose(), g, f, a),
    ):
        index = torch.linspace(0, len(own) - 1, min(len(own), count), device=own.device).long()
        part = cost.rows(index).to(torch.float64)
        zero = torch.zeros(len(index), dtype=torch.float64, device=own.device)
        exponent = part.exponent(zero, other + solved.epsilon * weight, solved.epsilon)
        gap = own[index] / solved.epsilon + exponent.logsumexp(1)
        errors.append(float((gap - gap.mean()).abs().max()))
    return min(errors)


def eager(problem: Problem, device: torch.device) -> Prepared:
    """PyTorch as the formulas say: the baseline that every kernel must beat."""
    assert not isinstance(problem, GWProblem)
    cost, marginals, epsilon = linear_problem(problem, device)
    if isinstance(problem, HalfStepProblem):
        return ours_linear(problem, device, "eager")
    matrix = cost.dense().matrix
    log_a, log_b = marginals.log_a, marginals.log_b

    def call(seed: int) -> Solved:
        del seed
        f, g = torch.zeros_like(log_a), torch.zeros_like(log_b)
        for _ in range(problem.iterations):
            f = -epsilon * torch.logsumexp(log_b + (g - matrix) / epsilon, dim=1)
            g = -epsilon * torch.logsumexp(log_a[:, None] + (f[:, None] - matrix) / epsilon, dim=0)
        return Solved(cost, marginals, Potentials(f, g), epsilon)

    return Prepared(call, _solved_rows, _solved_info("eager PyTorch", "iterations"))


def compiled(problem: Problem, device: torch.device) -> Prepared:
    return ours_linear(problem, device, "compile")


def flash(problem: Problem, device: torch.device, *, tf32: bool) -> Prepared:
    """flash-sinkhorn by its documented API: alternating updates at a fixed epsilon."""
    assert not isinstance(problem, GWProblem)
    if find_spec("flash_sinkhorn") is None:
        raise Unsupported("flash-sinkhorn is not installed here (pip install flash-sinkhorn).")
    if device.type != "cuda":
        raise Unsupported("flash-sinkhorn runs on CUDA only.")
    if problem.dtype != "float32":
        raise Unsupported("flash-sinkhorn computes in float32.")
    from flash_sinkhorn import SamplesLoss

    cost, marginals, epsilon = linear_problem(problem, device)
    x, y = cost.left / 2, cost.right
    half_steps = isinstance(problem, HalfStepProblem)
    count = problem.half_steps // 2 if half_steps else problem.iterations
    loss = SamplesLoss(
        "sinkhorn", backend="alternating", use_epsilon_scaling=False, eps=epsilon, n_iters=count,
        potentials=True, allow_tf32=tf32,
    )  # fmt: skip

    def call(seed: int) -> Solved:
        del seed
        f, g = loss(marginals.a, x, marginals.b, y)
        return Solved(cost, marginals, Potentials(f.detach(), g.detach()), epsilon)

    info = _solved_info("flash-sinkhorn", "iterations, preparation included")
    rows = None if half_steps else _solved_rows
    return Prepared(call, rows, info, problem.half_steps if half_steps else 1)
