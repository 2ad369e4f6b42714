"""Many small problems at once: packed by size, solved together, each as if it were alone."""
