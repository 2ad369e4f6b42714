"""Iterations over the tiles of a cost that hold mass, with a bound of what is left out."""
