"""# Newton's method: undo a distortion

An instrument has stretched and sheared a cloud. The affine map that gives it the distances of the
other cloud is found by Newton's method, whose linear systems are solved by conjugate gradients from
products with the Hessian, beside Adam and L-BFGS. Rotations change no distance, so that the Hessian
is singular along them; conjugate gradients never leave its range.
"""

import time

import torch
from matplotlib import pyplot as plt

import torchgw

generator = torch.Generator().manual_seed(0)


def normal(*shape):
    """Draw normal numbers."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


turn = torch.linalg.qr(normal(3, 3))[0]
stretch = turn @ torch.tensor([1.3, 0.8, 0.6], dtype=torch.float64).diag() @ turn.T
X = normal(80, 3) * torch.tensor([2.0, 1.0, 0.5], dtype=torch.float64)
Y = X[:60] @ stretch + 0.02 * normal(60, 3)
identity = torch.eye(3, dtype=torch.float64)


class Objective:
    """The loss of an affine map; each solve begins at the plan of the last."""

    def __init__(self):
        self.plan, self.solves, self.started = None, 0, time.process_time()

    def __call__(self, matrix):
        """Solve for a map, and return the loss with its graph."""
        result = torchgw.solve(
            X @ matrix, Y, distances="sqeuclidean", epsilon=6.0, init=self.plan, n_init=1,
            differentiable="value", tol=1e-8, inner_tol=1e-9,
        )  # fmt: skip
        self.plan, self.solves = result.lazy_plan, self.solves + 1
        return result.loss

    def seconds(self):
        """CPU time since the first solve was asked for."""
        return time.process_time() - self.started


def conjugate_gradients(product, gradient, accuracy=0.1):
    """Solve H step = -gradient, as far as H is positive."""
    step, left = torch.zeros_like(gradient), -gradient
    ahead, size = left, left.square().sum()
    goal = accuracy**2 * size
    while size > goal:
        bent = product(ahead)
        curve = (ahead * bent).sum()
        if curve <= 1e-10 * ahead.square().sum():
            return step if step.any() else left
        step, left = step + size / curve * ahead, left - size / curve * bent
        before, size = size, left.square().sum()
        ahead = left + size / before * ahead
    return step


def newton(goal, most=30):
    """Return the losses of Newton's method, until a goal."""
    objective, losses = Objective(), []
    matrix = identity.clone().requires_grad_()
    loss = objective(matrix)
    for _ in range(most):
        (gradient,) = torch.autograd.grad(loss, matrix, create_graph=True)

        def product(direction, gradient=gradient, matrix=matrix):
            return torch.autograd.grad(gradient, matrix, direction, retain_graph=True)[0]

        losses.append(loss.item())
        step, length = conjugate_gradients(product, gradient.detach()), 1.0
        slope = (gradient.detach() * step).sum()
        while True:
            trial = (matrix.detach() + length * step).requires_grad_()
            new = objective(trial)
            if new.item() < losses[-1] + 1e-4 * length * slope or length < 1e-3:
                break
            length /= 2
        matrix, loss = trial, new
        if loss.item() <= goal or losses[-1] - loss.item() < 1e-12 * losses[-1]:
            break
    return [*losses, loss.item()], objective.seconds()


def first_order(goal, make, most):
    """Return the losses of an optimiser of PyTorch, until a goal."""
    objective, losses = Objective(), []
    matrix = identity.clone().requires_grad_()
    optimiser = make([matrix])

    def closure():
        optimiser.zero_grad()
        loss = objective(matrix)
        loss.backward()
        return loss

    while len(losses) < most and (not losses or losses[-1] > goal):
        losses.append(optimiser.step(closure).item())
    return losses, objective.seconds()


least = min(newton(float("-inf"), 12)[0])
goal = least * (1 + 1e-8)
runs = {"Newton": newton(goal)}
# the best of the rates 0.01, 0.03 and 0.1
runs["Adam"] = first_order(goal, lambda x: torch.optim.Adam(x, lr=0.03), 400)
runs["L-BFGS"] = first_order(goal, lambda x: torch.optim.LBFGS(x, lr=0.3, max_iter=1), 80)
figure, ax = plt.subplots(figsize=(6, 4), layout="constrained")
for name, (losses, seconds) in runs.items():
    above = losses[-1] / least - 1
    print(f"{name:7} {len(losses) - 1:4} steps {seconds:6.2f} CPU s, {above:.1e} above the least")
    ax.semilogy([max(loss / least - 1, 1e-12) for loss in losses], label=name)
ax.set_xlabel("step")
ax.set_ylabel("loss above the least, relative")
ax.legend()
