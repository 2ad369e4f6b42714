"""Starts are followed, improved and judged, before the outer iteration begins."""
