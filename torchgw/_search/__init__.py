"""Where optima are looked for before the outer iteration begins."""

from __future__ import annotations

__all__: list[str] = []
