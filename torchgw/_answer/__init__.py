"""The solves that an answer takes: other starts, masses, weights, known pairs."""
