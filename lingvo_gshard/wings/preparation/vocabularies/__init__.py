"""Vocabularies: trained, published by others, and measured by language."""
