"""# Newton's method: unmix channels

Three channels measure positions, each a mixture of all coordinates and nearly the same as the
others. Distances of the same points are known from elsewhere, with errors; which point is which is
a guess that the plan may correct. The linear map under which the channels have these distances is
found by Newton's method, whose linear systems are solved by conjugate gradients from products with
the Hessian, beside Adam and L-BFGS.
Turns of the mapped points change no distance, so that the Hessian is singular along them where the
gradient is zero; conjugate gradients never leave its range.
"""

import time

import torch
from matplotlib import pyplot as plt

import torchgw

generator = torch.Generator().manual_seed(0)
count = 80


def normal(*shape):
    """Draw normal numbers in float64."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


positions = normal(count, 3) * torch.tensor([2, 1, 0.5])
left, _, right = torch.linalg.svd(normal(3, 3))
# the largest mixture is 20 times the smallest
mixing = left * torch.tensor([1, 20**-0.5, 1 / 20]) @ right
channels = positions @ mixing
errors = normal(count, count).abs()
D = (torch.cdist(positions, positions) + 0.02 * (errors + errors.T)).fill_diagonal_(0)
# the map is known to some 20%
begin = torch.linalg.inv(mixing) @ (torch.eye(3) + 0.2 * normal(3, 3))


class Objective:
    """The loss of a map; each solve begins at the plan of the last."""

    def __init__(self):
        self.plan = torch.eye(count, dtype=torch.float64) / count
        self.started = time.process_time()

    def __call__(self, unmixing):
        """Solve for a map, and return the loss with its graph."""
        result = torchgw.solve(
            channels @ unmixing,
            D_Y=D,
            distances="euclidean",
            epsilon=0.05,
            init=self.plan,
            differentiable="value",
            tol=1e-10,
            options=torchgw.Options(inner_tol=1e-11),
        )
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
    unmixing = begin.clone().requires_grad_()
    loss = objective(unmixing)
    for _ in range(most):
        (gradient,) = torch.autograd.grad(loss, unmixing, create_graph=True)

        def product(direction, gradient=gradient, unmixing=unmixing):
            return torch.autograd.grad(gradient, unmixing, direction, retain_graph=True)[0]

        losses.append(loss.item())
        step, length = conjugate_gradients(product, gradient.detach()), 1.0
        slope = (gradient.detach() * step).sum()
        while True:
            trial = (unmixing.detach() + length * step).requires_grad_()
            new = objective(trial)
            if new.item() < losses[-1] + 1e-4 * length * slope or length < 1e-3:
                break
            length /= 2
        unmixing, loss = trial, new
        if loss.item() <= goal or losses[-1] - loss.item() < 1e-12 * losses[-1]:
            break
    return [*losses, loss.item()], objective.seconds()


def first_order(goal, make, most):
    """Return the losses of an optimiser of PyTorch, until a goal."""
    objective, losses = Objective(), []
    unmixing = begin.clone().requires_grad_()
    optimiser = make([unmixing])

    def closure():
        optimiser.zero_grad()
        loss = objective(unmixing)
        loss.backward()
        return loss

    while len(losses) < most and (not losses or losses[-1] > goal):
        losses.append(optimiser.step(closure).item())
    return losses, objective.seconds()


least = min(newton(float("-inf"), 12)[0])
goal = least + 1e-9 * abs(least)
runs = {"Newton": newton(goal)}
# the best of the rates 0.02, 0.05, 0.1, 0.2 and 0.5
runs["Adam"] = first_order(goal, lambda x: torch.optim.Adam(x, lr=0.2), 300)
runs["L-BFGS"] = first_order(goal, lambda x: torch.optim.LBFGS(x, lr=1.0, max_iter=1), 150)
figure, ax = plt.subplots(figsize=(6, 4), layout="constrained")
for name, (losses, seconds) in runs.items():
    above = losses[-1] / least - 1
    print(f"{name:7} {len(losses) - 1:4} steps {seconds:6.2f} CPU s, {above:.1e} above the least")
    ax.semilogy([max(loss / least - 1, 1e-12) for loss in losses], label=name)
ax.set_xlabel("step")
ax.set_ylabel("loss above the least, relative")
ax.legend()
