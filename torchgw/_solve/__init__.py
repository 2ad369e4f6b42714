"""The outer iteration: everything between a problem and its plan."""

from __future__ import annotations

__all__: list[str] = []
