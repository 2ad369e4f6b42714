"""What users call for many problems: lists of spaces, stacks of matrices, matrices of values."""

from __future__ import annotations

__all__: list[str] = []
