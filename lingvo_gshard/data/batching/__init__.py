"""Batches out: mixing, packing and prefetching."""
