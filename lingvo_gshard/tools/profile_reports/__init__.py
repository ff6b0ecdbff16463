"""Profile reports: how the commands print profiles."""
