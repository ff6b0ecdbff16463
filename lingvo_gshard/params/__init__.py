"""Experiments: functions that return Params. `registry.names()` lists all of them."""
