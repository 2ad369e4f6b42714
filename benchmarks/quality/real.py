"""Real data with a known match: words in three layers of a model, proteins, handwritten digits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.quality.instances import (
    Array,
    Index,
    Instance,
    euclidean_copy,
    from_matrices,
    hits,
    permutation_plan,
)
from benchmarks.quality.networks import MissingDataError

__all__ = ["DATA_VARIABLE", "digits", "read_data", "word_layers", "yeast"]

Generator = np.random.Generator

DATA_VARIABLE = "TORCHGW_DATA"
_DEFAULT_FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data"


def read_data(name: str) -> dict[str, NDArray[Any]]:
    """Read all arrays of a file of the data folder."""
    path = Path(os.environ.get(DATA_VARIABLE) or _DEFAULT_FOLDER) / name
    if not path.is_file():
        raise MissingDataError(f"{path} is absent; set {DATA_VARIABLE} or pass --data FOLDER")
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


def word_layers(rng: Generator, source: int, target: int) -> Instance:
    """1,000 English words as hidden states of a sentence encoder after two of its layers.

    Centred rows of length one, cosine distances, each side over its mean (D. Alvarez-Melis and T.
    Jaakkola, Gromov-Wasserstein alignment of word embedding spaces, 2018).
    """
    data = read_data("words.npz")
    d_x, d_y = (_cosine(data[f"layer{layer}"].astype(np.float64)) for layer in (source, target))
    d_y, match = _shuffled(d_y, rng)
    return from_matrices(d_x, d_y, hits(match), answer=permutation_plan(match), divided=False)


def _cosine(vectors: Array) -> Array:
    vectors = vectors - vectors.mean(0)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    table = np.clip(1 - vectors @ vectors.T, 0, None)
    np.fill_diagonal(table, 0)
    return np.asarray(table / table.mean())


def _shuffled(d_y: Array, rng: Generator) -> tuple[Array, Index]:
    """Shuffle a side; return its distances and where each point went."""
    order = rng.permutation(len(d_y))
    return d_y[np.ix_(order, order)], np.argsort(order)


def yeast(rng: Generator, extra: int, *, by_degree: bool) -> Instance:
    """Protein interactions of yeast against a copy with 5 or 20% extra edges, 1,004 nodes.

    Equal weights: 0/1 adjacency, and a one-to-one matching is judged. By degree: the weights and
    the adjacency of S-GWL (half of A + A', H. Xu et al., 2019), and the plan is judged.
    """
    data = read_data("ppi.npz")
    names, others = data["names_true"], data[f"names_noise{extra}"]
    # the copy in the order of the first
    order = np.argsort(others)[np.argsort(np.argsort(names))]
    d_x = _adjacency(data["edges_true"], len(names))
    d_y = _adjacency(data[f"edges_noise{extra}"], len(names))[np.ix_(order, order)]
    d_y, match = _shuffled(d_y, rng)
    back = np.argsort(match)
    if not by_degree:
        answer = permutation_plan(match)
        return from_matrices(d_x, d_y, hits(match), answer=answer, network=True)
    a = data["degree_weights_true"].astype(np.float64)
    b = data[f"degree_weights_noise{extra}"].astype(np.float64)[order][back]
    a, b = a / a.sum(), b / b.sum()
    return from_matrices(
        d_x / 2, d_y / 2, hits(match), weights=(a, b), divided=False
    )  # fmt: skip


def _adjacency(edges: Index, n: int) -> Array:
    table = np.zeros((n, n))
    table[edges[0], edges[1]] = table[edges[1], edges[0]] = 1
    return table


def digits(rng: Generator, n: int) -> Instance:
    """Handwritten digits of 8 x 8 pixels in two embeddings, Euclidean distances.

    The 1,797 images ship with scikit-learn; for more points each is also moved by a pixel up,
    down, left and right. X is their first 32 principal components; Y is a random map, 256 rectified
    random sums of pixels: two views of the same images without a common coordinate.
    """
    from sklearn.datasets import load_digits

    images = load_digits().images / 16
    if n > len(images):
        padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
        moves = ((1, 1), (0, 1), (2, 1), (1, 0), (1, 2))
        images = np.concatenate([padded[:, i : i + 8, j : j + 8] for i, j in moves])
    chosen = rng.choice(len(images), n, replace=False)
    pixels = images[chosen].reshape(n, 64)
    pixels = pixels - pixels.mean(0)
    x = pixels @ np.linalg.svd(pixels, full_matrices=False)[2][:32].T
    y = np.maximum(pixels @ rng.normal(size=(64, 256)) + rng.normal(size=256), 0)
    d_x, d_y, match = euclidean_copy(x, y, rng)
    return from_matrices(
        d_x / d_x.mean(), d_y / d_y.mean(), hits(match), answer=permutation_plan(match),
        divided=False,
    )  # fmt: skip
