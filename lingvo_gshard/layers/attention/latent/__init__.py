"""Attention whose keys and values are computed from a small latent vector of each token."""
