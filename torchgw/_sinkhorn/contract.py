"""What a way of computing must offer to the Sinkhorn loop and to a plan."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from torchgw._boundary.checks import check_choice
from torchgw._errors import InvalidInputError
from torchgw._sinkhorn.cost import Cost
from torchgw._typing import Marginals, Potentials

__all__ = ["Backend", "BackendName", "STRICT", "Sweep", "Sweeper", "check_backend"]

# Factors of the half-steps of f and g under strict marginals.
STRICT = (1.0, 1.0)


class Sweep(NamedTuple):
    """Potentials after some full Sinkhorn iterations."""

    f: Tensor  # (n,) softmin of g: the rows of the plan (f, g) have mass a
    g: Tensor  # (m,)
    g_next: Tensor  # (m,) softmin of f; its distance to g measures the column error
    state: Potentials  # where the iteration goes on
    check: Tensor  # (2,) float64: one if no sum over- or underflowed, else zero; the column error


class Sweeper(Protocol):
    """Runs sweeps of one linear problem; what they share is prepared once.

    A sweeper of ``two_level`` also removes slow errors, between its iterations, by a small problem
    of its own. It needs no over-relaxation, and few iterations.
    """

    @property
    def two_level(self) -> bool:
        """Whether it does."""

    def __call__(self, start: Potentials, count: int, relaxation: float) -> Sweep:
        """Run ``count`` full iterations from ``start``: :func:`torchgw.backends.softmin_sweep`."""


class Backend(Protocol):
    """What a way of computing must offer."""

    name: str

    def softmin(
        self, cost: Cost, log_weight: Tensor, potential: Tensor, epsilon: float, axis: int
    ) -> Tensor:
        """Compute the half-step defined by :func:`torchgw.backends.softmin`."""

    def sweeper(
        self,
        cost: Cost,
        marginals: Marginals,
        start: Potentials,
        epsilon: float,
        *,
        tau: tuple[float, float] = STRICT,
    ) -> Sweeper:
        """Prepare sweeps that begin at or near ``start``, with half-steps tau * softmin."""

    def apply(
        self,
        cost: Cost,
        marginals: Marginals,
        potentials: Potentials,
        epsilon: float,
        values: Tensor,
    ) -> Tensor:
        """Return plan @ values, shape (n, c)."""

    def dense(
        self, cost: Cost, marginals: Marginals, potentials: Potentials, epsilon: float
    ) -> Tensor:
        """Return the plan as a matrix, shape (n, m)."""

    def transposed(self) -> Backend:
        """Return the backend for costs with source and target exchanged."""

    def topk(
        self, cost: Cost, marginals: Marginals, potentials: Potentials, epsilon: float, k: int
    ) -> tuple[Tensor, Tensor]:
        """Return the k largest entries of each row, values (n, k), and their columns (n, k).

        A row of weight zero has the columns of its conditional plan.
        """

    def draw(
        self,
        cost: Cost,
        marginals: Marginals,
        potentials: Potentials,
        epsilon: float,
        rows: Tensor,
        generator: torch.Generator,
    ) -> Tensor:
        """Draw one column from each of ``rows``, shape (s,); none may have weight zero."""


BackendName = Literal["auto", "triton", "compile", "eager"]
# What makes an object a torchgw.backends.Backend.
_BACKEND_PARTS = (
    "name", "softmin", "sweeper", "apply", "dense", "transposed", "topk", "draw",
)  # fmt: skip


def check_backend(backend: object) -> None:
    """Refuse an unknown name, and an object that is not all of a backend."""
    missing = [name for name in _BACKEND_PARTS if not hasattr(backend, name)]
    if isinstance(backend, str) or len(missing) == len(_BACKEND_PARTS):
        check_choice("backend", backend, get_args(BackendName))
    elif missing:
        raise InvalidInputError(
            f"`backend` must have all of a torchgw.backends.Backend; a {type(backend).__name__} "
            f"has no {', '.join(missing)}. Subclass torchgw.backends.EagerBackend, which does."
        )
