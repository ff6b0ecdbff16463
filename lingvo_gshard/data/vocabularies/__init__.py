"""Vocabularies of others, used as they are, and how well vocabularies cover languages."""
