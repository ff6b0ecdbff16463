"""What calls of the Python API leave in a run's directory, and what is read from it."""
