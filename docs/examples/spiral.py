"""# A spiral and a Swiss roll

The same curve, in two and in three dimensions, with another number of points. Geodesic distances
on nearest-neighbour graphs see that they are one curve; no coordinate is shared.
"""

import numpy as np
from matplotlib import pyplot as plt
from scipy.stats import spearmanr

import torchgw
from torchgw.datasets import spiral, swiss_roll
from torchgw.plotting import plot_convergence, plot_match, plot_plan

X, angle_x = spiral(400, random_state=0)
Y, angle_y = swiss_roll(500, random_state=1)
# in no particular order
shuffle = np.random.default_rng(0).permutation(500)
Y, angle_y = Y[shuffle], angle_y[shuffle]

result = torchgw.solve(X, Y, random_state=0)
print(result)

match = result.lazy_plan.argmax()
print(f"rank correlation of matched positions: {spearmanr(angle_x, angle_y[match])[0]:+.4f}")

figure = plt.figure(figsize=(10, 8), layout="constrained")
axes = figure.add_subplot(2, 2, 1), figure.add_subplot(2, 2, 2, projection="3d")
plot_match(result, X, Y, colour=angle_x, ax=axes)
plot_plan(result, ax=figure.add_subplot(2, 2, 3))
plot_convergence(result, ax=figure.add_subplot(2, 2, 4))
