"""From text to batches: readers, cleaning, vocabulary, mixing, packing, the embedded corpus."""
