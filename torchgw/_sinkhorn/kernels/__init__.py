"""Triton kernels of the linear problem, with their launchers."""

from __future__ import annotations

__all__: list[str] = []
