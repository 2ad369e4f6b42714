"""Certificates: what no plan can cost less than, with proofs that others can check."""
