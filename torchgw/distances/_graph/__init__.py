"""Neighbour graphs and given ones, made connected."""
