"""The outer iteration: everything between a problem and its plan."""
