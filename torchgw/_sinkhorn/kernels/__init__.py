"""Triton kernels of the linear problem, with their launchers."""
