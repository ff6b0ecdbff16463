"""The decoder of a run, and the quality that its precision costs."""
