"""Registration by Newton's method.

Which linear map of one cloud makes its inner distances those of another? The objective is
differentiable twice, so that the map can be found by Newton's method: `torch.autograd.grad(...,
create_graph=True)` differentiates its gradient again, one linear system for each product with the
Hessian, and a few conjugate gradient steps solve for the step. Rotations of the result change
nothing: the Hessian is singular there, which truncated conjugate gradients do not mind. Adam and
L-BFGS need the gradient alone, and more solves.
"""

import time

import torch
from matplotlib import pyplot as plt

import torchgw

generator = torch.Generator().manual_seed(0)
points = torch.randn(40, 3, dtype=torch.float64, generator=generator)
true = torch.tensor([[1.5, 0.3, 0.0], [0.0, 0.6, 0.2], [0.1, 0.0, 1.0]], dtype=torch.float64)
Y = (points @ true)[torch.randperm(40, generator=generator)]
plan, solves = None, 0


def loss_of(A):
    """Solve from the last plan; the loss carries gradients to the map."""
    global plan, solves
    result = torchgw.solve(
        points @ A, Y, distances="sqeuclidean", scale=None, epsilon=1.0, init=plan, n_init=None,
        differentiable="value", tol=1e-8, random_state=0,
    )  # fmt: skip
    plan, solves = result.lazy_plan, solves + 1
    return result.loss


def newton_step(A, loss):
    """Solve H step = -gradient by a few conjugate gradient steps; stop at negative curvature."""
    (gradient,) = torch.autograd.grad(loss, A, create_graph=True)
    residual = -gradient.detach()
    step, ahead = torch.zeros_like(A), residual.clone()
    for _ in range(8):
        (bent,) = torch.autograd.grad(gradient, A, ahead, retain_graph=True)
        curvature = (ahead * bent).sum()
        if curvature <= 1e-6 * ahead.square().sum():
            return step if step.any() else residual
        size = residual.square().sum()
        step = step + size / curvature * ahead
        residual = residual - size / curvature * bent
        if residual.norm() < 0.1 * gradient.norm():
            break
        ahead = residual + residual.square().sum() / size * ahead
    return step


def run(name):
    """Follow one method; return losses and seconds after each of its steps."""
    global plan, solves
    plan, solves, started = None, 0, time.perf_counter()
    A = torch.eye(3, dtype=torch.float64).requires_grad_()
    losses, seconds = [], []
    slow = {"Adam": torch.optim.Adam([A], lr=0.02), "L-BFGS": torch.optim.LBFGS([A], max_iter=1)}
    for _ in range({"Newton-CG": 8, "L-BFGS": 30, "Adam": 150}[name]):
        if name == "Newton-CG":
            loss = loss_of(A)
            step = newton_step(A, loss)
            with torch.no_grad():
                size = 1.0
                while size > 1e-3 and float(loss_of(A + size * step)) > float(loss):
                    size /= 2
                A += size * step
        else:

            def closure():
                slow[name].zero_grad()
                loss = loss_of(A)
                loss.backward()
                return loss

            slow[name].step(closure)
        losses.append(float(loss_of(A.detach())))
        seconds.append(time.perf_counter() - started)
    return losses, seconds


found = {name: run(name) for name in ("Newton-CG", "L-BFGS", "Adam")}
best = min(losses[-1] for losses, _ in found.values())
figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
for name, (losses, seconds) in found.items():
    gaps = [max(loss - best, 1e-12) for loss in losses]
    reached = next((i for i, gap in enumerate(gaps) if gap <= 1e-4 * losses[0]), None)
    when = "not" if reached is None else f"after {reached + 1} steps, {seconds[reached]:.1f} s"
    print(f"{name:9s} loss {losses[0]:.4f} -> {losses[-1]:.8f}; within 1e-4 of the best {when}")
    axes[0].semilogy(gaps, label=name)
    axes[1].semilogy(seconds, gaps, label=name)
axes[0].set(xlabel="steps", ylabel="loss above the best")
axes[1].set(xlabel="seconds")
axes[0].legend()
