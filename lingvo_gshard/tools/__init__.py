"""Command-line programs: each an absl main program, also reachable as `python -m`."""
