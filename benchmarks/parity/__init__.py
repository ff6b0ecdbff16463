"""Compares published models here with the same models in transformers."""
