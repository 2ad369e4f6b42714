"""# New points, without solving again

A solve on some of the points gives potentials; a new point needs its distances to the old ones and
one half-step. Here 300 points are solved and 1,700 are mapped afterwards, from a saved file.
"""

import tempfile
import time

import numpy as np
from matplotlib import pyplot as plt
from scipy.spatial import cKDTree
from scipy.stats import spearmanr

import torchgw
from torchgw.datasets import spiral, swiss_roll

X, angle = spiral(2000, random_state=0)
Y, target_angle = swiss_roll(400, random_state=1)
old = np.arange(2000) % 20 < 3
result = torchgw.solve(X[old], Y, random_state=0)

with tempfile.TemporaryDirectory() as folder:
    result.save(f"{folder}/spiral.npz")
    again = torchgw.load(f"{folder}/spiral.npz")

start = time.perf_counter()
moved = again.transform(X[~old])
print(f"{len(moved)} new points in {time.perf_counter() - start:.2f} s")
nearest = cKDTree(Y).query(moved)[1]
print(f"rank correlation: {spearmanr(angle[~old], target_angle[nearest])[0]:+.4f}")

known = result.lazy_plan.barycentric(Y)
print(f"old points move by {np.abs(result.transform(X[old]) - known).max():.1e}")

figure = plt.figure(figsize=(10, 4.5), layout="constrained")
left = figure.add_subplot(1, 2, 1)
left.scatter(*X[~old].T, c=angle[~old], s=4)
left.scatter(*X[old].T, c="black", s=3, label="solved")
left.legend()
left.set_title("X: new points by colour")
right = figure.add_subplot(1, 2, 2, projection="3d")
right.scatter(*Y.T, c="0.8", s=4)
right.scatter(*moved.T, c=angle[~old], s=4)
right.view_init(elev=50)
right.set_title("where they go in the space of Y")
