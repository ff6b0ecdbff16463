"""A part of docs/planned_and_published.md: published measurements beside their plans."""
