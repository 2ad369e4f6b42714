"""Plans of low rank, barycenters and embeddings, made with :func:`torchgw.solve`."""

from __future__ import annotations

__all__: list[str] = []
