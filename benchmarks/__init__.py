"""Benchmarks: named problems, runners for torchgw and its peers, one evaluator for all.

``python -m benchmarks --help`` lists the commands; README.md says what is recorded and how.
"""
