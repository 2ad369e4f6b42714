"""Everything that comes from or goes to the outside world: arrays, graphs, files, the console."""

from __future__ import annotations

__all__: list[str] = []
