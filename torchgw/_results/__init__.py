"""What a user gets back: the result, its files, the mapping of new points."""

from __future__ import annotations

__all__: list[str] = []
