"""Tensor tools that know nothing of transport: memory, CUDA graphs, draws, orders."""

from __future__ import annotations

__all__: list[str] = []
