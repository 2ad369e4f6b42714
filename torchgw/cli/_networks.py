"""Networks from files, for the command line. Nothing is ever unpickled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy

from torchgw._boundary.archive import UNREADABLE
from torchgw._errors import InvalidInputError

if TYPE_CHECKING:
    import networkx

NETWORKS = (".graphml", ".gml", ".mtx", ".edgelist", ".edges")
# Column of a table whose rows are edges that has their lengths, as NetworkX names it.
LENGTH = "weight"


def read_network(path: Path) -> networkx.Graph:
    """Read a graph; a line of an edge list is two nodes, and a length where there is one."""
    import networkx as nx

    form = path.suffix.lower()
    try:
        if form == ".graphml":
            graph = nx.read_graphml(path)
        elif form == ".gml":
            graph = nx.read_gml(path)
        elif form == ".mtx":
            graph = _from_matrix(scipy.io.mmread(path))
        else:
            graph = _from_lines(path.read_text(encoding="utf-8-sig").splitlines())
    except (*UNREADABLE, nx.NetworkXException, SyntaxError, TypeError, LookupError) as error:
        raise InvalidInputError(f"{path}: not a readable network: {error}") from error
    if graph.is_multigraph():
        raise InvalidInputError(f"{path}: two nodes have several edges. Keep one of them.")
    return graph


def read_sparse(path: Path) -> networkx.Graph | None:
    """Read a graph from a SciPy sparse matrix in a ``.npz`` file; ``None`` if it holds none."""
    # opened here, because np.load leaves a damaged archive open
    with path.open("rb") as file:
        try:
            if not {"format", "shape"} <= set(np.load(file, allow_pickle=False).files):
                return None
        except (*UNREADABLE, AttributeError):
            # said where arrays are read
            return None
        file.seek(0)
        try:
            return _from_matrix(scipy.sparse.load_npz(file))
        except UNREADABLE as error:
            raise InvalidInputError(f"{path}: not a readable network: {error}") from error


def from_edges(edges: Sequence[Sequence[Any]]) -> networkx.Graph:
    """Make a graph of edges (node, node) or (node, node, length)."""
    import networkx as nx

    # names that are whole numbers are sorted, so that rows of the result can be told
    names = list(dict.fromkeys(name for edge in edges for name in edge[:2]))
    numbers = all(name.isdecimal() for name in names)
    graph = nx.Graph()
    graph.add_nodes_from(sorted(names, key=int) if numbers else names)
    for source, target, *length in edges:
        graph.add_edge(source, target, **({LENGTH: float(length[0])} if length else {}))
    return graph


def _from_lines(lines: list[str]) -> networkx.Graph:
    """Read lines of two nodes, and a length or NetworkX's attributes after them."""
    import networkx as nx

    lines = [line for line in lines if line.strip() and line[0] not in "#%"]
    if any("{" in line for line in lines):
        listed = nx.parse_edgelist(lines).edges(data=LENGTH)
        return from_edges([edge if edge[2] is not None else edge[:2] for edge in listed])
    edges = [line.replace(",", " ").split()[:3] for line in lines]
    for row, edge in enumerate(edges, start=1):
        if len(edge) < 2:
            raise ValueError(f"line {row} has one node (without comments)")
    return from_edges(edges)


def _from_matrix(matrix: Any) -> networkx.Graph:
    """Read a matrix of edge lengths; one that is not symmetric has directed edges."""
    import networkx as nx

    if not scipy.sparse.issparse(matrix) or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"not sparse and square, but of shape {matrix.shape}")
    directed = (matrix != matrix.T).nnz > 0
    return nx.from_scipy_sparse_array(matrix, create_using=nx.DiGraph if directed else nx.Graph)
