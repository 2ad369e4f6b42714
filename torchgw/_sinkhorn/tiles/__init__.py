"""Iterations over the tiles of a cost that hold mass, with a bound of what is left out."""

from __future__ import annotations

__all__: list[str] = []
