"""Benchmarks of graphs and shortest paths."""
