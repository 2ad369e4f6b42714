"""# A shape in two poses

A figure with limbs, and the same bent, each a surface of its own triangles. The two are compared by
paths along them, which bending hardly changes, and each place is coloured by where the match sends
it. The left limbs and the right ones are nearly alike: which is which, only the side on which
triangles look outside can tell.
"""

import numpy as np
from matplotlib import pyplot as plt
from scipy.spatial import ConvexHull

import torchgw


def directions(count, seed):
    """Draw points of a sphere, and triangles between them that look outside."""
    points = np.random.default_rng(seed).normal(size=(count, 3))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    faces = ConvexHull(points).simplices
    one, two, three = (points[faces[:, corner]] for corner in range(3))
    inside = (np.cross(two - one, three - one) * one).sum(1) < 0
    faces[inside] = faces[inside][:, ::-1]
    return points, faces


# head, arms, legs and tail: where they point, and how long they are
limbs = np.array(
    [[0, 0, 1], [0, 1, 0.3], [0, -1, 0.3], [0.4, 0.5, -1], [0.4, -0.5, -1], [-1, 0, -0.7]]
)
lengths = np.array([0.9, 1.4, 1.1, 1.8, 1.7, 2.2])


def figure(sphere):
    """Let limbs grow from a sphere."""
    near = sphere @ (limbs / np.linalg.norm(limbs, axis=1, keepdims=True)).T
    return sphere * (0.6 + np.exp(14 * (near - 1)) @ lengths)[:, None]


def bend(points, radius=4.0):
    """Lay the upright axis of a shape around a circle."""
    x, y, z = points.T
    return np.column_stack(
        [(radius + x) * np.cos(z / radius) - radius, y, (radius + x) * np.sin(z / radius)]
    )


# %%
# Vertices of both are drawn apart, so none has an exact partner. The mirror image of the match
# costs nearly the same, and is left out.

first, faces = directions(500, 0)
second, other_faces = directions(600, 1)
source, target = figure(first), bend(figure(second))
result = torchgw.solve(
    (source, faces),
    (target, other_faces),
    random_state=0,
    options=torchgw.Options(reflections=False),
)
print(result)
print(f"handedness: {result.handedness():.2f}")

# %%
# The place of each point of the second on the first, within a triangle; and how far it is from
# where it should be, as a share of the size of the figure.
# [Surfaces](../shapes.md#what-to-expect) has animals and people, published errors and POT's.

places = result.surface_map(inverse=True)
missed = np.linalg.norm(places.points - figure(second), axis=1)
by_vertex = np.linalg.norm(source[result.lazy_plan.argmax(axis=0)] - figure(second), axis=1)
size = np.ptp(source, axis=0).max()
print(f"missed by {missed.mean() / size:.3f} (by the largest entry: {by_vertex.mean() / size:.3f})")

# %%

figures = plt.figure(figsize=(9, 4.5))


def draw(place, points, triangles, values, title):
    """Draw a surface, each triangle coloured by the mean of its corners."""
    axes = figures.add_subplot(1, 2, place, projection="3d")
    drawn = axes.plot_trisurf(*points.T, triangles=triangles, shade=True, linewidth=0)
    low, high = source.min(0), source.max(0)
    drawn.set_facecolor(((values[triangles].mean(1) - low) / (high - low)).clip(0, 1))
    axes.set_box_aspect(np.ptp(points, axis=0))
    axes.set_title(title)
    axes.set_axis_off()


draw(1, source, faces, source, "a figure")
draw(2, target, other_faces, places.points, "bent, coloured by its match")
plt.tight_layout()
