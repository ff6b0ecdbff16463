"""Passes over StableHLO that write out for XLA's SPMD partitioner what it does not find."""
