"""Draws the pictures of README.md and docs/: `python -m docs.pictures --help`."""
