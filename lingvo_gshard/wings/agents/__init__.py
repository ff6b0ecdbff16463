"""Agents: one process on each host that starts a worker, watches it, and starts it again."""
