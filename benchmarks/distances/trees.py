"""A random tree in the hyperbolic plane: ``python -m benchmarks trees --nodes 2000 80000``.

A tree, each node attached to one drawn from those before, is embedded in the Poincare disk, and
matched with its copy under an isometry, shuffled. One line of JSON per size: seconds of the solve
alone, and the share of nodes that are matched with their image up to automorphisms of the tree.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

import torchgw
from torchgw._boundary.arrays import to_numpy

__all__ = ["main", "tree_and_copy"]

# Points (n, 2) of both sides, the order of the second, and classes of nodes that are alike.
TreePair: TypeAlias = tuple[
    NDArray[np.float64], NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]
]


def random_tree(n: int, rng: np.random.Generator) -> list[int]:
    """Attach each node to one drawn from those before; parents, rooted at a centre."""
    near: list[list[int]] = [[] for _ in range(n)]
    for node in range(1, n):
        other = int(rng.integers(node))
        near[node].append(other)
        near[other].append(node)

    def walk(root: int) -> tuple[list[int], dict[int, int]]:
        parent, order = {root: -1}, [root]
        for node in order:
            fresh = [other for other in near[node] if other not in parent]
            parent.update(dict.fromkeys(fresh, node))
            order += fresh
        return order, parent

    # from an end of the longest path to the other
    order, parent = walk(walk(0)[0][-1])
    path = [order[-1]]
    while parent[path[-1]] >= 0:
        path.append(parent[path[-1]])
    order, parent = walk(path[len(path) // 2])
    place = {node: i for i, node in enumerate(order)}
    return [-1] + [place[parent[node]] for node in order[1:]]


def embedded(parents: list[int], length: float) -> NDArray[np.complex128]:
    """Place a tree in the Poincare disk, its edges of one length, evenly around each node [1]_.

    References
    ----------
    .. [1] R. Sarkar. Low distortion Delaunay embedding of trees in hyperbolic plane. GD 2011.
    """
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], 1):
        children[parent].append(node)
    z, step = np.zeros(len(parents), complex), np.tanh(length / 2)
    for node, parent in enumerate(parents):
        back = 0.0
        if parent >= 0:
            back = np.angle((z[parent] - z[node]) / (1 - z[node].conj() * z[parent]))
        degree = len(children[node]) + (parent >= 0)
        for turn, child in enumerate(children[node], int(parent >= 0)):
            w = step * np.exp(1j * (back + 2 * np.pi * turn / degree))
            z[child] = (w + z[node]) / (1 + z[node].conj() * w)
    return z


def orbits(parents: list[int]) -> NDArray[np.int64]:
    """Number the classes of nodes that automorphisms of the tree exchange, by colour refinement."""
    near: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], 1):
        near[node].append(parent)
        near[parent].append(node)
    colours: list[int] = [0] * len(parents)
    count = 1
    while True:
        keys = [(colours[i], *sorted(colours[j] for j in near[i])) for i in range(len(parents))]
        names = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        colours = [names[key] for key in keys]
        if len(names) == count:
            return np.array(colours)
        count = len(names)


def tree_and_copy(n: int, length: float, seed: int = 0) -> TreePair:
    """Embed a random tree; move, reflect and shuffle a copy of it."""
    rng = np.random.default_rng(seed)
    parents = random_tree(n, rng)
    z = embedded(parents, length)
    away, turn = np.tanh(0.5) * np.exp(2j * np.pi * rng.random()), np.exp(2j * np.pi * rng.random())
    copy = (turn * (z + away) / (1 + away.conj() * z)).conj()
    order = rng.permutation(n)
    X, Y = (np.stack([w.real, w.imag], 1) for w in (z, copy[order]))
    return X, Y, order, orbits(parents)


def main(arguments: list[str]) -> None:
    """Solve trees of some sizes, and print a line for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks trees", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2_000])
    parser.add_argument("--length", type=float, default=2.0, help="hyperbolic length of an edge")
    parser.add_argument("--epsilon", type=float, default=2e-5)
    parser.add_argument("--landmarks", type=int, help="factors from so many; exact by default")
    parser.add_argument("--gradient", default="auto")
    parser.add_argument("--max-iter", type=int, default=12)
    parser.add_argument("--polish", action="store_true", help="the match itself, not a soft plan")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=2, help="the first call compiles")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    for n in options.nodes:
        x, y, order, classes = tree_and_copy(n, options.length, options.seed)
        source, target = (torch.from_numpy(part).to(options.device) for part in (x, y))
        settings: dict[str, Any] = {
            "epsilon": options.epsilon, "n_landmarks": options.landmarks,
            "max_iter": options.max_iter, "gradient": options.gradient, "search": "fast",
            "polish": options.polish, "random_state": 0,
        }  # fmt: skip
        for _ in range(options.repeat):
            started, cpu = time.perf_counter(), time.process_time()
            result = torchgw.solve(
                source, target, distances="poincare", options=torchgw.Options(**settings)
            )
            partners = to_numpy(result.lazy_plan.argmax())
            seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
            found = order[partners]
            record = {
                "nodes": n, "device": options.device, **settings, "length": options.length,
                "seconds": round(seconds, 3), "cpu_seconds": round(cpu, 3),
                "on_image": float((classes[found] == classes).mean()),
                "same": float((found == np.arange(n)).mean()), "value": result.value,
                "status": result.status.name, "used": result.gradient,
                "landmarks": result.report.landmarks, "timings": result.timings,
            }  # fmt: skip
            print(json.dumps(record), flush=True)
