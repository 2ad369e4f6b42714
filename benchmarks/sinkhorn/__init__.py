"""Benchmarks of the linear problem: kernels, precision, tiles."""
