"""# Training on Gromov-Wasserstein

A linear map to the plane is trained so that distances survive. The loss searches once, and every
hundred steps; otherwise it goes on from the last plan, in milliseconds. It never sees which point
is which.
"""

import torch
from matplotlib import pyplot as plt

from torchgw.losses import GWLoss

generator = torch.Generator().manual_seed(0)
angle = torch.linspace(0, 5.5, 64)
curve = torch.stack([angle.cos(), angle.sin(), 0.15 * angle], 1)
hidden = torch.cat([curve, 0.3 * torch.randn(64, 3, generator=generator)], 1)
order = torch.randperm(64, generator=generator)

torch.manual_seed(0)
encoder = torch.nn.Linear(6, 2)
loss = GWLoss(epsilon=0.02, debiased=True)
optimiser = torch.optim.Adam(encoder.parameters(), lr=0.02)
before = encoder(hidden).detach()
values = []
for _ in range(150):
    value = loss(encoder(hidden), curve[order])
    optimiser.zero_grad()
    value.backward()
    optimiser.step()
    values.append(value.item())
print(f"{values[0]:.3f} -> {values[-1]:.3f} with {loss.searches} searches in {len(values)} steps")

figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
for ax, points, title in zip(
    axes, (before, encoder(hidden).detach()), ("before", "after"), strict=False
):
    ax.scatter(*points.T, c=angle, s=12)
    ax.set_title(title)
    ax.set_aspect("equal")
axes[2].plot(values)
axes[2].set(xlabel="step", ylabel="loss")
