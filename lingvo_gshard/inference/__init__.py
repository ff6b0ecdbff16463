"""Inference: serves requests with a trained model, by compiled programs under jax.

Only programs.py needs TensorFlow, to lower programs. Everything else runs where they are loaded.
"""
