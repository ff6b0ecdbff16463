"""Prepared data: tokenized shards with a manifest, as gshard-prepare writes and training reads."""
