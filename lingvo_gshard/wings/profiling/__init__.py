"""Profiling: where the time of training steps went, measured by a trace and told by layer."""
