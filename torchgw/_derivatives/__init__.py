"""Gradients of a finished solve."""

from __future__ import annotations

__all__: list[str] = []
