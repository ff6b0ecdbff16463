"""Compares a partitioned computation with the same one on a single device."""
