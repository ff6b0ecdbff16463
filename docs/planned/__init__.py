"""A part of docs/planned_and_published.md: published models on machines, planned."""
