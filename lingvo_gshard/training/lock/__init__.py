"""The lock of a log directory: one run at a time writes into it."""
