"""Layers of Transformers: attention, feed-forward, experts, embeddings, norms, losses."""
