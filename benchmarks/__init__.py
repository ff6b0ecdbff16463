"""Measurements of parts, and comparisons with other engines. They are not installed."""
