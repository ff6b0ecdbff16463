"""Decoding, compared with other engines."""
