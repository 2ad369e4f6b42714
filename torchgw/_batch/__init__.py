"""Many small problems at once: packed by size, solved together, each as if it were alone."""

from __future__ import annotations

__all__: list[str] = []
