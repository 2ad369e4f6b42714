"""# The mean of several shapes

Three noisy flowers, turned and sampled anew each time, with different numbers of points. Their
barycenter is the metric space that is nearest to all three; classical scaling gives it coordinates.
Nobody has to say which points correspond.
"""

import numpy as np
from matplotlib import pyplot as plt

import torchgw

rng = np.random.default_rng(0)
shapes = []
for n in (90, 110, 130):
    angle = np.sort(rng.uniform(0, 2 * np.pi, n))
    radius = 1 + 0.35 * np.cos(3 * angle) + 0.04 * rng.normal(size=n)
    turn = angle + rng.uniform(0, 6)
    shapes.append(np.column_stack([radius * np.cos(turn), radius * np.sin(turn)]))

result = torchgw.barycenter(shapes, n=80, distances="sqeuclidean", epsilon=0.02, random_state=0)
print(result)
mean = result.points(2, squared=True)

figure, axes = plt.subplots(1, 4, figsize=(13, 3.4), layout="constrained")
for ax, points in zip(axes, (*shapes, mean), strict=True):
    ax.scatter(*points.T, s=8, color="C1" if points is mean else "C0")
    ax.set_aspect("equal")
    ax.set_title("barycenter" if points is mean else f"{len(points)} points")
