"""# Networks: which vertex is which

Two copies of one network, one with its vertices renamed and some edges removed. Vertices are
compared by their distances to all others along edges; names and attributes play no part. Edge
weights are lengths, missing ones count as 1. Each vertex of the copy has the colour of its match:
where the colours agree, it was found. Characters who meet the same others equally often cannot be
told apart, and are exchanged: then edges are kept although names are not.
"""

import networkx as nx
import numpy as np
from matplotlib import pyplot as plt

import torchgw

graph = nx.les_miserables_graph()
for _, _, edge in graph.edges(data=True):
    # a weight of this data set counts meetings; often is near
    edge["weight"] = 1 / edge["weight"]
nodes = list(graph)
rng = np.random.default_rng(0)

places = nx.kamada_kawai_layout(graph)
# neighbours in the picture have similar colours
around = {node: np.arctan2(*place) for node, place in places.items()}
figure, axes = plt.subplots(1, 3, figsize=(13, 4.5), layout="constrained")


def draw(ax, network, colours):
    """Draw a network, the vertices where they are in the original."""
    edges = nx.draw_networkx_edges(network, places, ax=ax, alpha=0.2)
    dots = nx.draw_networkx_nodes(
        network, places, ax=ax, node_size=60, cmap="hsv", vmin=-np.pi, vmax=np.pi,
        node_color=[colours[node] for node in network],
    )  # fmt: skip
    return edges, dots


draw(axes[0], graph, around)
axes[0].set_title("the original")
for ax, removed in zip(axes[1:], (0, 20), strict=True):
    order = rng.permutation(len(nodes))
    copy = nx.Graph()
    copy.add_nodes_from(nodes[place] for place in order)
    copy.add_edges_from(graph.edges(data=True))
    # a spanning tree stays, so that the copy is connected
    tree = nx.minimum_spanning_tree(copy)
    others = [edge for edge in copy.edges if not tree.has_edge(*edge)]
    gone = rng.choice(len(others), removed, replace=False)
    copy.remove_edges_from(others[place] for place in gone)

    result = torchgw.solve(graph, copy, random_state=0)
    matching = result.matching()
    found = matching.as_dict(graph, copy)
    same = np.mean([found[node] == node for node in nodes])
    kept = f"{matching.edges_kept} of {copy.number_of_edges()} edges kept"
    print(f"{removed} edges removed: {same:.0%} of vertices found, {kept}")
    draw(ax, copy, {found[node]: around[node] for node in nodes})
    ax.set_title(f"{removed} edges removed: {same:.0%} of vertices found")
