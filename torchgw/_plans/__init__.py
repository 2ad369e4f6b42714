"""Plans as operators: factors and potentials, a matrix, a few pairs, largest entries."""

from __future__ import annotations

__all__: list[str] = []
