"""The table of docs/open_models_planned.md: published models on machines, planned."""
