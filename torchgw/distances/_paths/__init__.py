"""Shortest paths in a graph."""

from __future__ import annotations

__all__: list[str] = []
