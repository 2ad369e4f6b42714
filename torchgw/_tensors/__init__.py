"""Tensor tools that know nothing of transport: memory, CUDA graphs, draws, orders."""
