"""# Handwritten digits in two representations

The same 300 images, once as 64 pixels and once as 10 principal components, in another order. The
solve sees distances inside each table only, and has to say which row is which. Euclidean distances
carry over almost unchanged: the default finds that they agree best, and takes them. Shortest paths
on neighbour graphs, `distances="precomputed"`, suit curved surfaces. Here several alignments by
them are about as good, and `result.ambiguity`, near 1, and a warning say so.
"""

import numpy as np
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA

import torchgw
from torchgw.plotting import plot_confusion

digits = load_digits()
rng = np.random.default_rng(0)
chosen = rng.permutation(len(digits.data))[:300]
shuffle = rng.permutation(300)
X, labels_x = digits.data[chosen], digits.target[chosen]
Y = PCA(10, random_state=0).fit_transform(digits.data)[chosen][shuffle]
labels_y = labels_x[shuffle]

figure, axes = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
for ax, distances in zip(axes, ("auto", "precomputed"), strict=True):
    result = torchgw.solve(X, Y, distances=distances, n_init=10, random_state=0)
    match = result.lazy_plan.argmax()
    same_image = (shuffle[match] == np.arange(300)).mean()
    same_digit = (labels_y[match] == labels_x).mean()
    print(
        f"{distances:11s}  same image {same_image:.3f}, same digit {same_digit:.3f}, "
        f"value {result.value:.5f}, ambiguity {result.ambiguity:.3f}"
    )
    plot_confusion(result, labels_x, labels_y, ax=ax)
    ax.set_title(f'distances="{distances}"')
