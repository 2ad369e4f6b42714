"""# Is the match real?

A solver matches anything with anything. Three pictures tell what a match is worth before anybody
knows the truth: [how they are made](../real.md).
"""

import numpy as np
from matplotlib import pyplot as plt

import torchgw
from torchgw.plotting import plot_match, plot_path, plot_test

rng = np.random.default_rng(0)
angle = np.sort(rng.random(60)) * 5
X = np.stack([angle * np.cos(angle), angle * np.sin(angle)], 1)
order = rng.permutation(60)
Y = (X + 0.25 * rng.normal(size=X.shape))[order]
nothing = rng.normal(size=(60, 2)) * X.std(0)

# %%
# ## Chance
#
# The objective beside those of clouds of the same extent that know nothing of X: for a noisy copy,
# and for a cloud of points.

figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
for ax, other, name in zip(axes, (Y, nothing), ("a noisy copy", "a cloud"), strict=True):
    found = torchgw.test(X, other, n_permutations=99, random_state=0)
    print(name, found)
    plot_test(found, ax=ax)
    ax.set_title(f"{name}: {ax.get_title()}")

# %%
# ## Confidence
#
# The share of resamples that keep the partner of each point: low where the curve is crowded and
# noise exchanges neighbours.

result = torchgw.solve(X, Y, distances="euclidean", random_state=0)
found = result.confidence()
right = order[result.lazy_plan.argmax()] == np.arange(60)
print(found, f"right: {right.mean():.2f}")
plot_match(result, X, Y, colour="confidence", size=30)

# %%
# ## Path
#
# What other values of epsilon would have made of it.

found = torchgw.path(
    X,
    Y,
    epsilon=[1e-3, 3e-3, 0.01, 0.03, 0.1],
    distances="euclidean",
    random_state=0,
    n_resamples=5,
)
print(found)
plot_path(found)
plt.show()
