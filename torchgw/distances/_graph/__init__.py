"""Neighbour graphs and given ones, made connected."""

from __future__ import annotations

__all__: list[str] = []
