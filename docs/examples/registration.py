"""# Newton's method: flatten a surface

Half a cylinder is cut open and laid flat: points of the plane are moved until their distances match
geodesic ones, of which each has been measured a little too long. All coordinates are found by
Newton's method, whose linear systems are solved by conjugate gradients from products with the
Hessian, beside Adam and L-BFGS. Moves of the whole plane change no distance, so that the Hessian is
singular along them where the gradient is zero; conjugate gradients never leave its range.
"""

import time

import torch
from matplotlib import pyplot as plt

import torchgw

generator = torch.Generator().manual_seed(0)
count = 80
angle, height = (
    torch.rand(count, generator=generator, dtype=torch.float64) * size for size in (3, 2)
)
flat = torch.stack([angle, height], 1)
noise = torch.randn(count, count, generator=generator, dtype=torch.float64).abs()
D = torch.cdist(flat, flat) + 0.01 * (noise + noise.T)
D = D.fill_diagonal_(0)
# seen from the side where it is widest
solid = torch.stack([angle.cos(), angle.sin(), height], 1)
solid = solid - solid.mean(0)
shadow = (solid @ torch.linalg.svd(solid, full_matrices=False).Vh[:2].T).contiguous()


class Objective:
    """The loss of points; each solve begins at the plan of the last."""

    def __init__(self):
        self.plan = torch.eye(count, dtype=torch.float64) / count
        self.started = time.process_time()

    def __call__(self, points):
        """Solve for points, and return the loss with its graph."""
        result = torchgw.solve(
            points, D_Y=D, distances="euclidean", epsilon=0.02, init=self.plan,
            differentiable="value", tol=1e-10, inner_tol=1e-11,
        )  # fmt: skip
        self.plan = result.lazy_plan
        return result.loss

    def seconds(self):
        """CPU time since the first solve was asked for."""
        return time.process_time() - self.started


def conjugate_gradients(product, gradient, accuracy=0.02):
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
    points = shadow.clone().requires_grad_()
    loss = objective(points)
    for _ in range(most):
        (gradient,) = torch.autograd.grad(loss, points, create_graph=True)

        def product(direction, gradient=gradient, points=points):
            return torch.autograd.grad(gradient, points, direction, retain_graph=True)[0]

        losses.append(loss.item())
        step, length = conjugate_gradients(product, gradient.detach()), 1.0
        slope = (gradient.detach() * step).sum()
        while True:
            trial = (points.detach() + length * step).requires_grad_()
            new = objective(trial)
            if new.item() < losses[-1] + 1e-4 * length * slope or length < 1e-3:
                break
            length /= 2
        points, loss = trial, new
        if loss.item() <= goal or losses[-1] - loss.item() < 1e-12 * losses[-1]:
            break
    return [*losses, loss.item()], objective.seconds()


def first_order(goal, make, most):
    """Return the losses of an optimiser of PyTorch, until a goal."""
    objective, losses = Objective(), []
    points = shadow.clone().requires_grad_()
    optimiser = make([points])

    def closure():
        optimiser.zero_grad()
        loss = objective(points)
        loss.backward()
        return loss

    while len(losses) < most and (not losses or losses[-1] > goal):
        losses.append(optimiser.step(closure).item())
    return losses, objective.seconds()


least = min(newton(float("-inf"), 15)[0])
goal = least + 1e-9 * abs(least)
runs = {"Newton": newton(goal)}
# the best of the rates 0.01, 0.03, 0.05, 0.1 and 0.2
runs["Adam"] = first_order(goal, lambda x: torch.optim.Adam(x, lr=0.05), 300)
runs["L-BFGS"] = first_order(goal, lambda x: torch.optim.LBFGS(x, lr=1.0, max_iter=1), 150)
figure, ax = plt.subplots(figsize=(6, 4), layout="constrained")
for name, (losses, seconds) in runs.items():
    above = losses[-1] / least - 1
    print(f"{name:7} {len(losses) - 1:4} steps {seconds:6.2f} CPU s, {above:.1e} above the least")
    ax.semilogy([max(loss / least - 1, 1e-12) for loss in losses], label=name)
ax.set_xlabel("step")
ax.set_ylabel("loss above the least, relative")
ax.legend()
