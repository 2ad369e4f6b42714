"""# Two slices of a tissue

Two slices that share a part of unknown size, the second one turned and shifted, and no genes. How
much of them matches is where the cost of more mass leaves its level; the spots that match make a
map of all of the first slice onto the second, also of what lies outside of the shared part.
"""

import numpy as np
from matplotlib import pyplot as plt

import torchgw
from torchgw.plotting import plot_masses

rng = np.random.default_rng(0)
tissue = np.stack(np.meshgrid(np.arange(16), np.arange(7)), -1).reshape(-1, 2)
tissue = tissue + 0.25 * rng.normal(size=tissue.shape)
tissue = tissue[tissue[:, 0].argsort()]
angle = 2.0
turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
first = tissue[:80]
order = rng.permutation(80) + 32
second = tissue[order] @ turn + [30, 5] + 0.02 * rng.normal(size=(80, 2))

# %%
# 48 of 80 spots, 60%, are in both slices. Both are taken to be in one unit where `mass` is given.
# [Linear costs](../fused.md) has slices with genes, and POT beside.

result = torchgw.solve(first, second, distances="euclidean", mass="auto", random_state=0)
print(result)
print(f"{result.report.mass:.0%} of the mass match", result.doubt)

# %%
# The map is fitted to pairs of the match, and leaves out those that do not fit.

there = result.rigid(robust=True)
missed = np.linalg.norm(there.transform(first) - (first @ turn + [30, 5]), axis=1)
print(there)
print(f"largest error, in distances between spots: {missed.max():.3f}")

# %%

figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
plot_masses(result, ax=axes[0])
axes[1].scatter(*first.T, label="first")
axes[1].scatter(*second.T, label="second")
axes[1].set_title("as given")
axes[1].legend()
axes[2].scatter(*there.transform(first).T)
axes[2].scatter(*second.T, marker="x")
axes[2].set_title("the first, moved onto the second")
for ax in axes[1:]:
    ax.set_aspect("equal")
