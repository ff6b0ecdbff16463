"""The engine: workers that decode the texts of many requests together."""
