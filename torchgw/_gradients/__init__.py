"""The ways to linearise the objective at a coupling."""

from __future__ import annotations

__all__: list[str] = []
