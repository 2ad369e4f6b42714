"""# A loss that moves points

The objective is differentiable: its gradient moves a cloud until its shape is that of another one,
wherever that one lies and however it is turned. Each step is a solve from the last plan and one
gradient.
"""

import torch
from matplotlib import pyplot as plt

import torchgw

generator = torch.Generator().manual_seed(0)
angle = torch.linspace(0, 6.283, 61, dtype=torch.float64)[:-1]
# a flower in three dimensions, which a flat cloud can only copy without its tilt
radius = 1 + 0.3 * torch.cos(3 * angle)
Y = torch.stack([radius * angle.cos(), radius * angle.sin(), 0.5 * radius * angle.cos()], dim=1)
X = torch.randn(60, 2, dtype=torch.float64, generator=generator).requires_grad_()

start, losses = X.detach().clone(), []
optimiser = torch.optim.Adam([X], lr=0.05)
plan = None
for _ in range(80):
    result = torchgw.solve(
        X, Y, distances="sqeuclidean", scale=None, epsilon=0.05, init=plan,
        differentiable="value", n_init=1,
    )  # fmt: skip
    optimiser.zero_grad()
    result.loss.backward()
    optimiser.step()
    plan = result.plan.detach()
    losses.append(result.loss.item())
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")

figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
axes[0].scatter(*start.T, s=10)
axes[0].set_title("X before")
axes[1].scatter(*X.detach().T, s=10, c=result.lazy_plan.argmax().detach(), cmap="hsv")
axes[1].set_title("X after, coloured by its match in Y")
axes[2].plot(losses)
axes[2].set_title("loss")
for ax in axes[:2]:
    ax.set_aspect("equal")
