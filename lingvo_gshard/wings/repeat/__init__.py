"""Repeat: many layers as one compiled loop, with a second loop as its gradient."""
