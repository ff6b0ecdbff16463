"""Vocabularies: from text to ids and back, and their files."""
