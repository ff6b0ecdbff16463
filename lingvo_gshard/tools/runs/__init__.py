"""Trained runs and what evaluation does with them."""
