"""Batching: mixes languages, packs tokens into rows, and prefetches batches."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, ["mixture_plan", "packing", "stream"])
