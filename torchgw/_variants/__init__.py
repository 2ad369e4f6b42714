"""Other problems, solved with the rooms below: low rank, barycenters, embeddings."""

from __future__ import annotations

__all__: list[str] = []
