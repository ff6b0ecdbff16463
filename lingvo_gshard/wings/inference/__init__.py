"""Inference: serves requests with a trained model, by compiled programs under jax.

Only programs/maker.py needs TensorFlow, to lower programs. All else runs where they are loaded.
"""
