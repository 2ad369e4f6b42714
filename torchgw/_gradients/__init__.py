"""The ways to linearise the objective at a coupling."""
