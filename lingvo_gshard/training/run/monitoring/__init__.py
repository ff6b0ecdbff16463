"""Metrics, progress, compilations and diagnosis of a run while it trains."""
