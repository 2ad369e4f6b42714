"""Distance providers: the symmetric distances of one space, (n, n), read by columns.

:class:`DistanceProvider` is the contract that all of them keep.
"""

from torchgw.distances._graph.edges import symmetrise, validate_graph
from torchgw.distances.base import DistanceProvider, Factors, ScaledDistance
from torchgw.distances.callable import CallableDistance, ManifoldDistance
from torchgw.distances.curved import CurvedDistance
from torchgw.distances.dijkstra import DijkstraDistance
from torchgw.distances.factored import FactoredDistance, ProductDistance
from torchgw.distances.geodesics import Geodesics
from torchgw.distances.graph import connect, default_n_neighbors, knn_graph
from torchgw.distances.landmark import LandmarkDistance, NystromDistance
from torchgw.distances.points import PointDistance
from torchgw.distances.precomputed import (
    DirectedDistance,
    PrecomputedDistance,
    geodesic_matrices,
    geodesic_matrix,
)
from torchgw.distances.surface import Surface

__all__ = [
    "CallableDistance", "CurvedDistance", "DijkstraDistance", "DirectedDistance",
    "DistanceProvider", "FactoredDistance", "Factors", "Geodesics", "LandmarkDistance",
    "ManifoldDistance", "NystromDistance", "PointDistance", "PrecomputedDistance",
    "ProductDistance", "ScaledDistance", "Surface", "connect", "default_n_neighbors",
    "geodesic_matrices", "geodesic_matrix", "knn_graph", "symmetrise", "validate_graph",
]  # fmt: skip
