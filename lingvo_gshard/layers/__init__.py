"""Layers of Transformers: attention, feed-forward, mixtures of experts, embeddings, norms, losses."""
