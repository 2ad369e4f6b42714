"""What a user gets back: the result, its files, the mapping of new points."""
