"""# Two hierarchies, in hyperbolic space

The folders and modules of NetworkX are a tree. It is embedded in the Poincare disk, the children of
a node evenly around it (R. Sarkar, Low distortion Delaunay embedding of trees in hyperbolic plane,
GD 2011). The other side is that tree without a tenth of its modules, embedded by itself, then
moved by an isometry of the disk, reflected and shuffled. Names play no part: the two clouds are
compared by hyperbolic distances, and, beside that, by the Euclidean distances of the same
coordinates, which no isometry of the disk keeps.

A module counts as found if its partner lies in the same folder: modules of one folder are leaves
side by side, and nothing but their order around it tells them apart.
"""

from pathlib import Path

import networkx as nx
import numpy as np
from matplotlib import pyplot as plt

import torchgw


def file_tree(root, removed=()):
    """Join each module and folder to the folder that it lies in."""
    tree = nx.DiGraph()
    for path in sorted(root.rglob("*.py")):
        parts = ("networkx", *path.relative_to(root).parts)
        if "tests" not in parts and parts not in removed:
            nx.add_path(tree, [parts[:length] for length in range(1, len(parts) + 1)])
    return tree


def embed(tree, length=2.0):
    """Place the children of every node evenly around it, at one hyperbolic distance."""
    place = {("networkx",): 0j}
    for node in nx.topological_sort(tree):
        z, parents, children = place[node], list(tree.predecessors(node)), list(tree[node])
        towards = [(place[p] - z) / (1 - np.conj(z) * place[p]) for p in parents]
        start = np.angle(towards[0]) if parents else 0.0
        turn = 2 * np.pi / max(1, len(children) + len(parents))
        for i, child in enumerate(children, len(parents)):
            w = np.tanh(length / 2) * np.exp(1j * (start + i * turn))
            place[child] = (w + z) / (1 + np.conj(z) * w)
    return np.array([place[node] for node in tree])


rng = np.random.default_rng(0)
root = Path(nx.__file__).parent
whole = file_tree(root)
modules = [node for node in whole if not whole[node]]
gone = {modules[i] for i in rng.choice(len(modules), len(modules) // 10, replace=False)}
part = file_tree(root, gone)
z, w = embed(whole), embed(part)
away = np.tanh(0.75) * np.exp(1j)
w = np.conj((w + away) / (1 + np.conj(away) * w))
order = rng.permutation(len(w))
names, others = list(whole), [list(part)[i] for i in order]
X, Y = (np.stack([u.real, u.imag], axis=1) for u in (z, w[order]))

figure, axes = plt.subplots(1, 2, figsize=(10, 5), layout="constrained")
for ax, metric in zip(axes, ("poincare", "euclidean"), strict=True):
    result = torchgw.solve(X, Y, distances=metric, random_state=0)
    partners = result.lazy_plan.argmax()
    pairs = [(name, others[i]) for name, i in zip(names, partners, strict=True)]
    folders = np.mean([name == other for name, other in pairs if whole[name]])
    inside = np.mean([name[:-1] == other[:-1] for name, other in pairs if not whole[name]])
    print(
        f"{metric:9s} {len(X)} x {len(Y)}: {folders:.0%} of the folders found, {inside:.0%} of the "
        f"modules in their folder; value {result.value:.2g}, {result.status.name}"
    )
    same = np.array([name[:2] == other[:2] for name, other in pairs])
    ax.scatter(*Y[partners].T, c=np.where(same, "tab:blue", "tab:red"), s=12)
    ax.add_patch(plt.Circle((0, 0), 1, fill=False))
    ax.set(title=f"{metric}: red where the top folder differs", aspect="equal")
