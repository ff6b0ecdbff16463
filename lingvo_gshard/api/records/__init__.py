"""Files that calls of the Python API write into a run's directory, and read from it."""
