"""# Roads: a sparse network with lost edges

Junctions of a road network have two or three neighbours each and look alike, so paths, degrees and
spectra hardly tell them apart. Here every tenth road is missing from one of two maps, and the two
are compared as tables, one where there is a road and zero elsewhere. What a junction can be is
told by its neighbours, by theirs, and so on: [messages along the edges](../algorithm.md) begin the
search. The matching then keeps as many roads as it can; where a dead end could be either of two,
nothing tells. The [leaderboard](../leaderboard.md#sparse-networks-that-lost-edges) has networks of
thousands of nodes, beside published results, POT and SciPy.
"""

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.collections import LineCollection
from scipy.sparse import csr_array
from scipy.spatial import Delaunay

import torchgw

rng = np.random.default_rng(0)
places = rng.random((200, 2))
corners = Delaunay(places).simplices
roads = np.unique(np.sort(np.concatenate([corners[:, :2], corners[:, 1:]]), axis=1), axis=0)
lengths = np.linalg.norm(places[roads[:, 0]] - places[roads[:, 1]], axis=1)
# short roads are built rather than long ones
roads = roads[(lengths * rng.uniform(0.3, 1, len(roads))).argsort()[:260]]


def table(ends):
    """Give the adjacency matrix of some roads."""
    once = csr_array((np.ones(len(ends)), ends.T), shape=(200, 200))
    return (once + once.T).toarray()


order = rng.permutation(200)
whole = table(roads)[np.ix_(order, order)]
left = roads[rng.random(len(roads)) > 0.1]
result = torchgw.solve(D_X=table(left), D_Y=whole, random_state=0)
matching = result.matching()
found = order[matching.target]
same = found == np.arange(200)
print(
    f"{matching.edges_kept} of {len(left)} roads lie on roads; {same.mean():.0%} of the junctions "
    "are where they were"
)

figure, axes = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
colours = places @ [[0.8, 0, 0.3], [0, 0.8, 0.4]] + [0.1, 0.1, 0.15]
for ax, ends, shades, title in (
    (axes[0], left, colours, "a tenth of the roads is missing"),
    (axes[1], roads, colours[found.argsort()], "each junction with the colour of its match"),
):
    ax.add_collection(LineCollection(places[ends], color="0.75"))
    ax.scatter(*places.T, c=shades.clip(0, 1), s=22, zorder=2)
    ax.set(title=title, xticks=[], yticks=[], aspect="equal")
