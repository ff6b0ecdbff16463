"""The data that gshard-inspect collects, and its tables."""
