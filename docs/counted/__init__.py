"""The weights of published models, counted from their configs here and by transformers."""
