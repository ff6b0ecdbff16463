"""Traces a training step for the cost model."""
