"""Knowing before running: what a compiled step needs, does and costs on machines not here."""
