"""Data: turns text into batches. Readers, cleaning, vocabularies, mixing, packing, a corpus."""
