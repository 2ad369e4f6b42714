"""Plans as operators: factors and potentials, a matrix, a few pairs, largest entries."""
