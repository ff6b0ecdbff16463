"""Experiments of the paper, of published models and of studies, registered by name."""
