"""Geodesic distances in low rank, from those to a few landmarks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchgw._boundary.arrays import resolve_device
from torchgw._errors import GraphWarning, warn_user
from torchgw._tensors.ranks import Ranks
from torchgw.distances._graph.edges import components
from torchgw.distances.base import Factors
from torchgw.distances.graph import as_geodesics
from torchgw.distances.nystrom import NystromDistance, draw

# Vertices above which a GPU adds up edges in float32: paths of 10,000,000 points are then off by
# 3e-6 of the longest one, where landmarks leave 1e-2. [L920]
_ROUGH = 2**20


class LandmarkDistance(NystromDistance):
    """Nystrom approximation of the geodesic distances of a graph.

    :class:`~torchgw.distances.NystromDistance` says how. It takes 15 runs of Dijkstra more than
    there are landmarks, and memory O(n L).

    Parameters
    ----------
    graph : SciPy sparse array or matrix, or Geodesics
        Symmetric edge lengths. Components of a graph that is not connected are given a finite
        distance, with a warning; :func:`torchgw.distances.connect` has the choices.
    n_landmarks, generator : int or None, torch.Generator or None, optional
        As of :class:`~torchgw.distances.NystromDistance`.
    start : int, optional
        First landmark.
    device : torch.device or str, optional
        Device of everything that is returned.
    dtype : torch.dtype, optional
        Dtype of everything that is returned. The factors are computed in float64; paths of more
        than 2^20 vertices in float32 on a GPU.

    Attributes
    ----------
    landmarks, rank, error : Tensor, int and float
        As of :class:`~torchgw.distances.NystromDistance`; the error is relative to exact geodesics.

    Raises
    ------
    InvalidInputError
        If the graph is not valid, or ``n_landmarks`` is not between 1 and n.

    Notes
    -----
    If there are fewer landmarks than components, some components cannot be told apart, and a
    warning says so.
    """

    def __init__(
        self,
        graph: Any,
        n_landmarks: int | None = None,
        *,
        start: int = 0,
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self._begin(graph, resolve_device(device), dtype)
        self._find(self._reader(), n_landmarks, start, generator)
        self._warn_if_too_few(len(self.landmarks))

    def _begin(self, graph: Any, device: torch.device, dtype: torch.dtype) -> None:
        self.geodesics = as_geodesics(graph)
        self.n, self.device, self.dtype = self.geodesics.n, device, dtype

    def _reader(self) -> Callable[[Tensor], Tensor]:
        return self.geodesics.reader(
            self.device, torch.float32 if self.n > _ROUGH else torch.float64
        )

    @classmethod
    def shared(
        cls, graph: Any, n_landmarks: int | None, device: torch.device, ranks: Ranks
    ) -> "LandmarkDistance":
        """Make the provider by paths that ranks share out; it has the bits of one made alone."""
        provider = cls.__new__(cls)
        provider._begin(graph, device, torch.float64)
        alone = provider._reader()
        empty = torch.empty(0, provider.n, dtype=torch.float64, device=device)

        def rows_of(sources: Tensor) -> Tensor:
            return ranks.at_once(len(sources), lambda some: alone(sources[some]), empty)

        provider._find(rows_of, n_landmarks, 0, None)
        provider._warn_if_too_few(len(provider.landmarks))
        return provider

    def state(self) -> dict[str, Any]:
        """Give what :meth:`restore` needs besides the graph."""
        return {
            "landmarks": self.landmarks,
            "error": self.error,
            "largest": self._largest,
            "factors": tuple(self._factors),
        }

    @classmethod
    def restore(cls, graph: Any, state: dict[str, Any]) -> "LandmarkDistance":
        """Make the provider that had this state, on the device of its tensors."""
        provider, factors = cls.__new__(cls), Factors(*state["factors"])
        provider._begin(graph, factors.matrix.device, factors.matrix.dtype)
        provider.landmarks, provider.error = state["landmarks"], state["error"]
        provider._largest, provider._factors = state["largest"], factors
        return provider

    def _warn_if_too_few(self, n_landmarks: int) -> None:
        """Warn if there are more components than landmarks."""
        if self.geodesics.unreachable is None:
            return
        n_components = components(self.geodesics.edges)[0]
        if n_components > n_landmarks:
            warn_user(
                f"{n_landmarks} landmarks cannot tell the {n_components} components of the graph "
                f"apart. Pass `n_landmarks={n_components}` or more, or join the components with "
                "`connect(graph, points)`.",
                GraphWarning,
            )

    def relative_error(
        self, sample: int = 64, *, generator: torch.Generator | None = None
    ) -> float:
        """Estimate the Frobenius error relative to exact geodesics from a sample of columns.

        Parameters
        ----------
        sample : int
            Columns to compare; each costs a run of Dijkstra.
        generator : torch.Generator or None
            Generator on the CPU that draws them; ``None`` has a fixed seed.
        """
        index = draw(self.n, min(sample, self.n), generator)
        exact = self.geodesics.rows(index)
        error = self.columns(torch.from_numpy(index).to(self.device)).T.cpu().double() - exact
        size = float(exact.norm())
        return float(error.norm()) / size if size else float(error.norm())
