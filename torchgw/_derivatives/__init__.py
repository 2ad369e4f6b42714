"""Gradients of a finished solve."""
