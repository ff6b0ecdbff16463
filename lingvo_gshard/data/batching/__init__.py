"""Batching: mixes languages, packs tokens into rows, and prefetches batches."""
