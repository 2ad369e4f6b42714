"""What users call for many problems: lists of spaces, stacks of matrices, matrices of values."""
