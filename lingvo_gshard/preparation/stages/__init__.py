"""The stages of a preparation: what is computed for one part, one bucket or one shard."""
