"""Conversations and pairs of prompt and completion: read, written with a template, and packed."""
