"""Data: turns text into batches. Readers, vocabularies, mixing, packing, a corpus."""
