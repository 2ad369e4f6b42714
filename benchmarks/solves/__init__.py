"""Benchmarks of whole calls."""
