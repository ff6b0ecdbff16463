"""Families with layers of Mamba-2 between their attentions."""
