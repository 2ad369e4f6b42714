"""What is asked: from the input of a user to a problem."""

from __future__ import annotations

__all__: list[str] = []
