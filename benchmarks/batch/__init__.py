"""Many small problems at once."""
