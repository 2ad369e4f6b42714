"""Shortest paths in a graph."""
